"""The agent's part in snapshots: what it tells ranks, saver and master, and what it keeps."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import structs

from elasticrun.agent.snapshots import (
    fetching as shards_module,
    peers,
    saver as savers_module,
)
from elasticrun.shm import memory
from elasticrun.shm.segment import NONE, VERSION
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.spawning import Exited, SpawnFailed
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.snapshots.played import LIMIT, Client, Node, Rank, layout_of, play, played

T = TypeVar("T")
CONTENT = layout_of().content
ONE = RoundName(7, 1, "n1")
BOTH = (CONTENT, CONTENT)


def persist(step: int, **changes: object) -> m.Persist:
    values: dict[str, object] = {
        "attempt": "a1",
        "round": ONE,
        "step": step,
        "world_size": 2,
        "ranks": (0, 1),
        "shared": (0,),
        "writers": 2,
        "coordinates": True,
        "coordinator": None,
        "reason": "periodic",
        "limit": 100.0,
        **changes,
    }
    return m.Persist(**values)  # type: ignore[arg-type]


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


async def life(node: Node, *steps: int) -> list[Rank]:
    """The first one of both ranks, who commit these steps."""
    node.begin(1)
    ranks = await node.ranks()
    for step in steps:
        await node.both(ranks, step)
    return ranks


async def life_with_saver(node: Node, step: int) -> tuple[list[Rank], Client]:
    """The same with a saver, which is there before they commit."""
    ranks = await life(node)
    saver = await node.saver()
    await node.both(ranks, step)
    return ranks, saver


def goes_on(node: Node) -> None:
    """The ranks of the first life are gone; the next one is to go on from its step 1."""
    node.snapshots.reaped()
    node.begin(2, restore=m.Restore(ONE, 1, 2))


async def compared(rank: Rank, wanted: int) -> s.Whole:
    """What a rank is told of the shard of this rank, which it has asked for."""
    await rank.asks(s.WantShard(wanted), s.ShardHere)
    return await rank.asks(s.IsWhole(wanted), s.Whole)


# ---------------------------------------------------------------- commits


@played()
async def test_a_step_counts_when_every_local_rank_has_committed_it(node: Node) -> None:
    node.begin(1)
    ranks = await node.ranks()
    assert [rank.resume.step for rank in ranks] == [NONE, NONE]
    assert all(rank.fresh for rank in ranks)
    ranks[0].commit(1)
    await node.heard(ranks)
    assert ranks[0].segment.watermark == NONE
    ranks[1].commit(1)
    await node.master.until(lambda said: said.held, m.Holdings)
    assert [rank.segment.watermark for rank in ranks] == [1, 1]  # alone, nobody else is asked
    await node.both(ranks, 2)
    await node.both(ranks, 3)  # over the first one
    assert node.held() == [(1, 3, BOTH, False), (1, 2, BOTH, False)]


@played()
async def test_what_ranks_have_skipped_is_told_to_the_master_and_begins_anew_with_each_life(
    node: Node,
) -> None:
    ranks = await life(node, 1)
    ranks[0].say(s.Skipped(2))
    ranks[1].say(s.Skipped(3))
    said = await node.master.until(lambda said: said.skipped == 3, m.Holdings)
    assert said.last == m.LastRound(ONE, 2)
    node.master.reports.clear()
    goes_on(node)
    await node.master.until(lambda said: said.skipped == 0, m.Holdings)


@played(several=True)
async def test_of_several_nodes_only_the_master_says_what_is_whole(node: Node) -> None:
    start = node.begin(1)
    ranks = await node.ranks()
    await node.both(ranks, 1)
    await node.both(ranks, 2)
    assert ranks[0].segment.watermark == NONE
    assert ranks[0].segment.free_slot() is None
    node.snapshots.obey(m.Watermark(RoundName(7, 9, "other"), 2))
    assert ranks[0].segment.watermark == NONE
    node.snapshots.obey(m.Watermark(start.round, 2))
    assert ranks[1].segment.watermark == 2
    assert ranks[1].segment.free_slot() is not None


@played()
async def test_what_a_killed_rank_has_committed_counts_when_it_was_reaped(node: Node) -> None:
    node.begin(1)
    ranks = await node.ranks()
    for rank in ranks:
        rank.commit(1, tell=False)  # killed before it could say so
        rank.close()
    assert node.held() == [(1, 1, BOTH, False)]


@played()
async def test_a_step_of_only_some_ranks_counts_where_there_is_no_better_one(node: Node) -> None:
    node.begin(1)
    ranks = await node.ranks()
    ranks[0].commit(1)
    await node.heard(ranks)
    assert not any(isinstance(said, m.Holdings) and said.held for said in node.master.reports)
    assert node.held() == [(1, 1, (CONTENT, 0), False)]


@played()
async def test_where_all_ranks_have_a_step_one_that_some_have_does_not_count(node: Node) -> None:
    ranks = await life(node, 1)
    ranks[0].commit(2)
    await node.heard(ranks)
    assert node.held() == [(1, 1, BOTH, False)]


# ---------------------------------------------------------------- restores


@played()
async def test_what_is_newer_than_the_chosen_step_is_gone_before_a_rank_is_born(node: Node) -> None:
    ranks = await life(node, 1, 2)
    goes_on(node)
    segment = ranks[0].segment
    (left,) = segment.snapshots()
    assert left.step == 1
    assert segment.pinned(left.slot)
    assert segment.watermark == 1
    again = await node.rank(0)
    rounds = (s.Named(7, 2, "n2"), s.Named(7, 1, "n1"))
    assert again.resume == s.Resume(*rounds, 1, 2, same=True, put_off=(1, 15))
    shard = await again.asks(s.WantShard(0), s.ShardHere)
    assert (shard.ok, shard.rank, shard.slot) == (True, 0, left.slot)
    assert len(again.fds) == 1
    other = await again.asks(s.WantShard(1), s.ShardHere)
    assert other.ok
    assert other.rank == 1
    none = await again.asks(s.WantShard(2), s.ShardHere)
    assert not none.ok
    assert "no rank 2 among 2" in none.reason


@played()
async def test_nothing_chosen_leaves_nothing(node: Node) -> None:
    ranks = await life(node, 1)
    node.snapshots.reaped()
    node.begin(2)
    assert ranks[0].segment.snapshots() == []
    assert ranks[0].segment.watermark == NONE
    assert node.held() == []


@played()
async def test_the_chosen_step_stays_until_the_new_life_has_a_whole_one_of_its_own(
    node: Node,
) -> None:
    ranks = await life(node, 1)
    node.snapshots.reaped()
    restore = m.Restore(ONE, 1, 2)
    node.begin(2, restore=restore)
    ranks = await node.ranks()
    assert not ranks[0].fresh
    ranks[0].commit(2)
    assert ranks[0].segment.free_slot() is None
    await node.heard(ranks)
    assert node.held() == [(2, 2, (CONTENT, 0), False), (1, 1, BOTH, False)]
    node.begin(3, restore=restore)  # killed before the other one: the same again
    ranks = await node.ranks()
    await node.both(ranks, 2)
    await node.both(ranks, 3)
    assert node.held() == [(3, 3, BOTH, False), (3, 2, BOTH, False)]


@played()
async def test_a_life_is_given_the_pages_of_the_one_before(node: Node) -> None:
    ranks = await life(node, 1)
    inodes = [rank.inode for rank in ranks]
    node.snapshots.reaped()
    node.begin(2)
    ranks = await node.ranks()
    assert [rank.inode for rank in ranks] == inodes


@played()
async def test_a_new_layout_has_a_segment_of_its_own_and_the_old_one_stays_until_it_is_whole(
    node: Node,
) -> None:
    ranks = await life(node, 1)
    for rank in ranks:  # optimizer state has come into being
        assert (await rank.needs(layout_of(5000))).fresh
    ranks[0].commit(2)
    await node.heard(ranks)
    assert len(node.snapshots._segments.held) == 4
    ranks[1].commit(2)
    await node.heard(ranks)
    assert len(node.snapshots._segments.held) == 2
    grown = layout_of(5000).content
    assert node.held() == [(1, 2, (grown, grown), False)]


@played()
async def test_what_a_rank_is_being_given_is_not_taken_for_needless(node: Node) -> None:
    """Memory for a layout in which the life before committed nothing: both ask for it at once, and
    who is given it first has the agent look for what nobody needs."""
    grown = layout_of(5000)
    ranks = await life(node, 1)
    for rank in ranks:
        await rank.needs(grown)
    goes_on(node)
    ranks = await node.ranks()
    given = await asyncio.gather(*(rank.needs(grown) for rank in ranks))
    assert all(here.fresh for here in given)
    await node.both(ranks, 2)


@played()
async def test_a_newer_checkpointer_is_given_what_the_one_before_had_asked_for(node: Node) -> None:
    node.begin(1)
    (rank, _) = await node.ranks()
    rank.say(rank.wanted(layout_of(5000)))
    newer = await node.rank(0)
    assert (await newer.needs(layout_of(9000))).fresh


@played()
async def test_a_rank_is_told_at_once_that_the_agent_cannot_map_its_memory(node: Node) -> None:
    """Nothing of that memory is left; and so with whatever else is in the way."""
    node.begin(1)
    rank = await node.rank(0)
    with at_most(200 << 20):
        here = await rank.asks(rank.wanted(layout_of(150 << 20)), s.SegmentHere)
    assert not here.ok
    assert "without snapshots: the agent cannot map 300 MiB" in here.reason
    assert node.snapshots._segments.held == []
    folder = Path(node.snapshots._segments._base)
    assert not list(folder.rglob("0-*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "mapped", lambda *_: 1 / 0)
        here = await rank.asks(rank.wanted(layout_of()), s.SegmentHere)
    assert "without snapshots: ZeroDivisionError" in here.reason
    assert (await rank.needs(layout_of())).ok


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """This process may map so many bytes more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@played(several=True)
async def test_a_shard_that_is_not_here_is_fetched_from_who_holds_it(node: Node) -> None:
    node.begin(2, restore=m.Restore(ONE, 5, 4))
    rank = await node.rank(0)
    saver = await node.saver(port=4000)
    assert (await node.master.until(lambda h: h.saver, m.Holdings)).saver == Endpoint(
        "10.0.0.1", 4000
    )
    assert not rank.resume.same
    rank.say(s.WantShard(3))
    asked = await node.master.until(lambda _: True, m.WhereIs)
    assert asked == m.WhereIs(ONE, 5, 3)
    node.snapshots.attached()  # another master has not heard it
    assert await node.master.until(lambda _: True, m.WhereIs) == asked
    node.snapshots.obey(m.Holder(ONE, 5, 3, 2, Endpoint("10.0.0.2", 99), ""))
    fetch = await saver.hears(s.Fetch)
    assert (fetch.host, fetch.port, fetch.rank) == ("10.0.0.2", 99, 2)
    layout = layout_of()
    length = len(layout.encode())
    size = s.FetchSize(fetch.key, True, "", length, layout.slot_bytes)
    assert await saver.asks(size, s.FetchInto) == s.FetchInto(fetch.key)
    fill(saver.fds.pop(), layout.key)
    saver.say(s.Fetched(fetch.key, True, ""))
    here = await rank.hears(s.ShardHere)
    assert here == s.ShardHere(True, "", 2, 0, 8)
    assert rank.fds
    assert (await rank.asks(s.IsWhole(3), s.Whole)).ok


