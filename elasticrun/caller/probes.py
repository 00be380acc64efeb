"""Probes as children of the caller, for nodes whose ranks are the caller's too.

They are executed, as its store hosts are: of the caller's own state nothing is in them that a
measure could suffer from.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticrun.config import STUCK_AFTER
from elasticrun.forkserver.probes import Telling, exec_command, order_file
from elasticrun.system.sweep import kill_group
from elasticrun.wire.spawning import Exited, FromSpawner, Spawned, SpawnFailed, SpawnProbe


@dataclass(eq=False)
class _Probe:
    child: subprocess.Popen[bytes]
    pidfd: int
    telling: Telling


class Probes:
    """All probes of this caller; their pipes and ends are watched by its selector, whose data are
    functions to call. `say` is called with what the agent is to hear."""

    def __init__(
        self, selector: selectors.BaseSelector, say: Callable[[FromSpawner], None]
    ) -> None:
        self._selector = selector
        self._say = say
        self._probes: dict[int, _Probe] = {}

    def start(self, order: SpawnProbe) -> None:
        """Execute one; what it says follows, and Exited; or SpawnFailed."""
        try:
            probe = _execute(order)
        except OSError as error:
            reason = f"no probe could be started: {error.strerror}"
            self._say(SpawnFailed(order.key, reason))
            return
        self._probes[order.key] = probe
        for descriptor in probe.telling.descriptors():
            read = functools.partial(self._read, order.key, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, read)
        ended = functools.partial(self._ended, order.key)
        self._selector.register(probe.pidfd, selectors.EVENT_READ, ended)
        self._say(Spawned(order.key, probe.child.pid, False))

    def send_signal(self, key: int, signum: int) -> bool:
        """Whether it was to a probe."""
        if key not in self._probes:
            return False
        kill_group(self._probes[key].child.pid, signum)
        return True

    def kill(self) -> None:
        """Kill all; their ends are told when they come."""
        for probe in self._probes.values():
            kill_group(probe.child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap all that are left, but for those that the kernel does not let die."""
        self.kill()
        for probe in self._probes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                probe.child.wait(STUCK_AFTER)
        self.let_go()
        self._probes.clear()

    def let_go(self) -> None:
        """Close our descriptors and leave the probes alone (in a fork of the caller, whose children
        they are not)."""
        for probe in self._probes.values():
            os.close(probe.pidfd)
            probe.telling.close()

    def _read(self, key: int, descriptor: int) -> None:
        telling = self._probes[key].telling
        said = telling.read(descriptor)
        if descriptor not in telling.descriptors():  # its end: the descriptor is closed by now
            self._selector.unregister(descriptor)
        for message in said:
            self._say(message)

    def _ended(self, key: int) -> None:
        probe = self._probes.pop(key)
        self._selector.unregister(probe.pidfd)
        for descriptor in probe.telling.descriptors():
            self._selector.unregister(descriptor)
        code = probe.child.wait()
        os.close(probe.pidfd)
        for message in probe.telling.last_words(code):
            self._say(message)
        self._say(Exited(key, probe.child.pid, code, time.time_ns() // 1000))


def _execute(order: SpawnProbe) -> _Probe:
    """Start it in a session of its own. Raises OSError."""
    environ = {name: value for name, value in os.environ.items() if name not in order.unset}
    telling = Telling(order.key)
    try:
        file = order_file(order)
        try:
            child = subprocess.Popen(
                exec_command(file, telling.words, os.getpid()),
                env={**environ, **order.env},
                pass_fds=(file, telling.words),
                stdin=subprocess.DEVNULL,
                stdout=telling.prints,
                stderr=telling.prints,
                start_new_session=True,
            )
        finally:
            os.close(file)
        try:
            return _Probe(child, os.pidfd_open(child.pid), telling)
        except OSError:
            child.kill()
            child.wait(STUCK_AFTER)
            raise
    except OSError:
        telling.close()
        raise
    finally:
        telling.born()
