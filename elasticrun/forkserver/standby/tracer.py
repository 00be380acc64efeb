"""The tracer: one process per node that holds all standbys.

It stops each standby at every system call and lets it continue if `rules.judge` permits. The first
call that must not be made parks the standby: all of its threads stay stopped, that one at the
entrance of the call. To become a rank, a standby is only released: nothing of the tracer is left in
it. If the tracer ends, the kernel kills its standbys.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from elasticrun.forkserver.standby import ptrace
from elasticrun.forkserver.standby.reads import Reads, State
from elasticrun.forkserver.standby.rules import (
    AT_FDCWD,
    CLOCKS,
    MARK,
    Mark,
    Parked,
    Read,
    deadline,
    judge,
)
from elasticrun.forkserver.standby.syscalls import names_of
from elasticrun.host.system import processes
from elasticrun.host.system.title import set_title
from elasticrun.snapshots.shm.throttle import are_cores_busy
from elasticrun.wire.frames import Connection, HungUp
from elasticrun.wire.spawning import SHIELDED, FromSpawner, StandbyState
from elasticrun.wire.types import resolve

MAX_RSS: Final = 2 * 1024**3
"""Bytes of memory at which a standby is given up: it loads data and not only code."""

SLICE: Final = 0.005
SHARE: Final = 0.1
"""While all cores are busy, or without the right to return from SCHED_IDLE, a standby runs for this
share of the time, in slices of SLICE seconds. The priority alone is not enough: caches and the
kernel's locks are shared (docs/figures.md)."""

MARKED: Final = {
    Mark.CLOCK.value: "a read of the clock",
    Mark.LOAD.value: "a read of the load",
    Mark.STORE.value: "TCPStore",
}
"""Where a standby is parked that is at no system call."""

_SECOND: Final = 1_000_000_000
"""Nanoseconds."""

_CHECK_EVERY: Final = 4096
"""System calls between two checks of a standby's memory."""


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class TraceStandby:
    """Hold this process from now on; `idle`: it only uses idle cores. Answer: StandbyHeld, or
    StandbyFailed."""

    pid: int
    idle: bool


@dataclass(frozen=True, slots=True)
class CheckStandby:
    """Stop this standby for good, unless all that it has read is unchanged. Answer: StandbyValid,
    and it stands still; or StandbyFailed. `batch`: a standby of the same batch may be compared with
    what was looked at for another one."""

    pid: int
    batch: int


@dataclass(frozen=True, slots=True)
class ReleaseStandby:
    """Let this valid standby go on, as the rank that it is from now on."""

    pid: int


@dataclass(frozen=True, slots=True)
class StandbyHeld:
    pid: int


@dataclass(frozen=True, slots=True)
class StandbyParked:
    """The standby is parked at this call."""

    pid: int
    call: str


@dataclass(frozen=True, slots=True)
class StandbyValid:
    pid: int


@dataclass(frozen=True, slots=True)
class StandbyFailed:
    """The standby is useless and is killed; a state of `wire.spawning`, with its detail."""

    pid: int
    state: StandbyState
    detail: str = ""


ToTracer = TraceStandby | CheckStandby | ReleaseStandby
FromTracer = StandbyHeld | StandbyParked | StandbyValid | StandbyFailed

# now, because the fork server hides this module before it reads a message (`lazy_imports`)
for _messages in (ToTracer, FromTracer, FromSpawner):
    resolve(_messages)


# ---------------------------------------------------------------- one standby


@dataclass
class _Thread:
    tid: int
    stopped: bool = False
    signum: int = 0  # to deliver when it continues
    since: tuple[int, ...] = (0,) * len(CLOCKS)  # when it was stopped for good, on each of CLOCKS