def fill(fd: int, key: int) -> None:
    """As a saver does with a copy."""
    import mmap

    from elasticrun.shm.segment import Segment

    with mmap.mmap(fd, 0) as mapped:
        segment = Segment(memoryview(mapped))
        segment.commit(0, round=ONE, sequence=8, step=5, layout=key, values=0)
        segment.close()
    os.close(fd)


@played(several=True)
async def test_nobody_holds_it(node: Node) -> None:
    node.begin(2, restore=m.Restore(ONE, 5, 4))
    rank = await node.rank(0)
    rank.say(s.WantShard(3))
    await node.master.until(lambda _: True, m.WhereIs)
    node.snapshots.obey(m.Holder(ONE, 5, 3, 3, None, "its node is gone"))
    here = await rank.hears(s.ShardHere)
    assert not here.ok
    assert here.reason == "its node is gone"


@played()
async def test_a_shard_is_compared_while_ranks_are_born_and_a_bad_one_does_not_count(
    node: Node,
) -> None:
    _, saver = await life_with_saver(node, 1)
    opened = await saver.hears(s.SegmentOpen)
    hashing = await saver.hears(s.HashSnapshot)
    assert hashing.key == opened.key
    assert saver.fds
    node.snapshots.reaped()
    await saver.hears(s.SegmentOpen)
    await saver.hears(s.HashSnapshot)
    node.begin(2, restore=m.Restore(ONE, 1, 2))
    checks = [await saver.hears(s.CheckSnapshot) for _ in range(2)]
    for check, ok in zip(checks, (True, False), strict=True):
        saver.say(s.Checked(check.key, check.slot, check.sequence, ok, "" if ok else "flipped"))
    rank = await node.rank(1)
    whole = await compared(rank, 1)
    assert (whole.ok, whole.reason) == (False, "flipped")
    rank.say(s.CannotRestore(1, "block 3 is not what was written"))
    bad = await node.master.until(lambda _: True, m.ShardBad)
    assert bad == m.ShardBad(ONE, 1, 1, "block 3 is not what was written")
    assert node.held() == [(1, 1, (CONTENT, 0), False)]


