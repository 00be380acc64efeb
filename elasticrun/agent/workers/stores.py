"""The c10d store hosts of this node: one prepared for every round, and their reserved ports.

The agent keeps a store's port bound, without listening, after its host has exited: a rank of an old
round that still connects to it must not reach a later round's store that reuses the port.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import Once, Timer
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.core.events import StoreLost, StoreReady
from elasticrun.host.log import logger
from elasticrun.wire import spawning
from elasticrun.wire.types import Endpoint

HOLD: Final = 600.0
"""Seconds for which the port of a released store is reserved; ranks of other nodes may connect to
it until their collectives time out (10 minutes by default)."""

START_LIMITS: Final = {True: 30.0, False: 300.0}
"""Seconds from the start of a store host, forked or not, until it must listen (one started by exec
imports torch first). No node can join without one, so one that hangs is replaced."""

MAX_RESERVED: Final = 64
"""Maximum number of reserved ports; beyond it the oldest is released."""

RETRY: Final = 1.0
"""Seconds before a failed start of a store host is retried."""

MAX_TRIES: Final = 30
"""Number of failed starts in a row that ends the node."""


PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EVERYWHERE: Final = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))


def bind_port(wanted: int = 0) -> socket.socket:
    """A TCP socket bound to a free port on all addresses, not listening: to this port, if it is
    free. Raises OSError.

    SO_REUSEPORT lets the store host of the same user listen on the port; connections go only to
    listening sockets."""
    error = OSError("no address")
    for family, host in _EVERYWHERE:  # some hosts have no IPv6
        for port in dict.fromkeys((wanted, 0)):
            try:
                return _bound(family, host, port)
            except OSError as failed:
                error = failed
    raise error


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
        # not before: the port may belong to another agent of this user
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        bound.close()
        raise
    return bound


def next_store(current: Endpoint) -> Endpoint:
    """Where the host of this store will probably have the store of the next round."""
    return Endpoint(current.host, _after(current.port) or current.port)


def _after(port: int) -> int:
    """The next port of those that the kernel chooses from; 0 if there is none."""
    try:
        last = int(PORTS.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        last = 0
    return port + 1 if 0 < port < last else 0


@dataclass
class _Store:
    endpoint: Endpoint
    held: socket.socket
    listening: bool = False
    released: bool = False
    late: Timer = field(default_factory=Timer)  # until it listens or exits


class Stores:
    """Prepares store hosts, reports their exits, reserves their ports."""

    def __init__(
        self,
        node: NodeContext,
        spawners: Spawners,
        hold: float = HOLD,
        *,
        start_limits: Mapping[bool, float] = START_LIMITS,
    ) -> None:
        self._node = node
        self._spawners = spawners
        self._tries = 0
        self._hold = hold
        self._start_limits = start_limits
        self._stores: dict[Child, _Store] = {}
        self._held: deque[socket.socket] = deque()
        self._retry = Timer()
        self._last_port = 0
        self._is_requested = False  # one was requested before our address was known
        self._once = Once()
        self._listening = asyncio.Event()

    def prepare(self) -> None:
        """Start a store host on its own port, the one after the last if that is free, so that other
        nodes can foresee it (`next_store`); StoreReady follows when it listens. A failed start is
        retried; one that would fail again, or MAX_TRIES in a row, end the node. The endpoint
        contains our address, so this waits until the address is known (`on_address`)."""
        self._retry.cancel()  # otherwise there would be two
        self._is_requested = not self._node.address
        if self._is_requested:
            return
        try:
            held = bind_port(_after(self._last_port))
        except OSError as error:
            self._retry_later(f"no port for a store: {error.strerror}")
            return
        self._last_port = port = int(held.getsockname()[1])
        child = self._spawners.start(spawning.SpawnStore(0, port), self)
        self._stores[child] = _Store(Endpoint(self._node.address, port), held)

    def on_address(self) -> None:
        """Start a store that was requested before our address was known. Call when it is."""
        if self._is_requested:
            self.prepare()

    async def prepared(self, current: Endpoint) -> Endpoint:
        """The store for the next round, once it listens; `current`: that of this round."""
        while True:
            ready = (s.endpoint for s in self._stores.values() if s.listening and not s.released)
            if (found := next((one for one in ready if one != current), None)) is not None:
                return found
            self._listening.clear()
            await self._listening.wait()

    def release(self, endpoint: Endpoint) -> None:
        """End the host of a store that nobody needs any more; its port stays reserved."""
        for child, store in self._stores.items():
            if store.endpoint == endpoint and not store.released:
                store.released = True
                child.send(spawning.CloseStore(child.key))

    def on_child_message(self, child: Child, message: spawning.FromSpawner) -> None:
        """Handle a message about a store host. Once started, it must listen within its time limit.
        If it exits before it is released: StoreLost if it was listening, otherwise another try."""
        store = self._stores[child]
        if isinstance(message, spawning.Spawned):
            limit = self._start_limits[message.forked]
            store.late.after(limit, self._on_start_limit, child, limit)
        elif isinstance(message, spawning.StoreListening) and not store.listening:
            store.listening = True
            self._listening.set()
            self._tries = 0
            self._once.clear()
            store.late.cancel()
            self._node.deliver(StoreReady(store.endpoint))
        elif isinstance(message, spawning.Exited | spawning.SpawnFailed):
            self._spawners.forget(child)
            self.lost(child)
            if store.listening and not store.released:
                self._node.deliver(StoreLost(store.endpoint))
            elif not store.released:
                why = (
                    f"it ended ({message.code})"
                    if isinstance(message, spawning.Exited)
                    else message.reason
                )
                sentence = f"a store host could not be started: {why}"
                if isinstance(message, spawning.SpawnFailed) and message.lasting:
                    self._node.fatal(sentence)
                else:
                    self._retry_later(sentence)

    def lost(self, child: Child) -> None:
        """Reserve the port of a store host that has exited. If its spawner died too, the state
        machine requests a new store itself."""
        store = self._stores.pop(child)
        store.late.cancel()
        if self._hold <= 0:
            store.held.close()
            return
        self._held.append(store.held)
        asyncio.get_running_loop().call_later(self._hold, self._release_port, store.held)
        while len(self._held) > MAX_RESERVED:
            self._held.popleft().close()

    def close(self) -> None:
        """Release every port."""
        self._retry.cancel()
        for store in self._stores.values():
            store.late.cancel()
            store.held.close()
        while self._held:
            self._held.popleft().close()

    def _on_start_limit(self, child: Child, limit: float) -> None:
        if not self._stores[child].released:  # its exit event causes another try
            logger.warning("a store host is not listening %g s after its start; killing it", limit)
            child.send(spawning.CloseStore(child.key))

    def _release_port(self, held: socket.socket) -> None:
        if held in self._held:
            self._held.remove(held)
            held.close()

    def _retry_later(self, sentence: str) -> None:
        self._tries += 1
        if self._tries >= MAX_TRIES:
            self._node.fatal(f"{sentence}, {self._tries} times in a row")
            return
        self._once.log(f"{sentence}; trying again every {RETRY:g} s")
        if not self._retry.is_set:
            self._retry.after(RETRY, self.prepare)
