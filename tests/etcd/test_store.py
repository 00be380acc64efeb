"""Leadership and record against a real etcd: who leads decides, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elasticrun.config import EXIT_NOT_LEADING, EXIT_SAVED, MasterConfig
from elasticrun.core.persisted import Facts
from elasticrun.master import etcd_store
from elasticrun.master.etcd_store import EtcdStore, boot_clock, facts_from_bytes, facts_to_bytes
from elasticrun.master.records import StoreRefused
from elasticrun.master.sqlite_store import MAX_CRASHES
from elasticrun.wire.etcd_place import Keys, parse_place
from elasticrun.wire.messages import End, Failure, FailureKind
from elasticrun.wire.rpc import etcd, protobuf as codec
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
        config = MasterConfig(
            job_id="job", host="h", port=port, spec=None, master_store=self.url, holder=holder
        )
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

    async def there(self) -> dict[str, etcd.Item]:
        return {item.key: item for item in (await self.etcd.read(KEYS.base)).items}

    async def recorded(self) -> Facts:
        return facts_from_bytes((await self.there())[KEYS.record].value)

    @staticmethod
    async def vanish(store: EtcdStore) -> None:
        """Its process is gone: nothing is renewed, and nothing given back."""
        for task in store._tasks:
            task.cancel()
        await asyncio.gather(*store._tasks, return_exceptions=True)
        await store._etcd.close()


@contextlib.asynccontextmanager
async def stage(url: str) -> AsyncIterator[Stage]:
    made = Stage(url)
    try:
        yield made
    finally:
        for store in made.stores:
            await store.close(over=False)
        await made.etcd.close()


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


def run(server: EtcdServer, body: Callable[[Stage], Any]) -> None:
    async def whole() -> None:
        async with stage(server.url) as s:
            await body(s)

    aio.run(whole())


def test_one_of_many_leads(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        stores = [s.store(port) for port in range(1, 9)]
        assert not any(store.leads() for store in stores)
        outcomes = await asyncio.gather(*(x.load() for x in stores), return_exceptions=True)
        (winner,) = (x for x, outcome in zip(stores, outcomes, strict=True) if outcome is None)
        refused = [outcome for outcome in outcomes if isinstance(outcome, StoreRefused)]
        assert len(refused) == 7
        assert {str(r) for r in refused} == {f"the master at h:{winner._me.port} leads this job"}
        assert {r.exit_code for r in refused} == {EXIT_NOT_LEADING}
        assert [x for x in stores if x.leads()] == [winner]
        assert winner.term == (await s.there())[KEYS.master].created

    run(etcd_server, body)


def test_the_next_one_knows_what_was_decided(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        first = s.store()
        assert await first.load() is None
        for number in (1, 2, 3):
            assert await write(first, facts(number))
        await first.close(over=False)
        second = s.store()
        assert await second.load() == facts(3)
        assert second.term > first.term
        assert not first.leads()

    run(etcd_server, body)


def test_newer_facts_take_the_place_of_older_ones(etcd_server: EtcdServer) -> None:
    """A hundred in one turn are a few writes, and each is told done, in their order."""

    async def body(s: Stage) -> None:
        store = await s.leader()
        before = (await s.etcd.read(KEYS.base)).revision
        done: list[int] = []
        last = asyncio.Event()
        for number in range(1, 101):
            store.write(facts(number), lambda number=number: done.append(number))  # type: ignore[misc]
        store.write(facts(101), last.set)
        await asyncio.wait_for(last.wait(), LIMIT)
        assert done == list(range(1, 101))
        assert await s.recorded() == facts(101)
        assert (await s.etcd.read(KEYS.base)).revision - before < 10

    run(etcd_server, body)


def test_a_lost_master_is_succeeded_when_its_lease_is_over(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        first = await s.leader()
        assert await write(first, facts(1))
        await s.vanish(first)
        second = await s.leader(2)
        assert second.term > first.term
        assert await s.recorded() == facts(1)

    run(etcd_server, body)


def test_the_same_agents_next_master_waits_for_no_lease(etcd_server: EtcdServer) -> None:
    """kill -9 of the master alone: its agent has seen it dead. Another agent's has to wait."""

    async def body(s: Stage) -> None:
        first = await s.leader(holder="agent-1")
        assert await write(first, facts(1))
        await s.vanish(first)
        with pytest.raises(StoreRefused):
            await s.store(holder="agent-2").load()
        with pytest.raises(StoreRefused):
            await s.store().load()
        second = s.store(holder="agent-1")
        assert await second.load() == facts(1)
        assert second.leads()
        assert second.term > first.term

    run(etcd_server, body)


def test_a_master_that_was_stopped_past_its_lease(etcd_server: EtcdServer) -> None:
    """It wakes in the middle of deciding: it may not speak, its decision is void, and it knows so
    before anything else happens in it."""

    async def body(s: Stage) -> None:
        clock = Clock()
        first = await s.leader(clock=clock)
        assert await write(first, facts(1))
        tasks = first._tasks
        clock.ahead += LONG  # from here on it has slept
        assert not first.leads()
        assert "it orders nothing more" in first.lost.result()
        clock.ahead = 0.0
        assert not first.leads(), "nothing gives it back"
        told: list[int] = []
        first.write(facts(2), lambda: told.append(2))
        await asyncio.wait(tasks, timeout=LIMIT)
        assert told == []
        assert await s.recorded() == facts(1)

    run(etcd_server, body)