@played()
async def test_without_a_saver_nothing_is_compared(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savers_module, "STARTS_MOST", 1)
    await life(node, 1)
    await node.saver_dies(await node.saver())
    goes_on(node)
    rank = await node.rank(0)
    whole = await compared(rank, 0)
    assert whole.ok
    assert "nothing was compared: the saver ended (killed by signal 9)" in whole.reason


def test_what_had_no_hashes_is_said_to_go_unverified(caplog: pytest.LogCaptureFixture) -> None:
    async def body(node: Node) -> None:
        _, saver = await life_with_saver(node, 1)
        goes_on(node)
        for _ in range(2):
            check = await next_of(saver, s.CheckSnapshot)
            which = (check.key, check.slot, check.sequence)
            saver.say(s.Checked(*which, True, "step 1 had not been hashed"))
        whole = await compared(await node.rank(0), 0)
        assert (whole.ok, whole.reason) == (True, "step 1 had not been hashed")

    play(body)
    assert "step 1 goes unverified: step 1 had not been hashed" in caplog.text


@played()
async def test_a_saver_that_did_its_work_is_started_again_as_often_as_it_dies(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one that keeps dying before it has written anything is of no use."""
    monkeypatch.setattr(savers_module, "STARTS_MOST", 2)
    await life(node, 1)
    for number in range(4):
        saver = await node.saver()
        attempt = f"a{number}"
        node.snapshots.obey(persist(1, attempt=attempt))
        await checked(saver, 2)
        await next_of(saver, s.PersistParts)
        saver.say(s.PartsDone(attempt, True, "", 1, 0.1))
        await node.master.until(lambda p: p.ok, m.Persisted)
        node.snapshots.obey(m.PersistOver(attempt, ONE, 1, False, "tried again"))
        await node.saver_dies(saver)
    for _ in range(2):
        await node.saver_dies(await node.saver())
    assert node.spawners.orders.empty()
    with pytest.raises(savers_module.SaverGone, match="not started again for a while"):
        await node.snapshots.savers.there()


@pytest.mark.parametrize("refused", [True, False])
def test_a_saver_that_cannot_be_started_is_tried_again_and_writes(
    refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No process is to be had for a while (a pids limit), or no thread, so that it ends before it
    has said a word: nothing is given up, and what was to be written is."""
    monkeypatch.setattr(savers_module, "RETRY_FIRST", 0.001)

    async def body(node: Node) -> None:
        await life(node, 1)
        node.snapshots.obey(persist(1))
        for _ in range(2 * savers_module.STARTS_MOST):
            key = (await asyncio.wait_for(node.spawners.orders.get(), LIMIT)).key
            why = "no saver could be started: Resource temporarily unavailable"
            end = SpawnFailed(key, why) if refused else Exited(key, 1, 1, 0)
            node.snapshots.savers.heard(node.spawners.children[key], end)
        saver = await node.saver()
        await checked(saver, 2)
        order = await next_of(saver, s.PersistParts)
        saver.say(s.PartsDone(order.attempt, True, "", 1, 0.1))
        assert (await node.master.until(lambda _: True, m.Persisted)).ok

    play(body)
    assert sum("it is tried again, 10 s later at most" in text for text in caplog.messages) == 1


@played()
async def test_a_saver_that_went_with_its_fork_server_is_not_counted(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(savers_module, "STARTS_MOST", 1)
    node.begin(1)
    await node.ranks()
    for key in (1, 2, 3):
        await node.saver()
        node.snapshots.savers.lost(node.spawners.children[key])
    await node.saver()


def test_a_saver_that_stands_still_does_not_hold_up_a_restore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards_module, "CHECK_LIMIT", 0.2)

    async def body(node: Node) -> None:
        await life(node, 1)
        await node.saver()  # and it says no more
        goes_on(node)
        rank = await node.rank(0)
        whole = await compared(rank, 0)
        assert whole.ok
        assert "nothing was compared: the saver has not answered" in whole.reason

    play(body)
    assert "step 1 goes unverified" in caplog.text


# ---------------------------------------------------------------- checkpoints


async def checked(saver: Client, count: int) -> None:
    """Answer so many checks, whatever else comes."""
    while count:
        message = await saver.hears(object)
        if isinstance(message, s.CheckSnapshot):
            saver.say(s.Checked(message.key, message.slot, message.sequence, True, ""))
            count -= 1


async def next_of(saver: Client, kind: type[T]) -> T:
    """The next order of this kind, whatever else comes."""
    while True:
        message = await saver.hears(object)
        if isinstance(message, kind):
            return message


@played()
async def test_a_wanted_step_is_pinned_written_committed_and_free_again(node: Node) -> None:
    node.begin(1)
    ranks = await node.ranks()
    saver = await node.saver()
    slots = [rank.commit(1, persist=True) for rank in ranks]
    await node.master.until(lambda said: said.held and said.held[0].wanted, m.Holdings)
    await node.both(ranks, 2)
    assert [rank.segment.free_slot() for rank in ranks] == [None, None]
    node.snapshots.obey(persist(1))
    await checked(saver, 2)
    order = await next_of(saver, s.PersistParts)
    assert (order.step, order.folder, order.keep_last, order.coordinates) == (
        *(1, "/runs/a", 3),
        True,
    )
    assert [(p.rank, p.slot, p.shared) for p in order.parts] == [
        (0, slots[0], True),
        (1, slots[1], False),
    ]
    saver.say(s.PartsDone("a1", True, "", 4096, 0.5))
    done = await node.master.until(lambda _: True, m.Persisted)
    assert done == m.Persisted("a1", True, False, "", 4096, 0.5)
    node.snapshots.obey(persist(1))  # a master that has not heard it asks again
    assert await node.master.until(lambda _: True, m.Persisted) == done
    node.snapshots.obey(m.CommitCheckpoint("a1"))
    assert await next_of(saver, s.CommitNow) == s.CommitNow("a1", 2)
    saver.say(s.CommitDone("a1", True, ""))
    assert (await node.master.until(lambda p: p.committed, m.Persisted)).ok
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, True, ""))
    assert [rank.segment.free_slot() for rank in ranks] == slots


