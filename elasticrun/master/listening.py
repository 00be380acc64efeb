"""For how long a stream was silent, as far as this process can say: it was, if it listened.

Unanswered pings break a stream some seconds after its node fell silent, and gRPC does not say why
a stream broke. What tells is when something came on it last; and what was heard of others in that
time tells that the silence was the node's and not ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from elasticrun.config import BEAT_INTERVAL
from elasticrun.core.pace import beat_interval

DEAF: Final = 2.5 * BEAT_INTERVAL
"""Seconds without a word of anybody that prove nothing about anybody: two nodes beat more often."""


class Listening:
    """When anything was heard, and since when without a gap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = self._since = clock()

    def heard(self) -> float:
        """Something came, on any stream; when."""
        now = self._clock()
        if now - self._last > DEAF:
            self._since = now
        self._last = now
        return now

    def quiet(self, last: float) -> float:
        """Seconds since a stream was heard last, at `last`, whether or not others were heard."""
        return max(0.0, self._clock() - last)

    def silence(self, last: float, streams: int) -> float:
        """Seconds for which nothing came on a stream that was heard last at `last`, more than the
        pace of so many streams allows; 0.0 where it may have been we who did not hear."""
        now = self._clock()
        if now - self._last > DEAF:
            return 0.0
        slack = beat_interval(streams) - BEAT_INTERVAL
        return max(0.0, now - max(last, self._since) - slack)
