"""Starts, supplies and restarts the port proxy of a static job, on node rank 0 (decision 008)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess

from elasticrun.agent.boot import Reaper
from elasticrun.agent.link import port_proxy_child
from elasticrun.agent.link.master_process import RESTARTS, shielded
from elasticrun.host.log import logger
from elasticrun.wire import debugger
from elasticrun.wire.messages import Start
from elasticrun.wire.types import Endpoint


class PortProxy:
    """Keeps the port proxy's process running and tells it its targets. The agent owns the listening
    socket, so connections wait in the backlog while the proxy restarts."""

    def __init__(self, listener: socket.socket, reaper: Reaper) -> None:
        self._listener = listener
        self._reaper = reaper
        self._targets: dict[str, str | None] = {}
        self._closing = False
        self._deaths = 0
        self._control: socket.socket | None = None
        self._exited = asyncio.Event()
        self._start()

    def set_target(self, target: str, where: Endpoint | None) -> None:
        """Set the address of the `master` or the `store` behind the proxy; None: connections to it
        wait."""
        self._targets[target] = None if where is None else str(where)
        self._send({target: self._targets[target]})

    def round_began(self, start: Start) -> None:
        """Forward the port to this round's store."""
        self.set_target("store", start.store)

    def ranks_stopping(self) -> None:
        """No-op: ranks may still need their store."""

    def ranks_gone(self, *, done: bool) -> None:
        """Clear the store if another round follows, because there is none between two rounds."""
        if not done:
            self.set_target("store", None)

    def close(self) -> None:
        """Stop restarting the proxy. `release` frees the port later, when the master is closed."""
        self._closing = True

    async def release(self, limit: float) -> None:
        """Free the port, and wait up to `limit` seconds for the proxy to exit."""
        self._closing = True
        self._listener.close()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), limit)

    def _start(self) -> None:
        if self._closing:
            return
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        try:
            with theirs, shielded(), debugger.without_debugger():
                process = subprocess.Popen(
                    port_proxy_child.command(*fds),
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._restart_later(f"the port proxy cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        self._control = ours
        self._reaper.watch(process, self._ended)
        self._reaper.spared.add(process.pid)
        self._send(self._targets)

    def _send(self, what: dict[str, str | None]) -> None:
        if self._control is not None and what:
            with contextlib.suppress(OSError):  # it has exited; its successor gets everything
                self._control.send(json.dumps(what).encode() + b"\n")

    def _ended(self, code: int) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._exited.set()
        if self._closing:
            return
        self._restart_later(f"the port proxy exited ({code})")

    def _restart_later(self, sentence: str) -> None:
        logger.warning("%s; restarting it", sentence)
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        asyncio.get_running_loop().call_later(wait, self._start)