@played()
async def test_a_rank_that_dies_before_it_says_that_it_wants_a_step_written(node: Node) -> None:
    node.begin(1)
    ranks = await node.ranks()
    for rank in ranks:
        rank.commit(1, persist=True, tell=False)
    assert node.held() == [(1, 1, BOTH, True)]
    node.snapshots.obey(m.PersistOver("", ONE, 1, False, "none is needed"))
    assert node.held() == [(1, 1, BOTH, False)]
    assert not ranks[0].segment.pinned(0)


@played()
async def test_what_is_being_written_stays_pinned_over_a_new_life(node: Node) -> None:
    ranks, saver = await life_with_saver(node, 1)
    node.snapshots.reaped()
    node.snapshots.obey(persist(1, reason="breakpoint"))
    node.begin(2, restore=m.Restore(ONE, 1, 2))
    await checked(saver, 2)
    ranks = await node.ranks()
    await node.both(ranks, 2)
    assert ranks[0].segment.free_slot() is None
    await next_of(saver, s.PersistParts)
    saver.say(s.PartsDone("a1", True, "", 1, 0.1))
    await node.master.until(lambda p: p.ok, m.Persisted)
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, True, ""))
    assert ranks[0].segment.free_slot() is not None


@played()
async def test_a_step_that_is_not_here_any_more_is_not_written(node: Node) -> None:
    node.begin(1)
    await node.ranks()
    node.snapshots.obey(persist(1))
    said = await node.master.until(lambda _: True, m.Persisted)
    assert not said.ok
    assert said.reason == "step 1 of rank 0 is not held here any more"
    node.snapshots.obey(m.CommitCheckpoint("another"))
    said = await node.master.until(lambda p: p.committed, m.Persisted)
    assert not said.ok
    assert "does not know that attempt" in said.reason


