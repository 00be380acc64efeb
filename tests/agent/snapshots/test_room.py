"""Room for snapshots: who waits for a slot, how many slots there are, in which pages they lie."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrun.agent.snapshots.peers import Peer
from elasticrun.agent.snapshots.segments import Segments, Sizes
from elasticrun.shm import memory
from elasticrun.shm.memory import LARGE, NoRoom
from elasticrun.shm.segment import NONE
from elasticrun.wire import messages as m, snapshots as s
from tests.agent.snapshots.played import Node, layout_of, played
from tests.harness import LIMIT

LAYOUT = layout_of()
SIZES = Sizes(LAYOUT.key, len(LAYOUT.encode()), LAYOUT.slot_bytes, 3)


# ---------------------------------------------------------------- who waits


@played(several=True)
async def test_a_rank_that_waits_is_told_when_a_slot_is_free(node: Node) -> None:
    start = node.begin(1)
    first, second = await node.ranks()
    await node.both([first, second], 1)
    await node.both([first, second], 2)
    assert first.segment.free_slot() is None
    first.say(s.AwaitRoom(NONE))
    await node.heard([second])
    assert not first.messages
    node.snapshots.obey(m.Watermark(start.round, 2))
    await first.hears(s.RoomThere)
    assert first.segment.free_slot() is not None
    await second.asks(s.AwaitRoom(NONE), s.RoomThere)  # at once: there is one


@played(several=True)
async def test_a_rank_that_waits_is_told_when_a_step_is_whole(node: Node) -> None:
    start = node.begin(1)
    ranks = await node.ranks()
    await node.both(ranks, 1)
    await node.both(ranks, 2)
    ranks[0].say(s.AwaitRoom(2))
    node.snapshots.obey(m.Watermark(start.round, 1))
    await node.heard(ranks)
    assert not ranks[0].messages
    node.snapshots.obey(m.Watermark(start.round, 2))
    await ranks[0].hears(s.RoomThere)


@played(several=True)
async def test_a_rank_that_waits_is_told_when_another_step_is_named(node: Node) -> None:
    """It ends by a signal once all have saved the first one, which one of them could not."""
    start = node.begin(1)
    ranks = await node.ranks()
    node.snapshots.obey(m.SaveAt(start.round, 2, "node a is to leave"))
    await node.both(ranks, 2, persist=True)
    ranks[0].say(s.AwaitRoom(2))
    await node.heard(ranks)
    node.snapshots.obey(m.SaveAt(start.round, 4, "node a is to leave"))
    node.snapshots.obey(m.PersistOver("", start.round, 2, ok=False, reason="one was past it"))
    await ranks[0].hears(s.RoomThere)


@played()
async def test_one_that_is_closed_is_not_asked_for_its_state(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.begin(1)
    ranks = await node.ranks()
    await node.both(ranks, 2)
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


@played(several=True)
async def test_a_rank_that_waits_is_told_when_steps_are_given_up(node: Node) -> None:
    start = node.begin(1)
    ranks = await node.ranks()
    await node.both(ranks, 1)
    await node.both(ranks, 2)
    ranks[1].say(s.AwaitRoom(NONE))
    node.snapshots.obey(m.Watermark(start.round, NONE, 1))
    await ranks[1].hears(s.RoomThere)


@played()
async def test_who_has_no_segment_cannot_wait_for_its_slots(node: Node) -> None:
    node.begin(1)
    rank = await node.rank(0)
    rank.say(s.AwaitRoom(NONE))
    assert await rank.hangs_up()


# ---------------------------------------------------------------- how many


def test_fewer_slots_do_where_there_is_no_room_for_all(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = replace(SIZES, slots=2).nbytes + 100
    monkeypatch.setattr(memory, "room_in_memory", lambda: (room, "the machine"))

    async def body() -> None:
        segments = Segments("a-job", 2, {"ELASTICRUN_SHM_DIR": str(shm)})
        await segments.open("node-a")
        with pytest.raises(NoRoom):
            await segments.need(0, SIZES, 1)
        held = await segments.need(0, SIZES, 1, least=2)
        assert held.segment.slots == 2
        assert "there is room for 2 snapshots of a rank only" in caplog.text
        assert await segments.need(0, SIZES, 1, least=2) is held  # and another life is given it
        await segments.close(job_over=True)

    asyncio.run(body())


# ---------------------------------------------------------------- pages


def test_large_pages_are_all_zero_and_all_there() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 3 * LARGE + 4096)
        memory.take(fd, 3 * LARGE + 4096)  # whether there are any is the machine's affair
        os.posix_fallocate(fd, 0, 3 * LARGE + 4096)
        assert os.fstat(fd).st_blocks * 512 >= 3 * LARGE + 4096
        assert os.pread(fd, LARGE, 2 * LARGE) == bytes(LARGE)
    finally:
        os.close(fd)


def test_why_there_are_no_large_pages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MADV_COLLAPSE", 9999)  # as a kernel before 6.1 takes it
    told: list[str] = []
    fd = memory.take_anonymous("test", 2 * LARGE, 2 * LARGE, told.append)
    try:
        assert os.fstat(fd).st_blocks * 512 >= 2 * LARGE
    finally:
        os.close(fd)
    assert told == ["Invalid argument"]


def test_a_small_segment_is_made_without_a_word() -> None:
    told: list[str] = []
    os.close(memory.take_anonymous("test", 3 * 4096, 3 * 4096, told.append))
    assert not told
