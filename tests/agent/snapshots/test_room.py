"""Room for snapshots: who waits for a slot, how many slots there are, in which pages they lie."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrun.agent.snapshots.peers import Peer
from elasticrun.agent.snapshots.segments import Segments, Sizes
from elasticrun.snapshots.shm import memory, throttle as throttling
from elasticrun.snapshots.shm.memory import CHUNK, LARGE, NoMemory
from elasticrun.snapshots.shm.segment import NONE
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.wire import messages as m, snapshots as s
from tests.agent.snapshots.played import LAYOUT, ONE, Node
from tests.harness import LIMIT

SIZES = Sizes(LAYOUT.key, len(LAYOUT.encode()), LAYOUT.slot_bytes, 3)


# ---------------------------------------------------------------- who waits


@pytest.mark.parametrize(
    ("awaited", "not_enough", "enough"),
    [
        pytest.param(NONE, m.Watermark(ONE, NONE), m.Watermark(ONE, 2), id="a-free-slot"),
        pytest.param(2, m.Watermark(ONE, 1), m.Watermark(ONE, 2), id="a-whole-step"),
        pytest.param(NONE, m.Watermark(ONE, NONE), m.Watermark(ONE, NONE, 1), id="one-given-up"),
    ],
)
async def test_a_rank_that_waits_is_told_when_there_is(
    one_of_three: Node, awaited: int, not_enough: m.Watermark, enough: m.Watermark
) -> None:
    first, second = await one_of_three.life(1, 2)
    assert first.segment.free_slot() is None
    first.say(s.AwaitRoom(awaited))
    one_of_three.snapshots.obey(not_enough)
    await one_of_three.heard([first, second])
    assert not first.messages
    one_of_three.snapshots.obey(enough)
    await first.hears(s.RoomThere)
    assert first.segment.free_slot() is not None
    await second.asks(s.AwaitRoom(awaited), s.RoomThere)  # at once


async def test_a_rank_that_waits_is_told_when_another_step_is_named(one_of_three: Node) -> None:
    """It ends by a signal once all have saved the first one, which one of them could not."""
    ranks = await one_of_three.life()
    obey = one_of_three.snapshots.obey
    obey(m.SaveAt(ONE, 2, "node a must leave"))
    await one_of_three.both(ranks, 2, persist=True)
    ranks[0].say(s.AwaitRoom(2))
    await one_of_three.heard(ranks)
    obey(m.SaveAt(ONE, 4, "node a must leave"))
    obey(m.PersistOver("", ONE, 2, ok=False, reason="one was past it"))
    await ranks[0].hears(s.RoomThere)


async def test_one_that_is_closed_is_not_asked_for_its_state(node: Node, monkeypatch) -> None:
    ranks = await node.life(2)
    assert node.snapshots.drain.step() == 2
    gone = asyncio.Event()
    lost = node.snapshots.lost

    def lose(peer: Peer) -> None:
        lost(peer)
        if node.snapshots.drain.step() == NONE:
            gone.set()

    monkeypatch.setattr(node.snapshots, "lost", lose)
    for rank in ranks:
        rank.close()
    await asyncio.wait_for(gone.wait(), LIMIT)


async def test_who_has_no_segment_cannot_wait_for_its_slots(node: Node) -> None:
    node.begin(1)
    rank = await node.rank(0)
    rank.say(s.AwaitRoom(NONE))
    assert await rank.hangs_up()


async def test_a_rank_that_waits_for_its_segment_gets_it_at_full_speed(
    node: Node, monkeypatch
) -> None:
    """Without AwaitSegment this allocation would take an hour."""
    monkeypatch.setattr(throttling, "are_cores_busy", lambda: True)
    monkeypatch.setattr(throttling, "LEAST", 0.0)
    monkeypatch.setattr(throttling, "SHARE", 1e-9)
    monkeypatch.setattr(throttling, "LONGEST", 600.0)
    node.begin(1)
    rank = await node.rank(0)
    rank.say(s.NeedSegment(LAYOUT.key, LAYOUT.content, len(LAYOUT.encode()), 16 * CHUNK, 2))
    assert (await rank.asks(s.AwaitSegment(), s.SegmentHere)).ok


# ---------------------------------------------------------------- how many


async def test_fewer_slots_do_where_there_is_no_more_room(shm: Path, monkeypatch, caplog) -> None:
    room = replace(SIZES, slots=2).nbytes + 100
    monkeypatch.setattr(memory, "available_memory", lambda: (room, "the machine"))
    segments = Segments("a-job", 2, {"ELASTICRUN_SHM_DIR": str(shm)})
    await segments.open("node-a")
    with pytest.raises(NoMemory):
        await segments.segment_for(0, SIZES, 1, Throttle())
    held = await segments.segment_for(0, SIZES, 1, Throttle(), least=2)
    assert held.segment.slots == 2
    assert "there is memory for only 2 snapshots of a rank" in caplog.text
    assert (
        await segments.segment_for(0, SIZES, 1, Throttle(), least=2) is held
    )  # and another life is given it
    await segments.close(job_over=True)


# ---------------------------------------------------------------- pages


def test_large_pages_are_all_zero_and_all_there() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 3 * LARGE + 4096)
        # whether there are any depends on the machine
        memory.allocate_huge_pages(fd, 3 * LARGE + 4096, Throttle())
        os.posix_fallocate(fd, 0, 3 * LARGE + 4096)
        assert os.fstat(fd).st_blocks * 512 >= 3 * LARGE + 4096
        assert os.pread(fd, LARGE, 2 * LARGE) == bytes(LARGE)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("nbytes", "why"), [(2 * LARGE, ["Invalid argument"]), (3 * 4096, [])])
def test_why_there_are_no_large_pages_is_told(nbytes: int, why: list[str], monkeypatch) -> None:
    monkeypatch.setattr(memory, "MADV_COLLAPSE", 9999)  # as a kernel before 6.1 takes it
    told: list[str] = []
    fd = memory.allocate_anonymous("test", nbytes, nbytes, Throttle(), told.append)
    try:
        assert os.fstat(fd).st_blocks * 512 >= nbytes
    finally:
        os.close(fd)
    assert told == why
