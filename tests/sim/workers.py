"""Work that is handed out in the simulated world: ranks that take shards and note what they use.

The lists of leases of a rank, and the part of its agent, are the real ones. What must hold, else it
is a fault of the world: along the history that survives no sample is used twice; and at rest, once
nothing is left, every sample of every epoch is used.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticrun.agent.work.local import LocalWork
from elasticrun.training.work import Spec, _Share
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import MAX_MARKS, RoundName
from tests.simulator.ranks import Rank
from tests.simulator.shelves import Key

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

Sample = tuple[int, int]  # epoch, index
PIPE = 0.001
"""Seconds of a message between a rank and its agent."""


@dataclass(slots=True)
class History:
    """What a rank of a round has used, in order, and how much of it by each of its steps."""

    used: list[Sample] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)
    since: int = 0  # it had used nothing by this step
    is_over: bool = False


@dataclass(slots=True)
class Uses:
    """What was used in the whole world. `restores`: ranks have a Checkpointer."""

    spec: Spec
    rng: random.Random
    restores: bool = True
    begins: dict[RoundName, Counter[Sample]] = field(default_factory=dict)
    rounds: dict[RoundName, dict[int, History]] = field(default_factory=dict)
    stored: dict[Key, str] = field(default_factory=dict)  # what checkpoints say
    sources: dict[RoundName, tuple[str, Key | None]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    repeats: int = 0
    finished: int = 0

    def begin(self, start: m.Start, checkpoints: list[Key]) -> None:
        """A round begins: what was used by the step that its ranks restore."""
        name, restore = start.round, start.info.restore
        if name in self.begins:
            return
        source, key = "nothing", None
        if restore is not None:
            source, key = "memory", (restore.round, restore.step)
        elif checkpoints:
            source, key = "storage", checkpoints[-1]
        self.sources[name] = (source, key)
        self.begins[name] = self.by(key)
        self.rounds[name] = {}

    def by(self, key: Key | None) -> Counter[Sample]:
        """What was used by a step, along the history that leads to it."""
        if key is None or key[0] not in self.begins:
            return Counter()
        found = Counter(self.begins[key[0]])
        for rank, history in self.rounds[key[0]].items():
            last = max((step for step in history.at if step <= key[1]), default=-1)
            count = history.at.get(last, 0)
            late = key[1] > history.since and count < len(history.used)
            if last != key[1] and late and any(step > key[1] for step in history.at):
                self.faults.append(f"{key} is restored, at which rank {rank} has saved nothing")
            found.update(history.used[:count])
        return found

    def of_node(self, world: World, node: Node) -> NodeWork:
        return NodeWork(world, node, self)

    def store(self, key: Key, used: str) -> None:
        self.stored[key] = used

    def use(self, name: RoundName, rank: int, sample: Sample) -> None:
        history = self.rounds[name].setdefault(rank, History())
        history.used.append(sample)
        seen = self.begins[name] if self.restores else Counter()
        if seen[sample] or any(sample in one.used[:-1] for one in self.rounds[name].values()):
            self.faults.append(f"rank {rank} of round {name} uses {sample} again")
        self.repeats += not self.restores and self.begins[name][sample] > 0

    def settle(self, stepping: list[RoundName]) -> None:
        """At rest: whether everything was used."""
        everything = {
            (epoch, index) for epoch in range(self.spec.epochs) for index in range(self.spec.total)
        }
        for name in stepping:
            ranks = self.rounds[name]
            used = set(self.begins[name]).union(*(one.used for one in ranks.values()))
            if not self.restores:
                used = {
                    one for ranks in self.rounds.values() for h in ranks.values() for one in h.used
                }
            if not ranks or not all(one.is_over for one in ranks.values()):
                self.faults.append(
                    f"work is left in round {name}: {len(used)} of {len(everything)}"
                )
            elif used != everything:
                self.faults.append(f"{len(everything - used)} samples were never used")
            else:
                self.finished += 1


class Worker:
    """A rank's connection, and what it has: as `training.work._Client`, without waiting."""

    def __init__(self, crowd: NodeWork, rank: Rank, other: Spec | None) -> None:
        self._crowd, self.rank = crowd, rank
        self._share = _Share(other or crowd.uses.spec, 0)
        self._record = 0
        self._marked: list[int] = []
        self.pid = rank.pid
        restored = crowd.uses.sources[rank.round][1]
        self._since = max(restored[1] if restored else 0, crowd.step)
        history = crowd.uses.rounds[rank.round].setdefault(rank.rank, History())
        history.since = self._since
        self._tell(s.WorkHere(rank.local_rank, rank.rank))

    def work(self, samples: int) -> None:
        """Use up to so many samples, as far as there are leases."""
        share, uses = self._share, self._crowd.uses
        history = uses.rounds[self.rank.round].setdefault(self.rank.rank, History())
        for _ in range(samples):
            shard = share.unfinished
            if shard is None and share.waiting:
                shard = share.begin()
            if shard is None:
                break
            index = shard.indices[0]
            shard.done(1)
            uses.use(self.rank.round, self.rank.rank, (shard.epoch, index))
        if not share.waiting and not share.is_over and not share.wants:
            share.wants = True
            self._send()
        # as a loop that asks for more and gets nothing: the step of the last samples is over
        marked = history.at.get(max(history.at, default=0), 0)
        is_marked = not uses.restores or marked == len(history.used)
        is_done = share.is_over and not share.waiting and not share.unfinished
        if is_done and is_marked and not history.is_over:
            history.is_over = True
            self._send()

    def mark(self, step: int) -> None:
        """This rank is about to save this step."""
        history = self._crowd.uses.rounds[self.rank.round].setdefault(self.rank.rank, History())
        history.at[step] = len(history.used)
        self._marked = [*self._marked, step][-MAX_MARKS:]
        self._share.marks = [*self._share.marks, self._share.used][-MAX_MARKS:]
        self._send()

    def _send(self) -> None:
        uses = self._crowd.uses
        report = (self._share.report(),)
        self._tell(
            s.RankWork(uses.restores, self._since, tuple(self._marked), report, self._record)
        )

    def _tell(self, message: s.FromWorker) -> None:
        self._crowd.later(lambda: self._crowd.local.on_message(self, message))

    # the agent's side of the connection

    def send(self, message: s.ToWorker) -> None:
        def received() -> None:
            if isinstance(message, s.RankRefused):
                self._crowd.refused(self.rank, message.reason)
            elif self.rank.alive and self._share.add(message):
                self._record = max(self._record, message.record)

        self._crowd.clock.after(PIPE, received)

    def break_off(self, why: str) -> None:
        self._crowd.uses.faults.append(f"rank {self.rank.rank} is cut off: {why}")

    def close(self) -> None:
        pass


