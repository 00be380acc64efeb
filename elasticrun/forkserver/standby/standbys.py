"""The standbys as the fork server sees them: it forks them and their tracer, and exchanges one for
an order to start its rank."""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NoReturn, Protocol

from elasticrun.forkserver.child import Page
from elasticrun.forkserver.standby import tracer
from elasticrun.forkserver.standby.syscalls import names_of
from elasticrun.forkserver.standby.tracer import (
    CheckStandby,
    FromTracer,
    ReleaseStandby,
    StandbyFailed,
    StandbyHeld,
    StandbyParked,
    StandbyValid,
    ToTracer,
    TraceStandby,
)
from elasticrun.host.system import processes
from elasticrun.wire.frames import Connection, FrameError
from elasticrun.wire.spawning import (
    FromSpawner,
    SpawnRank,
    SpawnStandby,
    StandbyIs,
    StandbyState,
)

ANSWER_LIMIT: Final = 2.0
"""Seconds for the tracer to check a standby; after that all standbys are dropped and the rank is
forked. A check takes 10 to 50 ms."""


class Forks(Protocol):
    """How the fork server makes processes."""

    def fork(self, become: Callable[[], NoReturn]) -> int:
        """Fork a child that runs `become`; returns its pid. Raises OSError."""

    def become_standby(self, order: SpawnStandby, page: Page) -> NoReturn:
        """In a traced fork: run the order's script."""


@dataclass
class _Standby:
    order: SpawnStandby
    page: Page
    go: socket.socket  # closing it lets the process begin


