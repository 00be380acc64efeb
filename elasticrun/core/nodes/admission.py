"""Which nodes are not admitted, until when, and why.

*Backoff*: a node is pending although a round has a place for it, for 2, 4, 8 ... minutes, unless
the job needs it to reach its minimum size. Its agent repeatedly fell silent, or was killed whenever
it trained (too little memory, a broken disk). It returns each time, and each time the job ends one
round to admit it and another when it dies. (`rounds.attribution` has the third cause: its ranks
fail first.) A *stay* lasts from the round in which an incarnation of a node first has a place until
that incarnation's death. A node that leaves in good order is not charged, and neither is one that
dies while pending, because that costs no round.

*Excluded*: a node is refused because it failed the network check ("failed"), is too slow ("slow"),
its agent found its machine unfit ("unhealthy"), a rank of it differs from its replicas ("differs"),
or an operator asked for it ("asked"). The entry is for a node id on a host: the same id on another
host is a new node. When the exclusion ends the node may return, and is probed like any new node. At
most STRAGGLERS_PER_HOUR exclusions within an hour are for being slow, even of the same node, so
that wrong measurements cannot empty a job.

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elasticrun.config import (
    EXCLUDE_BRIEF_AFTER,
    EXCLUDE_SILENT_AFTER,
    RESTART_HEALTHY_AFTER,
    STRAGGLERS_PER_HOUR,
)
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.persisted import DeathRecord, ExclusionFacts, FlapFacts
from elasticrun.core.reasons import Banned, Excluded
from elasticrun.wire.messages import MAX_EXCLUDED, ExcludedNode

BACKOFF_UNIT = 120.0
"""Seconds of a node's first backoff; each later one is twice as long."""

MAX_BACKOFF = 3600.0
"""Longest backoff in seconds."""


def backoff_length(times: int) -> float:
    """Seconds of a node's `times`-th backoff."""
    return min(BACKOFF_UNIT * 2.0 ** min(times - 1, 30), MAX_BACKOFF)


class Backoffs(dict[str, str]):
    """The nodes in backoff, and why, as a clause."""

    def __init__(self) -> None:
        super().__init__()
        self._until: Deadlines[str] = Deadlines()

    def put(self, node: str, until: float, why: str) -> None:
        """Put `node` in backoff until `until`."""
        self._until.arm(node, until)
        self[node] = why

    def lift(self, node: str) -> None:
        """End the backoff of a node; no-op if it has none."""
        self._until.disarm(node)
        self.pop(node, None)

    def due(self, now: float) -> list[str]:
        """Remove and return the nodes whose backoff is over."""
        found = self._until.pop_due(now)
        for node in found:
            del self[node]
        return found

    def next(self) -> float | None:
        """When the next backoff ends; None if there is none."""
        return self._until.next()

    def sentence(self, node: str, now: float) -> str:
        """Why and for how long a node is in backoff."""
        until = self._until.when(node)
        assert until is not None
        return f"in backoff: {self[node]}; may rejoin in {max(0.0, until - now):.0f} s"


MEMORY = 600.0
"""Seconds within which deaths are counted; see EXCLUDE_SILENT_AFTER."""


class Deaths:
    """When a node died in one particular way (by silence, or soon after it was admitted), and how
    often it was put in backoff for that."""

    def __init__(self, after: int = EXCLUDE_SILENT_AFTER) -> None:
        """`after`: this many deaths within MEMORY lead to backoff."""
        self.times: list[float] = []
        """Oldest first; all within MEMORY of the newest."""
        self.backoff_until = -math.inf
        """Until when it is in backoff; -inf if it is not."""
        self._backoffs = 0
        self._after = after

    def count(self, now: float) -> None:
        """Count a death; the node is in backoff if there are enough."""
        self.times = [when for when in self.times if when >= now - MEMORY]
        self.times.append(now)
        if len(self.times) >= self._after:
            self._backoffs += 1
            self.backoff_until = max(self.backoff_until, now + backoff_length(self._backoffs))

    def still_count(self, now: float) -> bool:
        """Whether these deaths still count against the node."""
        return bool(self.times) and (self._backoffs > 0 or self.times[-1] > now - MEMORY)

    def fact(self, node: str, now: float) -> DeathRecord:
        """The record of these deaths."""
        return DeathRecord(
            node=node,
            silences=tuple(now - when for when in self.times),
            bars=self._backoffs,
            remaining=max(0.0, self.backoff_until - now),
        )

    @classmethod
    def from_fact(cls, fact: DeathRecord, at: float, after: int = EXCLUDE_SILENT_AFTER) -> Deaths:
        """Rebuild from what `fact` recorded at time `at`."""
        deaths = cls(after)
        deaths.times, deaths._backoffs = [at - age for age in fact.silences], fact.bars
        if fact.remaining > 0.0:
            deaths.backoff_until = at + fact.remaining
        return deaths


