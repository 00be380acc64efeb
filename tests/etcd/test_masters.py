"""Masters as processes, with their leadership in a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from elasticrun.config import EXIT_NOT_LEADING, Identity, MasterPlan
from elasticrun.wire import messages as m
from elasticrun.wire.rpc import etcd
from elasticrun.wire.rpc.channel import LinkError, attend, open_channel
from elasticrun.wire.rpc.etcd_place import Keys, leader_from_bytes, parse_place
from elasticrun.wire.types import Endpoint
from tests.certificates import Authority
from tests.etcd.server import EtcdServer, patient_masters
from tests.harness import LIMIT
from tests.master.people import SPEC, enter, hear, hello
from tests.master.test_process import Process, started

pytestmark = pytest.mark.slow

KEYS = Keys("job")
HASTY = structs.replace(SPEC, last_call_timeout=1.0)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder of this test's own, and masters that are not in a hurry."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, value in patient_masters().items():
        monkeypatch.setenv(name, value)


async def until_nobody_leads(url: str) -> None:
    """As an agent hears of it: by following."""
    client = etcd.Etcd(parse_place(url))
    async with asyncio.timeout(LIMIT):
        following = client.follow(KEYS.lead)
        async for there in following:
            if KEYS.master not in there:
                break
        await following.aclose()  # type: ignore[attr-defined]
    await client.close()


class Agent:
    """A node that attends one master and remembers all that it is told."""

    def __init__(self, master: Process) -> None:
        self._channel = open_channel(master.endpoint)
        self.stream = attend(self._channel)
        self.told: list[m.Order] = []
        self.first_order, self.ended = asyncio.Event(), asyncio.Event()

    async def join(self, said: m.Hello) -> m.Welcome:
        answer = await enter(self.stream, said)
        assert isinstance(answer, m.Welcome)
        self._reading = asyncio.create_task(self._read())
        await self.stream.send(m.Join(Endpoint("127.0.0.1", 4711)))
        return answer

    async def _read(self) -> None:
        with contextlib.suppress(LinkError):
            while (order := await self.stream.receive()) is not None:
                self.told.append(order)
                self.first_order.set()
        self.ended.set()

    async def close(self) -> None:
        self.stream.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()


async def test_one_that_was_stopped_past_its_lease_says_nothing_more(
    etcd_server: EtcdServer,
) -> None:
    """It is stopped with a decision at hand (last call is about to end) and a beat unanswered; it
    wakes when another leads: not one order more leaves it, and it ends."""
    with started(launch=MasterPlan(store=etcd_server.url), spec=HASTY) as first:
        old = Agent(first)
        was = await old.join(hello("n0", spec=HASTY))
        await asyncio.wait_for(old.first_order.wait(), LIMIT)  # that last call has begun
        first.popen.send_signal(signal.SIGSTOP)
        await old.stream.send(m.Beat(1))
        await until_nobody_leads(etcd_server.url)
        with started(launch=MasterPlan(store=etcd_server.url), spec=HASTY) as second:
            new = Agent(second)
            now = await new.join(hello("n0", spec=HASTY, last_term=was.term))
            assert now.term > was.term
            before = list(old.told)
            first.popen.send_signal(signal.SIGCONT)
            await asyncio.wait_for(old.ended.wait(), LIMIT)
            assert old.told == before
            assert not [order for order in before if isinstance(order, m.Echo)]
            code, said = await asyncio.to_thread(first.ended)
            assert code == EXIT_NOT_LEADING
            assert "it sends no more orders" in said
            await new.close()
        await old.close()


def test_the_second_one_ends_with_a_sentence_and_a_code(etcd_server: EtcdServer) -> None:
    store: dict[str, Any] = {"launch": MasterPlan(store=etcd_server.url)}
    with started(**store) as first, started(**store) as second:
        code, said = second.ended()
        assert code == second.answer["exit_code"] == EXIT_NOT_LEADING
        assert second.answer["error"] == f"the master at {first.endpoint} leads this job"
        assert said == ""
        assert first.status().job_id == "job"


async def test_a_round_is_on_record_before_it_is_told(etcd_server: EtcdServer) -> None:
    """While etcd stands still the round that is decided is told to nobody."""
    spec = structs.replace(SPEC, max_nodes=1)  # the first to join makes it whole
    with started(launch=MasterPlan(store=etcd_server.url), spec=spec) as master:
        channel = open_channel(master.endpoint)
        stream = attend(channel)
        assert isinstance(await enter(stream, hello("n0", spec=spec)), m.Welcome)
        etcd_server.stop()
        try:
            await stream.send(m.Join(Endpoint("127.0.0.1", 4711)))
            told = []
            with contextlib.suppress(LinkError):
                while (order := await hear(stream)) is not None:
                    told.append(order)
            assert not [order for order in told if isinstance(order, m.Start)]
            code, _ = await asyncio.to_thread(master.ended)
            assert code == EXIT_NOT_LEADING
        finally:
            etcd_server.go_on()
        await channel.close()


async def test_the_leader_names_the_address_that_it_was_given(etcd_server: EtcdServer) -> None:
    named = {"advertise": "node-7.example", "holder": "me"}
    with started(launch=MasterPlan(store=etcd_server.url), **named) as master:
        client = etcd.Etcd(parse_place(etcd_server.url), limit=LIMIT)
        (item,) = (await client.txn((), (etcd.get(KEYS.master),))).items
        await client.close()
        leader = leader_from_bytes(item.value)
        assert leader.endpoint == Endpoint("node-7.example", master.endpoint.port)
        assert leader.holder == "me"


async def test_etcd_behind_tls(etcd_server: EtcdServer, tmp_path: Path) -> None:
    """`etcds://` with --tls-ca and a certificate of our own, which the server asks for."""
    authority = Authority(tmp_path).create()
    theirs = authority.sign("etcd", "IP:127.0.0.1")
    ours = authority.sign("node", "IP:127.0.0.1")
    strangers = Authority(tmp_path, "other").create().sign("stranger", "IP:127.0.0.1")
    etcd_server.close()
    etcd_server.start(tls=theirs)
    url = etcd_server.url.replace("etcd://", "etcds://")

    async def campaign(limit: float = etcd.CALL_LIMIT, **files: str) -> None:
        client = etcd.Etcd(parse_place(url), limit=limit, **files)
        try:
            await client.txn((), (etcd.put("/x", b""),))
        finally:
            await client.close()

    await campaign(LIMIT, ca=ours.ca, cert=ours.cert, key=ours.key)
    with pytest.raises(etcd.EtcdSilent):
        await campaign(ca=ours.ca)
    with pytest.raises(etcd.EtcdSilent):
        await campaign(ca=strangers.ca, cert=ours.cert, key=ours.key)
    with started(launch=MasterPlan(store=url), identity=Identity("job", tls=ours)) as master:
        assert "port" in master.answer
