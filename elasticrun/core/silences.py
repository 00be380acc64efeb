"""Deaths that are held against one node, and how long one that dies so again and again waits
outside: deaths by silence, and those soon after the node was let in (`stays`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from elasticrun.config import EXCLUDE_SILENT_AFTER
from elasticrun.core.bars import bar_length
from elasticrun.core.facts import LeftOut

MEMORY = 600.0
"""Such deaths are counted over this many seconds; see EXCLUDE_SILENT_AFTER."""


class Silences:
    """When a node died in one of these ways, and how often it was sent to the door for it."""

    def __init__(
        self,
        times: Iterable[float] = (),
        bars: int = 0,
        barred_until: float = -math.inf,
        after: int = EXCLUDE_SILENT_AFTER,
    ) -> None:
        """`after`: so many deaths within MEMORY are too many."""
        self.times = list(times)
        """Monotonic seconds, oldest first: within MEMORY of the newest."""
        self.bars = bars
        self.barred_until = barred_until
        """Until when it waits at the door; -inf if it need not."""
        self._after = after

    def count(self, now: float) -> None:
        """It died so."""
        self.times = [when for when in self.times if when >= now - MEMORY]
        self.times.append(now)
        if len(self.times) >= self._after:
            self.bars += 1
            self.barred_until = max(self.barred_until, now + bar_length(self.bars))

    def matter(self, now: float) -> bool:
        """Whether they can still be held against the node."""
        return bool(self.times) and (self.bars > 0 or self.times[-1] > now - MEMORY)

    def fact(self, node: str, now: float) -> LeftOut:
        """For the record of the job."""
        return LeftOut(
            node=node,
            silences=tuple(now - when for when in self.times),
            bars=self.bars,
            remaining=max(0.0, self.barred_until - now),
        )


def recalled(fact: LeftOut, now: float, after: int = EXCLUDE_SILENT_AFTER) -> Silences:
    """What `Silences.fact` gave to a master before this one."""
    until = now + fact.remaining if fact.remaining > 0.0 else -math.inf
    return Silences((now - age for age in fact.silences), fact.bars, until, after)