MAX_RECORDS = 1000
"""Maximum number of nodes whose brief stays are remembered, the newest."""


class FlapHistory:
    """How long nodes stay in the rounds they are admitted to, and which of them keep dying
    early."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._brief: dict[str, Deaths] = {}

    def formed(self, nodes: Iterable[str], now: float) -> None:
        """Exactly these nodes have a place now. A node that had one before keeps its start time.
        O(n)."""
        old = self._since
        self._since = {node: old.get(node, now) for node in nodes}

    def taken_over(self, nodes: Iterable[str]) -> None:
        """These nodes had places under another master, for an unknown time."""
        self._since.update(dict.fromkeys(nodes, -math.inf))

    def lost(self, node: str, at: float, now: float) -> None:
        """The incarnation of this node that had a place died at `at`, and was declared dead at
        `now`. Count that if its stay was shorter than RESTART_HEALTHY_AFTER."""
        since = self._since.pop(node, -math.inf)
        if at - since >= RESTART_HEALTHY_AFTER:
            return
        record = self._brief.pop(node, None) or Deaths(EXCLUDE_BRIEF_AFTER)
        record.count(now)
        self._brief[node] = record
        if len(self._brief) > MAX_RECORDS:
            self._brief.pop(next(iter(self._brief)))

    def over(self, node: str) -> None:
        """The node left in good order."""
        self._since.pop(node, None)

    def backoff_until(self, node: str, now: float) -> float:
        """Until when a node that keeps dying early is in backoff; `now` if it is not."""
        record = self._brief.get(node)
        return now if record is None else max(now, record.backoff_until)

    def facts(self, now: float) -> FlapFacts:
        """What the next master needs."""
        found = ((node, one) for node, one in self._brief.items() if one.still_count(now))
        return FlapFacts(tuple(one.fact(node, now) for node, one in found))

    def restore(self, facts: FlapFacts, at: float) -> None:
        """Restore what another master recorded at time `at`."""
        for one in facts.fickle:
            self._brief[one.node] = Deaths.from_fact(one, at, EXCLUDE_BRIEF_AFTER)


HOUR = 3600.0

FAILED = "failed"
SLOW = "slow"
ASKED = "asked"
UNHEALTHY = "unhealthy"
DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One exclusion."""

    how: Excluded
    at: float
    until: float


class Exclusions:
    """The excluded nodes, at most MAX_EXCLUDED: the oldest are dropped first."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}  # by node id and host, oldest first
        self._slow: deque[float] = deque(maxlen=STRAGGLERS_PER_HOUR)
        """When nodes were last excluded for being slow; older times no longer matter."""

    def add(self, node: str, host: str, how: Excluded, *, seconds: float, now: float) -> None:
        """Exclude this node for `seconds`."""
        self._entries = {key: one for key, one in self._entries.items() if now < one.until}
        self._entries.pop((node, host), None)
        self._entries[node, host] = _Entry(how, now, now + seconds)
        if how.by == SLOW:
            self._slow.append(now)
        if len(self._entries) > MAX_EXCLUDED:
            self._entries.pop(next(iter(self._entries)))

    def lift(self, node: str) -> None:
        """Allow the node to return, on any host; no-op if it is not excluded."""
        self._entries = {key: one for key, one in self._entries.items() if key[0] != node}

    def refusal(self, node: str, host: str, now: float) -> Banned | None:
        """Why this node may not attach; None if it may."""
        entry = self._entries.get((node, host))
        if entry is None or now >= entry.until:
            return None
        return Banned(entry.how, entry.until - now, node, host)

    def may_be_slow(self, now: float) -> bool:
        """Whether one more node may be excluded for being slow."""
        return len(self._slow_within_an_hour(now)) < STRAGGLERS_PER_HOUR

    def page(self, now: float) -> tuple[ExcludedNode, ...]:
        """The nodes that are refused now."""
        return tuple(
            ExcludedNode(
                node, host, entry.how.by, entry.how.verdict, now - entry.at, entry.until - now
            )
            for (node, host), entry in self._entries.items()
            if now < entry.until
        )

    def _slow_within_an_hour(self, now: float) -> tuple[float, ...]:
        """How many seconds ago nodes were excluded for being slow, oldest first; at most
        STRAGGLERS_PER_HOUR."""
        return tuple(now - at for at in self._slow if now - at < HOUR)

    def facts(self, now: float) -> ExclusionFacts:
        """What the next master needs."""
        return ExclusionFacts(self.page(now), slow_ages=self._slow_within_an_hour(now))

    def restore(self, facts: ExclusionFacts, at: float) -> None:
        """Restore what another master recorded at time `at`."""
        self._slow.extend(at - age for age in facts.slow_ages)
        for one in facts.excluded:
            self._entries[one.node, one.host] = _Entry(
                Excluded(one.kind, one.reason), at - one.age, at + one.remaining
            )