@dataclass
class Standby:
    """A traced process: what the rules ask about it (`rules.Tracee`), and what it has read."""

    pid: int
    idle: bool = True
    threads: dict[int, _Thread] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)
    probes: set[str] = field(default_factory=set)
    made: str = ""
    search_path: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    hooks: tuple[tuple[int, int], ...] = ()  # where the clock is hooked, and what was there
    begun: bool = False  # the script runs
    is_held: bool = False  # its threads are stopped and stay so
    calls: int = 0
    used: float = 0.0  # CPU seconds of it and its tracer at the end of the last pause

    def stands_still(self) -> bool:
        """Whether all of its threads are stopped, one that was just started too."""
        tids = set(map(int, os.listdir(f"/proc/{self.pid}/task")))
        return tids == {thread.tid for thread in self.threads.values() if thread.stopped}

    def path(self, address: int, folder: int) -> str:
        name = os.fsdecode(ptrace.text(self.pid, address)) if address else ""
        if not name or name.startswith("/"):
            return name
        link = f"/proc/{self.pid}/cwd" if folder == AT_FDCWD else f"/proc/{self.pid}/fd/{folder}"
        return os.path.join(os.readlink(link), name)

    def opened(self, descriptor: int) -> str:
        try:
            return os.readlink(f"/proc/{self.pid}/fd/{descriptor}")
        except OSError:
            return ""

    def memory(self, address: int, length: int) -> bytes:
        return ptrace.read(self.pid, address, length)

    def left(self, address: int, clock: int | None) -> float:
        seconds, nanoseconds = struct.unpack("=qq", self.memory(address, 16))
        until: float = seconds + nanoseconds / 1e9
        return until if clock is None else until - time.clock_gettime(clock)

    def may_create(self, path: str) -> bool:
        return os.access(os.path.dirname(path), os.W_OK | os.X_OK)

    def mode(self, path: str) -> int:
        try:
            return os.stat(path).st_mode
        except OSError:
            return 0


