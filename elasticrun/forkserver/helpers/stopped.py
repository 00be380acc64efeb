"""Wakes store hosts that a signal has stopped.

A store cannot be replaced while its round runs: the ranks use its address and keep keys in it.
SIGCONT is harmless. The kernel reports stopped children to their parent by SIGCHLD.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

STOPPED_LIMIT: Final = 20.0
"""Seconds that a store host may stay stopped."""


class StoppedStores:
    """The stopped store hosts, each with its deadline in monotonic seconds."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}

    def next_deadline(self) -> float | None:
        return min(self._due.values(), default=None)

    def check(self, stores: Iterable[int], now: float) -> int:
        """Wake the store hosts that have been stopped for STOPPED_LIMIT; returns how many. Call
        after every SIGCHLD and at the deadline. `stores`: pids of children that have not been
        reaped."""
        living, woken = set(stores), 0
        for pid in living:
            self._collect(pid, now)
        self._due = {pid: due for pid, due in self._due.items() if pid in living}
        for pid in [pid for pid, due in self._due.items() if due <= now]:
            del self._due[pid]
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
                woken += 1
        return woken

    def _collect(self, pid: int, now: float) -> None:
        """Collect a stop or continue event; leaves the exit status to be reaped elsewhere."""
        with suppress(ChildProcessError):
            event = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if event is not None and event.si_code == os.CLD_STOPPED:
                self._due.setdefault(pid, now + STOPPED_LIMIT)
            elif event is not None:
                self._due.pop(pid, None)
