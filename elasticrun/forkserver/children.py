"""Ranks and helpers of the fork server: starts them, forwards reports, reports exits."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

from elasticrun.forkserver import child
from elasticrun.forkserver.child import EXEC_NEXT, EXECED, FAILED, NOTICE, Page
from elasticrun.forkserver.helpers.helper import (
    KINDS,
    Helper,
    Order,
    ProbeHelper,
    SaverHelper,
    StoreHelper,
    environment,
)
from elasticrun.forkserver.prepare import Prepared
from elasticrun.forkserver.program import BecomeRank
from elasticrun.forkserver.standby.standbys import StandbyPool
from elasticrun.host.system import processes
from elasticrun.wire.spawning import (
    Execed,
    Exited,
    FromSpawner,
    Notice,
    Spawned,
    SpawnFailed,
    SpawnRank,
    SpawnStandby,
    Stale,
    StandbyIs,
    StandbyState,
)
from elasticrun.wire.types import EntryKind

_EVERY_SIGNAL = sorted(map(int, signal.valid_signals()))

FORKABLE = (EntryKind.SCRIPT, EntryKind.MODULE, EntryKind.RUN_PATH)


class Reports(Protocol):
    """Accepts reports for the agent."""

    def send(self, report: FromSpawner) -> None:
        """Queue the report; never blocks."""


@dataclass
class _Rank:
    key: int
    page: Page
    failed: str = ""


class Children:
    """All children of the fork server. `in_child` closes the server's descriptors in a fork."""

    def __init__(self, prepared: Prepared, talk: Reports, in_child: Callable[[], None]) -> None:
        self._prepared = prepared
        self._inherited = prepared.inherited
        self._report = talk.send
        self._in_child = in_child
        self._ranks: dict[int, _Rank] = {}  # by pid, like the helpers
        self._helpers: dict[int, Helper] = {}
        self._groups: dict[int, int] = {}  # process group by key, until swept
        self._exec_next: set[str] = set()
        self._stale = ""
        self.standbys = StandbyPool(self, self._report)

    # ------------------------------------------------------------ start

    def spawn_rank(self, order: SpawnRank) -> None:
        """Fork the rank if that is safe, else exec it; report Spawned or SpawnFailed."""
        if order.entry.kind is EntryKind.FUNCTION:
            self._fail(order, "a function can only be run by its own caller")
            return
        forked = self._prepared.mode == "fork" and not self._why_exec(order)
        # From the first rank on we outlive our parent, until we have swept what the ranks leave
        # behind. SIGCONT reports the parent's death, and wakes us up if we are stopped (SIGSTOP).
        processes.die_with_parent(signal.SIGCONT)
        if (taken := self.standbys.take(order, forked=forked)) is not None:
            pid = taken[0]
            self._ranks[pid] = _Rank(order.key, taken[1])
            self._started(order, pid, forked)
            self._read_page(self._ranks[pid])
            return
        page = None
        try:
            page = Page()
            pid = self.fork(partial(self._become_rank, order, page, forked))
        except OSError as error:
            if page is not None:
                page.close()
            self._fail(order, f"no process could be started: {error.strerror}")
            return
        self._ranks[pid] = _Rank(order.key, page)
        self._started(order, pid, forked)

    def _fail(self, order: SpawnRank | Order, reason: str) -> None:
        self._report(SpawnFailed(order.key, reason))

    def _started(self, order: SpawnRank | Order, pid: int, forked: bool) -> None:
        self._groups[order.key] = pid
        self._report(Spawned(order.key, pid, forked))

    def spawn_standby(self, order: SpawnStandby) -> None:
        """Start a standby, unless its rank would be exec'd."""
        if self._prepared.mode == "fork" and not self._why_exec(order.rank):
            self.standbys.start(order)
        else:
            self._report(StandbyIs(order.key, StandbyState.EXECED))

    def become_standby(self, order: SpawnStandby, page: Page) -> NoReturn:
        """In a traced fork: become the standby."""
        self._become_rank(order.rank, page, True, order)

    def _become_rank(
        self, order: SpawnRank, page: Page, forked: bool, standby: SpawnStandby | None = None
    ) -> NoReturn:
        if not forked:
            child.exec_rank(self._inherited, order, page, self._prepared.python)
        try:
            prepared = self._prepared
            folders = prepared.preloader.folders
            child.become_rank(self._inherited, order, page, prepared.hidden, standby, folders)
        except BecomeRank:
            raise
        except BaseException as error:  # report our own bug as a sentence, not as a traceback
            child.fail(page, f"the fork could not be prepared ({type(error).__name__}: {error})")

    def _why_exec(self, order: SpawnRank) -> str:
        """Why this rank is exec'd although forks are safe in general; empty if it is forked.
        Reports a reason that the agent has to log."""
        if order.entry.kind not in FORKABLE:
            return "a command"
        if order.entry.target in self._exec_next:
            return "told already"
        if others := self._differing(order):
            self._report(Notice(f"ranks are started by exec: {', '.join(others)} changed since "
                              "torch was imported"))  # fmt: skip
            return "environment"
        if not self._stale:
            self._stale = self._prepared.hidden.stale_file()
            if self._stale:
                self._report(Stale(f"{self._stale} has changed since it was imported"))
        return self._stale

    def _differing(self, order: SpawnRank) -> list[str]:
        """Names of variables that an import has read with values other than this rank's."""
        environ = environment(self._inherited.baseline.environ, order)
        now = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
        hidden = self._prepared.hidden
        return hidden.environment.changed(hidden.packages, now)

    def spawn_helper(self, order: Order) -> None:
        """Fork or exec a helper; report Spawned or SpawnFailed, then its messages and its exit.
        Kill an existing saver first: an order for another one means that it was given up."""
        kind = KINDS[type(order)]
        if kind is SaverHelper:
            self._kill(SaverHelper)
        helper = None
        try:
            helper = kind(order)
            pid = self.fork(partial(self._become_helper, helper, order))
        except OSError as error:
            if helper is not None:
                helper.close()
            self._fail(order, f"no {kind.kind} could be started: {error.strerror}")
            return
        finally:
            if helper is not None:
                helper.started()
        self._helpers[pid] = helper
        self._started(order, pid, self._prepared.can_fork_stores)

    def _become_helper(self, helper: Helper, order: Order) -> NoReturn:
        try:
            environ = environment(self._inherited.baseline.environ, order)
            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            forked = self._prepared.can_fork_stores
            if forked:
                child.set_environ(environ)
            helper.become(self._inherited.server, None if forked else environ)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def fork(self, become: Callable[[], NoReturn]) -> int:
        """Fork a child that runs `become`, and return its pid. All signals are blocked across the
        fork; the child continues with them blocked, and `become` never returns."""
        server = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _EVERY_SIGNAL)
        try:
            pid = os.fork()
            if pid == 0:  # close what belongs to the server or to other children
                self._in_child()
                for rank in self._ranks.values():
                    rank.page.close()
                for helper in self._helpers.values():
                    helper.close()
                self.standbys.close_in_child()
                become()
            return pid
        finally:
            if os.getpid() == server:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # ------------------------------------------------------------ while they run

    def living(self) -> list[int]:
        """Pids of ranks, helpers and standbys that have not been reaped."""
        return [*self._ranks, *self._helpers, *self.standbys.pids()]

    def stores(self) -> list[int]:
        """Pids of store hosts."""
        return [pid for pid, helper in self._helpers.items() if isinstance(helper, StoreHelper)]

    def groups(self, keys: Iterable[int]) -> list[int]:
        return [self._groups[key] for key in keys if key in self._groups]

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._groups.pop(key, None)

    def send_signal(self, key: int, signum: int, *, alone: bool = False) -> None:
        """Signal the process group of a child that has not been reaped, or only the child if
        `alone`; otherwise do nothing."""
        pid = self._groups.get(key, 0)
        if pid not in self.living() or not 0 <= signum < signal.NSIG:
            return
        with suppress(PermissionError):
            if not alone:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signum)
                    return
            with suppress(ProcessLookupError):  # it has not called setsid yet
                os.kill(pid, signum)

    def kill_ranks(self) -> None:
        """Kill ranks and probes. A probe that survived would keep its partners waiting for a node
        that is lost."""
        for rank in self._ranks.values():
            self.send_signal(rank.key, signal.SIGKILL)
        self._kill(ProbeHelper)
        self.standbys.kill()

    def _kill(self, kind: type[Helper]) -> None:
        for helper in self._helpers.values():
            if isinstance(helper, kind):
                self.send_signal(helper.key, signal.SIGKILL)

    # ------------------------------------------------------------ their messages

    def pipes(self) -> list[int]:
        """The descriptors of all helpers' pipes, and of the tracer's."""
        found = [each for helper in self._helpers.values() for each in helper.descriptors()]
        return found if self.standbys.fileno() < 0 else [*found, self.standbys.fileno()]

    def read_helpers(self, ready: Collection[int]) -> None:
        """Forward what has arrived on these pipes."""
        if self.standbys.fileno() in ready:
            self.standbys.read()
        for helper in self._helpers.values():
            for descriptor in set(helper.descriptors()).intersection(ready):
                for message in helper.read(descriptor):
                    self._report(message)

    def read_pages(self) -> None:
        """Read the shared page of every rank: SIGCHLD does not say which rank has written."""
        for rank in self._ranks.values():
            self._read_page(rank)

    def _read_page(self, rank: _Rank) -> None:
        for kind, text in rank.page.read():
            if kind == NOTICE:
                self._report(Notice(text))
            elif kind == EXEC_NEXT:
                self._exec_next.add(text)
            elif kind == EXECED:
                self._report(Execed(rank.key))
            elif kind == FAILED:
                rank.failed = text

    # ------------------------------------------------------------ exit

    def reaped(self, pid: int, code: int) -> None:
        """Report the exit of a child. Exits of ranks' orphans arrive here too and are ignored."""
        helper = self._helpers.pop(pid, None)
        if helper is not None:
            self._groups.pop(helper.key, None)  # helpers leave nothing to sweep
            for message in helper.drain(pid, code):
                self._report(message)
        rank = self._ranks.pop(pid, None)
        if self.standbys.reaped(pid) or rank is None:
            return
        self._read_page(rank)
        rank.page.close()
        if rank.failed:
            self._groups.pop(rank.key, None)
            self._report(SpawnFailed(rank.key, rank.failed))
        else:
            self._report(Exited(rank.key, pid, code, time.time_ns() // 1000))
