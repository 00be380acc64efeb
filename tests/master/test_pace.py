"""How often agents beat, and how little is sent in a large job."""

from __future__ import annotations

import asyncio

import pytest

from elasticrun.agent.link.link import Link
from elasticrun.core.events import AgentEvent, Attached, Detached, Heard
from elasticrun.core.nodes.membership import BEATS_PER_SECOND, beat_interval
from elasticrun.master import loop as master_loop
from elasticrun.master.loop import Loop, Mailbox
from elasticrun.wire import messages as m
from elasticrun.wire.rpc import protobuf as codec
from tests.master.people import LIMIT, Recorder, hello, serving


async def echo_of(loop: Loop, box: Mailbox, session: int) -> m.Order:
    """What the loop answers to a beat of this session."""
    loop.put(Heard(session, m.Beat(1)))
    while loop._inbox:
        loop._turn()
    while len(box):
        data = await box.take()
        assert data is not None
        order = codec.order_from_wire(data)
    return order


async def test_an_echo_tells_the_pace_of_a_job_that_has_grown() -> None:
    """The first to attach were told to beat each second; they hear it when there are thousands, and
    again when there are few."""
    many = 2 * BEATS_PER_SECOND
    loop = Loop(Recorder(), on_over=lambda _: None)
    boxes = {session: Mailbox() for session in range(1, many + 1)}
    loop.attach(Attached(1, hello("n1")), boxes[1])
    assert await echo_of(loop, boxes[1], 1) == m.Echo(1)
    for session in range(2, many + 1):
        loop.attach(Attached(session, hello(f"n{session}")), boxes[session])
    assert await echo_of(loop, boxes[1], 1) == m.Echo(1, beat_interval(many))
    for session in range(2, many + 1):
        loop.put(Detached(session, clean=True))
    assert await echo_of(loop, boxes[1], 1) == m.Echo(1, beat_interval(1))


async def test_an_agent_beats_as_the_echo_says(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[AgentEvent] = []
    async with serving() as served:
        link = Link(lambda: served.endpoint, hello, heard.append)
        link.start()
        monkeypatch.setattr(master_loop, "beat_interval", lambda streams: 7.0)
        await served.brain.until(lambda e: isinstance(e, Heard) and e.report == m.Beat(1))
        session = link._session
        assert session is not None
        async with asyncio.timeout(LIMIT):
            while session.beat_interval != 7.0:
                await session._echo.wait()
        assert session.echo_limit == 3.5
        await link.close(LIMIT)


async def test_who_starts_is_not_told_any_more_why_it_waited() -> None:
    box = Mailbox()
    for kind in ("Wait", "Stop", "Start"):
        box.put(kind, kind.encode())
    assert [await box.take() for _ in range(len(box))] == [b"Stop", b"Start"]
