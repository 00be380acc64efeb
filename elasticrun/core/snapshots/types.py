"""What the components of `Snapshots` share: a snapshot's name, the outgoing orders, and the lines
about failed saves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from elasticrun.core.deadlines import earliest
from elasticrun.core.words import names
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName, write_ranges

FAILURE_WINDOW: Final = 1.0
"""Seconds for which a line about a failed save waits for further ranks."""

MAX_OPEN: Final = 64
"""Maximum number of steps and reasons for which further ranks are awaited."""

MAX_KNOWN: Final = 4096
"""Maximum number of ranks, by reason, that are mentioned in a round."""

Key = tuple[RoundName, int]
"""The name of a snapshot: its round and step."""


def key_of(restore: m.Restore) -> Key:
    """The name of a snapshot that is restored."""
    return (restore.round, restore.step)


def sort_key(key: Key) -> tuple[int, int, int]:
    """Sort key: snapshots by age, the oldest first."""
    return (key[0].term, key[0].number, key[1])


class Outbox:
    """Queues orders and log lines until the caller takes them."""

    def __init__(self) -> None:
        self.orders: list[tuple[tuple[str, ...], m.Order | None]] = []
        """Recipients, and the order; None: the facts must be durable before what follows."""
        self.notes: list[tuple[str, str]] = []  # a line for the operator, and its level

    def send(self, order: m.Order, *nodes: str) -> None:
        """Queue an order for these nodes."""
        self.orders.append((nodes, order))

    def record(self) -> None:
        """Queue a record of the facts. What is queued after it waits until they are durable."""
        self.orders.append(((), None))

    def log(self, text: str, level: str = "info") -> None:
        """Queue a line for the operator."""
        self.notes.append((text, level))


def rank_names(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    return f"rank{'s' * (len(ranks) > 1)} {write_ranges(ranks, pairs=True)}"


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
    who = rank_names(one.nodes)
    if one.is_lost:
        return f"the checkpoint of step {step} is not written: {who} could not save it: {why}"
    return f"{who} could not save step {step}: {why}"
