"""The loop's own duties: drain before judging, say when it overslept, survive its brain."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from msgspec import structs

from elasticrun.agent.link.link import Link
from elasticrun.core.events import (
    Attached,
    Detached,
    Heard,
    JobEvent,
    Overslept,
    Send,
    Tick,
)
from elasticrun.core.nodes.membership import BEATS_PER_SECOND, beat_interval
from elasticrun.master import loop as master_loop
from elasticrun.master.loop import Figures, Loop, Mailbox, StateMachineFault, subject
from elasticrun.wire import messages as m
from elasticrun.wire.messages import Holding, Holdings, Steps
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import Endpoint
from tests.agent.link.test_link import Heard as Followed
from tests.master.people import LIMIT, ROUND, Clock, Recorder, hello, serving, status

HEARD = Heard(1, m.Beat(1))


class Judge(Recorder):
    """Has a deadline until it has been told the time."""

    def step(self, event: JobEvent, now: float) -> list:  # type: ignore[type-arg]
        if isinstance(event, Tick):
            self.deadline = None
        return super().step(event, now)


@pytest.mark.parametrize(
    ("late", "events"),
    [
        (-1.0, [HEARD]),  # nothing is judged before its time
        (0.1, [HEARD, Tick()]),
        (0.5, [Overslept(0.5), HEARD, Tick()]),
        (6.0, [Overslept(6.0), HEARD, Tick()]),
    ],
)
async def test_a_turn_drains_before_it_judges_and_says_first_if_it_is_late(
    late: float, events: list[JobEvent]
) -> None:
    brain, clock = Judge(), Clock()
    loop = Loop(brain, clock=clock)
    brain.deadline = clock.now
    clock.now += late
    loop.put(HEARD)
    loop._turn()
    assert brain.events == events


async def test_a_deadline_wakes_the_loop_and_none_leaves_it_asleep() -> None:
    loop = asyncio.get_running_loop()
    before = set(map(id, loop._scheduled))  # type: ignore[attr-defined]
    async with serving(Judge()) as served:
        served.brain.deadline = served.loop._clock() + 0.05
        served.loop.put(HEARD)
        await served.brain.until(lambda e: isinstance(e, Tick))
        async with served.agent():
            pass
        await served.brain.until(lambda e: isinstance(e, Detached))
        until = time.monotonic() + 5.0  # in which grpc clears away after the agent
        while time.monotonic() < until:
            await asyncio.sleep(0)
            timers = [h for h in loop._scheduled if not h.cancelled()]  # type: ignore[attr-defined]
            if {id(timer) for timer in timers} <= before:
                break
        else:
            pytest.fail(f"nothing is due, and yet there are {timers}")
        assert served.brain.events.count(Tick()) == 1


async def test_a_brain_that_raises_costs_the_session_and_the_third_time_the_master(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def raises(event: JobEvent) -> list:  # type: ignore[type-arg]
        if isinstance(event, Heard) and isinstance(event.report, m.Stopped):
            raise KeyError("a defect")
        return []

    brain = Recorder()
    brain.on = raises
    loop = Loop(brain)
    box = Mailbox()
    loop.attach(Attached(1, hello()), box)
    turning = asyncio.ensure_future(loop.run())
    stopped = Heard(1, m.Stopped(ROUND))
    loop.put(stopped)
    async with asyncio.timeout(LIMIT):
        orders = [await box.take(), await box.take()]
    assert isinstance(protobuf.order_from_wire(orders[0]), m.Welcome)
    assert orders[1] is None  # hung up
    loop.put(stopped)
    loop.put(stopped)
    with pytest.raises(StateMachineFault, match="3 events"):
        async with asyncio.timeout(LIMIT):
            await turning
    assert "a defect" in caplog.text


async def test_a_mailbox_keeps_the_newest_of_each_kind_in_order_of_change() -> None:
    box = Mailbox()
    for kind, order in [("Start", b"1"), ("Stop", b"2"), ("Echo", b"3"), ("Start", b"4")]:
        box.put(kind, order)
    assert len(box) == 3
    box.close()
    box.put("Echo", b"5")
    async with asyncio.timeout(LIMIT):
        assert [await box.take() for _ in range(4)] == [b"2", b"3", b"4", None]


def test_what_is_said_of_one_thing_is_no_word_about_another() -> None:
    """The end of an attempt must not be lost because that of the next one is waiting, too; nor the
    answer about one shard because of that about another."""
    orders: list[m.Order] = [
        m.PersistOver("one", ROUND, 7, ok=True, reason=""),
        m.PersistOver("two", ROUND, 8, ok=True, reason=""),
        m.PersistOver("", ROUND, 9, ok=False, reason="a newer one was taken"),
        m.PersistOver("", ROUND, 10, ok=False, reason="a newer one was taken"),
        m.Holder(ROUND, 7, 0, 0, None, ""),
        m.Holder(ROUND, 7, 1, 1, None, ""),
        m.Watermark(ROUND, 7),
        m.Replicate(ROUND, 7, 2, (0,), (1,), Endpoint("a", 1)),
        m.Replicate(ROUND, 7, 2, (1,), (2,), Endpoint("b", 1)),
    ]
    assert len({subject(order) for order in orders}) == len(orders)
    newer = [m.PersistOver("one", ROUND, 7, ok=False, reason="late"), m.Watermark(ROUND, 8)]
    assert {subject(order) for order in newer} < {subject(order) for order in orders}


async def test_a_mailbox_that_nobody_empties_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_loop, "MAX_ORDERS", 3)
    closed: list[str] = []
    box = Mailbox(lambda: closed.append("closed"))
    for number in range(3):
        box.put(f"Holder {number}", b"")
    box.put("Holder 1", b"again")
    assert not closed
    box.put("Holder 3", b"")
    assert closed


async def test_an_order_that_cannot_be_sent_is_no_end_of_the_master() -> None:
    async with serving() as served:
        served.brain.on = lambda event: (
            [Send((event.session,), m.Refused("no", 999))]
            if isinstance(event, Heard) and event.report == m.Beat(13)
            else []
        )
        async with served.agent() as stream:
            await stream.send(m.Beat(13))
        await served.is_well()


# ---------------------------------------------------------------- how often agents beat


async def echo_of(loop: Loop, box: Mailbox, session: int) -> m.Order:
    """What the loop answers to a beat of this session."""
    loop.put(Heard(session, m.Beat(1)))
    while loop._inbox:
        loop._turn()
    while len(box):
        data = await box.take()
        order = protobuf.order_from_wire(data)
    return order


async def test_an_echo_tells_the_pace_of_a_job_that_has_grown() -> None:
    """The first to attach were told to beat each second; they hear it when there are thousands, and
    again when there are few."""
    many = 2 * BEATS_PER_SECOND
    loop = Loop(Recorder())
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
    async with serving() as served:
        link = Link(Followed(served.endpoint, hello))
        link.start()
        monkeypatch.setattr(master_loop, "beat_interval", lambda streams: 7.0)
        await served.brain.until(lambda e: isinstance(e, Heard) and e.report == m.Beat(1))
        session = link._session
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


# ---------------------------------------------------------------- what the status shows


def test_the_step_its_age_and_the_jobs() -> None:
    now = 100.0
    figures = Figures(lambda: now)
    assert figures.shown(status()).step == -1
    report = Steps(ROUND, 40, 5, 0.1, 0.0, 0.0)
    figures.on_report(report)
    now = 103.0
    figures.on_report(report)  # the same step again is no news
    page = figures.shown(status())
    assert (page.step, page.step_age, page.age) == (40, 3.0, 3.0)
    again = replace(ROUND, number=2)
    figures.on_start(again)
    figures.on_report(structs.replace(report, step=50))  # of a round that is over
    assert figures.shown(status()).step == 40
    figures.on_report(structs.replace(report, round=again, step=30))  # back to a snapshot
    page = figures.shown(status())
    assert (page.step, page.step_age) == (30, 0.0)


def test_a_snapshot_in_memory_tells_the_step_too() -> None:
    figures = Figures(lambda: 0.0)
    figures.on_start(ROUND, nodes=2)
    assert figures.nodes == 2
    old = Holding(replace(ROUND, number=9), 90, 0, 2, (1, 1), wanted=False)
    held = tuple(structs.replace(old, round=ROUND, step=step) for step in (20, 30))
    figures.on_report(Holdings(None, (old, *held)))
    assert figures.shown(status()).step == 30
