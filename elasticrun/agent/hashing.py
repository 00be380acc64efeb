"""When the saver hashes what ranks have committed: a moment later, and only the newest of it."""

from __future__ import annotations

import asyncio
from typing import Final

from elasticrun.agent.held import Held
from elasticrun.agent.savers import Savers

HASH_AFTER: Final = 0.1
"""Seconds after a commit when it is hashed."""

APART: Final = 1.0
"""Seconds between two snapshots of one segment that are hashed; ranks that commit faster have only
some hashed, and keep their cores to themselves."""


class Hashing:
    """The timers, one a segment."""

    def __init__(self, savers: Savers) -> None:
        self._savers = savers
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._hashed: dict[int, float] = {}  # when, on the loop's clock

    def soon(self, held: Held) -> None:
        """Something was committed in it."""
        if held.key not in self._timers:
            loop = asyncio.get_running_loop()
            last = self._hashed.get(held.key, -APART)
            at = max(loop.time() + HASH_AFTER, last + APART)
            self._timers[held.key] = loop.call_at(at, self.now, held)

    def now(self, held: Held) -> None:
        """Have its newest snapshot hashed."""
        timer = self._timers.pop(held.key, None)
        if timer is not None:
            timer.cancel()
        newest = held.find_any()
        if newest is not None:
            self._hashed[held.key] = asyncio.get_running_loop().time()
            self._savers.hash(held, newest)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
