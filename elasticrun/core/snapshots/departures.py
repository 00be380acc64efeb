"""Nodes that are to leave, and the step that all ranks save before.

A node that departs says which step it is at, and in how many steps word comes to every rank. The
step that is asked for lies so far beyond the newest that is known; nodes that depart at the same
time are given the same one. Where a rank was past it already, or had no room, another is named,
twice as far beyond; after MAX_TRIES the nodes leave without.

What comes of it is left in `orders` and `news`, for the caller to take.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticrun.core.words import some
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MAX_TRIES = 5
"""Steps that are named one after the other until every rank saves one."""


class Departures:
    """Of the present round."""

    def __init__(self) -> None:
        self._round: RoundName | None = None
        self._nodes: dict[str, m.Departing] = {}
        self._step = -1  # that is asked for; -1: none
        self._margin = 0
        self._tries = 0
        self._is_saved = False
        self._is_written = False
        self.orders: list[m.SaveAt | m.PersistOver] = []
        """For every node of the round."""
        self.news: list[tuple[str, str]] = []  # a sentence, and its level

    def begin_round(self, name: RoundName) -> None:
        """A round was formed or adopted."""
        if name != self._round:
            self._round = name
            self._nodes.clear()
            self._step = -1
            self._tries = 0
            self._is_saved = self._is_written = False

    def departing(self, node: str, report: m.Departing) -> None:
        """A node is to leave; said again to a new master, or when its stream broke."""
        if report.round != self._round:
            return
        if node not in self._nodes:
            self.news.append((f"node {node} is to leave: {report.reason}", "info"))
        self._nodes[node] = report
        self._margin = max(self._margin, report.margin)
        if self._step < 0 or self._is_saved:
            self._is_saved = False
            asked = max(report.asked, -1)
            fresh = asked > self._step  # the master before this one has named it
            self._name(asked if fresh else max(report.step, self._step) + self._margin)

    def missed(self, node: str, report: m.Missed) -> None:
        """A rank cannot save the step that was named."""
        if report.round != self._round or report.asked != self._step or self._is_saved:
            return
        why = f"node {node} was past step {self._step}, or had no room for it"
        self._tries += 1
        old = self._step
        if self._tries < MAX_TRIES:
            self._margin = min(2 * self._margin, m.MAX_MARGIN)
            self._name(max(report.step, self._step) + self._margin, why)
        else:
            self._is_saved = True  # nothing more is asked for
            tries = f"{MAX_TRIES} steps were named"
            self.news.append((f"{tries}, and none could be saved by all: {why}", "warning"))
        # none may keep a slot for it; told after the new one, since it lets nodes go
        self.orders.append(m.PersistOver("", report.round, old, ok=False, reason=why))

    def saved(self, restore: m.Restore | None) -> None:
        """This is the newest checkpoint."""
        if restore is not None and restore.round == self._round and 0 <= self._step <= restore.step:
            self._is_saved = self._is_written = True

    def has_saved(self, name: RoundName) -> bool:
        """Whether the step that nodes asked for before they left this round is in storage."""
        return self._is_written and name == self._round

    def gone(self, nodes: Iterable[str]) -> bool | None:
        """These nodes go; whether what their ranks have is still to be saved. None: they were not
        departing."""
        found = [node for node in nodes if self._nodes.pop(node, None) is not None]
        return not self._is_saved if found else None

    @property
    def order(self) -> m.SaveAt | None:
        """What a node of the round is to know that may not have been told."""
        if self._round is None or self._step < 0 or self._is_saved or not self._nodes:
            return None
        return m.SaveAt(self._round, self._step, self._reason())

    @property
    def asked(self) -> tuple[RoundName, int] | None:
        """The round and the step that are asked for, or were last."""
        return None if self._round is None or self._step < 0 else (self._round, self._step)

    def status(self) -> str:
        """For the status page; empty if no node is to leave."""
        return f"{self._reason()}: all ranks save step {self._step}" if self.order else ""

    def _name(self, step: int, why: str = "") -> None:
        self._step = step
        self._is_written = False
        assert self._round is not None
        what = f"every rank is asked to save step {step}"
        self.news.append((f"{what}: {why or self._reason()}", "info"))
        self.orders.append(m.SaveAt(self._round, step, self._reason()))

    def _reason(self) -> str:
        nodes = list(self._nodes)
        more = f" and {some(len(nodes) - 1, 'node')} more" if len(nodes) > 1 else ""
        return f"node {nodes[0]}{more} is to leave" if nodes else "a node is to leave"
