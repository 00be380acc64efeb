"""Starts the spawner (the fork server), sends it its configuration, and reaps child processes.

This module imports nothing heavy. It runs in the agent's first millisecond, so that the spawner
imports torch while the agent imports grpc and looks for its master.

The reaper is installed before the first child starts. The agent is a child subreaper: when its
spawner dies, the ranks and their descendants become children of the agent, which kills and reaps
them. Parent-death signals are not enough because they are not inherited across fork. The same
reaping makes the agent a correct process 1 of a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticrun.agent.warm import WarmChild, can_be_warm, fork_server
from elasticrun.config import Launch
from elasticrun.host.log import logger
from elasticrun.host.system import sandbox
from elasticrun.host.system.processes import all_processes, below
from elasticrun.wire import env, frames
from elasticrun.wire.spawning import Configure, is_kept_ignored, start_server

if TYPE_CHECKING:
    import asyncio

RESCAN: Final = 0.05
"""Maximum seconds between scans of /proc during a sweep. Rescanning finds processes that were
forked between a scan and its kills."""


FORWARDED = ("SIGUSR1", "SIGUSR2")
"""Signals that are only forwarded to the ranks' process groups, unless the user has made them death
signals."""


class SignalInbox:
    """Catches the death signals and the forwarded signals; delivers them in order of arrival."""

    def __init__(self, death: Iterable[str]) -> None:
        self._death: set[int] = set()
        self._saved: dict[int, Any] = {}
        self._early: list[int] = []
        self._deliver: Callable[[int, bool], None] | None = None
        self._on_child: Callable[[], None] | None = None
        self.unknown: list[str] = []
        """Signal names for which no handler could be installed."""
        self._names = tuple(dict.fromkeys(name.strip() for name in death if name.strip()))

    def install(self) -> None:
        """Install the handlers. Only the main thread can; in any other thread this is a no-op."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in self._names:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                self.unknown.append(name)
                continue
            if is_kept_ignored(number):
                continue
            try:
                self._saved[number] = signal.signal(number, self._caught)
            except (OSError, ValueError):  # SIGKILL and SIGSTOP
                self.unknown.append(name)
                continue
            self._death.add(number)
        for name in FORWARDED:
            number = signal.Signals[name]
            if number not in self._saved:
                self._saved[number] = signal.signal(number, self._caught)
        self._saved[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child)

    def attach(self, deliver: Callable[[int, bool], None], on_child: Callable[[], None]) -> None:
        """Call `deliver(signum, is_death)` for the queued signals and for all later ones, and
        `on_child()` now and at each SIGCHLD.

        Later calls come from a signal handler, so the callbacks may only schedule work."""
        self._deliver, self._on_child = deliver, on_child
        early, self._early = self._early, []
        for number in early:
            deliver(number, number in self._death)
        on_child()

    def detach(self, unhandled: Iterable[int] = ()) -> None:
        """Stop delivering: queue signals until the next `attach`. `unhandled`: signals that were
        delivered but not handled; they are queued first."""
        self._deliver = self._on_child = None
        self._early[:0] = unhandled

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._saved.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._saved.clear()
        self._deliver = self._on_child = None

    def _caught(self, number: int, _frame: object) -> None:
        if self._deliver is None:
            self._early.append(number)
        else:
            self._deliver(number, number in self._death)

    def _child(self, _number: int, _frame: object) -> None:
        if self._on_child is not None:
            self._on_child()


@dataclass
class SpawnerProcess:
    """A running spawner. `process` is None if a caller of elastic_launch acts as the spawner."""

    channel: socket.socket
    process: subprocess.Popen[bytes] | WarmChild | None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def is_warm(self) -> bool:
        return isinstance(self.process, WarmChild)

    @property
    def swept(self) -> asyncio.Event | None:
        """Set when the guard of a warm fork server has killed and reaped that server's descendants;
        None without a guard."""
        return self.process.swept if isinstance(self.process, WarmChild) else None

    def watch(self, reaper: Reaper, ended: Callable[[int], None]) -> None:
        """Call `ended(code)` when the process has been reaped, by this agent or by its guard; never
        if there is no process."""
        if isinstance(self.process, WarmChild):
            self.process.watch(ended)
        elif self.process is not None:
            reaper.watch(self.process, ended)

    def kill(self) -> None:
        """Send SIGKILL to the spawner only, not to its descendants."""
        if self.process is None or self.process.returncode is not None:
            return
        if isinstance(self.process, WarmChild):
            self.process.kill()  # by its pidfd: its guard may have reaped it
        else:
            sandbox.kill(self.process.pid)


