"""The client against a real etcd: transactions, leases, following, servers in turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elasticrun.wire.rpc import etcd
from elasticrun.wire.rpc.etcd_place import EtcdPlace, parse_place
from elasticrun.wire.types import Endpoint
from tests.etcd.server import EtcdServer, Relay
from tests.harness import LIMIT, free_port

pytestmark = pytest.mark.slow

JOB = "/elasticrun/v1/job/lead/"


@contextlib.asynccontextmanager
async def client(*places: str | int, limit: float = LIMIT) -> AsyncIterator[etcd.Etcd]:
    """A client of these servers (ports, or a URL)."""
    if isinstance(places[0], str):
        place = parse_place(places[0])
    else:
        place = EtcdPlace(tuple(Endpoint("127.0.0.1", int(port)) for port in places))
    made = etcd.Etcd(place, limit=limit)
    try:
        yield made
    finally:
        await made.close()


class Follower:
    """What `follow` says, to be waited for."""

    def __init__(self, of: etcd.Etcd, prefix: str = JOB) -> None:
        self.states: list[dict[str, bytes]] = []
        self.troubles: list[str] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(of, prefix))

    async def _run(self, of: etcd.Etcd, prefix: str) -> None:
        async for there in of.follow(prefix, self._trouble):
            self.states.append({key.removeprefix(prefix): i.value for key, i in there.items()})
            self._changed.set()

    def _trouble(self, sentence: str) -> None:
        self.troubles.append(sentence)
        self._changed.set()

    async def until(self, right: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT):
            while not right():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def test_a_transaction_decides_once(etcd_server: EtcdServer) -> None:
    async with client(etcd_server.url) as c:
        key = JOB + "master"
        free = (etcd.created_at(key, 0),)
        first = await c.txn(free, (etcd.put(key, b"one"),), (etcd.get(key),))
        again = await c.txn(free, (etcd.put(key, b"two"),), (etcd.get(key),))
        assert first.succeeded
        assert not again.succeeded
        (item,) = again.items
        assert (item.key, item.value, item.created) == (key, b"one", first.revision)
        ours = (etcd.created_at(key, first.revision),)
        assert (await c.txn(ours, (etcd.put(key, b"three"), etcd.put(JOB + "x", b"")))).succeeded
        # The same life of the key, with another value: still ours.
        assert (await c.txn(ours, (etcd.delete(key),))).succeeded
        # A new life is not.
        assert (await c.txn(free, (etcd.put(key, b"four"),))).succeeded
        assert not (await c.txn(ours, (etcd.put(key, b"five"),))).succeeded
        there = (await c.read(JOB)).items
        assert [(i.key, i.value) for i in there] == [(key, b"four"), (JOB + "x", b"")]


async def test_a_prefix_is_not_its_neighbour(etcd_server: EtcdServer) -> None:
    async with client(etcd_server.url) as c:
        for key in ("/a/b/", "/a/b/c", "/a/b0", "/a/b", "/a/bb/c", "/a/c"):
            await c.txn((), (etcd.put(key, b""),))
        assert [i.key for i in (await c.read("/a/b/")).items] == ["/a/b/", "/a/b/c"]


async def test_a_lease_takes_its_keys_with_it(etcd_server: EtcdServer) -> None:
    async def _renew_on(c: etcd.Etcd, lease: int) -> None:
        timer = asyncio.Event()
        while True:
            await c.renew(lease)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(timer.wait(), 0.2)

    async with client(etcd_server.url) as c:
        # so long that the first ones still stand when all is written, however slowly
        long, short, kept = await c.grant(600), await c.grant(20), await c.grant(20)
        renewing = asyncio.create_task(_renew_on(c, kept))
        for name, lease in (("short", short), ("kept", kept), ("long", long)):
            await c.txn((), (etcd.put(JOB + name, b"", lease),))
        follower = Follower(c)
        await follower.until(lambda: follower.states)
        assert set(follower.states[0]) == {"short", "kept", "long"}
        await follower.until(lambda: "short" not in follower.states[-1])
        assert {"kept", "long"} <= set(follower.states[-1])
        assert not await c.renew(short)
        assert await c.renew(kept)
        await c.revoke(long)
        await c.revoke(long)  # nothing to complain about
        await follower.until(lambda: set(follower.states[-1]) == {"kept"})
        renewing.cancel()
        await follower.end()


async def test_what_is_too_large_is_refused(etcd_server: EtcdServer) -> None:
    async with client(etcd_server.url) as c:
        with pytest.raises(etcd.EtcdRefused, match="too large"):
            await c.txn((), (etcd.put(JOB + "x", bytes(2_000_000)),))


async def test_a_follower_outlives_its_server(etcd_server: EtcdServer) -> None:
    """It says that etcd is away, once it is back reads afresh, and goes on from there."""
    async with client(etcd_server.url) as c:
        follower = Follower(c)
        await follower.until(lambda: follower.states)
        await c.txn((), (etcd.put(JOB + "x", b"1"),))
        await follower.until(lambda: follower.states[-1] == {"x": b"1"})
        await asyncio.to_thread(etcd_server.kill)
        await follower.until(lambda: follower.troubles[-1])
        assert etcd_server.url in follower.troubles[-1]
        with pytest.raises(etcd.EtcdSilent):
            await c.read(JOB)
        seen = len(follower.states)
        await asyncio.to_thread(etcd_server.start)
        await follower.until(lambda: len(follower.states) > seen)
        assert follower.states[-1] == {"x": b"1"}
        assert not follower.troubles[-1]
        await c.txn((), (etcd.put(JOB + "y", b"2"),))
        await follower.until(lambda: follower.states[-1] == {"x": b"1", "y": b"2"})
        await follower.end()


async def test_a_revision_that_is_compacted_away(etcd_server: EtcdServer) -> None:
    """A follower that was away for long is told that history is gone, and reads afresh."""
    async with client(etcd_server.url) as c:
        for number in range(5):
            answer = await c.txn((), (etcd.put(JOB + "x", b"%d" % number),))
        command = [*etcd_server.etcdctl, "compaction"]
        compact = [*command, str(answer.revision)]
        await asyncio.to_thread(subprocess.run, compact, check=True, capture_output=True)
        said = [events async for events in c._watch(JOB, 1)]
        assert [e for events in said for e in events] == []
        follower = Follower(c)
        await follower.until(lambda: follower.states)
        assert follower.states == [{"x": b"4"}]
        await follower.end()


async def test_servers_are_asked_in_turn(etcd_server: EtcdServer) -> None:
    """One that is down, one that takes connections and never answers, and one that serves."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        dead, black = free_port(), mute.getsockname()[1]
        # what is lost on the black one, and what the last one has to answer in
        async with client(dead, black, etcd_server.port, limit=20.0) as c:
            assert (await c.txn((), (etcd.put(JOB + "x", b""),))).succeeded
            follower = Follower(c)
            await follower.until(lambda: follower.states)
            assert follower.states[-1] == {"x": b""}
            await follower.end()
        async with client(dead, black, limit=0.2) as c:
            with pytest.raises(etcd.EtcdSilent, match="does not answer"):
                await c.read(JOB)


