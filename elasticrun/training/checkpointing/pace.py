"""Decides when a snapshot is due, and when it is written to storage. Times are arguments; no clock.

All ranks must choose the same steps, otherwise no step is ever complete; but their clocks differ.
So with an interval in time, rank 0 chooses two snapshots in advance. It publishes each choice long
before the others need it, so no rank waits.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, SupportsIndex

AUTO: Final = "auto"
Every = Literal["auto"] | int | float

FLOOR: Final = 10.0
"""Minimum seconds between two snapshots with "auto"."""

OVERHEAD: Final = 0.01
"""Share of the training time that snapshots may take with "auto"."""

FAILURES: Final = 3 * 3600.0
"""Mean seconds between two failures, as assumed by "auto"."""

GROWTH: Final = 8
"""Maximum ratio of an interval, in steps, to the previous one. The first steps are slow and do not
predict later ones.
"""

PUBLISH_LIMIT: Final = 60.0
"""Seconds that a rank waits for the choice that rank 0 published one snapshot ago."""


@dataclass(frozen=True, slots=True)
class DueSnapshot:
    """A snapshot to be taken."""

    step: int
    persist: bool


def interval_of(name: str, steps: int | None, seconds: float | None) -> int | float | None:
    """Combine the options `{name}_steps` and `{name}_seconds`: steps (int) or seconds (float), None
    for neither. Raises ValueError."""
    if steps is not None and seconds is not None:
        raise ValueError(f"give one of {name}_steps and {name}_seconds, not both")
    if steps is not None:
        if isinstance(steps, bool) or not isinstance(steps, SupportsIndex) or not steps > 0:
            more = f"; seconds are {name}_seconds" if isinstance(steps, float) else ""
            raise ValueError(f"{name}_steps is {steps!r}; it must be a whole number above 0{more}")
        return operator.index(steps)
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"{name}_seconds is {seconds!r}; it must be a number above 0")
        return float(seconds)
    return None


class Pace:
    """One rank's view of the schedule. An interval in steps depends on the step alone."""

    def __init__(self, every: Every, persist_every: float | int | None, start: int) -> None:
        """Intervals are steps (int) or seconds (float). `start`: the step from which training
        starts."""
        self._every = every
        self._persist_every = persist_every
        self.start = start
        self.timed = not isinstance(every, int) or isinstance(persist_every, float)
        self._began, self._begun_at = 0.0, start
        self._persisted = 0.0

    def known_to_all(self, after: int) -> DueSnapshot:
        """The next snapshot that all ranks know without communication: the next multiple if
        snapshots have an interval in steps, otherwise the next step, because rank 0 has not
        published one yet."""
        if isinstance(self._every, int):
            return self.stepwise(after)
        return DueSnapshot(after + 1, self._persists(after, after + 1))

    def start_at(self, now: float, step: int) -> None:
        """Start counting time: training is at `step` now."""
        self._began = self._persisted = now
        self._begun_at = step

    def next_after(
        self, now: float, here: DueSnapshot, coming: DueSnapshot, stall: float
    ) -> DueSnapshot:
        """On rank 0: choose the snapshot after `coming`, the next one, which all ranks know.
        `here`: the current one. `stall`: seconds that a snapshot takes."""
        seconds = (now - self._began) / max(1, here.step - self._begun_at)
        if isinstance(self._every, int):
            step = self.stepwise(coming.step).step
        else:
            interval = float(self._every) if self._every != AUTO else auto_interval(stall)
            steps = interval / seconds if seconds > 0 else math.inf
            last = max(1, coming.step - here.step)
            step = coming.step + max(1, math.ceil(min(steps, GROWTH * last)))
        return DueSnapshot(step, self._due_to_persist(now, seconds, here, coming, step))

    def _due_to_persist(
        self, now: float, seconds: float, here: DueSnapshot, coming: DueSnapshot, step: int
    ) -> bool:
        if not isinstance(self._persist_every, float):
            return self._persists(coming.step, step)
        if here.persist:
            self._persisted = now
        if coming.persist:
            self._persisted = now + seconds * (coming.step - here.step)
        then = now + seconds * (step - here.step)
        return then - self._persisted >= self._persist_every

    def stepwise(self, after: int) -> DueSnapshot:
        """The next multiple of `every` or `persist_every`, for intervals in steps."""
        assert isinstance(self._every, int)
        step = (after // self._every + 1) * self._every
        if isinstance(self._persist_every, int):
            step = min(step, (after // self._persist_every + 1) * self._persist_every)
        return DueSnapshot(step, self._persists(after, step))

    def _persists(self, after: int, step: int) -> bool:
        """For intervals in steps: whether a multiple lies between the last snapshot and this
        one."""
        every = self._persist_every
        return isinstance(every, int) and step // every > after // every


def auto_interval(stall: float) -> float:
    """Seconds between two snapshots by Young's formula, which balances their cost against lost
    work."""
    return max(FLOOR, stall / OVERHEAD, math.sqrt(2 * stall * FAILURES))


class StepExchange(Protocol):
    """How rank 0 publishes to the others (`restore_choice.RankExchange`)."""

    def publish(self, key: str, text: str) -> None: ...

    def wait_for(self, key: str, limit: float) -> str: ...


class Schedule:
    """The coming snapshots, the same on all ranks."""

    def __init__(
        self, pace: Pace, exchange: StepExchange, rank: int, now: float, start: int
    ) -> None:
        self._pace = pace
        self._exchange = exchange
        self._rank = rank
        self._index = 0
        self.next = pace.known_to_all(pace.start)
        self._coming = pace.known_to_all(self.next.step)
        pace.start_at(now, start)

    def due(self, step: int) -> DueSnapshot | None:
        """What is due at this step. If the script reports only some steps, the first reported step
        at or after the due one counts."""
        return DueSnapshot(step, self.next.persist) if step >= self.next.step else None

    def advance(self, now: float, here: DueSnapshot, stall: float) -> None:
        """Find the next snapshot after `here`, which was taken or skipped. Raises what
        `StepExchange` raises if rank 0 has published nothing."""
        if not self._pace.timed:
            self.next = self._pace.stepwise(here.step)
            return
        self._index += 1
        if self._rank == 0:
            after = self._pace.next_after(now, here, self._coming, stall)
            self._exchange.publish(f"due/{self._index + 1}", f"{after.step} {int(after.persist)}")
            self.next, self._coming = self._coming, after
        elif self._index < 2:
            self.next = self._coming
        else:
            step, persist = self._exchange.wait_for(f"due/{self._index}", PUBLISH_LIMIT).split()
            self.next = DueSnapshot(int(step), persist == "1")