class StandbyPool:
    """At most one standby for each local rank."""

    def __init__(self, forks: Forks, report: Callable[[FromSpawner], None]) -> None:
        self._forks = forks
        self._report = report
        self._standbys: dict[int, _Standby] = {}  # by pid
        self._dropped: dict[int, Page | None] = {}  # killed, not reaped yet; tracers too
        self._tracer = 0
        self._connection: Connection | None = None
        self._policy = os.sched_getscheduler(0)
        self._batch = 0

    # ------------------------------------------------------------ start and end

    def start(self, order: SpawnStandby) -> None:
        """Start a standby in place of the one that its local rank has."""
        if names_of(machine := platform.machine()) is None:
            why = f"the system calls of {machine} are not known; of x86_64 and aarch64 they are"
            self._report(StandbyIs(order.key, StandbyState.REFUSED, why))
            return
        for pid in [p for p in self._standbys if self._is_for(p, order.rank.local_rank)]:
            self._gone(pid, StandbyState.DIFFERENT)
        page = Page()
        pair: tuple[socket.socket, ...] = ()
        try:
            self._start_tracer()
            pair = ours, theirs = socket.socketpair()  # not before: the tracer would keep it open
            pid = self._forks.fork(partial(self._become, order, page, ours, theirs))
        except OSError as error:
            page.close()
            for each in pair:
                each.close()
            why = error.strerror or str(error)
            self._report(StandbyIs(order.key, StandbyState.REFUSED, why))
            return
        theirs.close()
        ours.recv(1)  # it may be traced now, or has ended
        self._standbys[pid] = _Standby(order, page, ours)
        self._send(TraceStandby(pid, order.idle))

    def _become(
        self, order: SpawnStandby, page: Page, ours: socket.socket, theirs: socket.socket
    ) -> NoReturn:
        """In the fork: wait until it is traced."""
        ours.close()
        processes.allow_tracer(self._tracer)
        theirs.send(b"1")
        theirs.recv(1)
        theirs.close()
        processes.allow_tracer(0)
        self._forks.become_standby(order, page)

    def _is_for(self, pid: int, local_rank: int) -> bool:
        return self._standbys[pid].order.rank.local_rank == local_rank

    def _start_tracer(self) -> None:
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        server = os.getpid()

        def become() -> NoReturn:
            try:
                ours.close()
                os.setsid()
                tracer.enter(theirs, server)
            finally:
                os._exit(1)

        try:
            self._tracer = self._forks.fork(become)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = Connection(ours, FromTracer)

    def kill(self) -> None:
        """Kill all standbys."""
        for pid in list(self._standbys):
            self._gone(pid, StandbyState.ENDED)

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if (standby := self._standbys.pop(pid, None)) is not None:
                self._dropped[pid] = standby.page
                standby.go.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def drop_key(self, key: int) -> None:
        """Kill the standby of this key, if it still is one."""
        self._kill([pid for pid, standby in self._standbys.items() if standby.order.key == key])

    # ------------------------------------------------------------ becoming a rank

    def take(self, order: SpawnRank, *, forked: bool) -> tuple[int, Page] | None:
        """The process and page of a standby that has become this rank; None if there is none. A
        standby of this local rank is dropped if it was started for another order, or if the rank
        will not be forked."""
        pid = next((pid for pid in self._standbys if self._is_for(pid, order.local_rank)), 0)
        if not pid:
            return None
        standby = self._standbys[pid]
        if not forked:
            self._gone(pid, StandbyState.EXECED)
            return None
        same = replace(order, key=standby.order.rank.key) == standby.order.rank
        if not same or not all(map(_is_output, (pid, pid), (1, 2), (order.stdout, order.stderr))):
            self._gone(pid, StandbyState.DIFFERENT)
            return None
        with suppress(OSError):  # it may be waiting for an idle core
            os.sched_setscheduler(self._tracer, self._policy, os.sched_param(0))
        self._send(CheckStandby(pid, self._batch))
        while pid in self._standbys:
            if self._read(ANSWER_LIMIT) == pid:
                del self._standbys[pid]
                self._send(ReleaseStandby(pid))  # from here on it is the rank, whatever happens
                self._report(StandbyIs(standby.order.key, StandbyState.ACTIVE))
                return pid, standby.page
        return None

    def end_batch(self) -> None:
        """The orders that have arrived together are carried out."""
        self._batch += 1

    # ------------------------------------------------------------ messages

    def fileno(self) -> int:
        """The descriptor of the tracer's messages; -1: no tracer."""
        return -1 if self._connection is None else self._connection.fileno()

    def pids(self) -> list[int]:
        """All processes, the tracer too."""
        tracers = [self._tracer] if self._tracer else []
        return [*self._standbys, *self._dropped, *tracers]

    def _send(self, order: ToTracer) -> None:
        if self._connection is not None:
            self._connection.send(order)
            with suppress(ProcessLookupError):
                os.kill(self._tracer, signal.SIGUSR1)

    def read(self) -> None:
        """Handle what the tracer has said."""
        self._read(0.0)

    def _read(self, limit: float) -> int:
        """Handle messages, after waiting `limit` seconds at most; returns the pid of a standby that
        is valid and stands still. Without an answer, or with an invalid one, all are dropped."""
        valid = 0
        connection = self._connection
        try:
            if connection is None or not _is_readable(connection, limit):
                raise ConnectionError("it does not answer")
            for message in connection.receive() or ():
                match message:
                    case StandbyHeld(pid) if pid in self._standbys:
                        self._standbys[pid].go.close()
                        self._tell(pid, StandbyState.REHEARSING)
                    case StandbyParked(pid, call) if pid in self._standbys:
                        self._tell(pid, StandbyState.READY, call)
                    case StandbyValid(pid):
                        valid = pid
                    case StandbyFailed(pid, state, detail) if pid in self._standbys:
                        self._gone(pid, state, detail)
        except (OSError, FrameError) as error:
            self.lose_tracer(str(error))
        return valid

    def _tell(self, pid: int, state: StandbyState, detail: str = "") -> None:
        self._report(StandbyIs(self._standbys[pid].order.key, state, detail))

    def _gone(self, pid: int, state: StandbyState, detail: str = "") -> None:
        self._tell(pid, state, detail)
        self._kill([pid])

    def lose_tracer(self, why: str = "") -> None:
        """The tracer has ended or is useless, and all standbys with it."""
        for pid in list(self._standbys):
            self._gone(pid, StandbyState.NO_ANSWER, why)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._dropped[self._tracer] = None
            self._kill([self._tracer])
            self._tracer = 0

    def reaped(self, pid: int) -> bool:
        """Handle the exit of a child; False if it is none of these processes."""
        if pid == self._tracer:
            self.lose_tracer()
        if pid in self._standbys:
            self._gone(pid, StandbyState.ENDED)
        if pid not in self._dropped:
            return False
        if (page := self._dropped.pop(pid)) is not None:
            page.close()
        return True

    def close_in_child(self) -> None:
        """In a fork of the server: close what belongs to the server."""
        if self._connection is not None:
            self._connection.close()
        for standby in self._standbys.values():
            standby.page.close()
            standby.go.close()
        for page in filter(None, self._dropped.values()):
            page.close()


def _is_output(pid: int, descriptor: int, path: str) -> bool:
    """Whether this descriptor of a standby is that file, if the rank writes to one."""
    try:
        return not path or os.path.samefile(f"/proc/{pid}/fd/{descriptor}", path)
    except OSError:
        return False


def _is_readable(connection: Connection, limit: float) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(limit * 1000))
