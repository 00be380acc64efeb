"""Which nodes are not let in, until when, and why.

*Left out*: a node waits at the door although there is room for it, for 2, 4, 8 ... minutes, unless
the job needs it to reach its smallest size. Its agent fell silent again and again, or was killed
whenever it trained (too little memory, a broken disk): it comes back each time, and each time the
job gives up a round to let it in and another when it dies. A *stay* is from the round in which a
life of a node first has a place to that life's death; who leaves in good order has done nothing.
What dies at the door counts nothing: it costs nobody a round.

*Excluded*: a node is refused by a verdict: it failed the network check ("failed"), or it is too
slow ("slow"), or an operator wants it out ("asked"). The entry is of a node id on a host: who moves
to another host under the same id is a newcomer. When its time is over it may come back, and is
probed as any newcomer is. At most STRAGGLERS_PER_HOUR times within an hour a node is excluded for
being slow, be it the same one, so that a wrong measure cannot take a job apart.

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
from elasticrun.core.persisted import ExclusionFacts, FlapFacts, LeftOut
from elasticrun.core.reasons import Banned, Excluded
from elasticrun.wire.messages import MAX_EXCLUDED, ExcludedNode

BACKOFF_UNIT = 120.0
"""A node that is left out waits this many seconds at the door the first time, then twice as long,
..."""

BACKOFF_LONGEST = 3600.0
"""... but never longer than this."""


def backoff_length(times: int) -> float:
    """Seconds that a node waits at the door when it is left out for the `times`-th time."""
    return min(BACKOFF_UNIT * 2.0 ** min(times - 1, 30), BACKOFF_LONGEST)


class Backoffs(dict[str, str]):
    """The nodes that wait at the door although there is room for them, and why, in a clause."""

    def __init__(self) -> None:
        super().__init__()
        self._until: Deadlines[str] = Deadlines()

    def put(self, node: str, until: float, why: str) -> None:
        """`node` waits until then."""
        self._until.arm(node, until)
        self[node] = why

    def lift(self, node: str) -> None:
        """It need not wait, or has gone; harmless if it did not."""
        self._until.disarm(node)
        self.pop(node, None)

    def due(self, now: float) -> list[str]:
        """Take out and return those whose time is over."""
        found = self._until.pop_due(now)
        for node in found:
            del self[node]
        return found

    def next(self) -> float | None:
        """When the next one's time is over."""
        return self._until.next()

    def sentence(self, node: str, now: float) -> str:
        """Why a node that backs off waits, and how long."""
        until = self._until.when(node)
        assert until is not None
        return f"left out: {self[node]}; let in again in {max(0.0, until - now):.0f} s"


MEMORY = 600.0
"""Such deaths are counted over this many seconds; see EXCLUDE_SILENT_AFTER."""


class Deaths:
    """When a node died in one way that is held against it, by silence or soon after it was let in,
    and how often it was sent to the door for that."""

    def __init__(self, after: int = EXCLUDE_SILENT_AFTER) -> None:
        """`after`: so many deaths within MEMORY are too many."""
        self.times: list[float] = []
        """Oldest first: within MEMORY of the newest."""
        self.backoff_until = -math.inf
        """Until when it waits at the door; -inf if it need not."""
        self._backoffs = 0
        self._after = after

    def count(self, now: float) -> None:
        """It died so."""
        self.times = [when for when in self.times if when >= now - MEMORY]
        self.times.append(now)
        if len(self.times) >= self._after:
            self._backoffs += 1
            self.backoff_until = max(self.backoff_until, now + backoff_length(self._backoffs))

    def matter(self, now: float) -> bool:
        """Whether they can still be held against the node."""
        return bool(self.times) and (self._backoffs > 0 or self.times[-1] > now - MEMORY)

    def fact(self, node: str, now: float) -> LeftOut:
        """For the record of the job."""
        return LeftOut(
            node=node,
            silences=tuple(now - when for when in self.times),
            bars=self._backoffs,
            remaining=max(0.0, self.backoff_until - now),
        )

    @classmethod
    def recalled(cls, fact: LeftOut, at: float, after: int = EXCLUDE_SILENT_AFTER) -> Deaths:
        """What `fact` said of a node `at` that time."""
        deaths = cls(after)
        deaths.times, deaths._backoffs = [at - age for age in fact.silences], fact.bars
        if fact.remaining > 0.0:
            deaths.backoff_until = at + fact.remaining
        return deaths


