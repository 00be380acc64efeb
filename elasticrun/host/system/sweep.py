"""Removes processes that ranks have left behind.

`Sweeper` is for the fork server, a child subreaper: every orphaned descendant becomes its child, so
none can escape. Processes in a rank's own process group or session are killed at once; a descendant
with a session of its own (such as wandb's uploader) gets SIGTERM and some time to finish.

`Sweep` is for ranks that were children of a user's program: a caller of `elastic_launch` uses it
or, if the caller was killed, its agent. Such a program is not a subreaper, because it may have
other children whose orphans we must not touch. So leftovers are recognized by what they inherited:
the rank's session, its process group or, with a session of their own, the rank's mark in their
initial environment. A process with none of the three (forked, not exec'd, in its own session) is
missed.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from elasticrun.host.system import processes as linux

STUCK_AFTER = 30.0
"""Seconds after SIGKILL until a process is reported as stuck in the kernel (D state)."""

REPORT_AFTER = 1.0
"""Seconds until leftovers that may continue are reported: most leftovers of a rank (such as
multiprocessing's resource tracker) exit by themselves soon after it.
"""

MAX_REPORTED = 32
"""Maximum number of processes named in a report."""

RECHECK_AFTER = 0.05
"""Maximum seconds between scans of /proc in `kill_everything`, which cannot rely on SIGCHLD alone:
that of a killed process may have gone to its parent, which was exiting as well.
"""


class Tie(Enum):
    """How a process is tied to a rank."""

    NONE = "none"
    SESSION = "session"  # it is in the session or process group of the rank
    MARK = "mark"  # it has its own session, and the rank's mark


def tie(pid: int, ranks: Collection[int], mark: bytes) -> Tie:
    """How a process is tied to the ranks with these pids (which are also their session ids).

    `mark`: `NAME=value` in the ranks' environment. A process that has exited, or of another user,
    is not tied."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return Tie.NONE
        process = linux.read_process(pid)
        if process is None or process.has_ended:
            return Tie.NONE
        if process.group in ranks or process.session in ranks:
            return Tie.SESSION
        marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return Tie.MARK if marked else Tie.NONE
    except OSError:
        return Tie.NONE


def kill_group(pid: int, signum: int, *, alone: bool = False) -> None:
    """Send a signal to the process group that `pid` leads; only to `pid` if it leads none yet, or
    with `alone`. A no-op if it has exited."""
    for send in (os.kill,) if alone else (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signum)
            return


class SweepStage(Enum):
    """The progress of a `Sweep`."""

    LEFT = "left"  # leftovers may continue
    REPORTED = "reported"  # they may continue, and are to be reported
    TERMINATED = "terminated"  # they were sent SIGTERM
    KILLED = "killed"  # they were sent SIGKILL


_SIGNALS = {SweepStage.TERMINATED: signal.SIGTERM, SweepStage.KILLED: signal.SIGKILL}


class Sweep:
    """The removal of the processes that one set of ranks has left behind.

    `watch`: a pidfd, readable at exit, of each remaining process. `deadline`: when to call
    `deadline_passed`, on the clock of `now`.
    """

    def __init__(
        self,
        ranks: Collection[int],
        mark: bytes,
        *,
        grace: float,
        patience: float,
        now: float,
        linger: float = 0.0,
    ) -> None:
        """Find the processes; send SIGKILL to those in the ranks' sessions, SIGTERM to the others,
        and SIGKILL to these `grace` seconds later. What remains `patience` seconds after that is
        stuck in the kernel. With `linger`, all may continue for that many seconds, and then get
        SIGTERM."""
        self._ranks = frozenset(ranks)
        self._mark = mark
        self.stage = SweepStage.TERMINATED
        self.deadline = now + linger + grace
        self._later = [(SweepStage.KILLED, self.deadline + patience)]
        if linger > 0:
            self.stage, self.deadline = SweepStage.LEFT, now + min(REPORT_AFTER, linger)
            terminated = (SweepStage.TERMINATED, now + linger + grace)
            self._later = [(SweepStage.REPORTED, now + linger), terminated, *self._later]
        self.watch: dict[int, int] = {}  # pidfd -> pid
        self._find_leftovers()

    def process_exited(self, pidfd: int) -> None:
        """Handle the exit of the process of this pidfd. After the last exit, scans /proc again,
        because that process may have started another one."""
        self.watch.pop(pidfd)
        os.close(pidfd)
        if not self.watch:
            self._find_leftovers()

    def deadline_passed(self) -> tuple[int, ...]:
        """Start the next stage, now that the deadline has passed; returns (). After the last stage,
        stop watching and return the pids of the processes that did not die."""
        if self._later:
            self.stage, self.deadline = self._later.pop(0)
            for pidfd in self.watch if self.stage in _SIGNALS else ():
                _send(pidfd, _SIGNALS[self.stage])
            return ()
        stuck = tuple(self.watch.values())
        self.close()
        return stuck

    def close(self) -> None:
        """Close the pidfds."""
        for pidfd in self.watch:
            os.close(pidfd)
        self.watch.clear()

    def _find_leftovers(self) -> None:
        for name in os.listdir("/proc"):
            if not name.isdecimal() or tie(int(name), self._ranks, self._mark) is Tie.NONE:
                continue
            try:
                pidfd = os.pidfd_open(int(name))
            except OSError:
                continue
            kind = tie(int(name), self._ranks, self._mark)  # again: the pid may have been reused
            if kind is Tie.NONE:
                os.close(pidfd)
                continue
            self.watch[pidfd] = int(name)
            if self.stage in _SIGNALS:
                own_session = kind is not Tie.SESSION
                _send(pidfd, _SIGNALS[self.stage] if own_session else signal.SIGKILL)


def _send(pidfd: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signum)


def kill_leftovers(ranks: Collection[int], mark: bytes, limit: float) -> tuple[int, ...]:
    """Kill these ranks and everything that they leave behind; blocks until all of it is gone.
    Returns the pids of what remains after `limit` seconds."""
    for pid in ranks:
        kill_group(pid, signal.SIGKILL)
    sweep = Sweep(ranks, mark, grace=0.0, patience=limit, now=time.monotonic())
    while sweep.watch:
        poller = select.poll()
        for pidfd in sweep.watch:
            poller.register(pidfd, select.POLLIN)
        ended = poller.poll(max(0.0, sweep.deadline - time.monotonic()) * 1000 + 1)
        for pidfd, _ in ended:
            sweep.process_exited(pidfd)
        if not ended and (stuck := sweep.deadline_passed()):
            return stuck
    return ()


@dataclass
class _Sweep:
    keys: tuple[int, ...]
    groups: frozenset[int]
    term_at: float
    kill_at: float
    give_up_at: float
    lingers: bool
    report_at: list[float]
    """When to report leftovers that may continue: soon after the start, and when they get
    SIGTERM."""
    terminated: set[int] = field(default_factory=set)

    def deadline(self, now: float) -> float:
        times = (*self.report_at, self.term_at, self.kill_at)
        return min((at for at in times if at > now), default=self.give_up_at)


@dataclass(frozen=True, slots=True)
class SweepDone:
    keys: tuple[int, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepLeftovers:
    """Leftovers that still run; `ending`: they were sent SIGTERM. At most MAX_REPORTED pids."""

    keys: tuple[int, ...]
    pids: tuple[int, ...]
    ending: bool


class Sweeper:
    """All sweeps of a fork server. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sweeps: list[_Sweep] = []
        self._recheck_at: float | None = None

    def start(
        self,
        keys: tuple[int, ...],
        groups: Iterable[int],
        grace: float,
        now: float,
        *,
        linger: float = 0.0,
    ) -> None:
        """Start to sweep all descendants except those that belong to live ranks (`advance`). Those
        in `groups`, the process groups of the ranks that have exited, get SIGKILL at once, others
        SIGTERM and `grace` seconds later SIGKILL. `linger`: seconds for which all may continue
        before they get SIGTERM. `keys`: identify this sweep in results."""
        term_at = now + max(linger, 0.0)
        kill_at = term_at + max(grace, 0.0)
        lingers = linger > 0
        report_at = [min(now + REPORT_AFTER, term_at), term_at] if lingers else []
        times = (term_at, kill_at, kill_at + STUCK_AFTER)
        self._sweeps.append(_Sweep(keys, frozenset(groups), *times, lingers, report_at))

    def next_deadline(self) -> float | None:
        return self._recheck_at if self._sweeps else None

    def advance(self, live_ranks: Iterable[int], now: float) -> list[SweepDone | SweepLeftovers]:
        """Send the signals that are due; returns finished sweeps, and reports of others.
        `live_ranks`: pids of live ranks and helpers, which are not swept, nor are their groups,
        sessions and descendants. Call after every exit and at the deadline."""
        self._recheck_at = None
        if not self._sweeps:
            return []
        processes = linux.descendants(os.getpid())
        protected = set(live_ranks)
        done: list[SweepDone | SweepLeftovers] = []
        for sweep in list(self._sweeps):
            left = self._kill(sweep, processes, protected, now)
            if not left or now >= sweep.give_up_at:
                done.append(SweepDone(sweep.keys, tuple(sorted(left))))
                self._sweeps.remove(sweep)
            else:
                if sweep.report_at and now >= sweep.report_at[0]:
                    sweep.report_at = [at for at in sweep.report_at if at > now]
                    named = tuple(sorted(left))[:MAX_REPORTED]
                    done.append(SweepLeftovers(sweep.keys, named, ending=now >= sweep.term_at))
                later = sweep.deadline(now)
                self._recheck_at = min(self._recheck_at or later, later)
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
            if now < sweep.term_at:
                continue
            term_first = sweep.lingers or not ({process.group, process.session} & sweep.groups)
            if now >= sweep.kill_at or not term_first:
                kill_group(process.pid, signal.SIGKILL, alone=True)
            elif process.pid not in sweep.terminated:
                sweep.terminated.add(process.pid)
                kill_group(process.pid, signal.SIGTERM, alone=True)
        return left


def kill_everything(limit: float) -> tuple[int, ...]:
    """Kill and reap all descendants until none is left; returns the pids of those left after
    `limit` seconds. Leaves SIGCHLD masked."""
    end = time.monotonic() + limit
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        processes = linux.descendants(os.getpid())
        for process in processes:
            kill_group(process.pid, signal.SIGKILL, alone=True)
        reap_all()
        if not processes:
            return ()
        if time.monotonic() > end:
            return tuple(process.pid for process in processes)
        signal.sigtimedwait({signal.SIGCHLD}, RECHECK_AFTER)


def reap_all() -> list[tuple[int, int]]:
    """Reap every child that has exited; returns (pid, wait status) of each."""
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if pid == 0:
            return reaped
        reaped.append((pid, status))
