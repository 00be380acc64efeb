"""The port proxy of a static job as a process that its agent keeps alive (decision 008)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess

from elasticrun.agent.boot import Reaper
from elasticrun.agent.link.master_process import RESTARTS, shielded
from elasticrun.agent.link.port_proxy_child import command
from elasticrun.operator_log import logger
from elasticrun.wire.types import Endpoint


class PortProxy:
    """Keeps it alive on the user's port; the socket itself is ours."""

    def __init__(self, listener: socket.socket, reaper: Reaper) -> None:
        self._listener = listener
        self._reaper = reaper
        self._said: dict[str, str | None] = {}
        self._closing = False
        self._deaths = 0
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._gone = asyncio.Event()
        self._start()

    def pids(self) -> set[int]:
        """Of its process, which a sweep must spare."""
        return set() if self._process is None else {self._process.pid}

    def say(self, target: str, where: Endpoint | None) -> None:
        """Name the `master` or the `store` behind it."""
        self._said[target] = None if where is None else str(where)
        self._tell({target: self._said[target]})

    async def close(self, limit: float) -> None:
        """End it and give the port back."""
        self._closing = True
        self._listener.close()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit)

    def _start(self) -> None:
        if self._closing:
            return
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        with theirs, shielded():
            self._process = subprocess.Popen(
                command(*fds), stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
            )
        ours.setblocking(False)
        self._control = ours
        self._reaper.watch(self._process, self._ended)
        self._tell(self._said)

    def _tell(self, what: dict[str, str | None]) -> None:
        if self._control is not None and what:
            with contextlib.suppress(OSError):  # it has died; its successor is told everything
                self._control.send(json.dumps(what).encode() + b"\n")

    def _ended(self, code: int) -> None:
        self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None
        self._gone.set()
        if self._closing:
            return
        logger.warning("the door of the master port ended (%d) and is opened again", code)
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        asyncio.get_running_loop().call_later(wait, self._start)
