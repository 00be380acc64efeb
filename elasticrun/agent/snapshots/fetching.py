"""Snapshots from other nodes: shards from which ranks restore, and replicas that this node keeps.

Shards belong to the snapshot that the master has chosen. They come from this node's segments or
from another node, and are compared with their hashes. The comparison starts while the ranks are
still starting. A rank asks for the result after copying the shard.

Replicas are copies of another node's snapshots in this node's memory, so that the state survives
the loss of either node. The master decides what to copy and from whom. The saver process copies it,
so that no data passes through this loop. A replica is a segment like a rank's own: two slots (one
complete, one being written), a commit word, hashes. It is reported, served, restored, written and
adopted like one, too. Orders run one at a time; orders for an older step are dropped. Traffic is
limited only by the bandwidth of two connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from elasticrun.agent.runtime import Tasks
from elasticrun.agent.snapshots.inventory import SnapshotStore
from elasticrun.agent.snapshots.peers import Peer, one_line
from elasticrun.agent.snapshots.saver import SaverGone
from elasticrun.agent.snapshots.segments import Held, Sizes
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.memory import NoMemory
from elasticrun.snapshots.shm.segment import MIN_SLOTS, Snapshot
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import RoundName

WHERE_LIMIT: Final = 60.0
"""Seconds for the master to answer which node has a shard; that node may be reconnecting."""

FETCH_LIMIT: Final = 900.0
"""Seconds for a copy from another node: almost a terabyte at 1 GB/s."""

CHECK_LIMIT: Final = 300.0
"""Seconds for the saver to compare a shard: enough for more than a terabyte, and less than the time
that a rank waits for the answer."""

MAX_REQUESTS: Final = 16384
"""Maximum number of shards that one generation may request. Each local rank needs at most those of
a few other ranks."""

MAX_REASON: Final = 1000
"""Maximum characters of a reason sent to the master."""

MAX_ORDERS: Final = 64
"""Maximum number of pending Replicate orders. Each names another node; all are for the same
step."""

_NOTHING: Final = (-1, -1, -1)


class Absent(Exception):
    """A shard is not available."""


class Shards:
    """The shards from which the current generation restores."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._questions = Tasks(logger.error)
        self._work = Tasks(logger.error)
        self._checks: dict[tuple[int, int, int], asyncio.Task[tuple[bool, str]]] = {}
        self._holders: dict[int, asyncio.Future[m.Holder]] = {}
        self._copies: dict[int, asyncio.Task[Held | str]] = {}
        self._given: dict[int, tuple[Held, Snapshot, int]] = {}
        self._bad: set[int] = set()
        self.restore: m.Restore | None = None

    def start(self, start: m.Start) -> None:
        """Start a new generation: drop requests of the last one, and start the comparison."""
        self.stop()
        self.restore = start.info.restore
        self._bad.clear()
        self._given.clear()
        if self._store.savers.is_connected:
            self.compare()

    def stop(self) -> None:
        """Drop all requests and fetched copies."""
        self._questions.close()
        self._work.close()
        self._checks.clear()
        self._holders.clear()
        self.drop_copies()

    def drop_copies(self) -> None:
        """Drop the copies fetched from other nodes, because they are no longer needed."""
        for task in self._copies.values():
            task.cancel()
        self._copies.clear()
        for held in [one for one in self._store.segments.held if one.is_temporary]:
            self._store.drop(held)

    def compare(self) -> None:
        """Compare all local shards of the chosen snapshot with their hashes."""
        if self.restore is not None:
            name, step = self.restore.round, self.restore.step
            for held, snapshot, _ in self._store.inventory.all_of(name, step):
                if held.replica < 0:  # replicas are only compared on request
                    self._check(held, snapshot)

    def ask_again(self) -> None:
        """Repeat open queries to a master that may have missed them."""
        for rank, answer in self._holders.items():
            if not answer.done():
                self._where(rank)

    # ------------------------------------------------------------ requests of ranks

    def is_here(self, rank: int) -> bool:
        """Whether this rank's own shard is on this node."""
        return self._find_here(rank) is not None

    def provide(self, peer: Peer, rank: int) -> None:
        """Handle WantShard; the answer is ShardHere."""
        self._spawn(peer, self._bring(peer, rank))

    def verify(self, peer: Peer, rank: int) -> None:
        """Handle IsWhole; the answer is Whole."""
        self._spawn(peer, self._answer_whole(peer, rank))

    def reject(self, rank: int, reason: str) -> None:
        """Handle CannotRestore: this node and the master no longer use this shard."""
        if self.restore is None or rank in self._bad or len(self._bad) >= MAX_REQUESTS:
            return
        self._bad.add(rank)
        owner = self._given[rank][2] if rank in self._given else rank
        self.report_bad(self.restore.round, self.restore.step, owner, reason)

    def report_bad(self, round: RoundName, step: int, rank: int, reason: str) -> None:
        """A shard is corrupt or unavailable: withdraw it and notify the master."""
        logger.warning(
            "snapshot of step %d of rank %d is unusable: %s", step, rank, one_line(reason)
        )
        mine = self._store.inventory.find(round, step, rank)
        if mine is not None:
            held, snapshot = mine
            held.segment.withdraw(snapshot.slot)
        self._store.link.send(m.ShardBad(round, step, rank, reason[:MAX_REASON]))

    def holder(self, order: m.Holder) -> None:
        """Handle the master's answer to WhereIs."""
        answer, restore = self._holders.get(order.rank), self.restore
        if answer is None or answer.done() or restore is None:
            return
        if (restore.round, restore.step) == (order.round, order.step):
            answer.set_result(order)

    # ------------------------------------------------------------ providing a shard

    async def _bring(self, peer: Peer, rank: int) -> None:
        try:
            held, snapshot, owner = await self._find(rank)
        except Absent as error:
            peer.send(s.ShardHere(False, str(error), rank, 0, 0))
            return
        if not held.is_lost:
            self._given[rank] = (held, snapshot, owner)
            peer.send(s.ShardHere(True, "", owner, snapshot.slot, snapshot.sequence), held.fd)

    async def _find(self, rank: int) -> tuple[Held, Snapshot, int]:
        """The shard of this rank, or of one with the same content. Raises Absent."""
        if self.restore is None:
            raise Absent("there is no snapshot to restore from")
        if not 0 <= rank < self.restore.world_size:
            raise Absent(
                f"the snapshot has only {self.restore.world_size} ranks, and no rank {rank}"
            )
        if (mine := self._find_here(rank)) is not None:
            return (*mine, rank)
        order = await self._ask(rank)
        if (mine := self._find_here(order.holds)) is not None:
            return (*mine, order.holds)
        if order.saver is None:
            raise Absent(order.reason or f"no node has the shard of rank {rank}")
        if order.holds not in self._copies:
            fetching = self._work.start(self._fetch(order), "copying a shard")
            self._copies[order.holds] = fetching
        held = await asyncio.shield(self._copies[order.holds])
        if isinstance(held, str):
            raise Absent(held)
        snapshot = held.find_newest()
        if snapshot is None:
            raise Absent("the copy from another node was dropped")
        return held, snapshot, order.holds

    async def _ask(self, rank: int) -> m.Holder:
        """Ask the master which node has this rank's shard. Raises Absent."""
        if rank not in self._holders:
            if len(self._holders) >= MAX_REQUESTS:
                raise Absent(f"more than {MAX_REQUESTS} shards were requested")
            self._holders[rank] = asyncio.get_running_loop().create_future()
            self._where(rank)
        try:
            return await asyncio.wait_for(asyncio.shield(self._holders[rank]), WHERE_LIMIT)
        except TimeoutError:
            raise Absent(
                f"the master has not answered within {WHERE_LIMIT:g} s which node has rank "
                f"{rank}'s shard"
            ) from None

    def _where(self, rank: int) -> None:
        if self.restore is not None:
            self._store.link.send(m.WhereIs(self.restore.round, self.restore.step, rank))

    async def _fetch(self, order: m.Holder) -> Held | str:
        """A copy in a new segment, or the reason for none."""
        assert order.saver is not None
        segments, savers = self._store.segments, self._store.savers
        key = segments.new_key()
        where = (order.saver.host, order.saver.port)
        try:
            async with asyncio.timeout(FETCH_LIMIT):
                size = await savers.fetch_size(
                    s.Fetch(key, order.round, order.step, order.holds, *where)
                )
                if not size.ok:
                    return size.reason
                held = await segments.copy_of(size.layout_length, size.slot_bytes)
                done = await savers.fetch_into(key, held)
        except TimeoutError:
            return f"it could not be fetched within {FETCH_LIMIT:g} s"
        except (NoMemory, SaverGone) as error:
            return str(error)
        if not done.ok:
            segments.drop(held)
            return done.reason
        return held

    # ------------------------------------------------------------ comparing

    async def _answer_whole(self, peer: Peer, rank: int) -> None:
        given = self._given.get(rank)
        if given is None:
            peer.send(s.Whole(rank, False, f"rank {rank}'s shard was not given"))
        elif given[0].is_temporary:  # compared during the transfer
            peer.send(s.Whole(rank, True, ""))
        else:
            ok, reason = await asyncio.shield(self._check(given[0], given[1]))
            peer.send(s.Whole(rank, ok, reason))

    def _check(self, held: Held, snapshot: Snapshot) -> asyncio.Task[tuple[bool, str]]:
        name = (held.key, snapshot.slot, snapshot.sequence)
        if name not in self._checks:
            self._checks[name] = self._work.start(self._compared(held, snapshot), "comparing")
        return self._checks[name]

    async def _compared(self, held: Held, snapshot: Snapshot) -> tuple[bool, str]:
        """Have the saver compare a snapshot with its hashes: whether it is usable, and the reason.
        Without a comparison it counts as usable."""
        try:
            async with asyncio.timeout(CHECK_LIMIT):
                answer = await self._store.savers.check(held, snapshot)
        except (SaverGone, TimeoutError) as error:
            why = str(error) or f"the saver has not answered for {CHECK_LIMIT:g} s"
            text = f"nothing was compared: {why}"
            logger.warning("step %d is not verified: %s", snapshot.step, one_line(text))
            return True, text
        if answer.ok and answer.reason:  # its ranks exited before it was hashed
            logger.info("step %d is not verified: %s", snapshot.step, one_line(answer.reason))
        return answer.ok, answer.reason

    # ------------------------------------------------------------ helpers

    def _find_here(self, rank: int) -> tuple[Held, Snapshot] | None:
        if self.restore is None:
            return None
        name, step = self.restore.round, self.restore.step
        return self._store.inventory.find(name, step, rank)

    def _spawn(self, peer: Peer, work: Coroutine[Any, Any, None]) -> None:
        if len(self._questions) >= MAX_REQUESTS:
            work.close()
            peer.break_off(f"more than {MAX_REQUESTS} questions about shards are open")
            return
        self._questions.start(work, "bringing a shard")


