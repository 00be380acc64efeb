"""Keeps a thread that prepares memory from slowing down a training that needs the cores.

A low priority is not enough: many kernels do not preempt a thread that zeroes a huge page, and
where they group processes by session (autogroup), priorities count only within a session.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

Piece = TypeVar("Piece")

SHARE: Final = 0.1
"""Share of a core that a throttled thread uses while all cores are busy."""

LEAST: Final = 0.001
"""Seconds of CPU after which a thread pauses."""

LONGEST: Final = 1.0
"""Seconds of the longest pause."""

PATIENCE: Final = 300.0
"""Seconds after which the rest is done at full speed: until then a failure loses all steps, and the
rank waits for its memory for a limited time."""


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
        """Yield the pieces. While all cores are busy, pause after each one, in proportion to the
        CPU time that this thread has spent on it."""
        before = time.thread_time()
        for piece in pieces:
            yield piece
            spent = time.thread_time() - before
            if spent < LEAST:
                continue
            left = self._until - time.monotonic()
            if left > 0 and not self._hurry.is_set() and are_cores_busy():
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