async def test_a_server_whose_host_has_gone(etcd_server: EtcdServer) -> None:
    """No FIN, no answer: the transport's pings find out, and the next server is followed."""
    relay = Relay(etcd_server.port)
    try:
        async with client(relay.port, etcd_server.port, limit=1.0) as c:
            follower = Follower(c)
            await follower.until(lambda: follower.states)
            async with client(etcd_server.url) as other:
                await other.txn((), (etcd.put(JOB + "x", b"1"),))
                await follower.until(lambda: follower.states[-1] == {"x": b"1"})
                relay.swallow()
                await other.txn((), (etcd.put(JOB + "x", b"2"),))
            await follower.until(lambda: follower.states[-1] == {"x": b"2"})
            await follower.end()
    finally:
        relay.close()


async def test_an_etcd_that_speaks_tls(etcd_server: EtcdServer) -> None:
    """Plain words to `etcds://` fail as a silence with a reason, and files that are not there with
    a sentence."""
    place = parse_place(f"etcds://{etcd_server.address}")
    secure = etcd.Etcd(place, limit=5.0)
    with pytest.raises(etcd.EtcdSilent, match="does not answer"):
        await secure.read(JOB)
    await secure.close()
    with pytest.raises(etcd.EtcdRefused, match=r"no\.pem cannot be read"):
        etcd.Etcd(place, ca="no.pem")
