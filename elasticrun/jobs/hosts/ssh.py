"""One connection to a host: the system's ssh, with its configuration, keys and known hosts, and
`far` at its other end. This host itself is reached without ssh.

Nothing asks a person for anything (BatchMode). ssh has a session of its own, so Ctrl-C in our
terminal is ours alone; when we are killed its stdin ends, and with it the connection.
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
"""Seconds in which a host must answer."""

SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_LIMIT}"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
GREETING_LIMIT: Final = 60.0
"""Seconds until Python has started there, on a slow disk."""
MOST_NOISE: Final = 1000
"""Lines of a shell profile before the greeting."""
CLOSE_LIMIT: Final = 5.0

_NO_USE: Final = ("Permission denied", "Host key verification failed")
"""What ssh says where another try would say it again."""
_OF_SSH: Final = 255


class Cut(Exception):
    """There is no connection, or no more; the text says why. Another try may help."""


class Hopeless(Exception):
    """No agent can be started there; one sentence."""


def is_here(host: NamedHost) -> bool:
    """Whether it is this very host, which needs no ssh."""
    return not host.user and is_this_host(host.name)


def command(host: NamedHost, ssh: Sequence[str]) -> list[str]:
    """What reaches `far` on a host; all else is said on its stdin."""
    program = [sys.executable, "-P", "-m", "elasticrun.jobs.hosts.far"]
    if is_here(host):
        return program
    return [*ssh, *SSH_OPTIONS, host.for_ssh, f"exec {shlex.join(program)}"]


async def address_of(host: NamedHost, ssh: Sequence[str]) -> str:
    """What ssh's configuration makes of a host's name: others may not know the alias."""
    with contextlib.suppress(OSError, TimeoutError):
        asked = await asyncio.create_subprocess_exec(
            *(*ssh, "-G", host.for_ssh),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        said, _ = await asyncio.wait_for(asked.communicate(), CONNECT_LIMIT)
        for line in said.decode(errors="replace").splitlines():
            if line.startswith("hostname "):
                return line.split()[1]
    return host.name


class SshConnection:
    """`async with SshConnection(...) as one`: then `far` has greeted. Cut, Hopeless."""

    def __init__(self, host: NamedHost, ssh: Sequence[str]) -> None:
        self._command = command(host, ssh)
        # a file: a connection that others share would keep a pipe open
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
            raise Hopeless(f"{self._command[0]} cannot be started: {wrong.strerror}") from None
        try:
            await asyncio.wait_for(self._greeted(), GREETING_LIMIT)
        except BaseException as wrong:
            await self._close()
            if isinstance(wrong, TimeoutError):
                raise Cut(f"no answer within {GREETING_LIMIT:g} s") from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        wrong: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._close()

    async def _greeted(self) -> None:
        for _ in range(MOST_NOISE):
            line = (await self._line()).decode(errors="replace").strip()
            if line == GREETING:
                self._has_greeted = True
                return
            if line.startswith(GREETING.split()[0]):
                raise Hopeless(
                    f"another version of elasticrun is installed there ({line.split()[-1]}): it "
                    "must be the same on all hosts"
                )
        raise Hopeless("its shell profile prints too much for a connection to be told from it")

    def say(self, words: Mapping[str, Any]) -> None:
        """Queue a line; what breaks is seen by who reads."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")

    async def frames(self) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """What `far` tells, for ever. Cut."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                head = dict(json.loads(await self._line()))
                size = next((head[name] for name in STREAMS if name in head), 0)
                yield head, await self._process.stdout.readexactly(min(size, CHUNK))
            except (ValueError, asyncio.IncompleteReadError):
                raise await self._ended() from None

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self._ended()
        return line

    async def _ended(self) -> Cut | Hopeless:
        """Why nothing more comes."""
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), CLOSE_LIMIT)
        except TimeoutError:
            return Cut("its output has ended")
        self._errors.seek(0)
        said = self._errors.read(CHUNK).decode(errors="replace").split("\n")
        last = next((line.strip()[:300] for line in reversed(said) if line.strip()), "")
        if self._has_greeted:
            return Cut(last or "the connection was cut")
        if code in (126, 127):
            return Hopeless(
                f"there is no Python {sys.executable} there: the same environment must be at the "
                "same place on every host"
            )
        if code == _OF_SSH and any(word in last for word in _NO_USE):
            return Hopeless(f"{last} (nothing here asks for a password: use a key, or an agent)")
        if code == 1 and last:
            return Hopeless(last)
        return Cut(last or f"the connection has ended ({code})")

    async def _close(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            if self._has_greeted:  # then `far` ends by itself
                await asyncio.wait_for(process.wait(), CLOSE_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a ProxyCommand has started, too
        with contextlib.suppress(TimeoutError):  # read, for a pipe that is not read stays open
            await asyncio.wait_for(process.communicate(), CLOSE_LIMIT)
        self._errors.close()
