"""The last round that was formed, adopted or restored: its name, its rank assignment, and the state
of its members.

Rank assignment is deterministic. A node rank that the user gave is the group rank, if the round is
large enough. A survivor keeps its group rank. The others fill the gaps: first those with a node
rank, in that order, then the rest by order of first join. Ranks are numbered in the order of the
group ranks; nodes may have different numbers of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from elasticrun.core.nodes.node import Node, is_loopback
from elasticrun.core.persisted import RendezvousFacts, Seat
from elasticrun.core.reasons import Reason, read
from elasticrun.wire.messages import Hello, RoundInfo, Start
from elasticrun.wire.types import Endpoint, RoundName


def choose_nodes(ready: Sequence[Node], limit: int, previous: Mapping[str, int]) -> list[Node]:
    """The `limit` ready nodes that take part: members of the last round first, then nodes whose
    given node rank fits a round of that size, then by order of first join."""

    rank = {one.id: one.hello.node_rank for one in ready}
    return sorted(
        ready, key=lambda one: (one.id not in previous, not 0 <= rank[one.id] < limit, one.order)
    )[:limit]


def lay_out(members: Sequence[Node], previous: Mapping[str, int]) -> list[Node]:
    """The members in the order of their new group ranks. `previous`: group ranks in the last
    round."""
    places: list[Node | None] = [None] * len(members)
    given = {one.id: one.hello.node_rank for one in members}
    pending = sorted(members, key=lambda one: one.order)
    for wishes in (given, previous):
        others = []
        for one in pending:
            wish = wishes.get(one.id, -1)
            if 0 <= wish < len(places) and places[wish] is None:
                places[wish] = one
            else:
                others.append(one)
        pending = others
    pending.sort(key=lambda one: (given[one.id] < 0, given[one.id], one.order))
    rest = iter(pending)
    return [next(rest) if one is None else one for one in places]


def store_host(places: Sequence[Node]) -> Node:
    """The node with group rank 0, as in torchrun. If it offers only a loopback address, which other
    nodes cannot dial: the first node that offers another address, if any."""
    if is_loopback(places[0].store.host):
        return next((one for one in places if not is_loopback(one.store.host)), places[0])
    return places[0]


class Stage(StrEnum):
    """The state of a member of the last round."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Round:
    """A round and what is known of its members. A member that leaves stays in it, because its ranks
    may still be alive: see the fence in `rendezvous`."""

    info: RoundInfo
    store: Endpoint | None  # None: no round was formed yet
    store_node: str
    members: dict[str, Seat]  # by node
    last_heard: float = 0.0  # latest message of a departed member; at least the round's start
    is_adopted: bool = False  # its places are those that nodes have reported so far
    is_inherited: bool = False  # another master formed it
    why_stopped: Reason | None = None
    name: RoundName = field(init=False)
    seats: dict[str, int] = field(init=False)  # node -> group rank
    stages: dict[str, Stage] = field(init=False)
    away: dict[str, None] = field(default_factory=dict)  # members whose agents have exited
    leaving: set[str] = field(default_factory=set)  # leave as soon as their ranks have exited
    completed: set[str] = field(default_factory=set)  # members whose ranks all exited with 0
    disconnected: set[str] = field(default_factory=set)  # members whose stream is broken
    unseen: dict[str, None] = field(default_factory=dict)  # restored members, still unheard
    lost: list[Reason] = field(default_factory=list)  # losses of members whose ranks were not done
    broken: Reason | None = None  # why the round cannot continue although no node is lost
    fenced: bool = False  # it can complete no further collective

    def __post_init__(self) -> None:
        self.name = self.info.name
        self.seats = {node: seat.group_rank for node, seat in self.members.items()}
        self.stages = dict.fromkeys(self.members, Stage.STARTING)

    def expect(self, facts: RendezvousFacts, at: float) -> None:
        """Restore the state of the members that another master recorded at time `at`; none has
        reported to this master yet."""
        self.away = dict.fromkeys(facts.gone)
        self.unseen = {node: None for node in self.stages if node not in self.away}
        self.completed, self.disconnected = set(facts.done), set(self.unseen)
        self.fenced, self.last_heard = facts.fenced, at - facts.silent
        if (lost := read(facts.lost, facts.lost_code)) is not None:
            self.lost.append(lost)

    def unreported(self) -> int:
        """Number of ranks of an adopted round whose nodes have not reported their places."""
        return max(0, self.info.world_size - sum(seat.ranks for seat in self.members.values()))

    def is_older_than(self, name: RoundName) -> bool:
        """Whether `name` is a later round."""
        return (name.term, name.number) > (self.name.term, self.name.number)

    def add_seat(self, seat: Seat) -> bool:
        """Add the place that a member of an adopted round reports. Return whether the member is
        new."""
        self.members[seat.node] = seat
        self.seats[seat.node] = seat.group_rank
        is_new = seat.node not in self.stages
        self.stages.setdefault(seat.node, Stage.STARTING)
        return is_new

    def start(self, node: str) -> Start | None:
        """The order that gives this node its place; None for a node without one."""
        if (seat := self.members.get(node)) is None or self.store is None:
            return None
        return Start(
            info=self.info,
            group_rank=seat.group_rank,
            group_world_size=len(self.members),
            first_rank=seat.first_rank,
            role_first_rank=seat.role_first_rank,
            role_world_size=seat.role_world_size,
            store=self.store,
            host_store=node == self.store_node,
        )

    def is_member(self, node: str) -> bool:
        """Whether the node has a place in the last round and its agent has not exited."""
        return node in self.stages and node not in self.away

    def is_concerned(self, node: str) -> bool:
        """Whether the round still needs this node."""
        return self.is_member(node) and node not in self.completed

    def staying(self) -> set[str]:
        """Members that are present and not leaving; O(n)."""
        return self.stages.keys() - self.away.keys() - self.leaving

    def finished(self, node: str) -> None:
        """All ranks of this member have exited with 0."""
        if self.is_member(node) and self.stages[node] in (Stage.STARTING, Stage.RUNNING):
            self.stages[node] = Stage.FINISHED
            self.completed.add(node)


