"""Members -> group ranks and ranks. Functions only; the same input gives the same places.

A node rank that the user gave is the group rank, where the round is large enough. A survivor keeps
the group rank it had. The others fill the gaps: those with a node rank first, in its order, then by
order of first join. Ranks follow the group ranks; nodes may have different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticrun.wire.ids import Endpoint


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is ready to take part."""

    node: str
    node_rank: int  # -1: none was given
    order: int  # of first join
    local_world_size: int
    role: str
    store: Endpoint


@dataclass(frozen=True, slots=True)
class Place:
    """A node's place in a round."""

    node: str
    group_rank: int
    first_rank: int
    role_first_rank: int


@dataclass(frozen=True, slots=True)
class World:
    """A whole round, laid out."""

    places: tuple[Place, ...]  # by group rank
    world_size: int
    role_sizes: Mapping[str, int]
    store_host: str  # the node whose store the ranks use
    store: Endpoint


def choose(
    candidates: Sequence[Candidate], limit: int, previous: Mapping[str, int]
) -> list[Candidate]:
    """The `limit` candidates that take part: members of the last round first, then those whose
    given node rank has a place in a round of that size, then by order of first join."""

    def priority(one: Candidate) -> tuple[bool, bool, int]:
        return (one.node not in previous, not 0 <= one.node_rank < limit, one.order)

    return sorted(candidates, key=priority)[:limit]


def lay_out(members: Sequence[Candidate], previous: Mapping[str, int]) -> World:
    """Give every member its place. `previous`: group ranks of the last round, by node."""
    seats: list[Candidate | None] = [None] * len(members)
    pending = sorted(members, key=lambda one: one.order)
    pending = _seat(seats, pending, {one.node: one.node_rank for one in members})
    pending = _seat(seats, pending, previous)
    pending.sort(key=lambda one: (one.node_rank < 0, one.node_rank, one.order))
    free = iter([seat for seat, taken in enumerate(seats) if taken is None])
    for one in pending:
        seats[next(free)] = one
    return _number([one for one in seats if one is not None])


def _seat(
    seats: list[Candidate | None], pending: list[Candidate], wishes: Mapping[str, int]
) -> list[Candidate]:
    """Seat whoever's wish is free; the others."""
    others = []
    for one in pending:
        wish = wishes.get(one.node, -1)
        if 0 <= wish < len(seats) and seats[wish] is None:
            seats[wish] = one
        else:
            others.append(one)
    return others


def _number(seats: list[Candidate]) -> World:
    places = []
    next_rank = 0
    role_sizes: dict[str, int] = {}
    for group_rank, one in enumerate(seats):
        places.append(Place(one.node, group_rank, next_rank, role_sizes.get(one.role, 0)))
        next_rank += one.local_world_size
        role_sizes[one.role] = role_sizes.get(one.role, 0) + one.local_world_size
    host = store_host(seats)
    return World(tuple(places), next_rank, role_sizes, host.node, host.store)


def store_host(seats: Sequence[Candidate]) -> Candidate:
    """The node with group rank 0, as torchrun has it; but where it offers only its loopback, under
    which the others find nothing, the first that offers an address that others can dial."""
    if is_loopback(seats[0].store.host):
        for one in seats:
            if not is_loopback(one.store.host):
                return one
    return seats[0]


def is_loopback(host: str) -> bool:
    """Whether an address means "this host" wherever it is read."""
    return host == "localhost" or host.startswith(("127.", "::ffff:127.")) or host == "::1"
