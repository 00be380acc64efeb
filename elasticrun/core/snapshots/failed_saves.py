"""The lines about ranks that could not save a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from elasticrun.core.deadlines import earliest
from elasticrun.core.snapshots.types import Outbox
from elasticrun.core.words import names, rank_names

FAILURE_WINDOW: Final = 1.0
"""Seconds for which a line about a failed save waits for further ranks."""

MAX_OPEN: Final = 64
"""Maximum number of steps and reasons for which further ranks are awaited."""

MAX_KNOWN: Final = 4096
"""Maximum number of ranks, by reason, that are mentioned in a round."""


@dataclass
class _FailedSave:
    """The ranks that could not save a step for the same reason."""

    nodes: dict[int, str] = field(default_factory=dict)  # by rank
    until: float | None = None  # when the line about it is logged; None: not known yet
    is_lost: bool = False  # a checkpoint of this step was due, and is given up


class FailedSaves:
    """Logs one line about all ranks that could not save a step for the same reason. A rank that
    fails for this reason again is mentioned again only if a checkpoint is lost."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.was_used = False
        """Whether a rank has failed in this round."""
        self._known: set[tuple[int, str]] = set()  # ranks and reasons
        self.open: dict[tuple[int, str], _FailedSave] = {}  # by step and reason
        self._closed: dict[tuple[int, str], _FailedSave] = {}  # the newest ones

    def add(self, step: int, rank: int, node: str, reason: str) -> None:
        """A rank, on this node, could not save the step."""
        self.was_used = True
        if (step, reason) in self.open or len(self.open) < MAX_OPEN:
            self.open.setdefault((step, reason), _FailedSave()).nodes[rank] = node

    def give_up(self, step: int) -> bool:
        """The checkpoint of this step is given up; whether a line about its ranks will say so."""
        found = [one for (other, _), one in self.open.items() if other == step]
        late = {key: one for key, one in self._closed.items() if key[0] == step}
        for one in found:
            one.is_lost = True
        for key, one in late.items():
            if not one.is_lost:
                one.is_lost = True
                self._outbox.log(_sentence(*key, one), "error")
        return bool(found or late)

    def proceed(self, now: float, world_size: int) -> None:
        """Log what no further rank can join, or has waited long enough."""
        for key, one in list(self.open.items()):
            one.until = now + FAILURE_WINDOW if one.until is None else one.until
            if now >= one.until or len(one.nodes) >= world_size:
                self._log(*key)

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        return earliest(*[one.until for one in self.open.values()])

    def flush(self) -> None:
        """Log everything now, because the job ends."""
        for key in list(self.open):
            self._log(*key)

    def clear(self) -> None:
        """A round begins."""
        self.flush()
        self._known.clear()
        self._closed.clear()
        self.was_used = False

    def _log(self, step: int, reason: str) -> None:
        one = self._closed[step, reason] = self.open.pop((step, reason))
        while len(self._closed) > MAX_OPEN:
            del self._closed[next(iter(self._closed))]
        new = {(rank, reason) for rank in one.nodes} - self._known
        if len(self._known) + len(new) <= MAX_KNOWN:
            self._known |= new
        elif not one.is_lost:
            return
        if one.is_lost or new:
            level = "error" if one.is_lost else "warning"
            self._outbox.log(_sentence(step, reason, one), level)


def _sentence(step: int, reason: str, one: _FailedSave) -> str:
    where = list(dict.fromkeys(one.nodes.values()))
    why = f"{reason} (node{'s' * (len(where) > 1)} {names(where)})"
    who = rank_names(one.nodes, pairs=True)
    if one.is_lost:
        return f"the checkpoint of step {step} is not written: {who} could not save it: {why}"
    return f"{who} could not save step {step}: {why}"