def test_a_decision_that_another_leader_overtook(etcd_server: EtcdServer) -> None:
    """The fence that needs no clock: it believes that it leads, and its transaction fails."""

    async def body(s: Stage) -> None:
        first = await s.leader()
        assert await write(first, facts(1))
        await s.etcd.txn((), (etcd.delete(KEYS.master),))
        second = await s.leader(2)
        assert await write(second, facts(5))
        if not first.lost.done():  # a renewal may have told it already
            assert not await write(first, facts(2))
        assert not first.leads()
        assert await s.recorded() == facts(5)

    run(etcd_server, body)


def test_a_renewal_tells_who_has_lost_its_key(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        first = await s.leader()
        await s.etcd.txn((), (etcd.delete(KEYS.master),))
        assert "another master may lead" in await asyncio.wait_for(first.lost, LIMIT)
        assert not first.leads()

    run(etcd_server, body)


def test_nothing_is_done_while_etcd_stands_still(etcd_server: EtcdServer) -> None:
    """A write is not `done` before etcd has said so; who cannot prove that it leads gives up."""

    async def body(s: Stage) -> None:
        store = await s.leader()
        assert await write(store, facts(1))
        etcd_server.stop()
        try:
            assert not await write(store, facts(2))
            assert "it orders nothing more" in store.lost.result()
        finally:
            etcd_server.go_on()

    run(etcd_server, body)


def test_a_short_absence_of_etcd_costs_nothing(etcd_server: EtcdServer) -> None:
    """What was to be written while it was away is written when it is back; the lease still holds,
    by a clock that this test keeps still meanwhile."""

    async def body(s: Stage) -> None:
        still = boot_clock()
        store = await s.leader(clock=lambda: still)
        await asyncio.to_thread(etcd_server.kill)
        done = asyncio.Event()
        store.write(facts(7), done.set)
        await asyncio.to_thread(etcd_server.start)
        await asyncio.wait_for(done.wait(), LIMIT)
        assert store.leads()
        assert await s.recorded() == facts(7)

    run(etcd_server, body)


def test_the_outcome_stays_and_the_leadership_goes(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        end = End(7, "rank 3 failed", (BOOM,))
        first = await s.leader()
        assert await write(first, facts(1))
        assert await write(first, facts(1, outcome=end))
        await first.close(over=True)
        there = await s.there()
        assert set(there) == {KEYS.outcome, KEYS.record}
        assert codec.order_from_wire(there[KEYS.outcome].value) == end
        assert there[KEYS.outcome].lease == there[KEYS.record].lease != 0
        second = s.store()
        found = await second.load()
        assert found is not None
        assert found.outcome == end

    run(etcd_server, body)


def test_a_job_that_was_saved_may_soon_begin_again(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "SAVED_KEPT", TIMED)  # 30 s; long enough to write under it

    async def body(s: Stage) -> None:
        first = await s.leader()
        assert await write(first, facts(1, outcome=End(EXIT_SAVED, "every node has left", ())))
        await first.close(over=True)
        async with asyncio.timeout(LIMIT):
            async for there in s.etcd.follow(KEYS.base):
                if not there:
                    break
        assert await s.store().load() is None

    run(etcd_server, body)


def test_a_record_that_is_none(etcd_server: EtcdServer) -> None:
    """Damaged, or of another version: the agents are asked instead, and it is written anew."""

    async def body(s: Stage) -> None:
        for data in (b"", b"elasticrun facts 9\n{}", facts_to_bytes(facts(1))[:-5]):
            await s.etcd.txn((), (etcd.put(KEYS.record, data),))
            store = s.store()
            assert await store.load() is None
            assert await write(store, facts(3))
            assert await s.recorded() == facts(3)
            await store.close(over=False)

    run(etcd_server, body)


def test_masters_that_fail_on_a_record_in_a_row(etcd_server: EtcdServer) -> None:
    """After the third the record is not loaded any more: the agents know how things stand."""

    async def body(s: Stage) -> None:
        for crashes in range(MAX_CRASHES + 1):
            store = s.store()
            found = await store.load()
            assert (found is None) == (crashes in (0, MAX_CRASHES)), crashes
            if crashes == 0:
                assert await write(store, facts(1))
            await store.crashed()
            await store.close(over=False)
        # The count has begun anew with the record that is written next.
        store = s.store()
        assert await store.load() is not None

    run(etcd_server, body)


def test_a_leader_of_another_version_is_respected(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        await s.etcd.txn((), (etcd.put(KEYS.master, b'{"version": 9}'),))
        with pytest.raises(StoreRefused, match="another version"):
            await s.store().load()
        assert KEYS.master in await s.there()

    run(etcd_server, body)


def test_ten_thousand_nodes_fit(etcd_server: EtcdServer) -> None:
    async def body(s: Stage) -> None:
        large = facts(1, nodes=10_000)
        store = await s.leader()
        assert await write(store, large)
        await store.close(over=False)
        assert await s.store().load() == large

    run(etcd_server, body)


def test_a_record_that_fits_nowhere_is_a_sentence(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "MAX_BYTES", 1000)

    async def body(s: Stage) -> None:
        store = await s.leader()
        assert not await write(store, facts(1, nodes=1000))
        assert "is more than etcd takes" in store.lost.result()

    run(etcd_server, body)


def test_an_etcd_that_is_not_there(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticrun.master.etcd_store.CAMPAIGN_LIMIT", 0.5)
    etcd_server.kill()

    async def body(s: Stage) -> None:
        with pytest.raises(StoreRefused, match=f"{etcd_server.url} does not answer"):
            await s.store().load()

    run(etcd_server, body)


def test_what_unpacks_without_end_is_refused() -> None:
    import zlib

    bomb = etcd_store.HEAD + zlib.compress(bytes(etcd_store.MAX_TEXT + 1))
    with pytest.raises(ValueError, match="does not end"):
        facts_from_bytes(bomb)
