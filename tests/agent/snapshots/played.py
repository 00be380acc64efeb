"""A node's part in snapshots with real sockets and segments, and who speaks to it: ranks, a saver
and a master that the test plays."""

from __future__ import annotations

import array
import asyncio
import functools
import inspect
import mmap
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from elasticrun.agent.snapshots.snapshots import Snapshots
from elasticrun.agent.spawner import Child, Owner
from elasticrun.shm.layout import PAGE, Item, ItemKind, Layout, lay_out
from elasticrun.shm.segment import VERSION, Segment
from elasticrun.wire import snapshots as s
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.messages import Holdings, Report, SaveSpec, Start
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.spawning import Exited, SpawnSaver
from elasticrun.wire.types import RoundName
from tests.agent.configs import agent_config, start as a_start
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
        return await asyncio.to_thread(self.hung_up)

    def hung_up(self) -> bool:
        """Wait for the end, whatever is said before."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

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
            *(VERSION, self.local_rank, start.first_rank + self.local_rank, start.world_size),
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


class Master:
    """What stands where the link does: it keeps what is said."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.changed = asyncio.Event()
        self.beat_interval = 1.0

    def say(self, report: Report) -> None:
        self.reports.append(report)
        self.changed.set()

    def offer(self, report: Report) -> bool:
        self.say(report)
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
        self.config = agent_config(spec, token="secret", nproc_per_node=nproc)
        self.several = several
        self.snapshots = Snapshots(
            self.config,
            self.spawners,  # type: ignore[arg-type]
            environ={"ELASTICRUN_SHM_DIR": str(shm)},
            link=lambda: self.master,  # type: ignore[arg-type, return-value]
            address=lambda: "10.0.0.1",
        )
        self.start: Start

    def begin(self, number: int, **changes: Any) -> Start:
        """A life of the ranks, in a round of this number."""
        values: dict[str, Any] = {"first_rank": 2 if self.several else 0, "group_rank": 0}
        values |= {"world_size": 6 if self.several else 2}
        values |= {"group_world_size": 3 if self.several else 1}
        values |= {"round": RoundName(7, number, f"n{number}"), **changes}
        self.start = a_start(**values)
        self.snapshots.begin(self.start)
        return self.start

    async def rank(self, local_rank: int) -> Rank:
        """Such a rank of the present life."""
        return await self.call(Rank, self.snapshots.place(local_rank), self.start)

    async def ranks(self, layout: Layout | None = None) -> list[Rank]:
        """Both, with segments."""
        found = [await self.rank(0), await self.rank(1)]
        for rank in found:
            assert (await rank.needs(layout or layout_of())).ok
        return found

    async def both(self, ranks: list[Rank], step: int, **how: Any) -> None:
        """Both commit a step, and the agent has heard it."""
        for rank in ranks:
            rank.commit(step, **how)
        await self.heard(ranks)

    async def heard(self, ranks: list[Rank]) -> None:
        """All that these have said was taken in: each asks what is answered after it."""
        for rank in ranks:
            await rank.asks(s.IsWhole(10**6), s.Whole)

    async def saver(self, port: int = 0) -> Client:
        """Be the saver that was ordered."""
        order = await asyncio.wait_for(self.spawners.orders.get(), LIMIT)
        saver = await self.call(Client, order.place)
        saver.say(s.SaverHere(VERSION, order.key, port))
        await self.snapshots.savers.there()
        return saver

    async def saver_dies(self, saver: Client, code: int = -9) -> None:
        saver.close()
        child = self.snapshots.savers._child
        assert child is not None
        self.snapshots.savers.heard(child, Exited(child.key, 1, code, 0))

    async def call(self, what: Callable[..., T], *args: Any) -> T:
        made = await asyncio.to_thread(what, *args)
        if isinstance(made, Client):
            self.clients.append(made)
        return made

    def held(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        self.snapshots.reaped()
        return self.master.held()


def play(body: Callable[[Node], Awaitable[None]], **how: Any) -> None:
    """Run a test's body with a node; at the end nothing is left in its folder."""

    async def main(shm: Path) -> None:
        node = Node(shm, **how)
        await node.snapshots.open("node-a")
        try:
            async with asyncio.timeout(2 * LIMIT):
                await body(node)
        finally:
            for client in node.clients:
                client.close()
            await node.snapshots.close(job_over=True)
        assert not os.listdir(shm)

    with tempfile.TemporaryDirectory(prefix="elasticrun-test-", dir="/dev/shm") as folder:
        asyncio.run(main(Path(folder)))


def played(**how: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a test of `async def test_x(node: Node, ...)`, which has its other fixtures as ever."""

    def made(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            play(lambda node: test(node, **fixtures), **how)

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name != "node"]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return made
