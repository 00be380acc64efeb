"""Store hosts, probes and the saver as children of the caller, if the ranks are its children too.

They are exec'd, because they must not contain any of the caller's state. A store host is forked,
however, where ranks are forked and the caller has torch imported. One store host is started in
advance, so that it imports torch while the agent starts.
"""

from __future__ import annotations

import functools
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from elasticrun.config import STUCK_AFTER
from elasticrun.forkserver.helpers.helper import (
    KINDS,
    Helper,
    Order,
    SaverHelper,
    StoreHelper,
    environment,
)
from elasticrun.host.system.sweep import kill_group
from elasticrun.wire import debugger
from elasticrun.wire.spawning import FromSpawner, Spawned, SpawnFailed, SpawnStore

Fork = Callable[[Callable[[], NoReturn]], int]
"""Forks the caller and returns the child's pid; the function called in the child must not
return."""


@dataclass(eq=False)
class _Child:
    helper: Helper
    pid: int
    pidfd: int
    executed: subprocess.Popen[bytes] | None  # None: forked

    def reap(self) -> int:
        """Reap an exited child; return its exit code, negative for a signal."""
        os.close(self.pidfd)
        if self.executed is not None:
            return self.executed.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the caller ignores SIGCHLD: the code is lost
            return 1


class Helpers:
    """All helpers of a caller. The caller's selector watches their pipes and exits; its data are
    callbacks. `send` receives the messages for the agent."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[FromSpawner], None],
        fork: Fork | None = None,
    ) -> None:
        """`fork` forks a store host; None where that must not be tried."""
        self._selector = selector
        self._send = send
        self._fork = fork
        self._children: dict[int, _Child] = {}
        self._spare: _Child | None = None

    def start_spare_store(self) -> None:
        """Start a store host that waits for its order. Raises OSError."""
        self._spare = self._start(StoreHelper())

    def start(self, order: Order) -> None:
        """Start a helper; report Spawned or SpawnFailed, then its messages and its exit. Kill an
        existing saver first."""
        kind = KINDS[type(order)]
        if kind is SaverHelper:
            self.kill(SaverHelper)
        is_store = kind is StoreHelper
        child = self._spare if is_store else None
        if child is not None:
            self._spare = None
        try:
            if child is None:
                child = self._start(kind() if is_store else kind(order), order)
        except OSError as error:
            reason = f"no {kind.kind} could be started: {error.strerror}"
            self._send(SpawnFailed(order.key, reason))
            return
        if isinstance(order, SpawnStore):
            child.helper.obey(order)
        self._children[order.key] = child
        for descriptor in child.helper.descriptors():
            read = functools.partial(self._read, child.helper, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, read)
        ended = functools.partial(self._ended, order.key)
        self._selector.register(child.pidfd, selectors.EVENT_READ, ended)
        self._send(Spawned(order.key, child.pid, child.executed is None))

    def send_signal(self, key: int, signum: int) -> None:
        """Signal a helper; do nothing if the key is unknown or the helper has exited."""
        if key in self._children:
            kill_group(self._children[key].pid, signum)

    def kill(self, *kinds: type[Helper]) -> None:
        """Kill all helpers of these kinds; their exits are reported as usual."""
        for child in self._children.values():
            if isinstance(child.helper, kinds):
                kill_group(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill all remaining helpers, and reap those that exit within STUCK_AFTER; the kernel does
        not let the others die."""
        for child in self._all():
            kill_group(child.pid, signal.SIGKILL)
            poll = select.poll()
            poll.register(child.pidfd, select.POLLIN)
            child.helper.close()
            if poll.poll(STUCK_AFTER * 1000):
                child.reap()
            else:
                os.close(child.pidfd)
        self._children.clear()
        self._spare = None

    def close_in_fork(self) -> None:
        """In a fork of the caller: close our descriptors. The helpers are not its children."""
        for child in self._all():
            os.close(child.pidfd)
            child.helper.close()

    # ------------------------------------------------------------

    def _all(self) -> list[_Child]:
        return [*self._children.values(), *([self._spare] if self._spare is not None else [])]

    def _start(self, helper: Helper, order: Order | None = None) -> _Child:
        """Start a helper, by fork or exec. Raises OSError."""
        parent = os.getpid()
        executed = None
        try:
            if (
                isinstance(helper, StoreHelper)
                and self._fork is not None
                and "torch" in sys.modules
            ):
                pid = self._fork(functools.partial(_become, helper, parent))
            else:
                executed = _execute(helper, order, parent)
                pid = executed.pid
            try:
                return _Child(helper, pid, os.pidfd_open(pid), executed)
            except OSError:
                kill_group(pid, signal.SIGKILL)
                executed.wait(STUCK_AFTER) if executed is not None else os.waitpid(pid, 0)
                raise
        except OSError:
            helper.close()
            raise
        finally:
            helper.started()

    def _read(self, helper: Helper, descriptor: int) -> None:
        messages = helper.read(descriptor)
        if descriptor not in helper.descriptors():  # EOF: the descriptor is closed already
            self._selector.unregister(descriptor)
        for message in messages:
            self._send(message)

    def _ended(self, key: int) -> None:
        child = self._children.pop(key)
        self._selector.unregister(child.pidfd)
        for descriptor in child.helper.descriptors():
            self._selector.unregister(descriptor)
        for message in child.helper.drain(child.pid, child.reap()):
            self._send(message)
        if isinstance(child.helper, StoreHelper) and not child.helper.listens:
            self._fork = None  # the caller holds something that does not survive a fork


def _become(helper: Helper, parent: int) -> NoReturn:
    """In a fork of the caller: become the helper."""
    os.setsid()
    helper.become(parent, None)
    os._exit(1)


def _execute(helper: Helper, order: Order | None, parent: int) -> subprocess.Popen[bytes]:
    environ = dict(os.environb)
    with debugger.without_debugger():
        return subprocess.Popen(
            helper.words(parent),
            env=environ if order is None else environment(environ, order),
            pass_fds=helper.inherited,
            stdin=subprocess.DEVNULL,
            stdout=helper.output,
            stderr=helper.output,
            start_new_session=True,
        )
