"""Reach: the master dials who proves that it may ask, at its own address and nowhere else."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from elasticrun.host.doctor.reach import open_port
from elasticrun.host.system.network import mtu_to
from elasticrun.master import server
from elasticrun.master.server import peer_address, reach
from elasticrun.wire import messages as m
from elasticrun.wire.auth import MASTER_WRONG, TOKEN_WANTED, AuthClient, reader_token
from elasticrun.wire.rpc.channel import REACH, LinkError, grpc, open_channel, reach_me
from elasticrun.wire.rpc.protobuf import answer_from_wire, report_to_wire
from tests.harness import free_port
from tests.master.people import LIMIT, Served, asking, serving

TOKEN = "a secret of the job that nobody guesses"


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master dials a port of this very process, which stands still now and then."""
    monkeypatch.setattr("elasticrun.master.server.DIAL_LIMIT", LIMIT)


async def test_a_port_of_ours_is_reached() -> None:
    async with serving(token=TOKEN) as served:
        with open_port() as asked:
            before = time.time_ns() // 1000
            said = await reach_me(served.endpoint, LIMIT, asked, token=reader_token(TOKEN))
            after = time.time_ns() // 1000
        assert (said.ok, said.reason, said.address) == (True, "", "127.0.0.1")
        assert said.mtu == mtu_to("127.0.0.1") > 0
        assert before <= said.clock_us <= after
        assert said.host == socket.gethostname()
        await served.is_well(TOKEN)


async def test_a_closed_port_and_somebody_elses() -> None:
    async with serving() as served:
        asked = m.ReachMe(free_port(), bytes(m.NONCE_BYTES))
        said = await reach_me(served.endpoint, LIMIT, asked)
        assert (said.ok, said.reason) == (False, "connection refused")
        with open_port() as other:
            asked = m.ReachMe(other.port, bytes(m.NONCE_BYTES))
            said = await reach_me(served.endpoint, LIMIT, asked)
        assert (said.ok, said.reason) == (False, "another process answers there")


@pytest.mark.parametrize(
    ("hang_up", "reason"),
    [(True, "the connection ended before its nonce"), (False, "no answer within 0.3 s")],
)
async def test_a_port_that_says_too_little(
    hang_up: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hang_up:
        monkeypatch.setattr("elasticrun.master.server.DIAL_LIMIT", 0.3)

    kept: list[asyncio.StreamWriter] = []  # one that nobody holds hangs up, since Python 3.13

    async def visited(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)
        writer.write(b"half")
        await writer.drain()
        if hang_up:
            writer.close()

    there = await asyncio.start_server(visited, "127.0.0.1", 0)
    async with serving() as served, there:
        port = there.sockets[0].getsockname()[1]
        asked = m.ReachMe(port, bytes(m.NONCE_BYTES))
        said = await reach_me(served.endpoint, LIMIT, asked)
        assert (said.ok, said.reason) == (False, reason)
        kept[0].close()


@pytest.mark.parametrize(("token", "reason"), [("", TOKEN_WANTED), ("other", MASTER_WRONG)])
async def test_nobody_is_dialled_without_a_proof(token: str, reason: str) -> None:
    async with serving(token=TOKEN) as served:
        with open_port() as asked, pytest.raises(LinkError) as told:
            await reach_me(served.endpoint, LIMIT, asked, token=token)
        assert str(told.value) == reason


async def test_a_port_of_the_system_is_not_dialled() -> None:
    """Our own codec does not even write it; by hand, the master's refuses it."""
    asked = report_to_wire(m.ReachMe(2000, bytes(m.NONCE_BYTES)))
    low = asked.replace(b"\x08\xd0\x0f", b"\x08\x16")  # port 22, in one byte less
    low = low[:1] + bytes([low[1] - 1]) + low[2:]
    assert len(low) == len(asked) - 1
    async with serving() as served:
        call = await _proved(served)
        await call.write(low)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "port" in await call.details()
        await served.is_well()


async def test_anything_else_in_the_place_of_the_question() -> None:
    async with serving() as served:
        call = await _proved(served)
        await call.write(report_to_wire(m.Beat(1)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "expected ReachMe, got Beat"


async def test_who_never_asks_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = asking(monkeypatch)
    async with serving() as served:
        call = await _proved(served)
        await served.too_late("ReachMe", asked_for)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "timed out waiting for ReachMe"
        with open_port() as asked:
            assert (await reach_me(served.endpoint, LIMIT, asked)).ok


async def test_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are dialled now hold up nobody for long: the next one is told so."""
    monkeypatch.setattr(server, "MAX_REACHING", 1)

    visited: list[asyncio.StreamWriter] = []
    came = asyncio.Event()

    async def visitor(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visited.append(writer)
        came.set()

    there = await asyncio.start_server(visitor, "127.0.0.1", 0)
    async with serving() as served, there:
        slow = m.ReachMe(there.sockets[0].getsockname()[1], bytes(m.NONCE_BYTES))
        first = asyncio.ensure_future(reach_me(served.endpoint, LIMIT, slow))
        await asyncio.wait_for(came.wait(), LIMIT)
        with open_port() as asked:
            with pytest.raises(LinkError, match="already connects to 1 hosts") as told:
                await reach_me(served.endpoint, LIMIT, asked)
            assert not told.value.rejected
            visited[0].write(slow.nonce)
            assert (await first).ok
            assert (await reach_me(served.endpoint, LIMIT, asked)).ok
        visited[0].close()


async def test_it_hangs_up_whatever_it_has_read() -> None:
    """No connection of the master's is left behind, well or ill."""
    ended: asyncio.Queue[bytes] = asyncio.Queue()

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(m.NONCE_BYTES))
        try:
            ended.put_nowait(await reader.read())
        except ConnectionResetError:
            ended.put_nowait(b"")
        writer.close()

    there = await asyncio.start_server(visited, "127.0.0.1", 0)
    async with there:
        port = there.sockets[0].getsockname()[1]
        for nonce, ok in ((bytes(m.NONCE_BYTES), True), (bytes([1]) * m.NONCE_BYTES, False)):
            said = await reach(f"ipv4:127.0.0.1:{port}", m.ReachMe(port, nonce))
            assert said.ok is ok
            assert await asyncio.wait_for(ended.get(), LIMIT) == b"", "it says nothing"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5B2001:db8::7%5D:41234", "2001:db8::7"),
        ("ipv6:[::ffff:10.0.0.7]:41234", "10.0.0.7"),
        ("ipv6:%5Bfe80::7%25eth0%5D:41234", "fe80::7%eth0"),
        ("unix:/run/socket", ""),
        ("", ""),
    ],
)
def test_grpcs_word_for_a_peer(peer: str, address: str) -> None:
    assert peer_address(peer) == address


async def _proved(served: Served) -> Any:
    """A reader's stream that may ask now."""
    guest = AuthClient("", "1")
    call = open_channel(served.endpoint).stream_stream(REACH)(timeout=LIMIT)
    await call.write(report_to_wire(guest.knock))
    challenge = answer_from_wire(await call.read())
    await call.write(report_to_wire(guest.answer(challenge)))
    return call