MAX_RECORDS = 1000
"""Nodes whose brief stays are remembered, the newest."""


class FlapHistory:
    """How long nodes stay in the rounds they are let into, and which of them never stay."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._brief: dict[str, Deaths] = {}

    def formed(self, nodes: Iterable[str], now: float) -> None:
        """These nodes have a place now, and no others; O(n)."""
        old = self._since
        self._since = {node: old.get(node, now) for node in nodes}

    def taken_over(self, nodes: Iterable[str]) -> None:
        """These have had places under another master, nobody knows for how long."""
        self._since.update(dict.fromkeys(nodes, -math.inf))

    def lost(self, node: str, at: float, now: float) -> None:
        """The life of this node that had a place is over since `at`, as was found out `now`."""
        since = self._since.pop(node, -math.inf)
        if at - since >= RESTART_HEALTHY_AFTER:
            return
        record = self._brief.pop(node, None) or Deaths(EXCLUDE_BRIEF_AFTER)
        record.count(now)
        self._brief[node] = record
        if len(self._brief) > MAX_RECORDS:
            self._brief.pop(next(iter(self._brief)))

    def over(self, node: str) -> None:
        """It has left in good order."""
        self._since.pop(node, None)

    def backoff_until(self, node: str, now: float) -> float:
        """Until when a node that never stays waits at the door; `now` if it need not."""
        record = self._brief.get(node)
        return now if record is None else max(now, record.backoff_until)

    def facts(self, now: float) -> FlapFacts:
        """What the next master must know."""
        found = ((node, one) for node, one in self._brief.items() if one.matter(now))
        return FlapFacts(tuple(one.fact(node, now) for node, one in found))

    def restore(self, facts: FlapFacts, at: float) -> None:
        """Take over what another master had recorded."""
        for one in facts.fickle:
            self._brief[one.node] = Deaths.recalled(one, at, EXCLUDE_BRIEF_AFTER)


HOUR = 3600.0

FAILED = "failed"
SLOW = "slow"
ASKED = "asked"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One exclusion."""

    how: Excluded
    at: float
    until: float


class Exclusions:
    """The nodes that were excluded, MAX_EXCLUDED at most: the oldest are forgotten first."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}  # by node id and host, oldest first
        self._slow: deque[float] = deque(maxlen=STRAGGLERS_PER_HOUR)
        """When nodes were last excluded for being slow; older ones do not matter any more."""

    def add(self, node: str, host: str, how: Excluded, *, seconds: float, now: float) -> None:
        """Exclude this node for so many seconds."""
        self._entries = {key: one for key, one in self._entries.items() if now < one.until}
        self._entries.pop((node, host), None)
        self._entries[node, host] = _Entry(how, now, now + seconds)
        if how.by == SLOW:
            self._slow.append(now)
        if len(self._entries) > MAX_EXCLUDED:
            self._entries.pop(next(iter(self._entries)))

    def lift(self, node: str) -> None:
        """It may come back, on whatever host; harmless if it is not excluded."""
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
        """Those that are refused now."""
        return tuple(
            ExcludedNode(
                node, host, entry.how.by, entry.how.verdict, now - entry.at, entry.until - now
            )
            for (node, host), entry in self._entries.items()
            if now < entry.until
        )

    def _slow_within_an_hour(self, now: float) -> tuple[float, ...]:
        """How long ago (seconds) nodes were excluded for being slow, oldest first,
        STRAGGLERS_PER_HOUR at most."""
        return tuple(now - at for at in self._slow if now - at < HOUR)

    def facts(self, now: float) -> ExclusionFacts:
        """What the next master must know."""
        return ExclusionFacts(self.page(now), slow_ages=self._slow_within_an_hour(now))

    def restore(self, facts: ExclusionFacts, at: float) -> None:
        """Take over what another master had recorded."""
        self._slow.extend(at - age for age in facts.slow_ages)
        for one in facts.excluded:
            self._entries[one.node, one.host] = _Entry(
                Excluded(one.kind, one.reason), at - one.age, at + one.remaining
            )
