"""One attempt to write a snapshot out as a checkpoint, over all nodes that take part in it.

Every rank that is held writes a part: its own items, and one rank of each content the shared items
too. When all parts are in, the coordinator writes the marker, and that is the checkpoint. Pure
arithmetic; when to try, and again, is decided in `breakpoint_save`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.wire.messages import Persist
from elasticrun.wire.types import Endpoint, RoundName

BACK_OFF = 1.0
"""Seconds between a failed attempt and the next; doubled with every one, up to ..."""

MOST_BACK_OFF = 60.0

MAX_TRIES = 5
"""Failed attempts in a row, after which a snapshot is left alone: its slot is needed. From then on
each one that is to be written has a single try, until one comes through."""

Key = tuple[RoundName, int]
"""The name of a snapshot."""


def order_of(key: Key) -> tuple[int, int, int]:
    """Snapshots in the order of time."""
    return (key[0].term, key[0].number, key[1])


@dataclass(slots=True)
class Plan:
    """A snapshot that is to be written out."""

    key: Key
    reason: str  # as in Persist
    not_before: float = 0.0


@dataclass(slots=True)
class Storage:
    """How writing goes: failed attempts in a row, over all snapshots."""

    failures: int = 0
    not_before: float = 0.0  # of the next attempt, but for one that cannot wait

    def failed(self, now: float) -> float:
        """An attempt has failed; seconds until the next one."""
        wait = min(MOST_BACK_OFF, BACK_OFF * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.not_before = now + wait
        return wait

    def works(self) -> None:
        """One has come through."""
        self.failures, self.not_before = 0, 0.0


@dataclass(slots=True)
class Part:
    """What one node writes."""

    ranks: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass(slots=True)
class Attempt:
    """See the module's head."""

    name: str
    plan: Plan
    world_size: int
    parts: dict[str, Part]  # by node
    coordinator: str
    endpoint: Endpoint | None  # of the coordinator's saver
    began: float
    deadline: float
    rewound_from: int = -1  # as in Persist
    written: dict[str, int] = field(default_factory=dict)  # node -> bytes
    writers: int = 0  # parts, one a rank

    def __post_init__(self) -> None:
        self.writers = sum(len(part.ranks) for part in self.parts.values())

    @property
    def committing(self) -> bool:
        """Whether every part is written, and the marker is not."""
        return len(self.written) == len(self.parts)

    def needs(self, node: str) -> bool:
        """Whether this node has something to do for it still."""
        if node == self.coordinator:
            return True
        return node in self.parts and node not in self.written

    def order(self, node: str, now: float) -> Persist:
        """What this node is to write."""
        part = self.parts[node]
        round_, step = self.plan.key
        coordinates = node == self.coordinator
        return Persist(
            attempt=self.name,
            round=round_,
            step=step,
            world_size=self.world_size,
            ranks=part.ranks,
            shared=part.shared,
            writers=self.writers,
            coordinates=coordinates,
            coordinator=None if coordinates else self.endpoint,
            reason=self.plan.reason,
            limit=max(0.1, self.deadline - now),
            rewound_from=self.rewound_from,
        )


def divide(ledger: Ledger, step: int) -> dict[str, Part]:
    """Who writes what of a whole step, by node in the order of ranks: a rank that two nodes hold is
    written by one of them, its own before one with a replica."""
    of: dict[int, tuple[str, int]] = {}
    snap = ledger.snaps[step]
    for node, contents in [*snap.without_copies(), *snap.held.items()]:
        for rank, content in contents.items():
            of.setdefault(rank, (node, content))
    ranks: dict[str, list[int]] = {}
    shared: dict[str, list[int]] = {}
    seen: set[int] = set()
    for rank in sorted(of):
        node, content = of[rank]
        ranks.setdefault(node, []).append(rank)
        if content not in seen:
            seen.add(content)
            shared.setdefault(node, []).append(rank)
    return {node: Part(tuple(own), tuple(shared.get(node, ()))) for node, own in ranks.items()}


def in_size(nbytes: int) -> str:
    """`1.2 GiB`, `300 MiB`, `12 KiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
