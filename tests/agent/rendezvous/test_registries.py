"""What a registry returns when the lease changes hands, and when the search for a leader ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elasticrun.agent.claims import claim_file
from elasticrun.agent.claims.claim_file import ClaimFile
from elasticrun.agent.rendezvous import endpoint, shared_file
from elasticrun.agent.rendezvous.endpoint import EndpointRegistry
from elasticrun.agent.rendezvous.place import HostError
from elasticrun.agent.rendezvous.registry import VACANT, Leader, Lease, Vacant
from elasticrun.agent.rendezvous.rendezvous import NodeRendezvous
from elasticrun.agent.rendezvous.shared_file import SharedFile
from elasticrun.config import Place
from elasticrun.core.events import LinkBack, LinkLost
from elasticrun.wire.auth import reader_token
from elasticrun.wire.rpc.channel import LinkError
from elasticrun.wire.types import Endpoint
from tests.agent.configs import JOB, launched, node_context
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (claim_file, shared_file):
        monkeypatch.setattr(module, "READ_EVERY", 0.01)
    monkeypatch.setattr(claim_file, "RENEW_EVERY", 0.01)
    monkeypatch.setattr(endpoint, "TAKEOVER_AFTER", 0.01)


# ---------------------------------------------------------------- a shared file


def shared(path: Path) -> SharedFile:
    launch = launched({"max_nodes": 4}, local_addr="127.0.0.1")
    return SharedFile(launch, Place("file", port=29400, path=str(path)), JOB)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[SharedFile]:
    with closing(shared(tmp_path / "a")) as registry:
        yield registry


async def claimed(registry: SharedFile) -> Lease:
    assert await registry.read(served=False) == VACANT
    lease = await registry.take()
    assert lease is not None
    return lease


def take_over(path: Path, **words: object) -> None:
    """What another host does when nobody seems to renew the claim."""
    file = ClaimFile(str(path))
    claim = file.read()
    assert claim is not None
    changed = {**claim.words, "host": "other", "address": "192.0.2.7", **words}
    assert file.take(claim_file.new_claim(changed), claim)
    file.release()


def test_whose_file_was_taken_over_follows(holder: SharedFile, tmp_path: Path) -> None:
    async def run() -> object:
        lease = await claimed(holder)
        take_over(tmp_path / "a", port=29500)
        seen = await asyncio.wait_for(holder.read(served=True), LIMIT)
        assert lease.bind.host == "127.0.0.1"
        return seen

    assert asyncio.run(run()) == Leader(Endpoint("192.0.2.7", 29500))


def test_a_file_that_another_job_took_costs_this_one_no_master(
    holder: SharedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asyncio.Queue[str]()
    monkeypatch.setattr(holder, "_warn", said.put_nowait)

    async def run() -> object:
        await claimed(holder)
        reading = asyncio.ensure_future(holder.read(served=True))
        take_over(tmp_path / "a", job="another")
        for _ in range(3):
            assert await said.get() == "another job has started with that file (another)"
            assert not reading.done()
        take_over(tmp_path / "a", job="the-job", port=29501)
        return await reading

    found = asyncio.run(asyncio.wait_for(run(), LIMIT))
    assert found == Leader(Endpoint("192.0.2.7", 29501))


def test_who_lost_the_race_for_the_file_asks_by_the_winners_token(
    holder: SharedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had minted a token of its own for the claim that did not come about."""
    shown = asyncio.Queue[str]()

    async def get_status(where: Endpoint, limit: float, *, token: str, tls: object) -> None:
        shown.put_nowait(token)
        raise LinkError("nobody is there yet")

    monkeypatch.setattr(shared_file, "get_status", get_status)

    async def run() -> None:
        with closing(shared(tmp_path / "a")) as late:
            assert await late.read(served=False) == VACANT
            await claimed(holder)
            assert await late.take() is None
            reading = asyncio.ensure_future(late.read(served=False))
            assert await shown.get() == reader_token(holder.identity.token)
            reading.cancel()

    asyncio.run(asyncio.wait_for(run(), LIMIT))


def test_a_taken_port_moves_the_claim(holder: SharedFile, tmp_path: Path) -> None:
    async def run() -> None:
        first = await claimed(holder)
        before = json.loads((tmp_path / "a").read_text().splitlines()[0])
        assert await holder.move(first, "its port is taken") == VACANT
        second = await holder.take()
        assert second is not None
        after = json.loads((tmp_path / "a").read_text().splitlines()[0])
        assert first.bind.port < second.bind.port == after["words"]["port"]
        assert before["holder"] != after["holder"]
        assert before["words"]["token"] == after["words"]["token"]
        assert claim_file.ClaimFile(str(tmp_path / "a")).read() is not None

    asyncio.run(run())


# ---------------------------------------------------------------- an endpoint


def test_an_address_that_is_taken_is_another_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds it taken follows; it is free again, and no master has answered: take it."""

    async def run(registry: EndpointRegistry, taken: socket.socket) -> None:
        there = Endpoint(*taken.getsockname())
        assert await registry.read(served=False) == Leader(there)
        taken.close()
        assert await registry.read(served=False) == VACANT
        lease = await registry.take()
        assert lease == Lease(there)
        assert await registry.move(lease, "its port is taken") == Leader(there)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = Place("elastic", "127.0.0.1", taken.getsockname()[1])
        asyncio.run(run(EndpointRegistry(launched({"max_nodes": 2}), where, "the-job"), taken))


def test_only_a_killed_masters_address_is_taken_once_one_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that exited by itself has seen the end of the job."""

    async def run(registry: EndpointRegistry, taken: socket.socket) -> None:
        killed, looks = asyncio.Event(), asyncio.Queue[object]()
        loop = asyncio.get_running_loop()

        def was_killed(*what: object) -> bool:
            loop.call_soon_threadsafe(looks.put_nowait, what)
            return killed.is_set()

        monkeypatch.setattr(endpoint.user_folder, "was_killed", was_killed)
        await registry.read(served=False)
        taken.close()
        reading = asyncio.ensure_future(registry.read(served=True))
        for _ in range(4):
            await looks.get()
            assert not reading.done()
        killed.set()
        assert await asyncio.wait_for(reading, LIMIT) == VACANT

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = Place("elastic", "127.0.0.1", taken.getsockname()[1])
        asyncio.run(run(EndpointRegistry(launched({"max_nodes": 2}), where, "the-job"), taken))


