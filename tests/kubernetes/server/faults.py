"""What goes wrong between a client and an API server, by a seed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from tests.kubernetes.server.store import Refusal


@dataclass
class Faults:
    """Shares are of requests, 0 to 1; discovery is spared. Set the fields while the server runs."""

    seed: int = 0
    users: tuple[str, ...] = ()
    """Whose requests; empty: everybody's."""

    errors: float = 0.0
    """Answered 500; half of the writes among them have been done all the same."""

    too_many: float = 0.0
    """Answered 429, with `retry_after` seconds."""

    retry_after: int = 1
    delay: float = 0.0
    """Seconds that an answer waits, at most."""

    stale: int = 0
    """Versions that a list may lag behind."""

    cut_after: int = 0
    """Events after which a watch breaks off, without a word; 0: never."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def concerns(self, user: str) -> bool:
        return not self.users or user in self.users

    async def before(self, *, write: bool) -> bool:
        """Wait or refuse; True: refuse when it is done."""
        if self.delay:
            late = self._rng.uniform(0, self.delay)
            await asyncio.sleep(late)  # the moment is what is tested
        if self._rng.random() < self.too_many:
            message = (
                "the server has received too many requests and has asked us to try again later"
            )
            raise Refusal(429, "TooManyRequests", message, retry_after=self.retry_after)
        if self._rng.random() >= self.errors:
            return False
        if write and self._rng.random() < 0.5:
            return True
        self.fail()
        return True

    @staticmethod
    def fail() -> None:
        raise Refusal(500, "InternalError", "an error on the server has prevented the request")

    def lag(self) -> int:
        return self._rng.randint(0, self.stale) if self.stale else 0
