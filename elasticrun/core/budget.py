"""The job's restart budget: how many restarts are left, and how long the next one waits.

One budget for the whole job, kept by the master (torchrun keeps one per agent and they diverge).
A charge is made at most once per round, by whoever settles the round's failure window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from elasticrun.config import RESTART_HEALTHY_AFTER

MAX_AGES = 1024
"""Charges that are recorded one by one: a job that may restart more often than this in one window
is forgiven the older ones when its master dies."""


class Budget:
    """Counts charges. The first restart is immediate; one after a short life waits 1, 2, 4 ...
    seconds, so that an outage of storage does not eat the budget in milliseconds."""

    def __init__(
        self,
        *,
        max_restarts: int,
        window: float,
        backoff: float,
        healthy_after: float = RESTART_HEALTHY_AFTER,
    ) -> None:
        """`window`: seconds for which a charge counts against `max_restarts` (0: for ever).
        `backoff`: longest wait in seconds (0: never wait)."""
        self._max = max_restarts
        self._window = window
        self._backoff = backoff
        self._healthy_after = healthy_after
        self._charges: deque[float] = deque()
        self._adopted = 0
        self._short_lives = 0
        self.count = 0
        """Restarts charged since the job began: TORCHELASTIC_RESTART_COUNT."""

    def adopt(self, count: int) -> None:
        """Take over the count that the ranks of an adopted round were started with."""
        if count > self.count:
            self._adopted += count - self.count
            self.count = count

    def restore(self, count: int, ages: Iterable[float], short_lives: int, now: float) -> None:
        """What the record of the master before this one says; `ages` as `ages` gave them."""
        self.count = count
        self._short_lives = short_lives
        if self._window > 0:
            self._charges = deque(now - age for age in ages)
        else:
            self._adopted = count

    def ages(self, now: float) -> tuple[float, ...]:
        """For the record: how old the charges are that lie in the window, oldest first, the newest
        MAX_AGES of them; none where every charge counts for ever."""
        if self._window <= 0:
            return ()
        self.left(now)
        return tuple(now - when for when in self._charges)[-MAX_AGES:]

    @property
    def short_lives(self) -> int:
        """How many rounds in a row died soon after they began."""
        return self._short_lives

    def left(self, now: float) -> int:
        """Restarts that may still be charged."""
        while self._window > 0 and self._charges and self._charges[0] <= now - self._window:
            self._charges.popleft()
        spent = len(self._charges) + (self._adopted if self._window == 0 else 0)
        return max(0, self._max - spent)

    def delay(self, life: float) -> float:
        """Seconds that a restart waits after a life of `life` seconds, before it is charged."""
        if self._backoff <= 0 or life >= self._healthy_after or self._short_lives == 0:
            return 0.0
        return float(min(self._backoff, 2.0 ** min(self._short_lives - 1, 30)))

    def charge(self, now: float, life: float) -> None:
        """Spend one restart for a round that lived `life` seconds."""
        if life >= self._healthy_after:
            self._short_lives = 0
        self._short_lives += 1
        self._charges.append(now)
        self.count += 1
