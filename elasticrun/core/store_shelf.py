"""The c10d stores of one node: at most one is ready and unused, at most one is in use."""

from __future__ import annotations

from elasticrun.core.effects import AgentEffect, PrepareStore, ReleaseStore
from elasticrun.wire.ids import Endpoint

MAX_LOSSES = 5
"""Stores that may end unused, one after another, before the agent gives up."""


class StoreShelf:
    """Which store is offered, which one the round uses, and whether one is on its way."""

    def __init__(self) -> None:
        self.offer: Endpoint | None = None
        """Ready, and used by nobody."""
        self.hosted: Endpoint | None = None
        """Ours, and used by the present round."""
        self._preparing = False
        self._losses = 0

    @property
    def hopeless(self) -> bool:
        """Whether stores end again and again before they are used."""
        return self._losses >= MAX_LOSSES

    def prepare(self) -> list[AgentEffect]:
        """Ask for a store, unless there is one or it was asked for."""
        if self._preparing or self.offer is not None:
            return []
        self._preparing = True
        return [PrepareStore()]

    def ready(self, store: Endpoint) -> list[AgentEffect]:
        """A store host listens."""
        self._preparing = False
        if self.offer is not None:
            return [ReleaseStore(store)]
        self.offer = store
        return []

    def lost_offer(self) -> None:
        """The store on offer ended by itself."""
        self.offer = None
        self._losses += 1

    def release(self) -> list[AgentEffect]:
        """The round that used our store is over."""
        old, self.hosted = self.hosted, None
        return [] if old is None else [ReleaseStore(old)]

    def clear(self) -> list[AgentEffect]:
        """No round will need a store of this node."""
        old, self.offer = self.offer, None
        return [*self.release(), *([] if old is None else [ReleaseStore(old)])]

    def use(self, *, host: bool) -> None:
        """A round begins; `host`: with the store that we offered."""
        self._losses = 0
        if host:
            self.hosted, self.offer = self.offer, None

    def lose_spawner(self) -> None:
        """All store hosts are gone with it."""
        self.offer = self.hosted = None
        self._preparing = False
