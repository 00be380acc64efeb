"""Who does not belong to the job: refused in a sentence, bounded, and never heard by the brain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from elasticrun.config import EXIT_FAILED
from elasticrun.master import server
from elasticrun.master.server import LOG_EVERY, MAX_GAP, Listening, Refusals
from elasticrun.wire import messages as m
from elasticrun.wire.auth import MASTER_HAS_NONE, OTHER_JOB, TOKEN_WANTED, AuthClient, reader_token
from elasticrun.wire.rpc.channel import (
    ATTEND,
    GET_STATUS,
    SERVER_OPTIONS,
    LinkError,
    Unproved,
    get_status,
    grpc,
    open_channel,
)
from elasticrun.wire.rpc.protobuf import report_to_wire
from tests.master import raw
from tests.master.people import (
    LIMIT,
    SPEC,
    Clock,
    Served,
    asking,
    at_once,
    enter,
    hear,
    hello,
    serving,
    status,
)

STREAMS = SERVER_OPTIONS["grpc.max_concurrent_streams"] - 1
"""gRPC counts a little less than it is told."""

TOKEN = "a secret of the job that nobody guesses"
KNOCK = report_to_wire(
    AuthClient("", "1", m.Role.AGENT, job_id="job", node="n", incarnation="i").knock
)


async def test_who_knows_the_token_is_served() -> None:
    async with serving(token=TOKEN, term=7) as served:
        await served.is_well(TOKEN)
        page = await get_status(served.endpoint, LIMIT, token=reader_token(TOKEN))
        assert at_once(page) == status()


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [(TOKEN, "", TOKEN_WANTED), ("", TOKEN, MASTER_HAS_NONE)],
    ids=["agent-without", "master-without"],
)
async def test_one_side_with_a_token_and_one_without(
    ours: str, theirs: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "elasticrun")
    async with serving(token=ours) as served:
        async with served.stream() as stream:
            refused = await enter(stream, hello(), theirs)
            assert refused == m.Refused(reason, EXIT_FAILED)
            assert not stream.proved
            assert await hear(stream) is None
        with pytest.raises(LinkError) as told:
            await get_status(served.endpoint, LIMIT, token=theirs)
        assert str(told.value) == reason
        assert told.value.rejected
        assert not served.brain.events
    assert len(caplog.messages) == 1  # two refusals of one kind
    assert "refused a" in caplog.messages[0]
    assert TOKEN not in caplog.text


async def test_a_master_with_another_token_is_not_followed() -> None:
    """And it never sees a proof: what it gets from us is a knock and the end."""
    async with serving(token="another") as served:
        async with served.stream() as stream:
            with pytest.raises(Unproved, match="does not know this job's token"):
                await enter(stream, hello(), TOKEN)
        with pytest.raises(Unproved):
            await get_status(served.endpoint, LIMIT, token=reader_token(TOKEN))
        assert not served.brain.events


async def test_another_job_with_a_token_is_not_named() -> None:
    async with serving(token=TOKEN) as served, served.stream() as stream:
        spec = structs.replace(SPEC, job_id="mine")
        refused = await enter(stream, hello(spec=spec), TOKEN)
        assert refused == m.Refused(OTHER_JOB, EXIT_FAILED)


@pytest.mark.parametrize("method", [ATTEND, GET_STATUS])
async def test_a_wrong_proof_is_told_and_logged_without_a_byte_of_it(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "elasticrun")
    role = m.Role.AGENT if method == ATTEND else m.Role.READER
    who = AuthClient("other", "1", role, job_id="job", node="n0", incarnation="i0")
    async with serving(token=TOKEN) as served:
        async with open_channel(served.endpoint) as channel, asyncio.timeout(LIMIT):
            call = channel.stream_stream(method)()
            await call.write(report_to_wire(who.knock))
            await call.read()
            await call.write(report_to_wire(m.Proof(b"evil" * 8)))
            data = await call.read()
            assert b"proof of the job's token is wrong" in data
            assert b"evil" not in data
            assert await call.read() is grpc.aio.EOF
        assert not served.brain.events
        assert served.servicer.attached == 0
    assert caplog.messages == ["refused a peer with another token than the job's"]


# ---------------------------------------------------------------- how many, how long


async def _silent(channel: Any, said: tuple[bytes, ...] = ()) -> Any:
    call = channel.stream_stream(ATTEND)()
    for message in said:
        await call.write(message)
    if said:
        await call.read()
    return call


async def test_of_too_many_strangers_those_who_waited_longest_go() -> None:
    most = 5
    async with (
        serving(bounds={"MAX_UNPROVED": most}) as served,
        contextlib.AsyncExitStack() as held,
    ):
        calls = []
        for _ in range(most + 3):
            channel = await held.enter_async_context(open_channel(served.endpoint))
            calls.append(await _silent(channel, (KNOCK,)))
        for call in calls[:3]:
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too many connections" in await call.details()
        await served.is_well()  # which pushes off one more
        assert await calls[3].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls[4:])
        for call in calls:
            call.cancel()


async def test_who_is_in_is_never_pushed_off() -> None:
    async with serving(bounds={"MAX_UNPROVED": 2}) as served, contextlib.AsyncExitStack() as on:
        agent = await on.enter_async_context(served.agent())
        channels = [await on.enter_async_context(open_channel(served.endpoint)) for _ in range(6)]
        calls = [await _silent(channel, (KNOCK,)) for channel in channels]
        await agent.send(m.Beat(1))
        assert await hear(agent) == m.Echo(1)
        for call in calls:
            call.cancel()


async def test_a_dribbler_has_one_limit_for_all_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message now and then does not buy more time."""
    asked = asking(monkeypatch)

    async def run(served: Served) -> None:
        who = AuthClient("", "1", m.Role.AGENT, job_id="job", node="n", incarnation="i")
        async with open_channel(served.endpoint) as channel:
            call = await _silent(channel, (report_to_wire(who.knock),))
            (limit,) = served.servicer._pending._waiting
            due = limit.when()
            await call.write(report_to_wire(m.Proof(b"")))
            await _until(lambda: asked[-1] == "Hello")
            assert [one.when() for one in served.servicer._pending._waiting] == [due]
            await served.too_late("Hello", asked)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "timed out waiting for Hello" in await call.details()

    async with serving() as served:
        await run(served)
        assert not served.brain.events


