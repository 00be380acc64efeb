"""A node's part in snapshots with real sockets and segments, and who speaks to it: ranks, a saver
and a master that the test plays."""

from __future__ import annotations

import array
import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from elasticrun.agent.snapshots.snapshots import LocalSnapshots
from elasticrun.agent.workers.recoverable import Recoverables
from elasticrun.agent.workers.spawner import Child, Owner
from elasticrun.config import Identity
from elasticrun.snapshots.shm.layout import PAGE, Item, ItemKind, Layout, lay_out
from elasticrun.snapshots.shm.segment import VERSION, Segment
from elasticrun.wire import snapshots as s
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.messages import Holdings, Persist, Report, Restore, SaveSpec, Start
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.spawning import Exited, SpawnSaver
from elasticrun.wire.types import RoundName
from tests.agent.configs import launched, node_context, start as a_start
from tests.harness import LIMIT

T = TypeVar("T")


def layout_of(elements: int = 1000, name: str = "weight") -> Layout:
    """One tensor of bytes."""
    item = Item(
        *(name, (name,), ItemKind.TENSOR, False, "uint8"),
        *((elements,), (0,), (elements,)),
        head=704,
        nbytes=elements,
        tail=100,
    )
    return lay_out([item], PAGE, "2.13")


LAYOUT = layout_of()
CONTENT = LAYOUT.content
BOTH = (CONTENT, CONTENT)
ONE = RoundName(7, 1, "n1")
"""The round of a node's first life."""


def persist(step: int, **changes: Any) -> Persist:
    """The order to write this step of both ranks."""
    values: dict[str, Any] = {
        "attempt": "a1",
        "round": ONE,
        "step": step,
        "world_size": 2,
        "ranks": (0, 1),
        "shared": (0,),
        "writers": 2,
        "coordinates": True,
        "coordinator": None,
        "reason": "periodic",
        "limit": 100.0,
        **changes,
    }
    return Persist(**values)


class Client:
    """A process at the agent's socket; blocking, so to be used in threads."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(LIMIT)
        self.socket.connect(address(name))
        self.frames = FrameBuffer(s.ToPeer)
        self.messages: list[Any] = []
        self.fds: list[int] = []

    def say(self, message: s.FromPeer) -> None:
        self.socket.sendall(encode(message))

    def hear(self, kind: type[T]) -> T:
        """The next message, which has to be of this kind."""
        while not self.messages:
            data, beside, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(4 * 64))
            for _, _, raw in beside:
                self.fds += array.array("i", raw)
            assert data, f"hung up instead of {kind.__name__}"
            self.messages += self.frames.feed(data)
        message = self.messages.pop(0)
        assert isinstance(message, kind), message
        return message

    def ask(self, message: s.FromPeer, kind: type[T]) -> T:
        self.say(message)
        return self.hear(kind)

    async def hears(self, kind: type[T]) -> T:
        """The same, in a thread, while the node goes on; and so below."""
        return await asyncio.to_thread(self.hear, kind)

    async def asks(self, message: s.FromPeer, kind: type[T]) -> T:
        return await asyncio.to_thread(self.ask, message, kind)

    async def hangs_up(self) -> bool:
        """Wait for the end, whatever is said before."""

        def hung_up() -> bool:
            with contextlib.suppress(ConnectionError):
                while self.socket.recv(65536):
                    pass
            return True

        return await asyncio.to_thread(hung_up)

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Rank(Client):
    """A rank with a Checkpointer."""

    def __init__(self, place: str, start: Start, folder: str = "/runs/a") -> None:
        name, self.local_rank = read_place(place)
        super().__init__(name)
        self.start = start
        self.segment: Segment
        self.fresh = False
        here = s.RankHere(
            *(VERSION, self.local_rank, start.first_rank + self.local_rank, start.info.world_size),
            *(folder, 3, 0),
        )
        self.resume = self.ask(here, s.Resume)

    @staticmethod
    def wanted(layout: Layout, slots: int = 2) -> s.NeedSegment:
        sizes = (len(layout.encode()), layout.slot_bytes, slots)
        return s.NeedSegment(layout.key, layout.content, *sizes)

    def need(self, layout: Layout, slots: int = 2) -> s.SegmentHere:
        encoded = layout.encode()
        here = self.ask(self.wanted(layout, slots), s.SegmentHere)
        if here.ok:
            fd = self.fds.pop()
            mapped = mmap.mmap(fd, 0)
            self.inode = os.fstat(fd).st_ino
            os.close(fd)
            self.segment, self.fresh, self.layout = Segment(memoryview(mapped)), here.fresh, layout
            if here.fresh:
                mapped[PAGE : PAGE + len(encoded)] = encoded
        return here

    async def needs(self, layout: Layout) -> s.SegmentHere:
        return await asyncio.to_thread(self.need, layout)

    def commit(self, step: int, *, persist: bool = False, tell: bool = True) -> int:
        """Take a snapshot whose every byte is the step's; its slot."""
        segment = self.segment
        slot = segment.free_slot()
        assert slot is not None, "no slot is free"
        sequence = 1 + max((one.sequence for one in segment.snapshots()), default=0)
        segment.withdraw(slot)
        segment.payload(slot)[:] = bytes([step % 256]) * segment.slot_bytes
        if persist:
            segment.pin(slot)
        segment.commit(
            slot,
            round=self.start.round,
            sequence=sequence,
            step=step,
            layout=self.layout.key,
            values=0,
        )
        if tell:
            self.say(s.Committed(step, slot, sequence, persist))
        return slot


