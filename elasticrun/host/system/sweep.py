"""Removes what ranks have left behind.

`Sweeper` is the fork server's: a child subreaper, so every orphan below it becomes its child and
none can hide. Groups and sessions of the ranks themselves are killed at once; a descendant that
made a session of its own (wandb's uploader, say) gets SIGTERM and a time to finish first.

`Sweep` is for ranks that were children of a program of the user's (a caller of `elastic_launch`,
or, when it has been killed, its agent). Such a program is no subreaper (it may have children of its
own whose orphans are none of our business), so leftovers are known by what they inherited: the
rank's session, its process group, or, for those that made a session of their own, the rank's mark
in the environment they were executed with. What has none of the three (forked, not executed, in a
session of its own) is missed.
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
"""Seconds after SIGKILL until a process is reported as one that the kernel keeps (D-state)."""

TELL_AFTER = 1.0
"""Seconds until processes that may go on are told of: most that a rank leaves end by themselves
with it (multiprocessing's resource tracker, say)."""

MOST_TOLD = 32
"""Processes that are named where there are more."""

LOOK_AGAIN = 0.05
"""Seconds until the next look at the end of the server, when a killed process' parent, dying
itself, may have been the one that was told."""


class Tie(Enum):
    """How a process is tied to a rank."""

    NONE = "none"
    SESSION = "session"  # it is in the session or the process group of the rank
    MARK = "mark"  # it has a session of its own and the rank's mark


def tie(pid: int, ranks: Collection[int], mark: bytes) -> Tie:
    """How `pid` is tied to ranks of these pids (which are their sessions' as well).

    `mark` is `NAME=value` in an environment. A process that has ended is tied to nobody."""
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
    """Send a signal to the group that `pid` leads, or to `pid` alone while it does not lead one
    yet, or where only it is meant; nothing if it has gone."""
    for send in (os.kill,) if alone else (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signum)
            return


class SweepStage(Enum):
    """How far a `Sweep` is."""

    LEFT = "left"  # they may go on
    TOLD = "told"  # they may go on, and have been told of
    ASKED = "asked"  # they have been sent SIGTERM
    FORCED = "forced"  # they have been sent SIGKILL


_SIGNALS = {SweepStage.ASKED: signal.SIGTERM, SweepStage.FORCED: signal.SIGKILL}


class Sweep:
    """The removal of what one set of ranks left.

    `watch` holds a pidfd of each process that is still there (they become readable when it ends),
    `deadline` is when `overdue` is to be called, on the clock of `now`.
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
        """SIGKILL to what is in the ranks' sessions; SIGTERM to the rest, SIGKILL `grace` seconds
        later. What then still is there after `patience` seconds is kept by the kernel. With
        `linger`, all may go on for so many seconds, and get SIGTERM then."""
        self._ranks = frozenset(ranks)
        self._mark = mark
        self.stage = SweepStage.ASKED
        self.deadline = now + linger + grace
        self._later = [(SweepStage.FORCED, self.deadline + patience)]
        if linger > 0:
            self.stage, self.deadline = SweepStage.LEFT, now + min(TELL_AFTER, linger)
            asked = (SweepStage.ASKED, now + linger + grace)
            self._later = [(SweepStage.TOLD, now + linger), asked, *self._later]
        self.watch: dict[int, int] = {}  # pidfd -> pid
        self._look()

    def gone(self, pidfd: int) -> None:
        """The process of this pidfd has ended. After the last one there is a second look: it may
        have started another before it went."""
        self.watch.pop(pidfd)
        os.close(pidfd)
        if not self.watch:
            self._look()

    def overdue(self) -> tuple[int, ...]:
        """The deadline has passed: the next stage begins; or, when all was done, the pids of those
        that did not die of it. Those are not watched any more."""
        if self._later:
            self.stage, self.deadline = self._later.pop(0)
            for pidfd in self.watch if self.stage in _SIGNALS else ():
                _send(pidfd, _SIGNALS[self.stage])
            return ()
        stuck = tuple(self.watch.values())
        self.close()
        return stuck

    def close(self) -> None:
        """Let the pidfds go."""
        for pidfd in self.watch:
            os.close(pidfd)
        self.watch.clear()

    def _look(self) -> None:
        for name in os.listdir("/proc"):
            if not name.isdecimal() or tie(int(name), self._ranks, self._mark) is Tie.NONE:
                continue
            try:
                pidfd = os.pidfd_open(int(name))
            except OSError:
                continue
            kind = tie(int(name), self._ranks, self._mark)  # again: a pid can be given anew
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


def end_at_once(ranks: Collection[int], mark: bytes, limit: float) -> tuple[int, ...]:
    """Kill all that these ranks left, and the ranks; blocks until it is gone. Returns the pids of
    what is still there after `limit` seconds."""
    for pid in ranks:
        kill_group(pid, signal.SIGKILL)
    sweep = Sweep(ranks, mark, grace=0.0, patience=limit, now=time.monotonic())
    while sweep.watch:
        poller = select.poll()
        for pidfd in sweep.watch:
            poller.register(pidfd, select.POLLIN)
        ended = poller.poll(max(0.0, sweep.deadline - time.monotonic()) * 1000 + 1)
        for pidfd, _ in ended:
            sweep.gone(pidfd)
        if not ended and (stuck := sweep.overdue()):
            return stuck
    return ()


@dataclass
class _Sweep:
    keys: tuple[int, ...]
    groups: frozenset[int]
    ask_at: float
    kill_at: float
    give_up_at: float
    lingers: bool
    to_tell: list[float]
    """When is told what is left, of a sweep that lets it go on: at first, and as it ends."""
    asked: set[int] = field(default_factory=set)

    def deadline(self, now: float) -> float:
        times = (*self.to_tell, self.ask_at, self.kill_at)
        return min((at for at in times if at > now), default=self.give_up_at)


@dataclass(frozen=True, slots=True)
class Done:
    keys: tuple[int, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """Descendants that run although their ranks have ended; `ending`: they were sent SIGTERM."""

    keys: tuple[int, ...]
    pids: tuple[int, ...]
    ending: bool


class Sweeper:
    """All sweeps under way. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sweeps: list[_Sweep] = []
        self._look_again: float | None = None

    def start(
        self,
        keys: tuple[int, ...],
        groups: Iterable[int],
        grace: float,
        now: float,
        *,
        linger: float = 0.0,
    ) -> None:
        """Sweep below the ranks whose process groups were `groups`. `linger`: seconds for which
        what they left may go on before it gets SIGTERM, in whichever session."""
        ask_at = now + max(linger, 0.0)
        kill_at = ask_at + max(grace, 0.0)
        lingers = linger > 0
        to_tell = [min(now + TELL_AFTER, ask_at), ask_at] if lingers else []
        times = (ask_at, kill_at, kill_at + STUCK_AFTER)
        self._sweeps.append(_Sweep(keys, frozenset(groups), *times, lingers, to_tell))

    def next_deadline(self) -> float | None:
        return self._look_again if self._sweeps else None

    def look(self, living: Iterable[int], now: float) -> list[Done | Left]:
        """Kill what is due; the sweeps that are over, and what is to be told of others. `living`:
        pids of ranks and helpers that are not to be swept. To be called after every death and at
        the deadline."""
        self._look_again = None
        if not self._sweeps:
            return []
        processes = linux.descendants(os.getpid())
        protected = set(living)
        done: list[Done | Left] = []
        for sweep in list(self._sweeps):
            left = self._kill(sweep, processes, protected, now)
            if not left or now >= sweep.give_up_at:
                done.append(Done(sweep.keys, tuple(sorted(left))))
                self._sweeps.remove(sweep)
            else:
                if sweep.to_tell and now >= sweep.to_tell[0]:
                    sweep.to_tell = [at for at in sweep.to_tell if at > now]
                    named = tuple(sorted(left))[:MOST_TOLD]
                    done.append(Left(sweep.keys, named, ending=now >= sweep.ask_at))
                later = sweep.deadline(now)
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
            if now < sweep.ask_at:
                continue
            asked_first = sweep.lingers or not ({process.group, process.session} & sweep.groups)
            if now >= sweep.kill_at or not asked_first:
                kill_group(process.pid, signal.SIGKILL, alone=True)
            elif process.pid not in sweep.asked:
                sweep.asked.add(process.pid)
                kill_group(process.pid, signal.SIGTERM, alone=True)
        return left


def kill_everything(limit: float) -> tuple[int, ...]:
    """SIGKILL and reap all descendants until none is left; those left after `limit` seconds."""
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