def no_round() -> Round:
    """A placeholder before the first round."""
    return Round(RoundInfo(RoundName(0, 0, ""), 0), None, "", {})


def restored(facts: RendezvousFacts) -> Round | None:
    """The round in another master's record; None if there was none."""
    if facts.round is None:
        return None
    members = {seat.node: seat for seat in facts.seats}
    return Round(
        facts.round,
        facts.store,
        facts.store_node,
        members,
        is_adopted=facts.adopted,
        is_inherited=True,
        why_stopped=read(facts.over, facts.over_code),
    )


def adopt(start: Start) -> Round:
    """A round that another master formed, as its first node reports it; it has no members yet."""
    return Round(start.info, start.store, "", {}, is_adopted=True, is_inherited=True)


def adopted_seat(hello: Hello, start: Start) -> Seat:
    """The place that a node of an adopted round has received."""
    return Seat(
        node=hello.node,
        incarnation=hello.incarnation,
        group_rank=start.group_rank,
        first_rank=start.first_rank,
        ranks=hello.local_world_size,
        role_first_rank=start.role_first_rank,
        role_world_size=start.role_world_size,
    )


def form_round(info: RoundInfo, ready: Sequence[Node], limit: int, previous: Round | None) -> Round:
    """A new round of up to `limit` ready nodes, with their places; sets the world size."""
    before = previous.seats if previous else {}
    places = lay_out(choose_nodes(ready, limit, before), before)
    host, hellos = store_host(places), [one.hello for one in places]
    role_sizes: Counter[str] = Counter()
    for hello in hellos:
        role_sizes[hello.role] += hello.local_world_size
    world_size, role_first_ranks, members = 0, Counter[str](), {}
    for group_rank, hello in enumerate(hellos):
        members[hello.node] = Seat(
            node=hello.node,
            incarnation=hello.incarnation,
            group_rank=group_rank,
            first_rank=world_size,
            ranks=hello.local_world_size,
            role_first_rank=role_first_ranks[hello.role],
            role_world_size=role_sizes[hello.role],
        )
        world_size += hello.local_world_size
        role_first_ranks[hello.role] += hello.local_world_size
    return Round(replace(info, world_size=world_size), host.store, host.id, members)