class Tracer:
    """Holds the standbys and obeys the fork server. `policy`: how ranks are scheduled."""

    def __init__(self, sock: socket.socket, policy: int) -> None:
        self._connection = Connection(sock, ToTracer)
        self._architecture, self._names = names_of(platform.machine()) or (0, {})
        self._policy = policy
        self._standbys: dict[int, Standby] = {}
        self._owners: dict[int, Standby] = {}  # by thread
        self._batch: tuple[int, dict[Read, State]] = (-1, {})
        self._may_be_idle = _may_be_idle(policy)

    def run(self) -> NoReturn:
        """Run until the fork server has ended."""
        woken = {signal.SIGCHLD, signal.SIGUSR1}
        while True:
            self._wait_for_stops()
            self._obey()
            signal.sigwait(woken)

    # ------------------------------------------------------------ orders

    def _obey(self) -> None:
        try:
            orders = list(self._connection.receive() or ())
        except HungUp:
            os._exit(0)
        for order in orders:
            match order:
                case TraceStandby():
                    self._watch(order)
                case CheckStandby():
                    self._check(order)
                case ReleaseStandby(pid):
                    self._release(pid)

    def _watch(self, order: TraceStandby) -> None:
        pid = order.pid
        standby = Standby(pid, order.idle, used=_cpu_time(pid))
        try:
            ptrace.seize(pid)
            for tid in (pid, 0):  # 0: this process
                self._set_policy(tid, os.SCHED_IDLE if order.idle else self._policy)
            ptrace.interrupt(pid)
        except OSError as error:
            self._fail(pid, StandbyState.REFUSED, error.strerror or str(error))
            return
        self._standbys[pid] = standby
        self._adopt(standby, pid)

    def _adopt(self, standby: Standby, tid: int) -> _Thread:
        self._owners[tid] = standby
        thread = standby.threads[tid] = _Thread(tid)
        return thread

    def _check(self, order: CheckStandby) -> None:
        standby = self._standbys.get(order.pid)
        if standby is None or not standby.begun:
            self._fail(order.pid, StandbyState.NO_ANSWER)
            return
        for tid in (0, *standby.threads):  # 0: this process
            self._set_policy(tid, self._policy)
        standby.is_held = True
        self._hold(standby)
        while order.pid in self._standbys and not standby.stands_still():
            self._wait_for_stops(block=True)
        if order.pid not in self._standbys:
            return  # it has ended, which is reported
        if _has_signals(standby):
            self._fail(order.pid, StandbyState.ENDED, "a signal")
            return
        if self._batch[0] != order.batch:
            self._batch = (order.batch, {})
        if path := standby.reads.changed(self._batch[1]):
            self._fail(standby.pid, StandbyState.CHANGED, path)
        elif call := self._extend_waits(standby):
            self._fail(standby.pid, StandbyState.LIMIT, call)
        else:
            self._connection.send(StandbyValid(standby.pid))

    def _extend_waits(self, standby: Standby) -> str:
        """Move the deadlines for which threads are about to wait, by the time for which they have
        stood still. Returns the call whose deadline cannot be moved, "" if there is none."""
        now = _clocks()
        words: dict[int, int] = {}  # by address; threads may share a deadline
        for thread in standby.threads.values():
            call = None
            with suppress(ProcessLookupError):  # it has ended
                call = ptrace.entry(thread.tid)
            name = self._name(call) if call is not None else ""
            if call is None or (end := deadline(name, call.arguments)) is None:
                continue
            clock = CLOCKS.index(end.clock)
            try:
                seconds, rest = struct.unpack("=qq", standby.memory(end.address, 16))
                if not ptrace.is_private(standby.pid, end.address):
                    return name
            except (OSError, struct.error):
                return name
            if (seconds, rest) == (0, 0) or seconds < 0 or not 0 <= rest < _SECOND:
                continue  # no timer; or the kernel refuses it
            moved = seconds * _SECOND + rest + now[clock] - thread.since[clock]
            words[end.address], words[end.address + 8] = divmod(max(moved, 0), _SECOND)
        try:
            ptrace.write(standby.pid, words.items())
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _release(self, pid: int) -> None:
        if (standby := self._standbys.get(pid)) is None:
            return
        try:
            ptrace.write(pid, standby.hooks)
            for thread in standby.threads.values():
                self._set_policy(thread.tid, self._policy)
                with suppress(ProcessLookupError):  # it has ended
                    ptrace.detach(thread.tid, thread.signum)
        except OSError as error:
            self._fail(pid, StandbyState.REFUSED, error.strerror or str(error))
            return
        self._forget(standby)
        if standby.idle:
            self._set_policy(0, os.SCHED_IDLE)

    def _set_policy(self, tid: int, policy: int) -> None:
        if self._may_be_idle:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(tid, policy, os.sched_param(0))

    def _fail(self, pid: int, state: StandbyState, detail: str = "") -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if (standby := self._standbys.get(pid)) is not None:
            self._discard(standby)
        self._connection.send(StandbyFailed(pid, state, detail))

    def _discard(self, standby: Standby) -> None:
        """Forget a standby that does not become a rank, and remove what it may have left."""
        for path in standby.probes:
            with suppress(OSError):
                os.unlink(path)
        self._forget(standby)

    def _forget(self, standby: Standby) -> None:
        del self._standbys[standby.pid]
        for tid in standby.threads:
            self._owners.pop(tid, None)

    # ------------------------------------------------------------ stops

    def _wait_for_stops(self, *, block: bool = False) -> None:
        """Handle all stops that have happened; `block`: wait for one first."""
        while True:
            try:
                tid, status = os.waitpid(-1, ptrace.WAIT_ALL | (0 if block else os.WNOHANG))
            except ChildProcessError:
                return
            if not tid:
                return
            block = False
            if not os.WIFSTOPPED(status):
                self._ended(tid)
                continue
            try:
                self._stopped(tid, os.WSTOPSIG(status), status >> 16)
            except ProcessLookupError:  # killed meanwhile: its exit follows
                pass
            except OSError as error:  # a kernel that cannot say which call it is
                if (standby := self._owners.get(tid)) is not None:
                    why = error.strerror or str(error)
                    self._fail(standby.pid, StandbyState.REFUSED, why)

    def _ended(self, tid: int) -> None:
        standby = self._owners.pop(tid, None)
        if standby is None:
            return
        del standby.threads[tid]
        if tid == standby.pid:
            self._discard(standby)
            self._connection.send(StandbyFailed(tid, StandbyState.ENDED))

    def _stopped(self, tid: int, signum: int, event: int) -> None:
        standby = self._owners.get(tid)
        if standby is None:
            standby = self._standbys.get(_process_of(tid), None)
            if standby is None:  # released or killed
                return
            self._adopt(standby, tid)
        thread = standby.threads[tid]
        thread.stopped, thread.signum = True, 0
        if event == ptrace.EVENT_STOP and signum in ptrace.STOPPING:
            ptrace.listen(tid)
            return
        if event == 0 and signum != ptrace.SYSCALL_STOP:
            thread.signum = signum
        if event == ptrace.EVENT_STOP and tid == standby.pid and not standby.calls:
            standby.calls = 1
            self._connection.send(StandbyHeld(tid))
        if signum == ptrace.SYSCALL_STOP and not standby.is_held:
            self._on_call(standby, tid)
        if standby.is_held:
            thread.since = _clocks()
        elif standby.pid in self._standbys:
            self._pace(standby)
            thread.stopped = False
            ptrace.resume(tid, thread.signum)

    def _on_call(self, standby: Standby, tid: int) -> None:
        entry = ptrace.entry(tid)
        if entry is None:
            return
        standby.calls += 1
        if standby.calls % _CHECK_EVERY == 0 and _resident(standby.pid) > MAX_RSS:
            self._fail(standby.pid, StandbyState.MEMORY)
            return
        if entry.number == MARK:
            self._on_mark(standby, entry.arguments)
            return
        name = self._name(entry)
        try:
            verdict = judge(name, entry.arguments, standby)
        except (OSError, ValueError, OverflowError):
            verdict = Parked(name)
        if isinstance(verdict, Parked):
            if standby.begun:
                self._park(standby, verdict.call or f"system call {entry.number}")
        elif verdict is not None and (standby.begun or stat.S_ISREG(standby.mode(verdict.path))):
            path = verdict.path
            for own in ("/proc/self/", "/proc/thread-self/"):
                if path.startswith(own):
                    path = f"/proc/{standby.pid}/{path.removeprefix(own)}"
            if not standby.reads.note(verdict._replace(path=path)):
                self._fail(standby.pid, StandbyState.READS)

    def _name(self, call: ptrace.SystemCall) -> str:
        return self._names.get(call.number, "") if call.architecture == self._architecture else ""

    def _on_mark(self, standby: Standby, arguments: tuple[int, ...]) -> None:
        if arguments[0] == Mark.READY.value:
            told = json.loads(ptrace.read(standby.pid, arguments[1], arguments[2]))
            standby.hooks = tuple((int(at), int(word)) for at, word in told["hooks"])
            standby.search_path = frozenset(told["path"])
            cwd = os.readlink(f"/proc/{standby.pid}/cwd")
            standby.temporary = frozenset([*told["temporary"], cwd])
            places = [*told["path"], *(f"{each}/x" for each in told["temporary"]), cwd]
            standby.above = frozenset(str(each) for place in places for each in Path(place).parents)
            standby.begun = True
        elif standby.begun:
            self._park(standby, MARKED[arguments[0]])

    def _park(self, standby: Standby, call: str) -> None:
        standby.is_held = True
        self._hold(standby)
        if _resident(standby.pid) > MAX_RSS:
            self._fail(standby.pid, StandbyState.MEMORY)
            return
        self._connection.send(StandbyParked(standby.pid, call))

    def _hold(self, standby: Standby) -> None:
        for thread in standby.threads.values():
            if not thread.stopped:
                with suppress(OSError):
                    ptrace.interrupt(thread.tid)

    def _pace(self, standby: Standby) -> None:
        """Let a standby run for a share of the time, where its ranks need the cores."""
        if not standby.idle or (spent := _cpu_time(standby.pid) - standby.used) < SLICE:
            return
        if not self._may_be_idle or are_cores_busy():
            signal.sigtimedwait({signal.SIGUSR1}, spent * (1 - SHARE) / SHARE)  # or an order
        standby.used = _cpu_time(standby.pid)


