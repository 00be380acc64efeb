"""Streams of real gRPC clients, well-behaved and not. What one does wrong touches nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from elasticrun import __version__
from elasticrun.config import EXIT_FAILED
from elasticrun.core.events import Attached, Detached, Heard, JobEffect, JobEvent, Send
from elasticrun.master.server import BURST, RATE
from elasticrun.wire import messages as m
from elasticrun.wire.auth import AuthClient
from elasticrun.wire.pb import job_pb2 as pb
from elasticrun.wire.rpc.channel import (
    ATTEND,
    SERVER_OPTIONS,
    LinkError,
    grpc,
    open_channel,
)
from elasticrun.wire.rpc.protobuf import report_to_wire
from tests.master.people import (
    LIMIT,
    ROUND,
    SPEC,
    Served,
    asking,
    enter,
    hear,
    hello,
    serving,
)

ROOT = Path(__file__).resolve().parents[2]


async def _raw(served: Served, *messages: bytes) -> Any:
    """Send these bytes as messages; the error that ends the stream."""
    async with open_channel(served.endpoint) as channel:
        call = channel.stream_stream(ATTEND)()
        try:
            async with asyncio.timeout(LIMIT):
                for message in messages:
                    await call.write(message)
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as ended:
            return ended
    raise AssertionError("the stream ended well")


async def test_an_agent_is_welcomed_and_echoed() -> None:
    async with serving() as served:
        served.loop.readers.set_address("127.0.0.1", 9)
        before = time.time_ns() // 1000
        async with served.stream() as stream:
            welcome = await enter(stream, hello())
            assert isinstance(welcome, m.Welcome)
            assert welcome.status_url == "http://127.0.0.1:9/"
            assert before <= welcome.clock_us <= time.time_ns() // 1000
            await stream.send(m.Beat(1))
            assert await hear(stream) == m.Echo(1)
            assert served.servicer.attached == 1


async def test_a_clean_departure_and_a_break_are_told_apart() -> None:
    async with serving() as served:
        async with served.agent("clean") as stream:
            await stream.send(m.Beat(3))
            await stream.close()
            while (order := await hear(stream)) is not None:
                assert order == m.Echo(3)
        left = await served.brain.until(lambda e: isinstance(e, Detached))
        assert left.clean
        async with served.agent("broken"):
            pass  # the channel is closed under the stream
        broke = await served.brain.until(lambda e: isinstance(e, Detached) and e != left)
        assert not broke.clean
        assert served.servicer.attached == 0


AGENT = """
import asyncio, sys
from tests.master.people import hello
from elasticrun.wire.rpc import channel as c
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint

async def main():
    stream = c.attend(c.open_channel(Endpoint("127.0.0.1", int(sys.argv[1]))))
    await stream.enter(hello("victim"))
    await stream.send(m.Beat(5))
    while await stream.receive():
        pass

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_process_that_dies_or_stalls_is_no_clean_departure(number: signal.Signals) -> None:
    """For gRPC both look like the end of what an agent has to say."""
    async with serving(transport=SERVER_OPTIONS) as served:
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, str(served.endpoint.port), cwd=ROOT
        )
        try:
            await served.brain.until(lambda e: isinstance(e, Heard))
            agent.send_signal(number)
            gone = await served.brain.until(lambda e: isinstance(e, Detached))
            assert not gone.clean
            assert served.servicer.attached == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            await agent.wait()


async def test_hanging_up_sends_what_was_told_first() -> None:
    async with serving() as served, served.agent() as stream:
        await stream.send(m.Leaving("over", 0))
        assert await hear(stream) == m.End(0, "bye", ())
        assert await hear(stream) is None
        await served.brain.until(lambda e: isinstance(e, Detached))
        assert [over.exit_code for over in served.over] == [3]


@pytest.mark.parametrize("foreign", ["job", "protocol"])
async def test_a_stranger_is_refused_by_name(foreign: str) -> None:
    async with serving() as served:
        if foreign == "job":
            data, names = report_to_wire(_knock(job_id="other")), ("'other'", "'job'")
        else:
            made = pb.Report.FromString(report_to_wire(hello()))
            made.hello.protocol, made.hello.version = 99, "9.9.9"
            data = made.SerializeToString()
            names = ("9.9.9", "protocol 99", __version__, f"protocol {m.PROTOCOL_VERSION}")
        async with served.stream() as stream:
            await stream._call.write(data)
            refused = await hear(stream)
            assert isinstance(refused, m.Refused)
            assert refused.exit_code == EXIT_FAILED
            for name in names:
                assert name in refused.reason
            assert await hear(stream) is None
        assert not served.brain.events
        await served.is_well()


def _knock(**changes: Any) -> m.Knock:
    said = AuthClient("", "1", m.Role.AGENT, job_id="job", node="n0", incarnation="i0").knock
    return structs.replace(said, **changes)


def _hello(**changes: Any) -> bytes:
    return report_to_wire(hello(incarnation="i0", **changes))


