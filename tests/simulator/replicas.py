"""What a simulated node has copied of other nodes' ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrun.core.snapshots.types import order_of
from elasticrun.wire.messages import Holding, NotReplicated, Replicate
from tests.simulator.shelves import Kept

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

COPIES = 2
"""Snapshots of one rank that are kept."""
COPYING = 0.05
"""Seconds in which a node copies what an order names."""


class Replicas:
    """Of one node."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._orders: list[Replicate] = []  # of one step
        self.copies: list[Kept] = []  # one for each rank, the oldest first

    def begin(self) -> None:
        """Ranks of a new life start: orders of the last one are of no use."""
        self._orders.clear()

    def tidy(self) -> None:
        """A step is whole: what no order names any more can go."""
        wanted = {rank for one in self._orders for rank in one.ranks}
        self.copies = [one for one in self.copies if one.first_rank in wanted or one.pinned]

    def obey(self, order: Replicate) -> None:
        """Copy what it names, in a moment."""
        if any((one.round, one.step) != (order.round, order.step) for one in self._orders):
            self._orders.clear()
        self._orders.append(order)
        for rank in order.ranks:
            self._make_room(order, rank)

        def copied() -> None:
            if not any(one is order for one in self._orders) or not self._node.alive:
                return
            failed = [rank for rank in order.ranks if not self._copy(order, rank)]
            if failed:
                self._world.shelves.excused.add((order.round, order.step))
                self._node.say(NotReplicated(order.round, order.step, "it cannot be had"))
            self._node.memory.say()

        self._world.clock.after(COPYING, copied)

    def _copy(self, order: Replicate, rank: int) -> bool:
        """One rank's shard; whether it is here then."""
        key = (order.round, order.step)
        source = self._world.nodes.get(order.saver.host)
        if self._node.memory.gives(*key, rank):
            return True
        if source is None or not source.alive or not source.memory.gives(*key, rank):
            return False
        if any(one.bad for one in source.memory.of(key)):
            return False
        if len(self._of(rank)) == COPIES:
            return False
        made = Kept(*key, rank, order.world_size, 1, replica=True)
        self.copies.append(made)
        self.copies.sort(key=lambda one: order_of(one.key))
        self._world.shelves.has(self._node.name, made)
        return True

    def _make_room(self, order: Replicate, rank: int) -> None:
        """Withdraw what is written over: never the newest one, nor one that is needed."""
        mine = self._of(rank)
        if len(mine) == COPIES and not self._node.memory.gives(order.round, order.step, rank):
            old = next((one for one in mine[:-1] if not one.pinned), None)
            if old is not None:
                self.copies.remove(old)

    def _of(self, rank: int) -> list[Kept]:
        return [one for one in self.copies if one.first_rank == rank]

    def told(self) -> list[Holding]:
        """Those of one step as one row."""
        found = []
        for key in dict.fromkeys(one.key for one in self.copies):
            ranks = {one.first_rank: one for one in self.copies if one.key == key}
            span = range(min(ranks), max(ranks) + 1)
            content = self._world.shelves.content
            row = tuple(content(rank) if rank in ranks else 0 for rank in span)
            size = next(iter(ranks.values())).world_size
            found.append(Holding(*key, span.start, size, row, False, replica=True))
        return found