def test_nobody_else_can_host_a_static_jobs_master() -> None:
    async def run() -> None:
        where = Place("static", "127.0.0.1", 1)
        registry = EndpointRegistry(launched(node_rank=0), where, "the-job")
        assert await registry.read(served=False) == VACANT
        lease = await registry.take()
        assert lease is not None
        assert lease.proxy == Endpoint("127.0.0.1", 1)
        with pytest.raises(HostError, match="its port is taken"):
            await registry.move(lease, "its port is taken")

    asyncio.run(run())


def test_an_open_job_takes_the_next_free_port() -> None:
    async def run() -> None:
        registry = EndpointRegistry(launched(), Place("open", "127.0.0.1", 1), "the-job")
        assert await registry.read(served=False) == VACANT
        lease = await registry.take()
        assert lease == Lease(Endpoint("127.0.0.1", 1))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            before = Lease(Endpoint("127.0.0.1", taken.getsockname()[1] - 1))
            assert await registry.move(before, "its port is taken") == VACANT
            moved = await registry.take()
            assert moved is not None
            assert moved.bind.port > taken.getsockname()[1]

    asyncio.run(run())


# ---------------------------------------------------------------- the rendezvous


class Scripted:
    """A registry that says what the test puts into it, and notes what it is asked."""

    pushes = False
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.says: asyncio.Queue[Leader | Vacant] = asyncio.Queue()
        self.takes: asyncio.Queue[Lease | None] = asyncio.Queue()
        self.asked: list[str] = []
        self.news = asyncio.Event()

    def note(self, asked: str) -> None:
        self.asked.append(asked)
        self.news.set()

    async def read(self, *, served: bool) -> Leader | Vacant:
        self.note(f"read {served}")
        return await self.says.get()

    async def take(self) -> Lease | None:
        self.note("take")
        lease = await self.takes.get()
        self.takes.task_done()
        return lease

    async def move(self, lease: Lease, why: str) -> Leader | Vacant:
        raise AssertionError

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        self.note(f"leave {job_over} {master_stays}")

    def why_no_leader(self) -> str:
        return "nobody leads"


class Searching:
    """A rendezvous over a scripted registry."""

    def __init__(self, **spec: object) -> None:
        self.said: list[str] = []
        self.met = 0
        where = Place("elastic", "127.0.0.1", 1)
        launch = launched({"max_nodes": 2, **spec})
        node = node_context(launch, place=where, fatal=self.said.append)
        self.registry = Scripted()
        self.rendezvous = NodeRendezvous(node, self._met, self.registry)

    def _met(self) -> None:
        self.met += 1

    async def asked(self, *wanted: str) -> None:
        while self.registry.asked != list(wanted):
            await self.registry.news.wait()
            self.registry.news.clear()


def test_the_registry_is_read_only_while_no_master_answers() -> None:
    async def run(one: Searching) -> None:
        there = Endpoint("192.0.2.1", 5)
        one.registry.says.put_nowait(Leader(there))
        await one.rendezvous.settle(None)
        assert (one.rendezvous.dial, one.met) == (there, 1)
        await one.asked("read False", "read False")
        one.rendezvous.on_link_event(LinkBack())
        one.registry.says.put_nowait(Leader(Endpoint("192.0.2.2", 6)))  # nobody reads it now
        for _ in range(5):
            await asyncio.sleep(0)
        assert one.rendezvous.dial == there
        one.rendezvous.on_link_event(LinkLost("closed"))
        await one.asked("read False", "read False", "read True", "read True")
        assert (one.rendezvous.dial, one.met) == (Endpoint("192.0.2.2", 6), 2)
        await one.rendezvous.close(job_over=True)
        assert one.registry.asked[-1] == "leave True False"

    asyncio.run(asyncio.wait_for(run(Searching()), LIMIT))


def test_a_link_that_is_back_interrupts_no_take() -> None:
    """Half of it may have happened: somebody has to answer for a claim that was made."""

    async def run(one: Searching) -> None:
        one.registry.says.put_nowait(VACANT)
        settling = asyncio.ensure_future(one.rendezvous.settle(None))
        await one.asked("read False", "take")
        one.rendezvous.on_link_event(LinkBack())
        one.registry.takes.put_nowait(None)
        await one.registry.takes.join()
        one.rendezvous.on_link_event(LinkLost("closed"))
        await one.asked("read False", "take", "read True")
        settling.cancel()
        await one.rendezvous.close(job_over=False)

    asyncio.run(asyncio.wait_for(run(Searching()), LIMIT))


def test_who_finds_no_leader_in_time_says_why() -> None:
    async def run(one: Searching) -> None:
        with pytest.raises(HostError, match=r"nobody leads, for 0\.01 s"):
            await one.rendezvous.settle(None)
        await one.rendezvous.close(job_over=False)

    asyncio.run(asyncio.wait_for(run(Searching(join_timeout=0.01)), LIMIT))