def _has_signals(standby: Standby) -> bool:
    """Whether a signal has arrived, which was not meant for the rank."""
    if any(thread.signum for thread in standby.threads.values()):
        return True
    for tid in standby.threads:
        with suppress(OSError), open(f"/proc/{standby.pid}/task/{tid}/status") as file:
            about = dict(line.split(":", 1) for line in file if ":" in line)
            if int(about["SigPnd"], 16) or int(about["ShdPnd"], 16):
                return True
    return False


def _clocks() -> tuple[int, ...]:
    return tuple(map(time.clock_gettime_ns, CLOCKS))


def _process_of(tid: int) -> int:
    """The process to which a thread belongs; 0 if it does not exist."""
    with suppress(OSError), open(f"/proc/{tid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Tgid:"):
                return int(line.split()[1])
    return 0


def _cpu_time(pid: int) -> float:
    """CPU seconds of a process, 0 if it has ended, and of this one."""
    own = time.process_time()
    with suppress(OSError):
        # the kernel's number for this process's clock: CPUCLOCK_SCHED in linux/posix-timers.h
        own += time.clock_gettime(~pid << 3 | 2)
    return own


def _resident(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _may_be_idle(policy: int) -> bool:
    """Whether the kernel lets this user's processes leave SCHED_IDLE again; a child tries it."""
    if policy != os.SCHED_OTHER:
        return False
    if not (pid := os.fork()):
        _try_idle(policy)
    return os.waitpid(pid, 0)[1] == 0


def _try_idle(policy: int) -> NoReturn:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        os._exit(1)
    os._exit(0)


def enter(sock: socket.socket, parent: int) -> NoReturn:
    """In a fork of the fork server, with signals blocked: become the tracer."""
    policy = os.sched_getscheduler(0)
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    processes.set_name(b"elasticrun-trac")
    set_title(b"elasticrun: tracer of standbys")
    Tracer(sock, policy).run()
