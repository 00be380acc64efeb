"""Store hosts, probes and the saver as children of the caller, for nodes whose ranks are too.

They are executed, since of the caller's own state nothing is to be in them; but a store host is
forked where ranks are forked and the caller has torch. A first one is started before anybody asks,
so that its import of torch goes on while the agent starts.
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
"""Forks the caller; what is called in the child must end it. The child's pid."""


@dataclass(eq=False)
class _Child:
    helper: Helper
    pid: int
    pidfd: int
    executed: subprocess.Popen[bytes] | None  # None: forked

    def reap(self) -> int:
        """Of one that has ended: its exit code, negative for a signal."""
        os.close(self.pidfd)
        if self.executed is not None:
            return self.executed.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the caller ignores SIGCHLD: nobody knows
            return 1


class Helpers:
    """All of them. Their pipes and ends are watched by the caller's selector, whose data are
    functions to call; `say` is called with what the agent is to hear."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        say: Callable[[FromSpawner], None],
        fork: Fork | None = None,
    ) -> None:
        """`fork`: how a store host is forked, where that may be tried."""
        self._selector = selector
        self._say = say
        self._fork = fork
        self._children: dict[int, _Child] = {}
        self._spare: _Child | None = None

    def start_spare_store(self) -> None:
        """A store host that waits for its order. OSError."""
        self._spare = self._start(StoreHelper())

    def start(self, order: Order) -> None:
        """Start one: Spawned or SpawnFailed, what it says, its end. A saver that is there is killed
        before."""
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
            self._say(SpawnFailed(order.key, reason))
            return
        if isinstance(order, SpawnStore):
            child.helper.obey(order)
        self._children[order.key] = child
        for descriptor in child.helper.descriptors():
            read = functools.partial(self._read, child.helper, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, read)
        ended = functools.partial(self._ended, order.key)
        self._selector.register(child.pidfd, selectors.EVENT_READ, ended)
        self._say(Spawned(order.key, child.pid, child.executed is None))

    def send_signal(self, key: int, signum: int) -> None:
        """Nothing if it is no helper, or has gone."""
        if key in self._children:
            kill_group(self._children[key].pid, signum)

    def kill(self, *kinds: type[Helper]) -> None:
        """Kill all of these kinds; their ends are told when they come."""
        for child in self._children.values():
            if isinstance(child.helper, kinds):
                kill_group(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap all that are left, but for those that the kernel does not let die."""
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

    def let_go(self) -> None:
        """Close our descriptors and leave them alone (in a fork of the caller, whose children they
        are not)."""
        for child in self._all():
            os.close(child.pidfd)
            child.helper.close()

    # ------------------------------------------------------------

    def _all(self) -> list[_Child]:
        return [*self._children.values(), *([self._spare] if self._spare is not None else [])]

    def _start(self, helper: Helper, order: Order | None = None) -> _Child:
        """Raises OSError."""
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
        said = helper.read(descriptor)
        if descriptor not in helper.descriptors():  # its end: the descriptor is closed by now
            self._selector.unregister(descriptor)
        for message in said:
            self._say(message)

    def _ended(self, key: int) -> None:
        child = self._children.pop(key)
        self._selector.unregister(child.pidfd)
        for descriptor in child.helper.descriptors():
            self._selector.unregister(descriptor)
        for message in child.helper.last_words(child.pid, child.reap()):
            self._say(message)
        if isinstance(child.helper, StoreHelper) and not child.helper.listens:
            self._fork = None  # something that the caller holds does not bear a fork


def _become(helper: Helper, parent: int) -> NoReturn:
    """In a fork of the caller."""
    os.setsid()
    helper.become(parent, None)
    os._exit(1)


def _execute(helper: Helper, order: Order | None, parent: int) -> subprocess.Popen[bytes]:
    environ = dict(os.environb)
    with debugger.escaped():
        return subprocess.Popen(
            helper.words(parent),
            env=environ if order is None else environment(environ, order),
            pass_fds=helper.inherited,
            stdin=subprocess.DEVNULL,
            stdout=helper.output,
            stderr=helper.output,
            start_new_session=True,
        )
