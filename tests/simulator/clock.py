"""The virtual clock: a queue of things that will happen, and nothing happens in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Runs what was scheduled in the order of time, things of one time in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran = 0  # things that have happened
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def after(self, delay: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay, what)

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do `what` at `when`, or now if that is over."""
        self._serial += 1
        heapq.heappush(self._queue, (max(when, self.now), self._serial, what))

    def next(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def run_one(self) -> None:
        self.ran += 1
        self.now, _, what = heapq.heappop(self._queue)
        what()