class Saver(Client):
    """The saver: it does what it is told, and copies from nowhere."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.layout = LAYOUT  # of what it copies
        self.slots: list[int] = []  # that it has copied into
        self.waiting: list[Any] = []  # orders that it has not looked at
        self.memory: dict[int, int] = {}  # by the key of a FetchInto: a descriptor

    def _next(self, kind: type[T]) -> T:
        for order in self.waiting:
            if isinstance(order, kind):
                self.waiting.remove(order)
                return order
        while True:
            found: Any = self.hear(object)
            if isinstance(found, s.PingSaver) and kind is not s.PingSaver:
                self.say(s.SaverPong(found.number))
                continue
            if isinstance(found, s.SegmentOpen):
                os.close(self.fds.pop(0))
            elif isinstance(found, s.FetchInto):
                self.memory[found.key] = self.fds.pop(0)
            if isinstance(found, kind):
                return found
            self.waiting.append(found)

    async def next(self, kind: type[T]) -> T:
        """The next order of this kind; others wait."""
        return await asyncio.to_thread(self._next, kind)

    async def checks(self, count: int = 2, ok: bool = True, why: str = "") -> None:
        """Find so many shards good, or not."""
        for _ in range(count):
            order = await self.next(s.CheckSnapshot)
            self.say(s.Checked(order.key, order.slot, order.sequence, ok, why))

    async def writes(self, parts: int = 2, nbytes: int = 1, seconds: float = 0.1) -> s.PersistParts:
        """Check and write so many parts: the order."""
        await self.checks(parts)
        order = await self.next(s.PersistParts)
        self.say(s.PartsDone(order.attempt, True, "", nbytes, seconds))
        return order

    async def gives_size(self, **changes: int) -> s.Fetch:
        """Only for a replica is it said which layout it has."""
        fetch = await self.next(s.Fetch)
        sizes = {"slot_bytes": self.layout.slot_bytes, **changes}
        layout = self.layout.key if fetch.replica else 0
        length = len(self.layout.encode())
        self.say(s.FetchSize(fetch.key, True, "", length, layout=layout, **sizes))
        return fetch

    async def fills(self, fetch: s.Fetch) -> None:
        """With a snapshot whose every byte is its step's."""
        into = await self.next(s.FetchInto)
        layout = self.layout.key if fetch.replica else 0
        assert (into.key, into.layout) == (fetch.key, layout)
        self.slots.append(into.slot)
        fd = self.memory.pop(into.key)
        with mmap.mmap(fd, 0) as mapped:
            encoded = self.layout.encode()
            mapped[PAGE : PAGE + len(encoded)] = encoded
            segment = Segment(memoryview(mapped))
            segment.payload(into.slot)[:] = bytes([fetch.step]) * segment.slot_bytes
            name = RoundName(fetch.round.term, fetch.round.number, fetch.round.nonce)
            how = {"sequence": fetch.step, "step": fetch.step, "layout": self.layout.key}
            segment.commit(into.slot, round=name, values=0, **how)
            segment.close()
        os.close(fd)
        self.say(s.Fetched(fetch.key, True, ""))
        return into

    async def copies(self) -> s.Fetch:
        fetch = await self.gives_size()
        await self.fills(fetch)
        return fetch


class Master:
    """What stands where the link does: it keeps what is said."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.changed = asyncio.Event()
        self.beat_interval = 1.0

    def send(self, report: Report) -> None:
        self.reports.append(report)
        self.changed.set()

    def offer(self, report: Report) -> bool:
        self.send(report)
        return True

    async def until(self, good: Callable[[Any], bool], what: type[T]) -> T:
        """The first report of this kind that is good; it is taken out."""
        async with asyncio.timeout(LIMIT):
            while True:
                for report in self.reports:
                    if isinstance(report, what) and good(report):
                        self.reports.remove(report)
                        return report
                self.changed.clear()
                await self.changed.wait()

    def held(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        """(round, step, contents, wanted) of the last inventory."""
        last = [one for one in self.reports if isinstance(one, Holdings)][-1]
        return [(h.round.number, h.step, h.contents, h.wanted) for h in last.held]


class Spawners:
    """What stands where the fork server does: it keeps the orders."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[SpawnSaver] = asyncio.Queue()
        self.children: dict[int, Child] = {}

    def start(self, order: SpawnSaver, owner: Owner) -> Child:
        child = Child(len(self.children) + 1, owner, None)
        self.children[child.key] = child
        self.orders.put_nowait(replace(order, key=child.key))
        return child

    def forget(self, *children: Child) -> None:
        pass

    def is_old(self, child: Child) -> bool:
        return False


