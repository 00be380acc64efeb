"""What another node's ranks hold, copied into this node's memory, so that either may be lost.

The master says what to copy and from whom; the saver copies it, a process of its own, so that
nothing of it passes through this loop. A replica lies in a segment like a rank's own: two slots,
one that is whole and one that is written, a commit word, hashes; and it is told to the master,
served, restored from, persisted and taken over by a later agent like one.

One order is carried out at a time, and of several the newest. There is no limit to the traffic but
what two connections can carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elasticrun.agent.held import Held, Sizes
from elasticrun.agent.inventory import Inventory
from elasticrun.agent.memory import NoRoom
from elasticrun.agent.persisting import named
from elasticrun.agent.savers import SaverGone, Savers
from elasticrun.agent.segments import Segments
from elasticrun.agent.threads import tell_failure
from elasticrun.operator_log import logger
from elasticrun.wire.ids import RoundName
from elasticrun.wire.messages import NotReplicated, Replicate, Report, Start
from elasticrun.wire.segment import MIN_SLOTS, Snapshot
from elasticrun.wire.snapshots import Fetch

MAX_REASON: Final = 1000

MAX_ORDERS: Final = 64
"""That wait; each names another node, and of another step than theirs none waits."""


_NOTHING: Final = (-1, -1, -1)


class Replicas:
    """Those of this node. `say` reports to the master, `changed` is called when what is held has
    changed."""

    def __init__(
        self,
        segments: Segments,
        inventory: Inventory,
        savers: Savers,
        *,
        say: Callable[[Report], None],
        changed: Callable[[], None],
    ) -> None:
        self._segments = segments
        self._inventory = inventory
        self._savers = savers
        self._say = say
        self._changed = changed
        self._known: set[tuple[RoundName, int | None]] = set()
        self._orders: list[Replicate] = []
        self._ranks: set[int] = set()  # that the newest orders name
        self._newest: tuple[RoundName, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._untidy = False  # a copy was under way when something could have gone
        self.wanted = False
        """Whether the ranks of this node want them."""

    def begin(self, start: Start) -> None:
        """A new life of the ranks: orders of the last one are of no use."""
        self._known = {(start.round, None)}
        if start.restore is not None:
            self._known.add((start.restore.round, start.restore.step))
        self._orders.clear()
        self._ranks.clear()
        self._newest = None
        self._untidy = False  # this life has no whole step yet

    def close(self) -> None:
        """The agent ends."""
        self._orders.clear()
        if self._task is not None:
            self._task.cancel()

    def obey(self, order: Replicate) -> None:
        """Copy what is not here yet; the same order again is answered again."""
        name = (order.round, order.step)
        if not self._is_known(*name):
            self._say(NotReplicated(*name, "its ranks are of another round"))
            return
        if name != self._newest:
            self._newest = name
            self._orders.clear()
            self._ranks.clear()
            self._untidy = False  # what older orders have copied stays until this step counts
        self._ranks.update(order.ranks)
        if len(self._orders) < MAX_ORDERS and order not in self._orders:
            self._orders.append(order)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
            tell_failure(self._task, logger.error, "copying from another node")

    def tidy(self) -> None:
        """The present life has a whole step of its own: what no order names any more can go, and
        what a rank had before its state was laid out anew. While a copy is under way nothing does:
        it goes at the end of that."""
        self._untidy = self._task is not None
        if self._untidy:
            return
        held = [one for one in self._segments.held if one.replica >= 0]
        newest: dict[int, tuple[int, int, int]] = {}  # by the rank that it is of
        for one in held:
            newest[one.replica] = max(_newest(one), newest.get(one.replica, _NOTHING))
        gone = [
            one
            for one in held
            if (_newest(one) < newest[one.replica] or one.replica not in self._ranks)
            and not one.pinned()
        ]
        for one in gone:
            self._savers.forget(one)
            self._segments.drop(one)
        if gone:
            self._changed()

    # ------------------------------------------------------------ one order

    async def _work(self) -> None:
        try:
            while self._orders:
                await self._copy(self._orders.pop(0))
        finally:
            self._task = None
        if self._untidy:
            self.tidy()

    async def _copy(self, order: Replicate) -> None:
        """All that it names."""
        self._inventory.learn(order.round, order.world_size)
        rows = zip(order.ranks, order.contents, strict=True)
        reasons = await asyncio.gather(*(self._copy_one(order, *row) for row in rows))
        await self._segments.note(self._inventory.lives())
        reason = next(filter(None, reasons), "")
        if reason and self._is_known(order.round, order.step):
            self._say(NotReplicated(order.round, order.step, reason[:MAX_REASON]))
        self._changed()

    async def _copy_one(self, order: Replicate, rank: int, content: int) -> str:
        """What one rank has; why it could not be copied, "" if it was or is here already."""
        if self._inventory.find(self._segments.held, order.round, order.step, rank) is not None:
            return ""
        key = self._segments.new_key()
        where = (order.saver.host, order.saver.port)
        try:
            size = await self._savers.fetch_size(
                Fetch(key, named(order.round), order.step, rank, *where, replica=True)
            )
            if not size.ok:
                return size.reason
            sizes = Sizes(size.layout, size.layout_length, size.slot_bytes, MIN_SLOTS)
            held = await self._segments.replica_of(rank, sizes, content)
            slot = _slot(held)
            if slot is None:
                return f"both slots for rank {rank} are needed still"
            held.segment.withdraw(slot)
            done = await self._savers.fetch_into(key, held, slot)
        except NoRoom as error:
            return f"there is no room for replicas: {error}"
        except SaverGone as error:
            return str(error)
        if held.gone:
            return "it was dropped meanwhile"
        if done.ok and not self._is_known(order.round, order.step):
            held.segment.withdraw(slot)  # of a step that a later life has gone back behind
        held.written = held.written or done.ok
        self._changed()
        return "" if done.ok else done.reason

    def _is_known(self, name: RoundName, step: int) -> bool:
        """Whether the present life knows this step: its own, or what it goes on from."""
        return bool(self._known & {(name, None), (name, step)})


def _slot(held: Held) -> int | None:
    """Where the next snapshot goes: never over the newest one, nor over one that is needed."""
    found = sorted(held.snapshots(), key=_age)
    taken = {snapshot.slot for snapshot in found}
    empty = [slot for slot in range(held.segment.slots) if slot not in taken]
    for slot in [*empty, *(snapshot.slot for snapshot in found[:-1])]:
        if not held.pins.get(slot):
            return slot
    return None


def _newest(held: Held) -> tuple[int, int, int]:
    """The age of what was copied there last."""
    return max(map(_age, held.snapshots()), default=_NOTHING)


def _age(snapshot: Snapshot) -> tuple[int, int, int]:
    return (snapshot.term, snapshot.number, snapshot.step)
