"""What is known of one node: its membership word, and what `core.membership` says of it.

What nodes have said about themselves: their Hello, their store, their pids. Facts, no rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elasticrun.core.nodes.admission import Silences
from elasticrun.core.rounds.round import Candidate, is_loopback
from elasticrun.wire.messages import CheckSpec, Hello, JobSpec, SaveSpec
from elasticrun.wire.types import Endpoint


class Health(StrEnum):
    """The membership word of a node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    PARKED = "parked"  # it left because it is excluded, and stays attached without ranks


@dataclass(slots=True)
class Member:
    """What is known of one node id."""

    node: str
    host: str
    incarnation: str
    session: int | None  # the stream it is heard on; None: none stands
    last_heard: float
    health: Health = Health.ALIVE
    reason: str = ""  # why it is not ALIVE
    broke_at: float = 0.0  # when its stream broke, while SUSPECT
    silent: float = 0.0  # for how long nothing had come on it then, while others were heard
    quiet: float = 0.0  # the same, whoever was heard
    corroborated: bool = False
    silences: Silences = field(default_factory=Silences)
    unseen: bool = False  # known from the record, not heard by this master yet


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a stream that wants to be a node's."""

    refusal: str = ""  # a sentence; empty: admitted
    newer: bool = False  # another life of this node was known
    superseded: bool = False  # an older life of the node had not been given up: it is over now
    silent_since: float = 0.0  # ... and when its stream broke
    returned: bool = False  # this very incarnation had been given up as dead
    old_session: int | None = None  # a stream that this one replaces
    forgotten: str = ""  # a node that had gone, forgotten to make room


@dataclass(frozen=True, slots=True)
class Death:
    """A node that was given up, and why."""

    node: str
    reason: str
    session: int | None  # a stream that stood nevertheless: close it
    since: float = 0.0  # when its stream broke, or when it was last heard


_Pair = tuple[str, Any, Any]
_Spec = JobSpec | CheckSpec | SaveSpec

MAX_HOST_ADDRESSES = 4
"""Addresses that are remembered of one host name; by then the operator has been told thrice."""


@dataclass(slots=True)
class Entry:
    """One node id."""

    hello: Hello
    store: Endpoint | None = None
    pids: tuple[int, ...] = ()
    told: str = ""  # the sentence it was last told to wait for


class Roster:
    """Every node that was admitted, by node id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._order: dict[str, int] = {}  # of first join over all lives, by node
        self._joined = 0
        self._hosts: dict[str, dict[str, str]] = {}  # host name -> address -> node

    def __getitem__(self, node: str) -> Entry:
        return self._entries[node]

    def get(self, node: str) -> Entry | None:
        """What this node has said; None if this master has not heard it yet."""
        return self._entries.get(node)

    def __contains__(self, node: str) -> bool:
        return node in self._entries

    def enter(self, hello: Hello) -> Entry:
        """A stream of this node was admitted. Its place in the order of joins is kept for ever."""
        old = self._entries.get(hello.node)
        if old is not None and old.hello.incarnation == hello.incarnation:
            old.hello, old.told = hello, ""
            return old
        entry = self._entries[hello.node] = Entry(hello)
        return entry

    def namesake(self, hello: Hello) -> str:
        """A node that calls its host by the same name and has another address; empty if there is
        none, or if it was named before."""
        host, address = hello.host, hello.address
        if not host or is_loopback(address):
            return ""
        known = self._hosts.setdefault(host, {})
        if address in known or len(known) >= MAX_HOST_ADDRESSES:
            return ""
        other = next((node for node in known.values() if node != hello.node), "")
        known[address] = hello.node
        return other

    def forget(self, node: str) -> None:
        """The node has gone and its room is needed."""
        entry = self._entries.pop(node, None)
        self._order.pop(node, None)
        if entry is not None:
            self._hosts.pop(entry.hello.host, None)

    def remember(self, order: Iterable[str]) -> None:
        """The nodes that joined under another master, in the order of first join."""
        for node in order:
            self._first_join(node)

    def order(self, keep: Collection[str], others: int) -> tuple[str, ...]:
        """The order of first join: of the nodes to keep, and of so many others, the newest."""
        spare = sum(node not in keep for node in self._order) - others
        order = []
        for node in self._order:
            if node in keep:
                order.append(node)
            else:
                if spare <= 0:
                    order.append(node)
                spare -= 1
        return tuple(order)

    def joined(self, node: str, store: Endpoint) -> None:
        """It offers this store and can start."""
        entry = self._entries[node]
        entry.store = store
        entry.pids = ()
        self._first_join(node)

    def _first_join(self, node: str) -> None:
        if node not in self._order:
            self._order[node] = self._joined
            self._joined += 1

    def life_of(self, node: str) -> str:
        """The incarnation of the node's agent."""
        return self._entries[node].hello.incarnation

    def candidate(self, node: str) -> Candidate:
        """A node that has joined, as placement needs it."""
        entry = self._entries[node]
        hello = entry.hello
        assert entry.store is not None
        return Candidate(
            node,
            hello.node_rank,
            self._order[node],
            hello.local_world_size,
            hello.role,
            entry.store,
        )


def differences(theirs: JobSpec, ours: JobSpec) -> list[str]:
    """Where an agent was started with other numbers than the job has."""
    return [
        f"{name}={its} (the job: {own})"
        for mine, yours in (
            (theirs, ours),
            (theirs.checks, ours.checks),
            (theirs.saves, ours.saves),
        )
        for name, its, own in _pairs(mine, yours)
        if its != own and name not in ("checks", "saves")
    ]


def _pairs(theirs: _Spec, ours: _Spec) -> Iterator[_Pair]:
    for name in theirs.__struct_fields__:
        yield name, getattr(theirs, name), getattr(ours, name)
