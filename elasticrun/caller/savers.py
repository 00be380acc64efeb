"""The saver as a child of the caller, for nodes whose ranks are the caller's too; executed, as
probes are."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable

from elasticrun.config import STUCK_AFTER
from elasticrun.saver.start import ONE_THREAD, exec_command, order_file
from elasticrun.system.sweep import kill_group
from elasticrun.wire.spawning import Exited, FromSpawner, Spawned, SpawnFailed, SpawnSaver


class Saver:
    """At most one that counts. Its end is watched by the caller's selector, whose data are
    functions to call; `say` is called with what the agent is to hear."""

    def __init__(
        self, selector: selectors.BaseSelector, say: Callable[[FromSpawner], None]
    ) -> None:
        self._selector = selector
        self._say = say
        self._children: dict[int, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, order: SpawnSaver) -> None:
        """Execute it, in the place of one that is there; Exited follows at its end. SpawnFailed."""
        self.kill()
        try:
            child, pidfd = _execute(order)
        except OSError as error:
            reason = f"no saver could be started: {error.strerror}"
            self._say(SpawnFailed(order.key, reason))
            return
        self._children[order.key] = child, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(order.key))
        self._say(Spawned(order.key, child.pid, False))

    def send_signal(self, key: int, signum: int) -> bool:
        """Whether it was to a saver."""
        if key not in self._children:
            return False
        kill_group(self._children[key][0].pid, signum)
        return True

    def kill(self) -> None:
        """Its end is told when it comes."""
        for child, _ in self._children.values():
            kill_group(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap it, unless the kernel does not let it die."""
        self.kill()
        for child, _ in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STUCK_AFTER)
        self.let_go()
        self._children.clear()

    def let_go(self) -> None:
        """Close our descriptor and leave it alone (in a fork of the caller, whose child it is
        not)."""
        for _, pidfd in self._children.values():
            os.close(pidfd)

    def _ended(self, key: int) -> None:
        child, pidfd = self._children.pop(key)
        self._selector.unregister(pidfd)
        code = child.wait()
        os.close(pidfd)
        self._say(Exited(key, child.pid, code, time.time_ns() // 1000))


def _execute(order: SpawnSaver) -> tuple[subprocess.Popen[bytes], int]:
    environ = dict(os.environb)
    for name in order.unset:
        environ.pop(os.fsencode(name), None)
    environ |= {os.fsencode(name): os.fsencode(value) for name, value in order.env.items()}
    file = order_file(order)
    try:
        child = subprocess.Popen(
            exec_command(file, os.getpid()),
            env={**environ, **ONE_THREAD},
            pass_fds=(file,),
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
    finally:
        os.close(file)
    try:
        return child, os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait(STUCK_AFTER)
        raise