def configure_message(launch: Launch) -> Configure:
    """The spawner's settings as a message."""
    return Configure(
        launch=launch.mode,
        preload=launch.preload,
        entry=launch.entry,
        start_method=launch.start_method,
        numa=launch.numa_binding is not None,
    )


def start_spawner(launch: Launch, ignored: tuple[int, ...]) -> SpawnerProcess:
    """Start a spawner. `ignored`: the signals that this process inherited as ignored. Raises
    OSError."""
    environ = dict(os.environ)
    if launch.set_omp_threads:
        # torch sizes its thread pools at import; the ranks get the same value.
        environ[env.OMP_NUM_THREADS] = "1"
    if launch.python_exec:
        environ[env.PYTHON_EXEC] = launch.python_exec
    process: subprocess.Popen[bytes] | WarmChild
    warm = fork_server(environ, ignored) if can_be_warm(launch) else None
    process, channel = warm or start_server(ignored=ignored, env=environ)
    with contextlib.suppress(OSError):  # it died at once: the reader sees EOF
        channel.sendall(frames.encode(configure_message(launch)))
    return SpawnerProcess(channel, process)


def fault_error() -> str:
    """Why ELASTICRUN_FAULT cannot be parsed, in one sentence; "" if it is valid or not set."""
    try:
        env.read_faults(os.environ.get(env.FAULT, ""))
    except env.BadFault as error:
        return str(error)
    return ""


def fault_environment(node: str) -> dict[str, str]:
    """Return the environment variable with the faults planted in this node's ranks and probes, or
    an empty dict if there are none.

    Logs a warning if the job has planted faults on any node, and one for each fault of this
    node."""
    text = os.environ.get(env.FAULT, "")
    if not text:
        return {}
    logger.warning("%s=%s is set: faults are injected into this job", env.FAULT, text)
    here = env.faults_of_node(text, node)
    for fault in here:
        logger.warning("fault injected in this node (%s): %s", node, fault.text)
    return {env.NODE_FAULT: env.write_own_faults(here)} if here else {}


def _existing_children() -> frozenset[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # the common case; avoids a scan of all processes
    return _children()


def _children() -> frozenset[int]:
    """Children of this process, found by scanning all processes of the machine."""
    me = os.getpid()
    return frozenset(process.pid for process in all_processes() if process.parent == me)


class Reaper:
    """Reaps every child of this process except those that existed before the reaper."""

    def __init__(self) -> None:
        self._foreign = _existing_children()
        self._watched: dict[int, Callable[[int], None]] = {}
        self.spared: set[int] = set()
        """Children that sweeps spare, with their descendants, until they are reaped."""
        self._gone: asyncio.Event | None = None

    def watch(self, process: subprocess.Popen[bytes], ended: Callable[[int], None]) -> None:
        """Call `ended(code)` when this child has been reaped (negative code: killed by that
        signal).

        Call this in the same turn of the loop that starts the process; otherwise its exit may be
        missed."""

        def settle(code: int) -> None:
            process.returncode = code
            ended(code)

        self._watched[process.pid] = settle

    def reap(self) -> None:
        """Reap all exited children. Call after SIGCHLD, in the loop's thread."""
        while (pid := self._next_zombie()) is not None:
            try:
                pid, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if pid == 0:
                return
            self.spared.discard(pid)
            settle = self._watched.pop(pid, None)
            if settle is not None:
                settle(os.waitstatus_to_exitcode(status))
        if self._gone is not None:
            self._gone.set()

    def _next_zombie(self) -> int | None:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if info is None:
            return None
        if info.si_pid not in self._foreign:
            return info.si_pid
        # The first waitable child is the caller's own, and only the caller may reap it: find the
        # next one of ours.
        for pid in sorted(_children() - self._foreign):
            try:
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                if os.waitid(os.P_PID, pid, options) is not None:
                    return pid
            except ChildProcessError:
                continue
        return None

    async def sweep(self, *, limit: float, keep: Collection[int] = ()) -> tuple[int, ...]:
        """SIGKILL and reap every descendant, except `spared` and `keep` and their descendants.

        Returns the pids that still exist after `limit` seconds, for example processes in
        uninterruptible sleep."""
        import asyncio  # late: the fork server starts before this import

        from elasticrun.host.system.sweep import kill_group

        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        while True:
            self._gone = asyncio.Event()
            self.reap()
            self._gone.clear()
            left = below(os.getpid(), without=self._foreign | self.spared | set(keep))
            if not left or loop.time() >= end:
                self._gone = None
                return tuple(sorted(left))
            for pid in left:
                kill_group(pid, signal.SIGKILL, alone=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), RESCAN)
