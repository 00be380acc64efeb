"""The shared memory of one simulated node, and its saver: snapshots that are only numbers.

All ranks of a node commit a step at once. What a rank holds is its content: the same of all ranks
where every rank has the whole state ("ddp"), its own of each ("sharded"). There are as many slots
as a node of real ranks has, with the same rule for the one that may be written next.

What must hold, else it is a fault of the world:
* no two nodes of a round restore a different snapshot;
* nothing is restored, and no watermark set, that was never whole;
* a snapshot that is being written out is never dropped;
* with replicas, no watermark is set before every part was on two nodes, unless one could not copy
  its share, and no round goes back behind the watermark of the one before for the loss of one node;
* a checkpoint is committed only when all of its parts were written, and they are all there is;
* a node that ends as saved leaves a checkpoint of what was whole when it was told to go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrun.config import EXIT_SAVED
from elasticrun.core.snapshots.types import sort_key
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.simulator.digests import Digests
from tests.simulator.shelves import Kept, Key, Shelves as Shelves

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

SAVER_PORT = 7000
WRITING = 0.5
"""Seconds in which a node writes its part."""
MARKING = 0.01
"""Seconds in which the coordinator writes the marker."""
BYTES = 1 << 20
"""Of one rank's part."""
COPIES = 2
"""Snapshots of one rank that are kept."""
COPYING = 0.05
"""Seconds in which a node copies what an order names."""


class Replicas:
    """What a node has copied of other nodes' ranks."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._orders: list[m.Replicate] = []  # of one step
        self.copies: list[Kept] = []  # one for each rank, the oldest first

    def begin(self) -> None:
        """Ranks of a new life start: orders of the last one are of no use."""
        self._orders.clear()

    def tidy(self) -> None:
        """A step is whole: what no order names any more can go."""
        wanted = {rank for one in self._orders for rank in one.ranks}
        self.copies = [one for one in self.copies if one.first_rank in wanted or one.pinned]

    def obey(self, order: m.Replicate) -> None:
        if any((one.round, one.step) != (order.round, order.step) for one in self._orders):
            self._orders.clear()
        self._orders.append(order)
        for rank in order.ranks:
            self._make_room(order, rank)

        def copied() -> None:
            if not any(one is order for one in self._orders) or not self._node.alive:
                return
            failed = [rank for rank in order.ranks if not self._copy(order, rank)]
            if failed:
                self._world.shelves.excused.add((order.round, order.step))
                self._node.say(m.NotReplicated(order.round, order.step, "it cannot be had"))
            self._node.memory.say()

        self._world.clock.after(COPYING, copied)

    def _copy(self, order: m.Replicate, rank: int) -> bool:
        """One rank's shard; whether it is here then."""
        key = (order.round, order.step)
        source = self._world.nodes.get(order.saver.host)
        if self._node.memory.gives(*key, rank):
            return True
        if source is None or not source.alive or not source.memory.gives(*key, rank):
            return False
        if any(one.bad for one in source.memory.of(key)):
            return False
        if len(self._of(rank)) == COPIES:
            return False
        made = Kept(*key, rank, order.world_size, 1, replica=True)
        self.copies.append(made)
        self.copies.sort(key=lambda one: sort_key(one.key))
        self._world.shelves.has(self._node.name, made)
        return True

    def _make_room(self, order: m.Replicate, rank: int) -> None:
        """Withdraw what is written over: never the newest one, nor one that is needed."""
        mine = self._of(rank)
        if len(mine) == COPIES and not self._node.memory.gives(order.round, order.step, rank):
            old = next((one for one in mine[:-1] if not one.pinned), None)
            if old is not None:
                self.copies.remove(old)

    def _of(self, rank: int) -> list[Kept]:
        return [one for one in self.copies if one.first_rank == rank]

    def told(self) -> list[m.Holding]:
        """Those of one step as one row."""
        found = []
        for key in dict.fromkeys(one.key for one in self.copies):
            ranks = {one.first_rank: one for one in self.copies if one.key == key}
            span = range(min(ranks), max(ranks) + 1)
            content = self._world.shelves.content
            row = tuple(content(rank) if rank in ranks else 0 for rank in span)
            size = next(iter(ranks.values())).world_size
            found.append(m.Holding(*key, span.start, size, row, False, replica=True))
        return found


