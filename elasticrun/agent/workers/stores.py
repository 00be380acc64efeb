"""The c10d store hosts of this node: one made ready for every round, and their ports held.

A store's port stays bound by the agent, without listening, after its host has ended: a rank of an
old round that still dials it must not meet the store of a later one under a reused number.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import Once, Timer
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.core.events import StoreLost, StoreReady
from elasticrun.host.log import logger
from elasticrun.wire import spawning
from elasticrun.wire.types import Endpoint

HOLD: Final = 600.0
"""Seconds for which the port of a released store is held; ranks of other nodes may dial it for
as long as their collectives' time-out (10 minutes by default)."""

START_LIMITS: Final = {True: 30.0, False: 300.0}
"""Seconds from the start of a store host, forked or not, until it must listen (one that is executed
imports torch first). No node can join without one, so one that hangs is replaced."""

HELD_MOST: Final = 64
"""Ports held at most; beyond it the oldest is let go."""

RETRY: Final = 1.0
"""Seconds before a store host that could not be started is tried again."""

MAX_TRIES: Final = 30
"""Store hosts in a row that could not be started; then one more will not either."""


def bind_port() -> socket.socket:
    """A TCP socket on a free port of all addresses, bound and not listening.

    SO_REUSEPORT lets the store host of the same user listen beside it; connections go only to
    sockets that listen."""
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:  # no IPv6 on this host
        return _bound(socket.AF_INET, "")


def _bound(family: socket.AddressFamily, host: str) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, 0))
    except OSError:
        bound.close()
        raise
    return bound


@dataclass
class _Store:
    endpoint: Endpoint
    held: socket.socket
    listening: bool = False
    released: bool = False
    late: Timer = field(default_factory=Timer)  # until it listens, or has gone


class Stores:
    """Makes store hosts ready, tells of their ends, holds their ports."""

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
        self._wanted = Timer()
        self._waits = False  # one is asked for, and our address is not known
        self._told = Once()

    def prepare(self) -> None:
        """Have a store host started on a port of its own; StoreReady tells when it listens. Its
        endpoint carries our address: until that is known it waits (`addressed`)."""
        self._wanted.cancel()  # or there would be two
        self._waits = not self._node.address
        if self._waits:
            return
        try:
            held = bind_port()
        except OSError as error:
            self._again(f"no port for a store: {error.strerror}")
            return
        port = int(held.getsockname()[1])
        child = self._spawners.start(spawning.SpawnStore(0, port), self)
        self._stores[child] = _Store(Endpoint(self._node.address, port), held)

    def addressed(self) -> None:
        """Our address is known: one that was asked for before can be started."""
        if self._waits:
            self.prepare()

    def release(self, endpoint: Endpoint) -> None:
        """Nobody needs this store any more: end its host, hold its port."""
        for child, store in self._stores.items():
            if store.endpoint == endpoint and not store.released:
                store.released = True
                child.send(spawning.CloseStore(child.key))

    def heard(self, child: Child, message: spawning.FromSpawner) -> None:
        """From its start on a store host has so long until it must listen. Its end is told to the
        brain unless it had been released."""
        store = self._stores[child]
        if isinstance(message, spawning.Spawned):
            limit = self._start_limits[message.forked]
            store.late.after(limit, self._late, child, limit)
        elif isinstance(message, spawning.StoreListening) and not store.listening:
            store.listening = True
            self._tries = 0
            self._told.clear()
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
                self._again(f"a store host could not be started: {why}")

    def lost(self, child: Child) -> None:
        """It has gone: its port is held. Where its spawner died, too, the brain knows and will ask
        for a new one."""
        store = self._stores.pop(child)
        store.late.cancel()
        if self._hold <= 0:
            store.held.close()
            return
        self._held.append(store.held)
        asyncio.get_running_loop().call_later(self._hold, self._let_go, store.held)
        while len(self._held) > HELD_MOST:
            self._held.popleft().close()

    def close(self) -> None:
        """Let every port go."""
        self._wanted.cancel()
        for store in self._stores.values():
            store.late.cancel()
            store.held.close()
        while self._held:
            self._held.popleft().close()

    def _late(self, child: Child, limit: float) -> None:
        if not self._stores[child].released:  # its end is told by the kernel: another one is tried
            logger.warning("a store host does not listen %g s after its start: it is ended", limit)
            child.send(spawning.CloseStore(child.key))

    def _let_go(self, held: socket.socket) -> None:
        if held in self._held:
            self._held.remove(held)
            held.close()

    def _again(self, sentence: str) -> None:
        self._tries += 1
        if self._tries >= MAX_TRIES:
            self._node.fatal(f"{sentence}, {self._tries} times in a row")
            return
        self._told.tell(f"{sentence}; trying again every {RETRY:g} s")
        if not self._wanted.is_set:
            self._wanted.after(RETRY, self.prepare)