class Node:
    """The agent's part, of a node with two ranks, or `nproc`. `several`: of a job of several
    nodes."""

    def __init__(
        self, shm: Path, *, several: bool = False, limit: float = 100.0, nproc: int = 2
    ) -> None:
        self.master, self.spawners = Master(), Spawners()
        self.clients: list[Client] = []
        spec = {"max_nodes": 3 if several else 1, "saves": SaveSpec(True, limit)}
        launch, self.identity = (
            launched(spec, nproc_per_node=nproc),
            Identity("the-job", token="secret"),
        )
        self.several = several
        node = node_context(launch, identity=self.identity, link=self.master, address="10.0.0.1")
        self.snapshots = LocalSnapshots(
            node,
            self.spawners,
            Recoverables(node),
            {"ELASTICRUN_SHM_DIR": str(shm)},
        )
        self.start: Start

    def begin(self, number: int, **changes: Any) -> Start:
        """A life of the ranks, in a round of this number."""
        values: dict[str, Any] = {"first_rank": 2 if self.several else 0, "group_rank": 0}
        values |= {"world_size": 6 if self.several else 2}
        values |= {"group_world_size": 3 if self.several else 1}
        values |= {"round": RoundName(7, number, f"n{number}"), **changes}
        self.start = a_start(**values)
        self.snapshots.round_began(self.start)
        return self.start

    async def rank(self, local_rank: int) -> Rank:
        """Such a rank of the present life."""
        return await self.call(Rank, self.snapshots.place(local_rank), self.start)

    async def ranks(self, layout: Layout = LAYOUT) -> list[Rank]:
        """Both, with segments."""
        found = [await self.rank(0), await self.rank(1)]
        for rank in found:
            assert (await rank.needs(layout)).ok
        return found

    async def life(self, *steps: int) -> list[Rank]:
        """The first one of both ranks, who commit these steps."""
        self.begin(1)
        ranks = await self.ranks()
        for step in steps:
            await self.both(ranks, step)
        return ranks

    async def life_with_saver(self, step: int) -> tuple[list[Rank], Saver]:
        """The same with a saver, which is there before they commit."""
        ranks = await self.life()
        saver = await self.saver()
        await self.both(ranks, step)
        return ranks, saver

    def goes_on(self, **changes: Any) -> Start:
        """The ranks of the first life are gone; the next one is to go on from its step 1."""
        self.snapshots.ranks_gone(done=False)
        return self.begin(2, restore=Restore(ONE, 1, 2), **changes)

    async def both(self, ranks: list[Rank], step: int, **how: Any) -> None:
        """Both commit a step, and the agent has heard it."""
        for rank in ranks:
            rank.commit(step, **how)
        await self.heard(ranks)

    async def heard(self, ranks: list[Rank]) -> None:
        """All that these have said was taken in: each asks what is answered after it."""
        for rank in ranks:
            await rank.asks(s.IsWhole(10**6), s.Whole)

    async def saver(self, port: int = 0) -> Saver:
        """Be the saver that was ordered."""
        order = await asyncio.wait_for(self.spawners.orders.get(), LIMIT)
        saver = await self.call(Saver, order.place)
        saver.say(s.SaverHere(VERSION, order.key, port))
        await self.snapshots.savers.wait_connected()
        return saver

    async def saver_dies(self, saver: Client, code: int = -9) -> None:
        saver.close()
        child = self.snapshots.savers._child
        self.snapshots.savers.on_child_message(child, Exited(child.key, 1, code, 0))

    async def call(self, what: Callable[..., T], *args: Any) -> T:
        made = await asyncio.to_thread(what, *args)
        if isinstance(made, Client):
            self.clients.append(made)
        return made

    def held(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        self.snapshots.ranks_gone(done=False)
        return self.master.held()


@contextlib.asynccontextmanager
async def opened(shm: Path, **how: Any) -> AsyncIterator[Node]:
    """A node, until the test is over; then nothing is left in its folder."""
    node = Node(shm, **how)
    await node.snapshots.open("node-a")
    try:
        async with asyncio.timeout(2 * LIMIT):
            yield node
    finally:
        for client in node.clients:
            client.close()
        await node.snapshots.release(job_over=True)
    assert not os.listdir(shm)