@pytest.mark.slow
async def test_a_thousand_streams_that_say_nothing_hold_up_nobody() -> None:
    """While they come and wait, an agent is let in and its beats are echoed."""

    async def crowd(served: Served, channels: list[Any]) -> None:
        await asyncio.gather(*(_silent(channel) for channel in channels for _ in range(STREAMS)))

    async with serving() as served, served.agent() as agent, contextlib.AsyncExitStack() as on:
        channels = [
            await on.enter_async_context(open_channel(served.endpoint))
            for _ in range(1000 // STREAMS)
        ]
        crowding = asyncio.create_task(crowd(served, channels))
        for number in range(1, 51):
            await agent.send(m.Beat(number))
            assert await hear(agent) == m.Echo(number)
        await crowding
        await served.is_well()


def hurried() -> Any:
    """Who is to prove itself has 2 s; for others, on a machine that stands still now and then, it
    would be too little."""
    return patch.object(server, "PROVE_LIMIT", 2.0)


OPEN = raw.PREFACE + raw.settings() + raw.call(ATTEND)
LATE, BAD = "timed out waiting for Knock", "no report of elasticrun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (OPEN, LATE),
        (OPEN + raw.message(KNOCK)[:20], LATE),
        (OPEN + raw.message(KNOCK[:10], says=len(KNOCK)), LATE),
        (OPEN + raw.message(b"x" * 16000, says=m.MAX_MESSAGE_BYTES), LATE),
        (OPEN + raw.message(b"", says=2**31), "larger than max"),
        (OPEN + raw.message(b"\xff" * 100), BAD),
        (OPEN + raw.message(KNOCK) + raw.message(b"\xff" * 100), BAD),
    ],
    ids=["silence", "half-frame", "half", "dribble", "giant", "noise", "late-noise"],
)
async def test_what_no_grpc_library_sends_is_dropped(said: bytes, told: str) -> None:
    async with serving() as served, served.agent() as agent:
        with hurried() if told == LATE else contextlib.nullcontext():
            reader, writer = await asyncio.open_connection("127.0.0.1", served.endpoint.port)
            writer.write(said)
            async with asyncio.timeout(LIMIT):
                heard = await reader.readuntil(b"grpc-status")
                while told not in heard.decode(errors="replace"):
                    more = await reader.read(4096)
                    assert more, heard
                    heard += more
        await agent.send(m.Beat(1))
        assert await hear(agent) == m.Echo(1)
        await served.is_well()
        writer.close()