def dataset(text: str) -> Spec:
    """`20,4,1`: 20 samples in shards of 4, once."""
    total, size, epochs = map(int, text.split(","))
    return Spec("train", total, size, epochs, shuffle=-1)


class NodeWork:
    """The work of one node."""

    def __init__(self, world: World, node: Node, uses: Uses) -> None:
        self.uses, self.clock = uses, world.clock
        self._world, self._node = world, node
        self.local = LocalWork(self)  # type: ignore[arg-type]
        self._workers: dict[int, Worker] = {}
        self.has_begun = False

    @property
    def step(self) -> int:
        """The newest step of the ranks here."""
        return self._node.memory.current

    def refused(self, rank: Rank, reason: str) -> None:
        """A rank gets no work: it raises."""
        self._world.trace(self._node.name, f"rank {rank.rank}: ValueError: {reason}")
        self._node.end_rank(rank, 1, f"ValueError: {reason}")

    def send(self, report: m.Report) -> None:
        """As the agent's link."""
        self._node.say(report)

    def later(self, what: object) -> None:
        """A rank's message reaches its agent, unless that is stopped."""
        assert callable(what)

        def arrives() -> None:
            if self._node.frozen:
                self._node.hold(arrives)
            elif self._node.alive:
                what()

        self.clock.after(PIPE, arrives)

    def started(self, start: m.Start) -> None:
        self.uses.begin(start, self._world.shelves.checkpoints)
        self._workers.clear()
        self.local.round_began(start)

    def attached(self) -> None:
        self.local.attached()

    def grant(self, order: m.WorkGrant) -> None:
        self.local.grant(order)

    def use(self, samples: int, words: list[str]) -> None:
        """Every rank uses so many samples; the first time, it restores; with -1, it does
        only that. `words`: it opens this dataset."""
        other = dataset(words[0]) if words else None
        for rank in list(self._node.ranks.values()):
            if not rank.alive or rank.waits:
                continue
            known = self._workers.get(rank.local_rank)
            if known is None or known.rank is not rank:
                if rank.rank == 0 and self.uses.restores:
                    self._restored(rank.round)
                self._workers[rank.local_rank] = Worker(self, rank, other)
                self.has_begun = True
            if samples >= 0:
                self._workers[rank.local_rank].work(samples)

    def _restored(self, name: RoundName) -> None:
        source, key = self.uses.sources[name]
        used = self.uses.stored.get(key, "") if key and source == "storage" else ""
        done = s.Restored(key[1] if key else 0, source, used=used)
        self.later(lambda: self.local.restored(done))

    def mark(self, step: int) -> None:
        """The living ranks are about to save this step."""
        for worker in self._workers.values():
            if worker.rank.alive:
                worker.mark(step)
