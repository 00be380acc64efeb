"""What is known of each node: its connection, and what it reported about itself. Facts, no
rules."""

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
"""Maximum number of addresses remembered per host name; by then the operator has had three
warnings."""


class Health(StrEnum):
    """The state of a node's membership."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(slots=True)
class Node:
    """One node id, and the latest incarnation of its agent. Times are monotonic seconds."""

    id: str
    incarnation: str
    known_hello: Hello | None  # None: known from the record, not heard by this master yet
    session: int | None  # its open stream; None: not connected
    last_heard: float
    silences: Deaths
    health: Health = Health.ALIVE
    reason: Reason | None = None  # why it is not ALIVE; None: it is
    broke_at: float = 0.0  # when its stream broke, while SUSPECT
    silent: float = 0.0  # seconds without traffic on it before that, while others had some
    quiet: float = 0.0  # the same, whether or not other streams had traffic
    corroborated: bool = False  # ranks of its round have failed on another node
    offered: Endpoint | None = None  # the store of its last Join
    order: int = -1  # of first join, over all incarnations
    pids: tuple[int, ...] = ()
    sent_reason: str = ""  # the last reason to wait that it was sent
    probe: Probe | None = None  # the last one it was ordered to run
    is_probed_alone: bool = False  # it is probed alone before the rendezvous counts it
    slow: str = ""  # the evidence that it is slow, if it stays in the job
    pace: Steps | None = None  # its last report of steps in this round
    notices: tuple[str, ...] = ()  # problems of its machine that its agent reports
    standby: str = ""  # NodeHealth.standby

    @property
    def hello(self) -> Hello:
        """The Hello of a node that has attached to this master."""
        assert self.known_hello is not None
        return self.known_hello

    @property
    def host(self) -> str:
        """Its host's name; "" if the node is known only from the record."""
        return self.known_hello.host if self.known_hello is not None else ""

    @property
    def store(self) -> Endpoint:
        """The store of a node that has joined."""
        assert self.offered is not None
        return self.offered


class Nodes(dict[str, Node]):
    """Every known node, by node id, in the order of first contact."""

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[str, int] = {}  # of first join, over all incarnations
        self._numbers = count()
        self._hosts: dict[str, dict[str, str]] = {}  # host -> address -> node

    def namesake(self, hello: Hello) -> str:
        """Remember the node's address; return another node with the same host name and another
        address. "" if there is none, or if this address was known."""
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
        """Drop a node that is dead or has left, to make room."""
        dropped = self.pop(node)
        self._order.pop(node, None)
        if dropped.known_hello is not None:
            self._hosts.pop(dropped.known_hello.host, None)

    def joined(self, node: str, store: Endpoint) -> None:
        """The node offers this store and can start. Its place in the order never changes."""
        one = self[node]
        one.offered, one.pids = store, ()
        one.order = self._order.setdefault(node, next(self._numbers))

    def remember(self, order: Iterable[str]) -> None:
        """Restore the order of first join of another master's nodes."""
        for node in order:
            self._order.setdefault(node, next(self._numbers))

    def order(self, keep: Collection[str], others: int) -> tuple[str, ...]:
        """The order of first join: the nodes in `keep`, and the newest `others` of the rest."""
        spare = [node for node in self._order if node not in keep]
        dropped = set(spare[: max(0, len(spare) - others)])
        return tuple(node for node in self._order if node not in dropped)


def is_loopback(host: str) -> bool:
    """Whether an address refers to the local host wherever it is read."""
    return host == "localhost" or host.startswith(("127.", "::ffff:127.")) or host == "::1"


SpecPart = JobSpec | CheckSpec | SaveSpec | WatchSpec


def differences(theirs: JobSpec, ours: JobSpec) -> list[str]:
    """The settings in which an agent differs from the job, as text."""
    pairs: tuple[tuple[SpecPart, SpecPart], ...]
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