@pytest.mark.slow
async def test_who_lets_nothing_be_sent_to_it_is_dropped() -> None:
    """The challenge would wait for ever in its closed window."""
    shut = raw.PREFACE + raw.settings(window=0) + raw.call(ATTEND) + raw.message(KNOCK)
    async with serving() as served, served.agent() as agent:
        with hurried():
            _, writer = await asyncio.open_connection("127.0.0.1", served.endpoint.port)
            writer.write(shut)
            await _until(lambda: served.servicer.unproved == 1)
            await _until(lambda: served.servicer.unproved == 0)
        await agent.send(m.Beat(1))
        assert await hear(agent) == m.Echo(1)
        await served.is_well()
        writer.close()


async def _until(true: Any) -> None:
    """What a peer without a library notices by no event."""
    async with asyncio.timeout(LIMIT):
        while not true():  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0)


def test_refusals_are_logged_once_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    with caplog.at_level(logging.WARNING, "elasticrun"):
        for _ in range(1000):
            refusals.add("refused")
        refusals.add("")
        now[0] = LOG_EVERY
        refusals.add("refused")
    assert caplog.messages == ["refused", "refused (1000 times)"]


# ---------------------------------------------------------------- how long a stream was silent


def beats(listening: Listening, clock: Clock, until: float, every: float) -> None:
    """Somebody is reachable again and again."""
    while clock.now < until:
        clock.now = min(until, clock.now + every)
        listening.on_message()


@pytest.mark.parametrize(
    ("until", "every", "more", "last", "streams", "silence"),
    [
        (1005.0, 1.0, 0.0, 1000.0, 3, 5.0),
        (1005.0, 1.0, 0.2, 1005.0, 3, 0.2),
        # the master itself stood still, or there is nobody else: what breaks then proves nothing
        (1000.0, 1.0, 10.0, 1000.0, 3, 0.0),
        # 5,000 nodes beat every 10 s: 5 s without a word of one of them are nothing
        (1005.0, 0.1, 0.0, 1000.0, 5000, 0.0),
        (1014.0, 0.1, 0.0, 1000.0, 5000, 5.0),
        (1010.0, MAX_GAP, 0.0, 1000.0, 2, 10.0),
        (1000.0, 1.0, 5.0, 1000.0, 1, 0.0),
    ],
    ids=[
        *("outlived by others", "reset", "nobody was heard", "a large job", "for long in it"),
        *("a gap of a beat is none", "the only one"),
    ],
)
def test_a_stream_is_as_silent_as_others_were_heard(
    until: float, every: float, more: float, last: float, streams: int, silence: float
) -> None:
    """Somebody is heard so often until then; `more` seconds later the stream breaks."""
    clock = Clock()
    listening = Listening(clock)
    assert listening.on_message() == 1000.0
    beats(listening, clock, until, every)
    clock.now += more
    assert listening.silence(last, streams) == pytest.approx(silence)
    assert listening.quiet(last) == pytest.approx(clock.now - last)


def test_what_was_missed_while_nobody_listened_does_not_count() -> None:
    """The loop stood still for 10 s; others are read again before this stream is seen broken."""
    clock = Clock()
    listening = Listening(clock)
    last = listening.on_message()
    clock.now += 10.0
    listening.on_message()
    clock.now += 0.1
    assert listening.silence(last, 3) == pytest.approx(0.1)
    beats(listening, clock, 1013.0, 1.0)
    assert listening.silence(last, 3) == pytest.approx(3.0)