@played()
async def test_a_saver_that_dies_ends_its_attempt_and_another_one_is_started(node: Node) -> None:
    _, saver = await life_with_saver(node, 1)
    node.snapshots.obey(persist(1))
    await checked(saver, 2)
    await next_of(saver, s.PersistParts)
    await node.saver_dies(saver)
    said = await node.master.until(lambda _: True, m.Persisted)
    assert not said.ok
    assert said.reason == "the saver ended (killed by signal 9)"
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, False, said.reason))
    node.snapshots.obey(persist(1, attempt="a2"))
    saver = await node.saver()
    await checked(saver, 2)
    assert (await next_of(saver, s.PersistParts)).attempt == "a2"


@played()
async def test_an_attempt_is_given_up_here_when_its_time_is_over(node: Node) -> None:
    ranks, saver = await life_with_saver(node, 1)
    node.snapshots.obey(persist(1, limit=0.05))
    assert (await next_of(saver, s.GiveUp)).attempt == "a1"
    said = await node.master.until(lambda _: True, m.Persisted)
    assert not said.ok
    assert "not written within 0.05 s" in said.reason
    assert not any(ranks[0].segment.pinned(slot) for slot in range(2))


@played(limit=0.05)
async def test_a_wanted_step_that_nobody_writes_does_not_stop_snapshots_for_good(
    node: Node,
) -> None:
    node.begin(1)
    ranks = await node.ranks()
    slot = ranks[0].commit(1, persist=True)
    await node.heard(ranks)
    async with asyncio.timeout(240):
        while ranks[0].segment.pinned(slot):
            await node.heard(ranks)


