"""Those who have not proved yet that they belong to the job: how long, how many, and what is said
about them.

A stranger can open streams as fast as a network carries them, and each takes memory. So a stream
has PROVE_LIMIT seconds until it is in, and where more than MAX_UNPROVED wait, the one that has
waited longest goes: an honest agent is in within milliseconds, and dials again if it was not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

PROVE_LIMIT: Final = 5.0
"""Seconds from the opening of a stream to the end of its introduction."""

MAX_UNPROVED: Final = 4096
"""Streams that may be on their way in at a time; ten thousand agents that come back together are
answered faster than they dial."""

TELL_EVERY: Final = 60.0
"""Seconds after which a refusal of the same kind is logged again: a flood fills no log."""

logger = logging.getLogger("elasticrun")


class Late(Exception):
    """A stream has to go because it took too long; `crowded`: because too many others came."""

    def __init__(self, *, crowded: bool) -> None:
        super().__init__()
        self.crowded = crowded


class Doorstep:
    """The streams that are on their way in, oldest first."""

    def __init__(self, limit: float = PROVE_LIMIT, most: int = MAX_UNPROVED) -> None:
        self._limit = limit
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}  # in the order of arrival
        self._pushed: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """For as long as a stream introduces itself. Late when it has to go."""
        limit = asyncio.timeout(self._limit)
        try:
            async with limit:
                self._waiting[limit] = None
                if len(self._waiting) > self._most:
                    self._push_off()
                yield
        except TimeoutError:
            raise Late(crowded=limit in self._pushed) from None
        finally:
            self._waiting.pop(limit, None)
            self._pushed.discard(limit)

    def _push_off(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        self._pushed.add(oldest)
        oldest.reschedule(asyncio.get_running_loop().time())


class Refusals:
    """Tells the operator about strangers in fixed words, each kind at most once in TELL_EVERY."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def add(self, word: str) -> None:
        """Count one refusal of this kind; `word` is one of a few sentences of ours, "" for none."""
        if not word:
            return
        now = self._clock()
        self._count[word] = self._count.get(word, 0) + 1
        if now - self._told.get(word, -TELL_EVERY) >= TELL_EVERY:
            times = self._count.pop(word)
            logger.warning("%s%s", word, f" ({times} times)" if times > 1 else "")
            self._told[word] = now
