"""Which agent starts a master, with a real etcd and no master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from elasticrun.agent.rendezvous import etcd as registries
from elasticrun.agent.rendezvous.etcd import EtcdRegistry
from elasticrun.agent.rendezvous.registry import VACANT, Ended, Leader
from elasticrun.config import MasterPlan, Place
from elasticrun.wire.messages import End
from elasticrun.wire.rpc import etcd, protobuf
from elasticrun.wire.rpc.etcd_place import Keys, LeaderKey, parse_place
from elasticrun.wire.types import Endpoint
from tests.agent.configs import JOB, launched
from tests.etcd.server import EtcdServer
from tests.harness import LIMIT

KEYS = Keys("the-job")


@asynccontextmanager
async def registry(server: EtcdServer) -> AsyncIterator[EtcdRegistry]:
    plan = MasterPlan(store=server.url)
    launch = launched({"max_nodes": 2}, master=plan, local_addr="127.0.0.1")
    made = EtcdRegistry(launch, Place("etcd"), JOB)
    try:
        yield made
    finally:
        await made.leave(job_over=False, master_stays=False)


@asynccontextmanager
async def client(server: EtcdServer) -> AsyncIterator[etcd.Etcd]:
    made = etcd.Etcd(parse_place(server.url))
    try:
        yield made
    finally:
        await made.close()


def leader(holder: str, port: int) -> bytes:
    return LeaderKey("127.0.0.1", port, holder, "nonce").to_bytes()


def test_one_candidate_at_a_time_and_the_next_when_it_has_left(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries, "CANDIDATE_TTL", 600)  # no stall outlasts it

    async def run() -> None:
        async with registry(etcd_server) as one:
            assert await one.read(served=False) == VACANT
            async with registry(etcd_server) as two:
                assert await two.read(served=False) == VACANT
                assert await two.take() is not None
                assert await one.take() is None
                assert await one.read(served=False) == VACANT
                assert await one.take() is None
            while await one.take() is None:
                assert await one.read(served=False) == VACANT

    asyncio.run(asyncio.wait_for(run(), LIMIT))


def test_a_node_with_a_master_hears_only_that_it_leads_no_more(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own leadership is no news, and it releases the candidate key once it leads, long before
    the lease ends."""
    monkeypatch.setattr(registries, "CANDIDATE_TTL", 600)

    async def run() -> None:
        async with registry(etcd_server) as one, client(etcd_server) as other:
            assert await one.read(served=False) == VACANT
            lease = await one.take()
            assert lease is not None
            assert lease.in_etcd is not None
            assert lease.bind.host == lease.in_etcd.advertise == "127.0.0.1"
            reading = asyncio.ensure_future(one.read(served=False))
            key = etcd.put(KEYS.master, leader(lease.in_etcd.holder, 5))
            await other.txn((), (key,))
            async for keys in other.follow(KEYS.lead):
                if KEYS.candidate not in keys:
                    break
            assert not reading.done()
            await other.txn((), (etcd.put(KEYS.master, leader("another", 6)),))
            assert await reading == Leader(Endpoint("127.0.0.1", 6))

    asyncio.run(asyncio.wait_for(run(), LIMIT))


def test_an_end_that_etcd_remembers_is_told_also_to_the_host(etcd_server: EtcdServer) -> None:
    async def run() -> None:
        async with registry(etcd_server) as one, client(etcd_server) as other:
            assert await one.read(served=False) == VACANT
            assert await one.take() is not None
            end = End(exit_code=1, reason="the job has failed", failures=())
            outcome = etcd.put(KEYS.outcome, protobuf.order_to_wire(end))
            await other.txn((), (outcome,))
            assert await one.read(served=False) == Ended(end)

    asyncio.run(asyncio.wait_for(run(), LIMIT))