@played(several=True)
async def test_a_saver_of_several_nodes_has_a_secret_and_an_address(node: Node) -> None:
    node.begin(1)
    await node.ranks()
    order = await node.spawners.orders.get()
    assert order.host == "10.0.0.1"
    assert len(order.secret) == 64
    assert order.secret != node.config.token
    assert order.env["OMP_NUM_THREADS"] == "1"


# ---------------------------------------------------------------- strangers


@played()
async def test_peers_that_break_the_protocol_are_hung_up_on(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.begin(1)
    name, _ = read_place(node.snapshots.place(0))
    good = s.RankHere(VERSION, 0, 0, 2, "/runs/a", 3, 0)
    for wrong in (
        s.IsWhole(0),  # not introduced
        replace(good, local_rank=2),
        replace(good, rank=1),
        replace(good, version=99),
        replace(good, folder="x" * 5000),
        s.SaverHere(VERSION, 77, 0),
    ):
        client = await node.call(Client, name)
        client.say(wrong)
        assert await client.hangs_up()
    client = await node.call(Client, name)
    client.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert await client.hangs_up()
    for second in (good, s.Checked(1, 0, 1, True, "")):
        rank = await node.rank(0)
        rank.say(second)
        assert await rank.hangs_up()
    assert "it has to say once, and first, who it is" in told(caplog)
    assert "it says that it is rank 1 of 2, and is rank 0 of 2" in told(caplog)
    assert "no such saver was started" in told(caplog)
    assert (await node.rank(0)).resume.step == NONE  # and goes on with whoever is right


@played()
async def test_who_says_nothing_is_hung_up_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FIRST_WORD", 0.05)
    name, _ = read_place(node.snapshots.place(0))
    assert await (await node.call(Client, name)).hangs_up()


@played()
async def test_there_are_not_more_connections_than_there_can_be(node: Node) -> None:
    name, _ = read_place(node.snapshots.place(0))
    most = 2 * 2 + peers.SPARE
    for _ in range(most):
        await node.call(Client, name)
    one_more = await node.call(Client, name)
    assert await one_more.hangs_up()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    dial = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect('\\0' + sys.argv[1]); s.settimeout(240); sys.exit(len(s.recv(1)))"
    )

    async def body(node: Node) -> None:
        name, _ = read_place(node.snapshots.place(0))
        command = [sys.executable, "-c", dial, name]
        done = await asyncio.to_thread(subprocess.run, command, timeout=240, check=False)
        assert done.returncode == 0
        assert "a process of another user" in told(caplog)

    play(body)


