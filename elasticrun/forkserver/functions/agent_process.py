"""The agent as a child of the program that calls us, and what it says at its end."""

from __future__ import annotations

import dataclasses
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

from elasticrun.config import EXIT_FAILED, AgentConfig
from elasticrun.core.events import Exit
from elasticrun.forkserver.functions.consoles import Consoles
from elasticrun.host.system.processes import memory_file
from elasticrun.wire import debugger
from elasticrun.wire.spawning import is_kept_ignored
from elasticrun.wire.types import dumps, loads

END_LIMIT: Final = 60.0
"""Seconds for an agent to end its ranks when the caller gives up; after that it is killed, and its
spawner kills what is left."""

MAX_OUTCOME_BYTES: Final = 4 * 1024 * 1024
"""Room for MAX_FAILURES failures with their tracebacks and JSON's escapes, many times over."""

_ROOT: Final = str(Path(__file__).resolve().parents[3])

_START: Final = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

logger = logging.getLogger("elasticrun")


def command(module: str, *words: object) -> list[str]:
    """Like `python -m module words...`, but found where this file was found, and never in the
    working folder, where a file named like one of our imports may lie."""
    return [sys.executable, "-P", "-u", "-c", _START, _ROOT, module, *map(str, words)]


class AgentProcess:
    """One agent, in a session of its own: a Ctrl-C reaches it through the caller alone."""

    def __init__(
        self, config: AgentConfig, spawner: socket.socket | None, variables: Mapping[str, str]
    ) -> None:
        """Start it. `spawner` is its end of the conversation with a caller that plays the spawner,
        `variables` further ones for every rank. The notes of `config` have been printed.

        Raises OSError if it cannot be started."""
        self._result, theirs = socket.socketpair()
        self._heard = bytearray()
        self._consoles = Consoles()
        config = dataclasses.replace(
            config,
            called=True,
            notes=(),
            console_fds=self._consoles.fds,
            env={**config.env, **variables},
        )
        config_fd = memory_file("elasticrun-config")
        fds = {"--config-fd": config_fd, "--result-fd": theirs.fileno()}
        if spawner is not None:
            fds["--spawner-fd"] = spawner.fileno()
        try:
            with open(config_fd, "wb", closefd=False) as file:
                file.write(dumps(config).encode())
            os.lseek(config_fd, 0, os.SEEK_SET)
            with debugger.escaped():
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
            self._consoles.begin()

    def fileno(self) -> int:
        """Readable when the agent has said something about its end, or has ended."""
        return self._result.fileno()

    def hear(self) -> bool:
        """Take in what it says; false when it will say no more."""
        try:
            data = self._result.recv(65536)
        except OSError:
            data = b""
        if len(self._heard) < MAX_OUTCOME_BYTES:
            self._heard += data
        return bool(data)

    def wait(self) -> Exit:
        """What it said, once it has ended; in words of our own if it was killed before."""
        while self.hear():
            pass
        code = self.process.wait()
        self._consoles.wait()
        try:
            return loads(bytes(self._heard), Exit)
        except ValueError:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            reason = f"the agent {how} without a word about the job"
            return Exit(code if code > 0 else EXIT_FAILED, reason, (), 0)

    def send_signal(self, signum: int) -> None:
        """Pass a signal on; nothing if it has ended."""
        self.process.send_signal(signum)

    def give_up(self) -> None:
        """End it, its ranks with it: politely, then by force."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        """Hang up. An agent that still lives takes this for its caller's death."""
        self._result.close()


@contextmanager
def signals_passed_on(agent: AgentProcess, names: tuple[str, ...]) -> Iterator[dict[int, Any]]:
    """Pass these signals on to the agent while the block runs; yields the handlers that were there
    before, by number.

    As with torch's launcher this works in the main thread only; elsewhere a line says so."""
    before: dict[int, Any] = {}
    owner = os.getpid()

    def pass_on(signum: int, _frame: object) -> None:
        if os.getpid() == owner:  # not in a rank that was forked a moment ago
            agent.send_signal(signum)

    if threading.current_thread() is not threading.main_thread():
        logger.warning("not in the main thread: signals to this process do not reach the ranks")
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
