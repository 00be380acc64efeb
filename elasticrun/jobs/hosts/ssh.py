"""One connection to a host, with `far` at its other end.

It uses the system's ssh with its configuration, keys and known hosts; this host is reached without
ssh. Nothing prompts the user (BatchMode). ssh runs in its own session, so Ctrl-C in our terminal
does not reach it. If this process is killed, ssh's stdin closes and the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from elasticrun.host.system.network import is_this_host
from elasticrun.jobs.hosts.far import CHUNK, GREETING, STREAMS
from elasticrun.jobs.hosts.hostfile import NamedHost

CONNECT_LIMIT: Final = 10
"""Seconds within which a host must answer."""

SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_LIMIT}"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
GREETING_LIMIT: Final = 60.0
"""Seconds for Python to start there, on a slow disk."""
MAX_NOISE: Final = 1000
"""Maximum number of lines that a shell profile may print before the greeting."""
CLOSE_LIMIT: Final = 5.0

_PERMANENT_ERRORS: Final = ("Permission denied", "Host key verification failed")
"""Errors of ssh that a retry cannot fix."""
_SSH_ERROR_CODE: Final = 255


class ConnectionCut(Exception):
    """The connection failed or broke; the message says why. A retry may help."""


class CannotStart(Exception):
    """No agent can be started there; the message is a sentence."""


def is_here(host: NamedHost) -> bool:
    """Whether this is the local host, without a user name, so that ssh is not needed."""
    return not host.user and is_this_host(host.name)


def command(host: NamedHost, ssh: Sequence[str]) -> list[str]:
    """The command that starts `far` on a host; everything else goes through its stdin."""
    program = [sys.executable, "-P", "-m", "elasticrun.jobs.hosts.far"]
    if is_here(host):
        return program
    return [*ssh, *SSH_OPTIONS, host.for_ssh, f"exec {shlex.join(program)}"]


async def address_of(host: NamedHost, ssh: Sequence[str]) -> str:
    """The host name in ssh's configuration, because other hosts may not know the alias; the name as
    given if ssh does not report one."""
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(
            *(*ssh, "-G", host.for_ssh),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await asyncio.wait_for(process.communicate(), CONNECT_LIMIT)
        for line in output.decode(errors="replace").splitlines():
            if line.startswith("hostname "):
                return line.split()[1]
    return host.name


class SshConnection:
    """A connection to `far` on one host. On entry of the context `far` has sent its greeting;
    entering raises ConnectionCut or CannotStart."""

    def __init__(self, host: NamedHost, ssh: Sequence[str]) -> None:
        self._command = command(host, ssh)
        # A file, because a shared connection (ControlMaster) would keep a pipe open.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: asyncio.subprocess.Process | None = None
        self._has_greeted = False

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True
            )
        except OSError as wrong:
            raise CannotStart(f"{self._command[0]} cannot be started: {wrong.strerror}") from None
        try:
            await asyncio.wait_for(self._read_greeting(), GREETING_LIMIT)
        except BaseException as wrong:
            await self._close()
            if isinstance(wrong, TimeoutError):
                raise ConnectionCut(f"no answer within {GREETING_LIMIT:g} s") from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        wrong: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._close()

    async def _read_greeting(self) -> None:
        for _ in range(MAX_NOISE):
            line = (await self._line()).decode(errors="replace").strip()
            if line == GREETING:
                self._has_greeted = True
                return
            if line.startswith(GREETING.split()[0]):
                raise CannotStart(
                    f"another version of elasticrun is installed there ({line.split()[-1]}): it "
                    "must be the same on all hosts"
                )
        raise CannotStart("its shell profile prints too much output")

    def send(self, words: Mapping[str, Any]) -> None:
        """Queue a line; the reader notices a broken connection."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")

    async def frames(self) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """The reports of `far`: a head, and the output that follows it. Ends only with
        ConnectionCut or CannotStart."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                head = dict(json.loads(await self._line()))
                size = next((head[name] for name in STREAMS if name in head), 0)
                yield head, await self._process.stdout.readexactly(min(size, CHUNK))
            except (ValueError, asyncio.IncompleteReadError):
                raise await self._exit_reason() from None

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self._exit_reason()
        return line

    async def _exit_reason(self) -> ConnectionCut | CannotStart:
        """The exception that says why the output ended."""
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), CLOSE_LIMIT)
        except TimeoutError:
            return ConnectionCut("its output has ended")
        self._errors.seek(0)
        lines = self._errors.read(CHUNK).decode(errors="replace").split("\n")
        last = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
        if self._has_greeted:
            return ConnectionCut(last or "the connection was cut")
        if code in (126, 127):
            return CannotStart(
                f"there is no Python {sys.executable} there: every host needs the same "
                "environment at the same path"
            )
        if code == _SSH_ERROR_CODE and any(word in last for word in _PERMANENT_ERRORS):
            return CannotStart(f"{last} (elasticrun asks for no password: use a key, or an agent)")
        if code == 1 and last:
            return CannotStart(last)
        return ConnectionCut(last or f"the connection has ended ({code})")

    async def _close(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            if self._has_greeted:  # then `far` exits by itself
                await asyncio.wait_for(process.wait(), CLOSE_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also kills a ProxyCommand
        with contextlib.suppress(TimeoutError):  # drain it: an unread pipe stays open
            await asyncio.wait_for(process.communicate(), CLOSE_LIMIT)
        self._errors.close()