class Memory:
    def __init__(self, world: World, node: Node, before: Memory | None = None) -> None:
        """`before`: of a killed agent of this node, whose memory this one takes over."""
        self._world = world
        self._node = node
        self._shelves = world.shelves
        self.kept: list[Kept] = []  # the oldest first
        self.replicas = Replicas(world, node)
        self.digests = Digests(world, node)
        self.last: m.RoundInfo | None = None
        self.worked = False
        self.is_lost = False  # it went with its machine, or was given back
        if before is not None:
            self.kept, self.replicas.copies = before.kept, before.replicas.copies
            self.last = before.last
            self.worked = before._worked()
            for one in self._all():
                one.unpin()
        self.skipped = 0
        self._said: dict[str, list[m.Persisted]] = {}  # of attempts under way
        self.current = -1  # the step that ranks of this life are at
        self._asked: m.SaveAt | None = None
        self._watermark: Key | None = None
        self._kept: m.KeepStep | None = None
        self._then_whole: Key | None = None  # when the agent was first signalled
        self._given_up = -1
        self._start: m.Start | None = None
        self._saver = Endpoint(node.name, SAVER_PORT)
        self.work = world.uses.of_node(world, node) if world.uses is not None else None
        self._used: dict[str, str] = {}  # attempt -> what was used by its step

    # ------------------------------------------------------------ ranks

    def started(self, start: m.Start) -> None:
        shelves, want = self._shelves, start.info.restore
        if self.work is not None:
            self.work.started(start)
        key = None if want is None else (want.round, want.step)
        self._start, self._watermark, self._given_up = start, key, -1
        self.last = start.info
        self.current, self._asked = -1, None
        shelves.sizes[start.round] = start.info.world_size
        if shelves.restores.setdefault(start.round, key) != key:
            self._fault(f"round {start.round} restores {key} and {shelves.restores[start.round]}")
        if key is not None and not shelves.was_whole(key):
            self._fault(f"round {start.round} restores {key}, which never was whole")
        shelves.members.setdefault(start.round, {})[self._node.name] = self
        self.replicas.begin()
        self.digests.begin()
        for shelf in (self.kept, self.replicas.copies):
            for one in [one for one in shelf if key is None or one.is_later(key)]:
                if self._node.group.term in one.attempts.values():
                    self._fault(f"{self._node.name} drops step {one.step}, which is being written")
                shelf.remove(one)
            for one in shelf:
                one.restored, one.agreed = one.key == key, False
        self.say()
        if want is None:
            return
        old_size, size = want.world_size, start.info.world_size
        for rank in range(start.first_rank, start.first_rank + self._node.setup.nproc):
            for old in range(rank, old_size, size) or [rank % old_size]:
                if not self.gives(want.round, want.step, old):
                    self._node.say(m.WhereIs(want.round, want.step, old))

    def commit(self, step: int, *, persist: bool) -> None:
        """All local ranks take a snapshot, if there is a slot for it."""
        start = self._start
        if start is None or not any(rank.alive for rank in self._node.ranks.values()):
            return
        if self.work is not None:
            self.work.mark(step)
        asked, before = self._asked, self.current
        self.current = step
        is_asked = asked is not None and before < asked.step <= step
        if not self._take(start, step, persist or is_asked):
            self.skipped += 1
            is_asked = False
        if asked is not None and asked.step <= step:
            self._asked = None
            if not is_asked:
                self._node.say(m.Missed(asked.round, asked.step, step))

    def step(self, step: int) -> None:
        if any(rank.alive for rank in self._node.ranks.values()):
            self.current = step

    def reaped(self) -> None:
        """No rank of this life is left: how far it came from what it was restored from."""
        if self._went_on() is not None:
            self.say()

    def _went_on(self) -> m.WentOn | None:
        start = self._start
        if start is None or any(rank.alive for rank in self._node.ranks.values()):
            return None
        if start.info.restore is None or self.current <= start.info.restore.step:
            return None
        self._shelves.trained.setdefault(start.round, set()).add(self.current)
        return m.WentOn(start.round, self.current)

    def _take(self, start: m.Start, step: int, persist: bool) -> bool:
        if len(self.kept) >= self._shelves.slots:
            old = self._free()
            if old is None:
                return False
            self.kept.remove(old)
        place = (start.first_rank, start.info.world_size, self._node.setup.nproc)
        made = Kept(start.round, step, *place, persist)
        self.kept.append(made)
        self.digests.mark(made)
        self.digests.committed(made)
        self._shelves.ever.setdefault(made.key, set()).update(self._contents(made))
        self._shelves.has(self._node.name, made)
        self.say()
        return True

    def _free(self) -> Kept | None:
        mark = self._watermark
        whole = [one for one in self.kept if mark is not None and not one.is_later(mark)]
        older = self.kept[: self.kept.index(whole[-1])] if whole else []
        lost = [one for one in self.kept if one not in whole and one.step <= self._given_up]
        return next((one for one in older + lost if not one.pinned), None)

    def gives(self, name: RoundName, step: int, rank: int) -> bool:
        """Whether the shard of this rank, or one that is equal to it, is here."""
        content = self._shelves.content(rank)
        return any(content in self._contents(one) for one in self.of((name, step)))

    def signalled(self) -> int:
        """The agent is: the newest step that is here, or -1."""
        whole = [one.key for one in self._all() if self._shelves.was_whole(one.key)]
        self._then_whole = self._then_whole or max(whole, key=sort_key, default=None)
        return max((one.step for one in self._all()), default=-1)

    def leave(self, code: int) -> None:
        """The agent ends with this code, and all that is here goes."""
        self.is_lost = True
        whole, written = self._then_whole, self._shelves.checkpoints
        if whole is None or code != EXIT_SAVED:
            return
        if not any(sort_key(key) >= sort_key(whole) for key in written):
            self._fault(f"{self._node.name} ends as saved, and {whole} is not in storage")

    def cannot(self, step: int, why: str) -> None:
        """Its ranks could not save this step."""
        start = self._start
        if start is not None:
            self.current = step
            for rank in range(start.first_rank, start.first_rank + len(self._node.ranks)):
                self._node.say(m.ShardBad(start.round, step, rank, why))

    def spoil(self, step: int) -> None:
        for one in self.kept:
            one.bad = one.bad or one.step == step

    # ------------------------------------------------------------ the master

    def say(self) -> None:
        """Report what is held, if there ever was anything."""
        if self.kept or self._watermark or (self._start and self._shelves.replicas):
            held = [self._told(one) for one in self.kept] + self.replicas.told()
            replicas, went_on = self._shelves.replicas, self._went_on()
            told = (self._saver, tuple(held), replicas, self.last, went_on)
            self._node.say(m.Holdings(*told, worked=self._worked(), kept=self._kept))

    def _worked(self) -> bool:
        """Whether ranks of a round that is here have taken work."""
        self.worked = self.worked or (self.work is not None and self.work.has_begun)
        return self.worked

    def obey(self, order: m.Order) -> None:
        match order:
            case m.Watermark():
                self._mark(order)
            case m.Persist():
                self._persist(order)
            case m.SaveAt():
                if self._start is not None and order.round == self._start.round:
                    self._asked = order
            case m.CommitCheckpoint():
                self._world.clock.after(MARKING, lambda: self._commit_checkpoint(order.attempt))
            case m.PersistOver():
                self._over(order)
            case m.Holder():
                self._told_who(order)
            case m.Replicate():
                self.replicas.obey(order)
            case m.CompareReplicas():
                self.digests.obey(order)
            case m.KeepStep():
                self._kept = order
                for one in self.kept:
                    one.agreed = one.key == (order.round, order.step)
            case m.WorkGrant() if self.work is not None:
                self.work.grant(order)

    def _mark(self, order: m.Watermark) -> None:
        if self._start is None or order.round != self._start.round:
            return
        self._given_up = order.given_up
        if order.step < 0:
            return
        key = (order.round, order.step)
        if not self._shelves.was_whole(key):
            self._fault(f"the watermark is {key}, which never was whole")
        self._watermark = key
        for one in self._all():
            one.restored = False
        self.replicas.tidy()
        self._shelves.marked(key)

    def of(self, key: Key) -> list[Kept]:
        """What is here of this snapshot, replicas too."""
        return [one for one in self._all() if one.key == key]

    def _all(self) -> list[Kept]:
        return self.kept + self.replicas.copies

    def _persist(self, order: m.Persist) -> None:
        if order.attempt in self._said:
            self._say_again(order.attempt)
            return
        self._used[order.attempt] = order.used
        disk = self._shelves.disks.get(self._node.name, "")
        mine = self.of((order.round, order.step))
        self._said[order.attempt] = []
        self._world.clock.after(order.limit, lambda: self._end(order.attempt))
        for one in mine:
            one.attempts[order.attempt] = self._node.group.term
        if disk == "stuck":
            return
        held = mine and not disk and not mine[0].bad
        reason = "" if held else "the disk is full" if disk else "the snapshot is not here"

        def written() -> None:
            if not self._node.alive:
                return
            if held:
                contents = {self._shelves.content(rank) for rank in order.shared}
                self._shelves.parts.setdefault(order.attempt, set()).update(contents)
            size = BYTES * len(order.ranks) if held else 0
            self._tell(m.Persisted(order.attempt, bool(held), False, reason, size, WRITING))

        self._world.clock.after(WRITING, written)
        self._shelves.parts.setdefault(order.attempt, set())

    def _commit_checkpoint(self, attempt: str) -> None:
        if not self._node.alive:
            return
        if any(report.committed for report in self._said.get(attempt, ())):
            self._say_again(attempt)
            return
        mine = [one for one in self._all() if attempt in one.attempts]
        ok = bool(mine)
        if ok:
            key, size = mine[0].key, mine[0].world_size
            if self._shelves.parts[attempt] != {self._shelves.content(r) for r in range(size)}:
                self._fault(f"the checkpoint of {key} lacks parts")
            self._shelves.checkpoints.append(key)
            if self._world.uses is not None:
                self._world.uses.store(key, self._used[attempt])
        reason = "" if ok else "the snapshot is not here"
        self._tell(m.Persisted(attempt, ok, True, reason, 0, MARKING))

    def _tell(self, report: m.Persisted) -> None:
        if report.attempt in self._said:
            self._said[report.attempt].append(report)
        self._node.say(report)

    def _say_again(self, attempt: str) -> None:
        for report in self._said[attempt]:
            self._node.say(report)

    def _end(self, attempt: str) -> None:
        self._said.pop(attempt, None)
        for one in self._all():
            one.attempts.pop(attempt, None)

    def _over(self, order: m.PersistOver) -> None:
        self._end(order.attempt)
        for one in self.of((order.round, order.step)):
            if order.ok or not order.attempt:
                one.wanted = False
        if order.ok and self.last is not None:
            self.last = self.last.committed(order.step)
        self.say()

    def _told_who(self, order: m.Holder) -> None:
        """Fetch the shard, or say that it cannot be had."""
        reason = order.reason
        if order.saver is not None:
            other = self._world.nodes.get(order.saver.host)
            there = other is not None and other.alive
            if there and other and other.memory.gives(order.round, order.step, order.rank):
                bad = any(one.bad for one in other.memory.of((order.round, order.step)))
                if not bad:
                    return
                reason = "it does not have its hash"
            else:
                reason = f"{order.saver.host} does not give it"
        self._node.say(m.ShardBad(order.round, order.step, order.rank, reason))

    # ------------------------------------------------------------ small change

    def attached(self) -> None:
        """A master is there that may have heard nothing."""
        if self.work is not None:
            self.work.attached()
        self.say()
        for attempt in self._said:
            self._say_again(attempt)

    def _contents(self, one: Kept) -> set[int]:
        ranks = range(one.first_rank, one.first_rank + one.ranks)
        return {self._shelves.content(rank) for rank in ranks}

    def _told(self, one: Kept) -> m.Holding:
        ranks = range(one.first_rank, one.first_rank + one.ranks)
        contents = tuple(self._shelves.content(rank) for rank in ranks)
        return m.Holding(one.round, one.step, one.first_rank, one.world_size, contents, one.wanted)

    def _fault(self, text: str) -> None:
        self._shelves.faults.append(f"{self._world.clock.now:.3f}: {text}")
