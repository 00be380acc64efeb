"""Deaths by silence of one node, and how long a node that dies so again and again waits outside."""

from __future__ import annotations

import math
from collections.abc import Iterable

from elasticrun.config import EXCLUDE_SILENT_AFTER

MEMORY = 600.0
"""Deaths by silence are counted over this many seconds; see EXCLUDE_SILENT_AFTER."""

BAR_UNIT = 120.0
"""A node that dies of silence too often waits this long at the door, then twice as long, ..."""

BAR_LONGEST = 3600.0


class Silences:
    """When a node died of silence, and how often it was sent to the door for it."""

    def __init__(self, times: Iterable[float] = (), bars: int = 0) -> None:
        self.times = list(times)
        """Monotonic seconds, oldest first: within MEMORY of the newest."""
        self.bars = bars

    def count(self, now: float) -> None:
        """It died of silence."""
        self.times = [when for when in self.times if when >= now - MEMORY]
        self.times.append(now)
        if len(self.times) >= EXCLUDE_SILENT_AFTER:
            self.bars += 1

    @property
    def barred_until(self) -> float:
        """Until when it waits at the door; -inf if it need not."""
        if len(self.times) < EXCLUDE_SILENT_AFTER or not self.bars:
            return -math.inf
        return self.times[-1] + min(BAR_UNIT * 2.0 ** min(self.bars - 1, 30), BAR_LONGEST)

    def matter(self, now: float) -> bool:
        """Whether they can still be held against the node."""
        return bool(self.times) and (self.bars > 0 or self.times[-1] > now - MEMORY)
