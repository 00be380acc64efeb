"""Leadership and record against a real etcd: who leads decides, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from elasticrun.config import EXIT_NOT_LEADING, EXIT_SAVED, Identity, MasterConfig, MasterPlan
from elasticrun.core.persisted import Facts
from elasticrun.master import etcd_store
from elasticrun.master.etcd_store import EtcdStore, boot_clock, facts_from_bytes, facts_to_bytes
from elasticrun.master.file_store import MAX_CRASHES
from elasticrun.master.store import StoreRefused
from elasticrun.wire.messages import End, Failure, FailureKind
from elasticrun.wire.rpc import etcd, protobuf
from elasticrun.wire.rpc.etcd_place import Keys, parse_place
from tests import aio
from tests.etcd.server import EtcdServer
from tests.harness import LIMIT
from tests.master.facts import facts

pytestmark = pytest.mark.slow

KEYS = Keys("job")

LONG = 60
"""Seconds of a lease that no stall of the machine or of its disk outlasts."""

TIMED = 10
"""The same of a lease whose end is waited for."""

BOOM = Failure("h", 3, 1, 77, 0, 5, FailureKind.SCRIPT, "it broke", "Traceback ...", "")


@pytest.fixture(autouse=True)
def _a_lease_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses, is refused or gives up because something stood still for a while."""
    ends = (
        test_a_lost_master_is_succeeded_when_its_lease_is_over,
        test_nothing_is_done_while_etcd_stands_still,
    )
    monkeypatch.setattr(etcd_store, "LEADER_TTL", TIMED if request.function in ends else LONG)
    for limit in ("CAMPAIGN_LIMIT", "CLOSE_LIMIT", "ETCD_CALL_LIMIT"):
        monkeypatch.setattr(etcd_store, limit, LIMIT)


class Clock:
    """The real clock, which a test can move on: as long as a process was stopped."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return boot_clock() + self.ahead


class Stage:
    """Masters of one job, without masters: their stores alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stores: list[EtcdStore] = []
        self.etcd = etcd.Etcd(parse_place(url), limit=LIMIT)

    def store(self, port: int = 1, holder: str = "", clock: Any = boot_clock) -> EtcdStore:
        plan = MasterPlan(store=self.url)
        config = MasterConfig(Identity("job"), "h", port, None, plan, holder=holder)
        made = EtcdStore(config, port, clock)
        self.stores.append(made)
        return made

    async def leader(self, *args: Any, **how: Any) -> EtcdStore:
        """A store that leads, when whoever led before it has given up or run out."""
        while True:
            made = self.store(*args, **how)
            try:
                await made.load()
            except StoreRefused:
                async for there in self.etcd.follow(KEYS.lead):
                    if KEYS.master not in there:
                        break
            else:
                return made

    async def there(self) -> dict[str, etcd.KeyValue]:
        return {item.key: item for item in (await self.etcd.read(KEYS.base)).items}

    async def recorded(self) -> Facts:
        return facts_from_bytes((await self.there())[KEYS.record].value)

    async def close(self) -> None:
        for store in self.stores:
            await store.close()
        await self.etcd.close()

    @staticmethod
    async def vanish(store: EtcdStore) -> None:
        """Its process is gone: nothing is renewed, and nothing given back."""
        for task in store._tasks:
            task.cancel()
        await asyncio.gather(*store._tasks, return_exceptions=True)
        await store._etcd.close()


@pytest.fixture
def stage(etcd_server: EtcdServer) -> Iterator[Stage]:
    """Stores that campaign at one server."""

    async def made() -> Stage:
        return Stage(etcd_server.url)

    found = aio.run(made())
    yield found
    aio.run(found.close())


