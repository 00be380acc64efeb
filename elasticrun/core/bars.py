"""Nodes that are not let in for a while: how long, until when, and why."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.core.deadlines import Deadlines

BAR_UNIT = 120.0
"""A node that is left out waits this many seconds at the door the first time, then twice as long,
..."""

BAR_LONGEST = 3600.0
"""... but never longer than this."""


def bar_length(times: int) -> float:
    """Seconds that a node waits at the door when it is left out for the `times`-th time."""
    return min(BAR_UNIT * 2.0 ** min(times - 1, 30), BAR_LONGEST)


class Bars:
    """The nodes that wait at the door although there is room for them."""

    def __init__(self) -> None:
        self._until: Deadlines[str] = Deadlines()
        self._why: dict[str, str] = {}

    def __contains__(self, node: object) -> bool:
        return node in self._why

    def __len__(self) -> int:
        return len(self._why)

    def __iter__(self) -> Iterator[str]:
        return iter(self._why)

    def put(self, node: str, until: float, why: str) -> None:
        """`node` waits until then. `why`: a clause for people."""
        self._until.arm(node, until)
        self._why[node] = why

    def lift(self, node: str) -> None:
        """It need not wait, or has gone; harmless if it did not."""
        self._until.disarm(node)
        self._why.pop(node, None)

    def due(self, now: float) -> list[str]:
        """Take out and return those whose time is over."""
        found = self._until.pop_due(now)
        for node in found:
            del self._why[node]
        return found

    def next(self) -> float | None:
        """When the next one's time is over."""
        return self._until.next()

    def sentence(self, node: str, now: float) -> str:
        """Why a node that is barred waits, and how long."""
        until = self._until.when(node)
        assert until is not None
        return f"left out: {self._why[node]}; let in again in {max(0.0, until - now):.0f} s"
