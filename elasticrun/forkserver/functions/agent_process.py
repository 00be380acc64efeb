"""The agent as a child of the calling program, and the result that it reports when it exits."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from elasticrun.config import EXIT_FAILED, CalledLaunch, Caller, Identity, Launch, Place
from elasticrun.core.events import Exit
from elasticrun.forkserver.functions.consoles import Consoles
from elasticrun.host.system.processes import memory_file
from elasticrun.wire import debugger
from elasticrun.wire.spawning import is_kept_ignored
from elasticrun.wire.types import dumps, loads

END_LIMIT: Final = 60.0
"""Seconds that the agent has to end its ranks when the caller gives up. After that the caller kills
it, and its spawner kills the remaining ranks.
"""

MAX_OUTCOME_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of a result: far more than MAX_FAILURES failures with their tracebacks and JSON
escapes need."""

_ROOT: Final = str(Path(__file__).resolve().parents[3])

_START: Final = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

logger = logging.getLogger("elasticrun")


def command(module: str, *words: object) -> list[str]:
    """Like `python -m module words...`, but with the copy of elasticrun that this file belongs to.
    The working folder is not on sys.path, because it may contain a file named like one of our
    imports."""
    return [sys.executable, "-P", "-u", "-c", _START, _ROOT, module, *map(str, words)]


class AgentProcess:
    """One agent in its own session: Ctrl-C reaches it only through the caller."""

    def __init__(
        self,
        launch: Launch,
        place: Place,
        identity: Identity,
        spawner: socket.socket | None,
        variables: Mapping[str, str],
    ) -> None:
        """Start the agent. `spawner` is the agent's end of the socketpair to a caller that is the
        spawner; `variables` are added to the environment of every rank.

        Raises OSError if the agent cannot be started."""
        self._result, theirs = socket.socketpair()
        self._received = bytearray()
        self._consoles = Consoles()
        caller = Caller(self._consoles.fds, dict(variables))
        config_fd = memory_file("elasticrun-config")
        fds = {"--config-fd": config_fd, "--result-fd": theirs.fileno()}
        if spawner is not None:
            fds["--spawner-fd"] = spawner.fileno()
        try:
            with open(config_fd, "wb", closefd=False) as file:
                file.write(dumps(CalledLaunch(launch, place, identity, caller)).encode())
            os.lseek(config_fd, 0, os.SEEK_SET)
            with debugger.without_debugger():
                self.process = subprocess.Popen(
                    command("elasticrun.agent", *(f"{name}={fd}" for name, fd in fds.items())),
                    pass_fds=(*fds.values(), *self._consoles.fds),
                    start_new_session=True,
                )
        except BaseException:
            self._result.close()
            raise
        finally:
            os.close(config_fd)
            theirs.close()
            self._consoles.start()

    def fileno(self) -> int:
        """The descriptor that is readable when the agent has sent a part of its result, or has
        exited."""
        return self._result.fileno()

    def read(self) -> bool:
        """Read a part of the result; return False at EOF."""
        try:
            data = self._result.recv(65536)
        except OSError:
            data = b""
        if len(self._received) < MAX_OUTCOME_BYTES:
            self._received += data
        return bool(data)

    def wait(self) -> Exit:
        """Wait until the agent has exited and return its result, or one made up here if it was
        killed before it sent one."""
        while self.read():
            pass
        code = self.process.wait()
        self._consoles.wait()
        try:
            return loads(bytes(self._received), Exit)
        except ValueError:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            reason = f"the agent {how} without a result of the job"
            return Exit(code if code > 0 else EXIT_FAILED, reason, (), 0)

    def send_signal(self, signum: int) -> None:
        """Forward a signal to the agent; do nothing if it has exited."""
        self.process.send_signal(signum)

    def give_up(self) -> None:
        """End the agent with its ranks: SIGTERM, then SIGKILL after END_LIMIT."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        """Close the connection. An agent that is still running takes this for its caller's
        death."""
        self._result.close()


@contextmanager
def signals_passed_on(agent: AgentProcess, names: tuple[str, ...]) -> Iterator[dict[int, Any]]:
    """Forward these signals to the agent while the block runs; yield the previous handlers by
    number.

    As in torch's launcher, this works only in the main thread; elsewhere it logs a warning."""
    before: dict[int, Any] = {}
    owner = os.getpid()

    def pass_on(signum: int, _frame: object) -> None:
        if os.getpid() == owner:  # not in a rank that was just forked
            agent.send_signal(signum)

    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "not in the main thread: signals sent to this process are not forwarded to the ranks"
        )
        names = ()
    try:
        for name in names:
            number = getattr(signal, name, None)
            try:
                if isinstance(number, signal.Signals) and not is_kept_ignored(number):
                    before[number] = signal.signal(number, pass_on)
            except (OSError, ValueError) as error:
                logger.warning("%s cannot be handled: %s", name, error)
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
