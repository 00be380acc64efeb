"""What is known of each node: what it said about itself and how it is heard. Facts, no rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from elasticrun.core.nodes.admission import Deaths
from elasticrun.core.reasons import Reason
from elasticrun.wire.messages import CheckSpec, Hello, JobSpec, Probe, SaveSpec, Steps, WatchSpec
from elasticrun.wire.types import Endpoint

MAX_HOST_ADDRESSES = 4
"""Addresses that are remembered of one host name; by then the operator has been told thrice."""


class Health(StrEnum):
    """The membership word of a node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(slots=True)
class Node:
    """One node id, and the life of its agent that was heard last. Times are monotonic seconds."""

    id: str
    incarnation: str
    said: Hello | None  # None: known from the record, not heard by this master yet
    session: int | None  # the stream it is heard on; None: none stands
    last_heard: float
    silences: Deaths
    health: Health = Health.ALIVE
    reason: Reason | None = None  # why it is not ALIVE
    broke_at: float = 0.0  # when its stream broke, while SUSPECT
    silent: float = 0.0  # for how long nothing had come on it then, while others were heard
    quiet: float = 0.0  # the same, whoever was heard
    corroborated: bool = False  # ranks of its round have failed on another node
    offered: Endpoint | None = None  # the store of its last Join
    order: int = -1  # of first join, over all lives
    pids: tuple[int, ...] = ()
    told: str = ""  # the sentence it was last told to wait for
    probe: Probe | None = None  # the last that it was ordered
    at_gate: bool = False  # it is probed by itself, before the rendezvous may know of it
    slow: str = ""  # the evidence that it is slow, where it stays all the same
    pace: Steps | None = None  # how training goes on it, as it has told last in this round

    @property
    def hello(self) -> Hello:
        """Of a node that was heard."""
        assert self.said is not None
        return self.said

    @property
    def host(self) -> str:
        """Its host's name; "" of one that the record names and nobody has heard."""
        return self.said.host if self.said is not None else ""

    @property
    def store(self) -> Endpoint:
        """Of a node that has joined."""
        assert self.offered is not None
        return self.offered


class Nodes(dict[str, Node]):
    """Every node that was seen, by node id, in the order of first sight."""

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[str, int] = {}  # of first join over all lives
        self._numbers = count()
        self._hosts: dict[str, dict[str, str]] = {}  # host -> address -> node

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
        """It has gone and its room is needed."""
        gone = self.pop(node)
        self._order.pop(node, None)
        if gone.said is not None:
            self._hosts.pop(gone.said.host, None)

    def joined(self, node: str, store: Endpoint) -> None:
        """It offers this store and can start. Its place in the order is kept for ever."""
        one = self[node]
        one.offered, one.pids = store, ()
        one.order = self._order.setdefault(node, next(self._numbers))

    def remember(self, order: Iterable[str]) -> None:
        """The nodes that joined under another master, in the order of first join."""
        for node in order:
            self._order.setdefault(node, next(self._numbers))

    def order(self, keep: Collection[str], others: int) -> tuple[str, ...]:
        """The order of first join: of the nodes to keep, and of so many others, the newest."""
        spare = [node for node in self._order if node not in keep]
        dropped = set(spare[: max(0, len(spare) - others)])
        return tuple(node for node in self._order if node not in dropped)


def is_loopback(host: str) -> bool:
    """Whether an address means "this host" wherever it is read."""
    return host == "localhost" or host.startswith(("127.", "::ffff:127.")) or host == "::1"


Part = JobSpec | CheckSpec | SaveSpec | WatchSpec


def differences(theirs: JobSpec, ours: JobSpec) -> list[str]:
    """Where an agent was started with other numbers than the job has."""
    pairs: tuple[tuple[Part, Part], ...]
    pairs = (
        (theirs, ours),
        (theirs.checks, ours.checks),
        (theirs.saves, ours.saves),
        (theirs.watch, ours.watch),
    )
    return [
        f"{name}={getattr(its, name)} (the job: {getattr(own, name)})"
        for its, own in pairs
        for name in its.__struct_fields__
        if getattr(its, name) != getattr(own, name) and name not in ("checks", "saves", "watch")
    ]
