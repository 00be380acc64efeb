"""How long nodes stay in the rounds they are let into, and which of them never stay.

A node whose agent is killed whenever it trains (too little memory, a broken disk) comes back each
time, and each time the job gives up a round to let it in and another when it dies. A *stay* is from
the round in which a life of a node first has a place to that life's death; who leaves in good order
has done nothing. A node whose stays are brief again and again waits at the door for 2, 4, 8 ...
minutes, unless the job needs it to reach its smallest size. What dies at the door counts nothing:
it costs nobody a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elasticrun.config import EXCLUDE_BRIEF_AFTER, RESTART_HEALTHY_AFTER
from elasticrun.core.facts import LeftOut
from elasticrun.core.silences import Silences, recalled

MAX_RECORDS = 1000
"""Nodes whose brief stays are remembered, the newest."""


class Stays:
    """The stays of all nodes; times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._brief: dict[str, Silences] = {}

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
        record = self._brief.pop(node, None) or Silences(after=EXCLUDE_BRIEF_AFTER)
        record.count(now)
        self._brief[node] = record
        if len(self._brief) > MAX_RECORDS:
            self._brief.pop(next(iter(self._brief)))

    def over(self, node: str) -> None:
        """It has left in good order."""
        self._since.pop(node, None)

    def barred_until(self, node: str, now: float) -> float:
        """Until when a node that never stays waits at the door; `now` if it need not."""
        record = self._brief.get(node)
        return now if record is None else max(now, record.barred_until)

    def record(self, now: float) -> tuple[LeftOut, ...]:
        """What the next master must know."""
        return tuple(one.fact(node, now) for node, one in self._brief.items() if one.matter(now))

    def restore(self, facts: Iterable[LeftOut], now: float) -> None:
        """Take over what another master had recorded."""
        for one in facts:
            self._brief[one.node] = recalled(one, now, EXCLUDE_BRIEF_AFTER)
