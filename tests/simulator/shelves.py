"""What all simulated nodes' memories have in common, and what must hold of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from elasticrun.core.snapshots.choice import FEW_STEPS, MAX_REJECTED
from elasticrun.core.snapshots.types import sort_key
from elasticrun.wire.types import RoundName

if TYPE_CHECKING:
    from tests.simulator.memory import Memory

SLOTS = 2

Key = tuple[RoundName, int]


@dataclass(slots=True)
class Shelves:
    state: str = "ddp"
    slots: int = SLOTS
    disks: dict[str, str] = field(default_factory=dict)  # node -> full, stuck
    ever: dict[Key, set[int]] = field(default_factory=dict)  # contents that were ever committed
    sizes: dict[RoundName, int] = field(default_factory=dict)  # rounds -> world size
    restores: dict[RoundName, Key | None] = field(default_factory=dict)  # by the first node of each
    parts: dict[str, set[int]] = field(default_factory=dict)  # attempt -> contents written
    checkpoints: list[Key] = field(default_factory=list)  # committed, in order
    faults: list[str] = field(default_factory=list)
    replicas: bool = False
    homes: dict[Key, dict[int, set[str]]] = field(default_factory=dict)  # who ever had a content
    excused: set[Key] = field(default_factory=set)  # that could not be copied
    marks: dict[RoundName, int] = field(default_factory=dict)  # watermarks that are on two nodes
    members: dict[RoundName, dict[str, Memory]] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)  # nodes that have said so
    spoilt: bool = False
    forgets: bool = False  # a new master may not know what was used of the work handed out
    told: dict[RoundName, int] = field(default_factory=dict)  # watermarks
    trained: dict[RoundName, set[int]] = field(default_factory=dict)  # steps done after a restore
    judged: int = 0  # rounds of which `settle` had something to say
    judged_blind: int = 0  # of these, the first ones of a new master

    def content(self, rank: int) -> int:
        return 1 if self.state == "ddp" else rank + 1

    def has(self, node: str, one: Kept) -> None:
        """A node has committed or copied this."""
        homes = self.homes.setdefault(one.key, {})
        for rank in range(one.first_rank, one.first_rank + one.ranks):
            homes.setdefault(self.content(rank), set()).add(node)

    def marked(self, key: Key) -> None:
        """A node was told that this is the watermark."""
        self.told[key[0]] = max(key[1], self.told.get(key[0], -1))
        if key in self.excused:  # older ones may be overwritten that were on two nodes
            self.marks.pop(key[0], None)
        elif self.replicas and len(self.members[key[0]]) > 1:
            if all(len(nodes) > 1 for nodes in self.homes[key].values()):
                self.marks[key[0]] = key[1]
            elif not self.leaving & self.members[key[0]].keys():  # who leaves copies nothing
                self.faults.append(f"the watermark is {key}, which is not on two nodes")

    def settle(self) -> None:
        """At the end: no round went back behind the watermark of the one before, if the memory of
        all of its nodes was there, or with replicas of all but one (and the master too, who knew
        what its ranks had); if no byte flipped, and no snapshot can be suspect: rounds that had
        trained on from it, a few steps, came to an end."""
        rounds = sorted(self.restores, key=lambda name: (name.term, name.number))
        soon = [self.restores[name] for name in rounds if self._failed_soon(name)]
        for before, name in pairwise(rounds):
            key, origin, there = self.restores[name], self.restores[before], self.members[name]
            had = [*self.members[before].items()]
            if origin is not None and self.told.get(before, -1) < 0:
                had += self.members[origin[0]].items()
            lost = {
                node
                for node, memory in had
                if node not in there or there[node].kept is not memory.kept
            }
            mark = (self.marks if lost else self.told).get(before, -1)
            floor = (before, mark) if mark >= 0 or lost else origin
            suspect = origin is not None and soon.count(origin) >= MAX_REJECTED
            if floor is None or floor[1] < 0 or self.spoilt or suspect:
                continue
            if len(lost) > 1 or ((lost or self.forgets) and name.term != before.term):
                continue
            self.judged += 1
            self.judged_blind += not lost and name.term != before.term
            if key is None or sort_key(key) < sort_key(floor):
                gone = sorted(lost)
                self.faults.append(f"round {name} restores {key}, and {gone} were lost of {before}")

    def _failed_soon(self, name: RoundName) -> bool:
        """Whether its end may speak against what it went on from."""
        key = self.restores[name]
        steps = self.trained.get(name, set())
        return key is not None and any(key[1] < step <= key[1] + FEW_STEPS for step in steps)

    def was_whole(self, key: Key) -> bool:
        """Whether every content of the round was committed at this step."""
        size = self.sizes.get(key[0], 0)
        return size > 0 and self.ever.get(key, set()) >= {self.content(r) for r in range(size)}


@dataclass(slots=True)
class Kept:
    round: RoundName
    step: int
    first_rank: int
    world_size: int
    ranks: int
    wanted: bool = False
    restored: bool = False  # pinned, since the present round goes on from it
    bad: bool = False
    attempts: dict[str, int] = field(default_factory=dict)  # under way, by masters of these terms
    replica: bool = False
    altered: dict[int, set[str]] = field(default_factory=dict)  # rank -> tensors
    agreed: bool = False  # pinned, since the job may go back to it

    @property
    def key(self) -> Key:
        return (self.round, self.step)

    def unpin(self) -> None:
        """The agent that knew what it is needed for is gone."""
        self.wanted = self.restored = self.agreed = False
        self.attempts.clear()

    @property
    def pinned(self) -> bool:
        return self.wanted or self.restored or self.agreed or bool(self.attempts)

    def is_later(self, than: Key) -> bool:
        """Whether it was taken after the one of this name."""
        return sort_key(self.key) > sort_key(than)
