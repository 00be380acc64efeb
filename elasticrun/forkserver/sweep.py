"""Removing what ranks leave behind.

The server is a child subreaper, so every orphan below it becomes its child and none can hide.
Groups and sessions of the ranks themselves are killed at once; a descendant that made a session of
its own (wandb's uploader, say) gets SIGTERM and a time to finish first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticrun.forkserver import linux

STUCK_AFTER = 30.0
"""Seconds after SIGKILL until a process is reported as one that the kernel keeps (D-state)."""

LOOK_AGAIN = 0.05
"""Seconds until the next look at the end of the server, when a killed process' parent, dying
itself, may have been the one that was told."""


@dataclass
class _Sweep:
    keys: tuple[int, ...]
    groups: frozenset[int]
    kill_at: float
    give_up_at: float
    asked: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Done:
    keys: tuple[int, ...]
    stuck: tuple[int, ...]


class Sweeper:
    """All sweeps under way. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sweeps: list[_Sweep] = []
        self._look_again: float | None = None

    def start(self, keys: tuple[int, ...], groups: Iterable[int], grace: float, now: float) -> None:
        """Sweep below the ranks whose process groups were `groups`."""
        kill_at = now + max(grace, 0.0)
        self._sweeps.append(_Sweep(keys, frozenset(groups), kill_at, kill_at + STUCK_AFTER))

    def next_deadline(self) -> float | None:
        return self._look_again if self._sweeps else None

    def look(self, living: Iterable[int], now: float) -> list[Done]:
        """Kill what is due; the sweeps that are over. `living`: pids of ranks and helpers that
        are not to be swept. To be called after every death and at the deadline."""
        self._look_again = None
        if not self._sweeps:
            return []
        processes = linux.descendants(os.getpid())
        protected = set(living)
        done = []
        for sweep in list(self._sweeps):
            left = self._kill(sweep, processes, protected, now)
            if not left or now >= sweep.give_up_at:
                done.append(Done(sweep.keys, tuple(sorted(left))))
                self._sweeps.remove(sweep)
            else:
                later = sweep.kill_at if now < sweep.kill_at else sweep.give_up_at
                self._look_again = min(self._look_again or later, later)
        return done

    def _kill(
        self, sweep: _Sweep, processes: list[linux.Process], protected: set[int], now: float
    ) -> set[int]:
        safe = set(protected)
        left = set()
        for process in processes:
            if safe & {process.pid, process.parent, process.group, process.session}:
                safe.add(process.pid)
                continue
            left.add(process.pid)
            own_session = not ({process.group, process.session} & sweep.groups)
            if now >= sweep.kill_at or not own_session:
                _send(process.pid, signal.SIGKILL)
            elif process.pid not in sweep.asked:
                sweep.asked.add(process.pid)
                _send(process.pid, signal.SIGTERM)
        return left


def kill_everything(limit: float) -> tuple[int, ...]:
    """SIGKILL and reap all descendants until none is left; those left after `limit` seconds."""
    end = time.monotonic() + limit
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        processes = linux.descendants(os.getpid())
        for process in processes:
            _send(process.pid, signal.SIGKILL)
        reap_all()
        if not processes:
            return ()
        if time.monotonic() > end:
            return tuple(process.pid for process in processes)
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_AGAIN)


def reap_all() -> list[tuple[int, int]]:
    """Every child that has ended: (pid, wait status)."""
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if pid == 0:
            return reaped
        reaped.append((pid, status))


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass
