"""What replicas have in common on a simulated node: tensors that are only names, and those of them
that a script has altered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_PARTS, key_of_name, parts_of
from tests.simulator.shelves import Kept

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

TENSORS = tuple(f"w{number:03}" for number in range(200))
HASHING = 0.2
"""Seconds in which a node hashes a step."""


class Digests:
    """Answers CompareReplicas."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._once: dict[int, set[str]] = {}  # by local rank, until its next life
        self._always: dict[int, set[str]] = {}
        self._order: m.CompareReplicas | None = None
        self._hashed: Kept | None = None

    def begin(self) -> None:
        """Ranks of a new life have what they restored."""
        self._once.clear()
        self._order = self._hashed = None

    def alter(self, local_rank: int, name: str, *, always: bool) -> None:
        """From now on this rank has another value there than its replicas."""
        assert name in TENSORS
        altered = self._always if always else self._once
        altered.setdefault(local_rank, set()).add(name)

    def mark(self, made: Kept) -> None:
        """A step is taken: note what is altered in it."""
        for altered in (self._once, self._always):
            for local_rank, names in altered.items():
                made.altered.setdefault(made.first_rank + local_rank, set()).update(names)

    def obey(self, order: m.CompareReplicas) -> None:
        if order.last:
            self._answer(order, self._hashed)
            return
        self._order = order
        later = [one for one in self._node.memory.kept if one.round == order.round]
        for one in later:
            self.committed(one)

    def committed(self, one: Kept) -> None:
        """Hash this step, if it is the first after the one that the order names."""
        order = self._order
        if order is not None and one.round == order.round and one.step > order.step:
            self._order, self._hashed = None, one
            self._world.clock.after(HASHING, lambda: self._answer(order, one))

    def _answer(self, order: m.CompareReplicas, one: Kept | None) -> None:
        if one is None or not self._node.alive:
            return
        ranks = [
            self._of(one, rank, order)
            for rank in range(one.first_rank, one.first_rank + one.ranks)
            if rank in order.ranks or not order.ranks
        ]
        if ranks:
            self._node.say(m.Digests(order.round, one.step, order.number, tuple(ranks), 0.01))

    def _of(self, one: Kept, rank: int, order: m.CompareReplicas) -> m.RankDigests:
        altered = one.altered.get(rank, set())
        parts = [(0, len(TENSORS))]
        if order.last:
            parts = parts_of(order.first, order.last, MAX_PARTS)
        digests = []
        for first, last in parts:
            kept = [t for t in TENSORS[first:last] if key_of_name(t) not in order.left_out]
            values = [f"{t}, altered" if t in altered else t for t in kept]
            digests.append(key_of_name(" ".join(values)))
        single = bool(order.last) and all(last - first == 1 for first, last in parts)
        names = tuple(TENSORS[first] for first, _ in parts) if single else ()
        return m.RankDigests(rank, len(TENSORS), tuple(digests), names, f"cuda:{rank}")