async def write(store: EtcdStore, what: Facts) -> bool:
    """Whether it became durable; False when the leadership was lost instead."""
    done = asyncio.Event()
    store.write(what, done.set)
    waits = (asyncio.ensure_future(done.wait()), asyncio.ensure_future(asyncio.shield(store.lost)))
    await asyncio.wait(waits, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    assert done.is_set() or store.lost.done(), "neither written nor lost"
    return done.is_set()


async def test_one_of_many_leads(stage: Stage) -> None:
    stores = [stage.store(port) for port in range(1, 9)]
    assert not any(store.leads() for store in stores)
    outcomes = await asyncio.gather(*(x.load() for x in stores), return_exceptions=True)
    (winner,) = (x for x, outcome in zip(stores, outcomes, strict=True) if outcome is None)
    refused = [outcome for outcome in outcomes if isinstance(outcome, StoreRefused)]
    assert len(refused) == 7
    assert {str(r) for r in refused} == {f"the master at h:{winner._own_key.port} leads this job"}
    assert {r.exit_code for r in refused} == {EXIT_NOT_LEADING}
    assert [x for x in stores if x.leads()] == [winner]
    assert winner.term == (await stage.there())[KEYS.master].created


async def test_the_next_one_knows_what_was_decided(stage: Stage) -> None:
    first = stage.store()
    assert await first.load() is None
    for number in (1, 2, 3):
        assert await write(first, facts(number))
    await first.close()
    second = stage.store()
    assert await second.load() == facts(3)
    assert second.term > first.term
    assert not first.leads()


async def test_newer_facts_take_the_place_of_older_ones(stage: Stage) -> None:
    """A hundred in one turn are a few writes, and each is told done, in their order."""
    store = await stage.leader()
    before = (await stage.etcd.read(KEYS.base)).revision
    done: list[int] = []
    last = asyncio.Event()
    for number in range(1, 101):
        store.write(facts(number), lambda number=number: done.append(number))  # type: ignore[misc]
    store.write(facts(101), last.set)
    await asyncio.wait_for(last.wait(), LIMIT)
    assert done == list(range(1, 101))
    assert await stage.recorded() == facts(101)
    assert (await stage.etcd.read(KEYS.base)).revision - before < 10


async def test_a_lost_master_is_succeeded_when_its_lease_is_over(stage: Stage) -> None:
    first = await stage.leader()
    assert await write(first, facts(1))
    await stage.vanish(first)
    second = await stage.leader(2)
    assert second.term > first.term
    assert await stage.recorded() == facts(1)


async def test_the_same_agents_next_master_waits_for_no_lease(stage: Stage) -> None:
    """kill -9 of the master alone: its agent has seen it dead. Another agent's has to wait."""
    first = await stage.leader(holder="agent-1")
    assert await write(first, facts(1))
    await stage.vanish(first)
    with pytest.raises(StoreRefused):
        await stage.store(holder="agent-2").load()
    with pytest.raises(StoreRefused):
        await stage.store().load()
    second = stage.store(holder="agent-1")
    assert await second.load() == facts(1)
    assert second.leads()
    assert second.term > first.term


async def test_a_master_that_was_stopped_past_its_lease(stage: Stage) -> None:
    """It wakes in the middle of deciding: it may not speak, its decision is void, and it knows so
    before anything else happens in it."""
    clock = Clock()
    first = await stage.leader(clock=clock)
    assert await write(first, facts(1))
    tasks = first._tasks
    clock.ahead += LONG  # from here on it has slept
    assert not first.leads()
    assert "it sends no more orders" in first.lost.result()
    clock.ahead = 0.0
    assert not first.leads(), "nothing gives it back"
    told: list[int] = []
    first.write(facts(2), lambda: told.append(2))
    await asyncio.wait(tasks, timeout=LIMIT)
    assert told == []
    assert await stage.recorded() == facts(1)


async def test_a_decision_that_another_leader_overtook(stage: Stage) -> None:
    """The fence that needs no clock: it believes that it leads, and its transaction fails."""
    first = await stage.leader()
    assert await write(first, facts(1))
    await stage.etcd.txn((), (etcd.delete(KEYS.master),))
    second = await stage.leader(2)
    assert await write(second, facts(5))
    if not first.lost.done():  # a renewal may have told it already
        assert not await write(first, facts(2))
    assert not first.leads()
    assert await stage.recorded() == facts(5)


async def test_a_renewal_tells_who_has_lost_its_key(stage: Stage) -> None:
    first = await stage.leader()
    await stage.etcd.txn((), (etcd.delete(KEYS.master),))
    assert "another master may lead" in await asyncio.wait_for(first.lost, LIMIT)
    assert not first.leads()


async def test_nothing_is_done_while_etcd_stands_still(
    stage: Stage, etcd_server: EtcdServer
) -> None:
    """A write is not `done` before etcd has said so; who cannot prove that it leads gives up."""
    store = await stage.leader()
    assert await write(store, facts(1))
    etcd_server.stop()
    try:
        assert not await write(store, facts(2))
        assert "it sends no more orders" in store.lost.result()
    finally:
        etcd_server.go_on()


async def test_a_short_absence_of_etcd_costs_nothing(stage: Stage, etcd_server: EtcdServer) -> None:
    """What was to be written while it was away is written when it is back; the lease still holds,
    by a clock that this test keeps still meanwhile."""
    still = boot_clock()
    store = await stage.leader(clock=lambda: still)
    await asyncio.to_thread(etcd_server.kill)
    done = asyncio.Event()
    store.write(facts(7), done.set)
    await asyncio.to_thread(etcd_server.start)
    await asyncio.wait_for(done.wait(), LIMIT)
    assert store.leads()
    assert await stage.recorded() == facts(7)


async def test_the_outcome_stays_and_the_leadership_goes(stage: Stage) -> None:
    end = End(7, "rank 3 failed", (BOOM,))
    first = await stage.leader()
    assert await write(first, facts(1))
    assert await write(first, facts(1, outcome=end))
    await first.close()
    there = await stage.there()
    assert set(there) == {KEYS.outcome, KEYS.record}
    assert protobuf.order_from_wire(there[KEYS.outcome].value) == end
    assert there[KEYS.outcome].lease == there[KEYS.record].lease != 0
    second = stage.store()
    found = await second.load()
    assert found.outcome == end


async def test_a_job_that_was_saved_may_soon_begin_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 30 s; long enough to write under it
    monkeypatch.setattr(etcd_store, "SAVED_OUTCOME_TTL", TIMED)

    first = await stage.leader()
    assert await write(first, facts(1, outcome=End(EXIT_SAVED, "every node has left", ())))
    await first.close()
    async with asyncio.timeout(LIMIT):
        async for there in stage.etcd.follow(KEYS.base):
            if not there:
                break
    assert await stage.store().load() is None


async def test_a_record_that_is_none(stage: Stage) -> None:
    """Damaged, or of another version: the agents are asked instead, and it is written anew."""
    for data in (b"", b"elasticrun facts 9\n{}", facts_to_bytes(facts(1))[:-5]):
        await stage.etcd.txn((), (etcd.put(KEYS.record, data),))
        store = stage.store()
        assert await store.load() is None
        assert await write(store, facts(3))
        assert await stage.recorded() == facts(3)
        await store.close()


async def test_masters_that_fail_on_a_record_in_a_row(stage: Stage) -> None:
    """After the third the record is not loaded any more: the agents know how things stand."""
    for crashes in range(MAX_CRASHES + 1):
        store = stage.store()
        found = await store.load()
        assert (found is None) == (crashes in (0, MAX_CRASHES)), crashes
        if crashes == 0:
            assert await write(store, facts(1))
        await store.crashed()
        await store.close()
    # The count has begun anew with the record that is written next.
    store = stage.store()
    assert await store.load() is not None


async def test_a_leader_of_another_version_is_respected(stage: Stage) -> None:
    await stage.etcd.txn((), (etcd.put(KEYS.master, b'{"version": 9}'),))
    with pytest.raises(StoreRefused, match="another version"):
        await stage.store().load()
    assert KEYS.master in await stage.there()


async def test_ten_thousand_nodes_fit(stage: Stage) -> None:
    large = facts(1, nodes=10_000)
    store = await stage.leader()
    assert await write(store, large)
    await store.close()
    assert await stage.store().load() == large


async def test_a_record_that_fits_nowhere_is_a_sentence(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "MAX_BYTES", 1000)

    store = await stage.leader()
    assert not await write(store, facts(1, nodes=1000))
    assert "is more than etcd takes" in store.lost.result()


async def test_an_etcd_that_is_not_there(
    stage: Stage, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticrun.master.etcd_store.CAMPAIGN_LIMIT", 0.5)
    etcd_server.kill()

    with pytest.raises(StoreRefused, match=f"{etcd_server.url} does not answer"):
        await stage.store().load()


def test_what_unpacks_without_end_is_refused() -> None:
    import zlib

    bomb = etcd_store.HEAD + zlib.compress(bytes(etcd_store.MAX_TEXT + 1))
    with pytest.raises(ValueError, match="truncated"):
        facts_from_bytes(bomb)