HELLO = _hello()
KNOCK = report_to_wire(_knock())
READER = report_to_wire(AuthClient("", "1").knock)
PROOF = report_to_wire(m.Proof(b""))
BEAT = report_to_wire(m.Beat(1))
IN = (KNOCK, PROOF, HELLO)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((BEAT,), "Beat came instead of Knock"),
        ((HELLO,), "Hello came instead of Knock"),
        ((PROOF,), "Proof came instead of Knock"),
        ((READER,), "role reader"),
        ((KNOCK, KNOCK), "Knock came instead of Proof"),
        ((KNOCK, HELLO), "Hello came instead of Proof"),
        ((KNOCK, PROOF, BEAT), "Beat came instead of Hello"),
        ((KNOCK, PROOF, PROOF), "Proof came instead of Hello"),
        ((KNOCK, PROOF, _hello(node="n1")), "another node than the one that was proved"),
        ((KNOCK, PROOF, report_to_wire(hello())), "another node"),
        ((KNOCK, PROOF, _hello(spec=structs.replace(SPEC, job_id="other"))), "another node"),
        ((b"",), "kind"),
        ((b"\xff\xfe\xfd" * 30,), "no report of elasticrun"),
        ((KNOCK[:40],), "no report of elasticrun"),
        ((*IN, HELLO), "second Hello"),
        ((*IN, _hello(node="n1")), "second Hello"),
        ((*IN, KNOCK), "second Knock"),
        ((*IN, report_to_wire(m.ReachMe(2000, bytes(m.NONCE_BYTES)))), "a reader's message"),
        ((*IN, BEAT, b"\x0a\x02\x08\x63"), "protocol 99"),
        ((*IN, b"\xde\xad\xbe\xef"), "no report"),
    ],
    ids=[
        *("beat-first", "hello-first", "proof-first", "reader", "two-knocks", "no-proof"),
        *("no-hello", "two-proofs", "other-node", "other-life", "other-job", "empty", "noise"),
        *("half", "two-hellos", "turncoat", "knock-again", "reach-me"),
        *("late-protocol", "late-noise"),
    ],
)
async def test_a_wrong_message_ends_its_stream_with_a_sentence(
    messages: tuple[bytes, ...], said: str
) -> None:
    async with serving() as served, served.agent("bystander") as bystander:
        ended = await _raw(served, *messages)
        assert said in ended.details()
        assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT
        await bystander.send(m.Beat(5))
        assert await hear(bystander) == m.Echo(5)
        attached = [e for e in served.brain.events if isinstance(e, Attached)]
        if messages[:3] == IN:
            await served.brain.until(lambda e: isinstance(e, Detached) and not e.clean)
        else:
            assert len(attached) == 1
        await served.is_well()


async def test_who_does_not_introduce_himself_in_time_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asking(monkeypatch)
    async with serving() as served:
        for said, due in (((), "Knock"), ((KNOCK,), "Proof"), ((KNOCK, PROOF), "Hello")):
            ended, _ = await asyncio.gather(_raw(served, *said), served.too_late(due, asked))
            assert ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert f"timed out waiting for {due}" in ended.details()
        assert not served.brain.events
    async with serving() as served:
        await served.is_well()


async def test_a_huge_message_is_refused() -> None:
    async with serving() as served:
        ended = await _raw(served, *IN, b"\0" * (m.MAX_MESSAGE_BYTES + 1))
        assert ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.brain.until(lambda e: isinstance(e, Detached))
        await served.is_well()


@pytest.mark.slow
async def test_a_flood_is_dropped_and_others_are_served() -> None:
    async with (
        serving(bounds={"FLOOD_LIMIT": 0.5}) as served,
        served.agent("bystander") as bystander,
    ):
        began = asyncio.get_running_loop().time()
        async with served.agent("flood") as flood:
            with pytest.raises(LinkError, match=r"reports a second|broke"):
                async with asyncio.timeout(LIMIT):
                    await asyncio.gather(_pour(flood), _drain(flood))
        await bystander.send(m.Beat(9))
        assert await hear(bystander) == m.Echo(9)
        heard = [e for e in served.brain.events if isinstance(e, Heard)]
        seconds = asyncio.get_running_loop().time() - began
        assert len(heard) < BURST + (10 + seconds) * RATE


async def _pour(stream: Any) -> None:
    with contextlib.suppress(LinkError):  # it has ended: who receives learns why
        for number in range(1_000_000):
            await stream.send(m.Beat(number))


async def _drain(stream: Any) -> None:
    while await stream.receive() is not None:
        pass


async def test_sessions_are_bounded_and_room_comes_back() -> None:
    async with serving(bounds={"MAX_SESSIONS": 2}) as served:
        async with served.agent("a"), served.agent("b"):
            ended = await _raw(served, *IN)
            assert ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "serves 2 nodes" in ended.details()
        for node in (1, 2):  # both have left
            await served.brain.until(lambda e, n=node: isinstance(e, Detached) and e.session == n)
        await served.is_well()


async def test_orders_to_a_slow_reader_are_coalesced_and_the_stream_stands() -> None:
    """An agent that reads nothing while 4 MB of waits are told to it, then reads."""
    count = 1000

    def many(event: JobEvent) -> list[JobEffect]:
        if isinstance(event, Heard) and isinstance(event.report, m.Stopped):
            told: list[JobEffect] = [
                Send((event.session,), m.Wait(f"{n} " + "x" * 4000)) for n in range(count)
            ]
            return [*told, Send((event.session,), m.Echo(1))]
        return []

    async with serving() as served:
        served.brain.on = many
        async with served.agent() as stream:
            for _ in range(3):
                await stream.send(m.Stopped(ROUND))
            await served.brain.until(
                lambda _: sum(isinstance(e, Heard) for e in served.brain.events) == 3
            )
            seen = 0
            while True:
                order = await hear(stream)
                if order == m.Wait(f"{count - 1} " + "x" * 4000):
                    break
                seen += 1
            assert seen < count  # of 3000 that were told
            await served.is_well()
