"""The c10d store hosts of this node: one made ready for every round, and their ports held.

A store's port stays bound by the agent, without listening, after its host has ended: a rank of an
old round that still dials it must not meet the store of a later one under a reused number.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from elasticrun.agent.spawner import Spawners
from elasticrun.core.events import AgentEvent, StoreLost, StoreReady
from elasticrun.operator_log import logger
from elasticrun.wire.spawning import Exited, Spawned, SpawnFailed, SpawnStore, StoreListening
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
        bound = _bound(socket.AF_INET6, "::")
    except OSError:  # no IPv6 on this host
        bound = _bound(socket.AF_INET, "")
    return bound


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
    key: int
    endpoint: Endpoint
    held: socket.socket
    listening: bool = False
    released: bool = False
    late: asyncio.TimerHandle | None = None

    def forget_limit(self) -> None:
        """It listens, or has gone."""
        if self.late is not None:
            self.late.cancel()


class Stores:
    """Makes store hosts ready, tells of their ends, holds their ports."""

    def __init__(
        self,
        spawners: Spawners,
        address: Callable[[], str],
        deliver: Callable[[AgentEvent], None],
        fatal: Callable[[str], None],
        hold: float = HOLD,
        *,
        start_limits: Mapping[bool, float] = START_LIMITS,
    ) -> None:
        self._spawners = spawners
        self._address = address
        self._deliver = deliver
        self._fatal = fatal
        self._tries = 0
        self._hold = hold
        self._start_limits = start_limits
        self._stores: dict[int, _Store] = {}
        self._held: deque[socket.socket] = deque()
        self._wanted: asyncio.TimerHandle | None = None

    def prepare(self) -> None:
        """Have a store host started on a port of its own; StoreReady tells when it listens."""
        self._wanted = None
        try:
            held = bind_port()
        except OSError as error:
            self._again(f"no port for a store: {error.strerror}")
            return
        key = self._spawners.new_key()
        port = int(held.getsockname()[1])
        self._stores[key] = _Store(key, Endpoint(self._address(), port), held)
        self._spawners.start(SpawnStore(key, port))

    def release(self, endpoint: Endpoint) -> None:
        """Nobody needs this store any more: end its host, hold its port."""
        for store in self._stores.values():
            if store.endpoint == endpoint and not store.released:
                store.released = True
                self._spawners.close_store(store.key)

    def spawned(self, message: Spawned) -> None:
        """If it is a store host, it has so long from now on until it must listen."""
        store = self._stores.get(message.key)
        if store is not None:
            limit = self._start_limits[message.forked]
            store.late = asyncio.get_running_loop().call_later(limit, self._late, store, limit)

    def listening(self, message: StoreListening) -> None:
        store = self._stores.get(message.key)
        if store is not None and not store.listening:
            store.listening = True
            self._tries = 0
            store.forget_limit()
            self._deliver(StoreReady(store.endpoint))

    def gone(self, message: Exited | SpawnFailed) -> bool:
        """Whether it was a store host's end; told to the brain unless it had been released."""
        store = self._stores.pop(message.key, None)
        if store is None:
            return False
        self._spawners.forget([message.key])
        self._keep(store)
        if store.released:
            return True
        if store.listening:
            self._deliver(StoreLost(store.endpoint))
        else:
            why = (
                message.reason if isinstance(message, SpawnFailed) else f"it ended ({message.code})"
            )
            self._again(f"a store host could not be started: {why}")
        return True

    def all_lost(self) -> None:
        """Their spawner has died and they with it; the brain knows and will ask for a new one."""
        for key, store in list(self._stores.items()):
            if self._spawners.owner(key) is None:
                del self._stores[key]
                self._keep(store)

    def close(self) -> None:
        """Let every port go."""
        if self._wanted is not None:
            self._wanted.cancel()
        for store in self._stores.values():
            store.forget_limit()
            store.held.close()
        while self._held:
            self._held.popleft().close()

    def _late(self, store: _Store, limit: float) -> None:
        if not store.released:  # its end is told by the kernel, and another one is tried
            logger.warning("a store host does not listen %g s after its start: it is ended", limit)
            self._spawners.close_store(store.key)

    def _keep(self, store: _Store) -> None:
        """Of a store that has gone: its port."""
        store.forget_limit()
        held = store.held
        if self._hold <= 0:
            held.close()
            return
        self._held.append(held)
        asyncio.get_running_loop().call_later(self._hold, self._let_go, held)
        while len(self._held) > HELD_MOST:
            self._held.popleft().close()

    def _let_go(self, held: socket.socket) -> None:
        if held in self._held:
            self._held.remove(held)
            held.close()

    def _again(self, sentence: str) -> None:
        self._tries += 1
        if self._tries >= MAX_TRIES:
            self._fatal(f"{sentence}, {self._tries} times in a row")
            return
        logger.warning("%s; trying again in %g s", sentence, RETRY)
        if self._wanted is None:
            self._wanted = asyncio.get_running_loop().call_later(RETRY, self.prepare)