SPEAK = """
import os, socket, sys
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.shm.segment import VERSION
from elasticrun.wire.snapshots import RankHere, ToPeer
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
rank = int(sys.argv[2])
sock.sendall(encode(RankHere(VERSION, rank, rank, 2, "/runs/a", 3, 0)))
print("heard" if sock.recv(65536) else "hung up", flush=True)
sys.stdin.read()
"""


@contextmanager
def speaks(node: Node, local_rank: int, *, leads: bool = False) -> Iterator[str]:
    """Another process that says it is that rank; how it was answered. `leads`: it has a session of
    its own, as the process that is started for a rank has."""
    name, _ = read_place(node.snapshots.place(local_rank))
    command = [sys.executable, "-c", SPEAK, name, str(local_rank)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=leads, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@played()
async def test_a_child_of_a_rank_does_not_take_its_place(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.begin(1)
    rank = await node.rank(0)
    await rank.needs(layout_of())

    def a_child_comes() -> str:
        with speaks(node, 0) as answer:
            return answer

    assert await asyncio.to_thread(a_child_comes) == "hung up"
    assert f"process {os.getpid()} speaks for that rank" in told(caplog)
    rank.commit(1)
    await node.heard([rank])
    newer = await node.rank(0)  # a later Checkpointer of the same process
    assert await rank.hangs_up()
    assert (await newer.needs(layout_of())).ok


@played()
async def test_who_comes_after_a_process_within_a_rank(node: Node) -> None:
    """The rank is a shell, say, that runs one program after another."""
    node.begin(1)

    async def is_heard(local_rank: int) -> bool:
        try:
            await node.rank(local_rank)
        except (AssertionError, ConnectionError):
            return False
        return True

    for leads, after in ((False, True), (True, False)):
        local_rank = int(leads)
        made = speaks(node, local_rank, leads=leads)
        assert await asyncio.to_thread(made.__enter__) == "heard"
        assert not await is_heard(local_rank)
        await asyncio.to_thread(made.__exit__, None, None, None)
        assert await is_heard(local_rank) is after
    node.begin(2)
    assert await is_heard(1)


@played()
async def test_ranks_of_an_older_life_are_not_heard_any_more(node: Node) -> None:
    node.begin(1)
    old = await node.rank(0)
    node.begin(2)
    assert await old.hangs_up()
    with pytest.raises(AssertionError, match="hung up"):  # it says its old place
        await node.call(Rank, node.snapshots.place(0), structs.replace(node.start, world_size=9))


@played()
async def test_no_socket_is_left_and_none_has_a_path(node: Node) -> None:
    name, local_rank = read_place(node.snapshots.place(1))
    assert local_rank == 1
    assert name.startswith("elasticrun-")
    assert len(name) == 43
    with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError):
        other.bind(address(name))