class Replicator:
    """Copies other nodes' snapshots to this node, as ordered by the master."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._tasks = Tasks(logger.error)
        self._known: set[tuple[RoundName, int | None]] = set()
        self._orders: list[m.Replicate] = []
        self._ranks: set[int] = set()  # ranks in the newest orders
        self._newest: tuple[RoundName, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._untidy = False  # tidy was called during a copy
        self.enabled = False
        """Whether the ranks of this node request replicas."""

    def start(self, start: m.Start) -> None:
        """Start a new generation of ranks: drop orders of the last one."""
        self._known = {(start.round, None)}
        if start.info.restore is not None:
            self._known.add((start.info.restore.round, start.info.restore.step))
        self._orders.clear()
        self._ranks.clear()
        self._newest = None
        self._untidy = False  # this generation has no complete step yet

    def close(self) -> None:
        """Stop copying, because the agent ends."""
        self._orders.clear()
        self._tasks.close()

    def obey(self, order: m.Replicate) -> None:
        """Copy the snapshots that are not here yet. A repeated order gets the same answer."""
        name = (order.round, order.step)
        if not self._is_known(*name):
            self._store.link.send(m.NotReplicated(*name, "its ranks are of another round"))
            return
        if name != self._newest:
            self._newest = name
            self._orders.clear()
            self._ranks.clear()
            self._untidy = False  # older replicas stay until this step is complete
        self._ranks.update(order.ranks)
        if len(self._orders) < MAX_ORDERS and order not in self._orders:
            self._orders.append(order)
        if self._task is None:
            self._task = self._tasks.start(self._work(), "copying from another node")

    def tidy(self) -> None:
        """Drop replicas that are no longer needed, once the current generation has a complete step.

        These are replicas that no current order lists, and those of a rank whose layout has changed
        since. A call during a copy takes effect after it."""
        self._untidy = self._task is not None
        if self._untidy:
            return
        held = [one for one in self._store.segments.held if one.replica >= 0]
        newest: dict[int, tuple[int, int, int]] = {}  # by rank
        for one in held:
            newest[one.replica] = max(_newest(one), newest.get(one.replica, _NOTHING))
        unneeded = [
            one
            for one in held
            if (_newest(one) < newest[one.replica] or one.replica not in self._ranks)
            and not one.is_pinned()
        ]
        for one in unneeded:
            self._store.drop(one)
        if unneeded:
            self._store.report.send_soon()

    # ------------------------------------------------------------ one order

    async def _work(self) -> None:
        try:
            while self._orders:
                await self._copy(self._orders.pop(0))
        finally:
            self._task = None
        if self._untidy:
            self.tidy()

    async def _copy(self, order: m.Replicate) -> None:
        """Copy all ranks that the order names."""
        self._store.inventory.learn(order.round, order.world_size)
        rows = zip(order.ranks, order.contents, strict=True)
        reasons = await asyncio.gather(*(self._copy_one(order, *row) for row in rows))
        await self._store.segments.note(self._store.inventory.rounds())
        reason = next(filter(None, reasons), "")
        if reason and self._is_known(order.round, order.step):
            self._store.link.send(m.NotReplicated(order.round, order.step, reason[:MAX_REASON]))
        self._store.report.send_soon()

    async def _copy_one(self, order: m.Replicate, rank: int, content: int) -> str:
        """Copy one rank's snapshot; returns why that failed, "" if it is here."""
        segments, savers = self._store.segments, self._store.savers
        if self._store.inventory.find(order.round, order.step, rank) is not None:
            return ""
        key = segments.new_key()
        where = (order.saver.host, order.saver.port)
        try:
            size = await savers.fetch_size(
                s.Fetch(key, order.round, order.step, rank, *where, replica=True)
            )
            if not size.ok:
                return size.reason
            sizes = Sizes(size.layout, size.layout_length, size.slot_bytes, MIN_SLOTS)
            held = await segments.replica_of(rank, sizes, content)
            slot = _slot(held)
            if slot is None:
                return f"both slots for rank {rank} are still in use"
            held.segment.withdraw(slot)
            done = await savers.fetch_into(key, held, slot)
        except NoMemory as error:
            return f"no memory for replicas: {error}"
        except SaverGone as error:
            return str(error)
        if held.is_lost:
            return "it was dropped during the copy"
        if done.ok and not self._is_known(order.round, order.step):
            held.segment.withdraw(slot)  # left over from before a rewind
        held.written = held.written or done.ok
        self._store.report.send_soon()
        return "" if done.ok else done.reason

    def _is_known(self, name: RoundName, step: int) -> bool:
        """Whether this step belongs to the current generation, or is the one it restores from."""
        return bool(self._known & {(name, None), (name, step)})


def _slot(held: Held) -> int | None:
    """The slot for the next snapshot: not the newest one's, and not pinned; None: no such slot."""
    found = sorted(held.snapshots(), key=_age)
    taken = {snapshot.slot for snapshot in found}
    empty = [slot for slot in range(held.segment.slots) if slot not in taken]
    for slot in [*empty, *(snapshot.slot for snapshot in found[:-1])]:
        if not held.pins.get(slot):
            return slot
    return None


def _newest(held: Held) -> tuple[int, int, int]:
    """The age of its newest snapshot as a sort key; newer ones are greater."""
    return max(map(_age, held.snapshots()), default=_NOTHING)


def _age(snapshot: Snapshot) -> tuple[int, int, int]:
    return (snapshot.term, snapshot.number, snapshot.step)
