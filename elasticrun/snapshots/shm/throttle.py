"""Keeps a thread that prepares memory from slowing down a training that needs the cores.

A low priority is not enough: many kernels do not preempt a thread that zeroes a huge page, and
where they group processes by session (autogroup), priorities count only within a session. In a
container with a CPU quota, such a thread may use up CPU time of the training while cores are idle.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from elasticrun.host.doctor.resources import CpuQuota, lowest_quota

Piece = TypeVar("Piece")

SHARE: Final = 0.1
"""Share of a core that a throttled thread uses while all cores are busy."""

LEAST: Final = 0.001
"""Seconds of CPU after which a thread pauses."""

LONGEST: Final = 1.0
"""Seconds of the longest pause, and for which a quota that was used up counts as such."""

PATIENCE: Final = 300.0
"""Seconds after which the rest is done at full speed: until then a failure loses all steps, and the
rank waits for its memory for a limited time."""

WINDOW: Final = 0.2
"""Seconds over which the use of a quota is measured; the kernel grants it for each 0.1 s."""


class Throttle:
    """Limits the share of a core that some work uses. The work consists of pieces that take
    milliseconds, and may continue in another thread."""

    def __init__(self, patience: float = PATIENCE) -> None:
        """`patience`: seconds from now on; 0: at full speed."""
        self._hurry = threading.Event()
        self._until = time.monotonic() + patience

    def hurry(self) -> None:
        """Someone waits for the work: do the rest at full speed."""
        self._hurry.set()

    def spread(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces. While all cores are busy, or the quota leaves none, pause after each
        one, in proportion to the CPU time that this thread has spent on it."""
        before, quota = time.thread_time(), QuotaWatch(lowest_quota())
        for piece in pieces:
            yield piece
            spent = time.thread_time() - before
            if spent < LEAST:
                continue
            left = self._until - time.monotonic()
            if left > 0 and not self._hurry.is_set():
                is_used_up = quota.is_used_up()
                if is_used_up or are_cores_busy():
                    self._hurry.wait(min(spent / SHARE - spent, LONGEST, left))
            before = time.thread_time()


def are_cores_busy(loads: Path = Path("/proc/loadavg")) -> bool:
    """Whether more threads are ready to run, with the calling one, than this process may use cores;
    True if that is unknown."""
    try:
        ready = int(loads.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return ready > len(os.sched_getaffinity(0))


class Usage(NamedTuple):
    """Seconds on the clock, and of CPU time: of all that share a quota, and of this thread."""

    clock: float
    used: float
    own: float


def leaves_a_core(cores: float, before: Usage, now: Usage) -> bool:
    """Whether a quota of so many cores leaves one for this thread, beside what others have used."""
    others = (now.used - before.used) - (now.own - before.own)
    return others + (now.clock - before.clock) <= cores * (now.clock - before.clock)


class QuotaWatch:
    """Measures whether a CPU quota leaves a core for the calling thread."""

    def __init__(self, quota: CpuQuota | None) -> None:
        self._quota = quota
        self._last = self._usage()
        self._is_used_up = self._last is not None
        self._span = WINDOW

    def is_used_up(self) -> bool:
        """Whether it does not, by the last measurement; True before the first one, False without a
        quota."""
        if self._last is None or time.monotonic() - self._last.clock < self._span:
            return self._is_used_up
        now = self._usage()
        if self._quota is not None and now is not None:
            self._is_used_up = not leaves_a_core(self._quota.cores, self._last, now)
            self._span = LONGEST if self._is_used_up else WINDOW
        self._last = now
        return self._is_used_up

    def _usage(self) -> Usage | None:
        used = None if self._quota is None else self._quota.used()
        return None if used is None else Usage(time.monotonic(), used, time.thread_time())
