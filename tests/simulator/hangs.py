"""What ranks do inside: counters of one process group over all ranks, and faults planted in them.

A script says `hang b 1 KIND` (idle, busy, stopped, traced, held, disk, ended, mismatch, said):
local rank 1 of b enters no further collective, and all others wait for it in the next; `go` lets
all go on. `silence` has every rank do nothing, outside of any collective. `turn KIND` changes what
the rank does, or with `turn awake` and `turn silence` what all do outside of collectives, while no
counter moves. Nodes say Quiet after QUIET seconds, as real agents do, and answer Inspect with what
stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

QUIET = 5.0
"""Seconds without movement after which a node says so."""

ANSWER = 0.05
"""Seconds for looking at all ranks of a node."""

CALL = "all_reduce [1000] float32"
GROUPS = (m.GroupSeen("0", "dp", ""),)
PLACE = "train.py:41 load_shard"
SLEEPS = m.RankSeen(0, 1, m.Being.SLEEPS, True, True, 0.0, 0.0, place=PLACE)
KINDS = {
    "idle": SLEEPS,
    "busy": replace(SLEEPS, being=m.Being.RUNS, cpu=1.0, io=237e6, place="train.py:88 save"),
    "stopped": replace(SLEEPS, being=m.Being.STOPPED, answers=False),
    "traced": replace(SLEEPS, being=m.Being.TRACED, answers=False),
    "held": replace(SLEEPS, answers=False, holds=True),
    "disk": replace(SLEEPS, being=m.Being.DISK, kernel="nfs_wait"),
    "ended": replace(SLEEPS, being=m.Being.ENDED, answers=False),
    "mismatch": SLEEPS,
    "said": replace(SLEEPS, says="judge", says_left=1200.0),
}

OUTSIDE = ("silence", "awake")


@dataclass(slots=True)
class Insides:
    """Of the round that runs: collectives done, since when none was, and who keeps the others."""

    done: int = 30
    still_since: float | None = None
    kind: str = ""  # of the fault; "silence", "awake": nobody is in a collective
    odd: tuple[str, int] = ("", -1)  # node, local rank
    limit: float = 0.0  # torch's own, of the collective
    told: set[tuple[str, RoundName]] = field(default_factory=set)

    def hang(self, world: World, kind: str, node: str = "", local_rank: int = -1) -> None:
        """From now on nothing moves."""
        self.kind, self.odd, self.still_since = kind, (node, local_rank), world.clock.now
        world.clock.after(QUIET, lambda: self.say(world, world.clock.now - QUIET))

    def go(self, world: World) -> None:
        """All go on, and the next collective is done."""
        if self.still_since is None:
            return
        self.kind, self.odd, self.still_since = "", ("", -1), None
        self.done += 1
        for node, name in self._homes(world):
            if (node.name, name) in self.told:
                node.say(m.Quiet(name, 0.0))
        self.told.clear()

    def say(self, world: World, since: float) -> None:
        """Each node says that its ranks are quiet, if they have been since then."""
        if self.still_since == since:
            for node, name in self._homes(world):
                self.attached(node, name)

    def attached(self, node: Node, name: RoundName | None) -> None:
        """A node whose stream is new, or whose ranks have just been found quiet, says so."""
        now = node.world.clock.now
        if self.still_since is None or name is None or now < self.still_since + QUIET - 1e-6:
            return
        self.told.add((node.name, name))
        odd = self.odd[0] == node.name and self.kind != "mismatch"
        waiting = 0 if self.kind in OUTSIDE else len(node.ranks) - odd
        node.say(m.Quiet(name, now - self.still_since, 1.0, True, waiting, self.kind == "busy"))

    def _homes(self, world: World) -> Iterator[tuple[Node, RoundName]]:
        for node in world.nodes.values():
            name = node.group.status().round
            if node.alive and not node.frozen and name is not None and node.ranks:
                yield node, name

    def inspect(self, node: Node, order: m.Inspect) -> None:
        """Answer a look."""
        node.world.clock.after(ANSWER, lambda: self._answer(node, order))

    def _answer(self, node: Node, order: m.Inspect) -> None:
        if not node.alive or node.frozen or node.group.status().round != order.round:
            return
        live = list(node.ranks.values())
        for first in range(0, len(live), m.MAX_INSPECTED):
            some = live[first : first + m.MAX_INSPECTED]
            seen = tuple(self._see(node, one.local_rank, one.rank) for one in some)
            left = max(0, len(live) - first - m.MAX_INSPECTED)
            node.say(m.Inspected(order.round, order.number, left, GROUPS, seen))
        if order.stacks:
            groups = tuple(
                m.StackGroup(self._see(node, one.local_rank, one.rank).place, f"{one.rank}", 1, "",
                             self._see(node, one.local_rank, one.rank).place)
                for one in live[: m.MAX_STACKS]
            )  # fmt: skip
            folder = f"logs/hang-{order.dump}" if order.dump else ""
            node.say(m.Stacks(order.round, order.number, groups, folder=folder))

    def _see(self, node: Node, local_rank: int, rank: int) -> m.RankSeen:
        now = node.world.clock.now
        age = 0.0 if self.still_since is None else now - self.still_since
        inside = m.Position(0, self.done + 1, self.done, -1, CALL, age, self.limit)
        outside = m.Position(0, self.done, self.done)
        pid = node.ranks[local_rank].pid
        if self.kind in OUTSIDE or self.still_since is None:
            does = KINDS["busy"] if self.kind == "awake" else SLEEPS
            return replace(does, rank=rank, pid=pid, quiet=age, at=(outside,))
        if (node.name, local_rank) != self.odd:
            return replace(
                SLEEPS, rank=rank, pid=pid, quiet=age, at=(inside,), place="train.py:9 step"
            )
        seen = replace(KINDS[self.kind], rank=rank, pid=pid, quiet=age)
        if self.kind == "mismatch":
            return replace(seen, at=(replace(inside, call="broadcast [1000] float32"),))
        return replace(seen, at=(outside,)) if seen.answers else seen
