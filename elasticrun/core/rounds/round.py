"""Members -> group ranks and ranks. Functions only; the same input gives the same places.

A node rank that the user gave is the group rank, where the round is large enough. A survivor keeps
the group rank it had. The others fill the gaps: those with a node rank first, in its order, then by
order of first join. Ranks follow the group ranks; nodes may have different numbers of ranks.

The last round that was formed, adopted or restored: its name, and the place of every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from elasticrun.core.persisted import RoundFacts, Seat
from elasticrun.wire.messages import Hello, Restore, RoundReport, Start
from elasticrun.wire.types import Endpoint, RoundName


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


@dataclass(slots=True)
class Round:
    """One round, as the master knows it."""

    name: RoundName
    world_size: int
    restart_count: int
    store: Endpoint
    store_node: str = ""  # empty of an adopted round
    inherited: bool = False  # another master formed it
    adopted: bool = False  # ... and its nodes told of it, there was no record
    members: dict[str, Seat] = field(default_factory=dict)  # by node
    seats: dict[str, int] = field(default_factory=dict)  # node -> group rank
    why_stopped: str = ""
    why: str = ""  # as in Start; not recorded
    restore: Restore | None = None  # the snapshot that its ranks go on from
    rewound_from: int = -1  # as in Start, and so are these
    suspect: bool = False
    restore_step: int = -1

    def is_older_than(self, name: RoundName) -> bool:
        """Whether `name` is of a later round."""
        return (name.term, name.number) > (self.name.term, self.name.number)

    def seat(self, seat: Seat) -> None:
        """Write down a member's place."""
        self.members[seat.node] = seat
        self.seats[seat.node] = seat.group_rank

    def start(self, node: str) -> Start | None:
        """The order that gives this node its place; None for a node that has none, or one of an
        adopted round: that one runs already, and has told only a part of it."""
        seat = self.members.get(node)
        if seat is None or not seat.role_world_size:
            return None
        return Start(
            round=self.name,
            group_rank=seat.group_rank,
            group_world_size=len(self.members),
            first_rank=seat.first_rank,
            world_size=self.world_size,
            role_first_rank=seat.role_first_rank,
            role_world_size=seat.role_world_size,
            restart_count=self.restart_count,
            store=self.store,
            host_store=node == self.store_node,
            restore=self.restore,
            rewound_from=self.rewound_from,
            suspect=self.suspect,
            restore_step=self.restore_step,
            why=self.why,
        )


def adopt(report: RoundReport) -> Round:
    """A round that another master formed, as far as one node knows it."""
    return Round(
        report.round,
        report.world_size,
        report.restart_count,
        report.store,
        inherited=True,
        adopted=True,
        restore=report.restore,
        rewound_from=report.rewound_from,
    )


def adopted_seat(hello: Hello, report: RoundReport) -> Seat:
    """The place that a node of an adopted round says it has."""
    return Seat(
        node=hello.node,
        incarnation=hello.incarnation,
        group_rank=report.group_rank,
        first_rank=report.first_rank,
        ranks=hello.local_world_size,
        role_first_rank=0,
        role_world_size=0,
    )


def restore(facts: RoundFacts) -> Round:
    """The round that stands in the record."""
    round_ = Round(
        facts.name,
        facts.world_size,
        facts.restart_count,
        facts.store,
        facts.store_node,
        inherited=True,
        adopted=facts.adopted,
        why_stopped=facts.over,
        restore=facts.restore,
        rewound_from=facts.rewound_from,
        suspect=facts.suspect,
        restore_step=facts.restore_step,
    )
    for seat in facts.seats:
        round_.seat(seat)
    return round_


def begin(
    name: RoundName,
    ready: Sequence[Candidate],
    limit: int,
    previous: Round | None,
    restart_count: int,
    life_of: Callable[[str], str],
    snapshot: Restore | None = None,
) -> Round:
    """Give `limit` of the ready nodes their places in a new round. `life_of`: node -> the
    incarnation of its agent; `snapshot`: what the ranks go on from."""
    seats = previous.seats if previous else {}
    chosen = choose(ready, limit, seats)
    world = lay_out(chosen, seats)
    by_name = {one.node: one for one in chosen}
    round_ = Round(name, world.world_size, restart_count, world.store, world.store_host)
    round_.restore = snapshot
    for place in world.places:
        one = by_name[place.node]
        round_.seat(
            Seat(
                node=place.node,
                incarnation=life_of(place.node),
                group_rank=place.group_rank,
                first_rank=place.first_rank,
                ranks=one.local_world_size,
                role_first_rank=place.role_first_rank,
                role_world_size=world.role_sizes[one.role],
            )
        )
    return round_


class Stage(StrEnum):
    """A member of the last round that was formed."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(slots=True)
class LastRound:
    """A member that goes stays in it, because its ranks may live on: see the fence in
    `rendezvous`."""

    stages: dict[str, Stage]
    last_word: float  # when the last member that has gone was last heard
    away: dict[str, None] = field(default_factory=dict)  # whose agents have gone, in that order
    leaving: set[str] = field(default_factory=set)  # who go as soon as their ranks have ended
    completed: set[str] = field(default_factory=set)  # all of whose ranks ended with 0
    unheard: set[str] = field(default_factory=set)  # whose stream is broken
    lost: list[str] = field(default_factory=list)  # who went before its ranks were done, sentences
    broken: str = ""  # why the round cannot go on although nobody is lost
    fenced: bool = False  # it can complete no further collective

    def is_member(self, node: str) -> bool:
        """Whether the node has a place in the last round and its agent has not gone."""
        return node in self.stages and node not in self.away

    def is_concerned(self, node: str) -> bool:
        """Whether the work of the round needs this node still."""
        return self.is_member(node) and node not in self.completed

    def is_stopping(self, node: str) -> bool:
        """Whether the ranks of this member are being stopped, or were."""
        return self.stages.get(node) in (Stage.STOPPING, Stage.STOPPED)

    def staying(self) -> set[str]:
        """Members that are there and do not go; O(n)."""
        return self.stages.keys() - self.away.keys() - self.leaving

    def running(self, node: str) -> None:
        """All ranks of this member have been started."""
        if self.is_member(node) and self.stages[node] is Stage.STARTING:
            self.stages[node] = Stage.RUNNING

    def finished(self, node: str) -> None:
        """All ranks of this member have ended with 0."""
        if self.is_member(node) and self.stages[node] in (Stage.STARTING, Stage.RUNNING):
            self.stages[node] = Stage.FINISHED
            self.completed.add(node)
