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

import pytest

from elasticrun.agent.snapshots import (
    fetching as shards_module,
    peers,
    saver as savers_module,
    snapshots as snapshots_module,
)
from elasticrun.snapshots.shm import memory
from elasticrun.snapshots.shm.segment import NONE, VERSION
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.spawning import Exited, SpawnFailed
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.snapshots.played import (
    BOTH,
    CONTENT,
    LAYOUT,
    LIMIT,
    ONE,
    Client,
    Node,
    Rank,
    layout_of,
    opened,
    persist,
)
from tests.harness import await_true
from tests.starts import changed


async def compared(rank: Rank, wanted: int) -> s.Whole:
    """What a rank is told of the shard of this rank, which it has asked for."""
    await rank.asks(s.WantShard(wanted), s.ShardHere)
    return await rank.asks(s.IsWhole(wanted), s.Whole)


# ---------------------------------------------------------------- commits


async def test_a_step_counts_when_every_local_rank_has_committed_it(node: Node) -> None:
    ranks = await node.life()
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


async def test_the_master_is_told_what_ranks_of_this_life_have_skipped(node: Node) -> None:
    ranks = await node.life(1)
    ranks[0].say(s.Skipped(2))
    ranks[1].say(s.Skipped(3))
    said = await node.master.until(lambda said: said.skipped == 3, m.Holdings)
    assert said.last == m.RoundInfo(ONE, 2, 2)
    node.master.reports.clear()
    node.goes_on()
    await node.master.until(lambda said: said.skipped == 0, m.Holdings)


async def test_of_several_nodes_only_the_master_says_what_is_whole(one_of_three: Node) -> None:
    ranks = await one_of_three.life(1, 2)
    assert ranks[0].segment.watermark == NONE
    assert ranks[0].segment.free_slot() is None
    one_of_three.snapshots.obey(m.Watermark(RoundName(7, 9, "other"), 2))
    assert ranks[0].segment.watermark == NONE
    one_of_three.snapshots.obey(m.Watermark(ONE, 2))
    assert ranks[1].segment.watermark == 2
    assert ranks[1].segment.free_slot() is not None


@pytest.mark.parametrize("wanted", [False, True])
async def test_what_a_killed_rank_committed_counts_once_reaped(node: Node, wanted: bool) -> None:
    """And that it is to be written, until the master says that it is not."""
    ranks = await node.life()
    for rank in ranks:
        rank.commit(1, persist=wanted, tell=False)  # killed before it could say so
        rank.close()
    assert node.held() == [(1, 1, BOTH, wanted)]
    node.snapshots.obey(m.PersistOver("", ONE, 1, False, "none is needed"))
    assert node.held() == [(1, 1, BOTH, False)]
    assert not ranks[0].segment.pinned(0)


@pytest.mark.parametrize(("whole", "counts"), [((), (CONTENT, 0)), ((1,), BOTH)])
async def test_a_step_of_only_some_ranks_counts_where_there_is_no_better_one(
    node: Node, whole: tuple[int, ...], counts: tuple[int, int]
) -> None:
    ranks = await node.life(*whole)
    some = len(whole) + 1
    ranks[0].commit(some)
    await node.heard(ranks)
    told = [said.held for said in node.master.reports if isinstance(said, m.Holdings)]
    assert not any(one.step == some for held in told for one in held)
    assert node.held() == [(1, 1, counts, False)]


# ---------------------------------------------------------------- restores


async def test_what_is_newer_than_the_chosen_step_is_gone_before_a_rank_is_born(node: Node) -> None:
    ranks = await node.life(1, 2)
    node.goes_on()
    segment = ranks[0].segment
    (left,) = segment.snapshots()
    assert left.step == 1
    assert segment.pinned(left.slot)
    assert segment.watermark == 1
    again = await node.rank(0)
    rounds = (RoundName(7, 2, "n2"), RoundName(7, 1, "n1"))
    assert again.resume == s.Resume(*rounds, 1, 2, same=True, put_off=(1, 15))
    shard = await again.asks(s.WantShard(0), s.ShardHere)
    assert (shard.ok, shard.rank, shard.slot) == (True, 0, left.slot)
    assert len(again.fds) == 1
    other = await again.asks(s.WantShard(1), s.ShardHere)
    assert (other.ok, other.rank) == (True, 1)
    none = await again.asks(s.WantShard(2), s.ShardHere)
    assert not none.ok
    assert "only 2 ranks, and no rank 2" in none.reason


async def test_nothing_chosen_leaves_nothing_but_the_pages(node: Node) -> None:
    ranks = await node.life(1)
    inodes = [rank.inode for rank in ranks]
    node.snapshots.ranks_gone(done=False)
    node.begin(2)
    assert ranks[0].segment.snapshots() == []
    assert ranks[0].segment.watermark == NONE
    assert [rank.inode for rank in await node.ranks()] == inodes
    assert node.held() == []


async def test_the_chosen_step_stays_until_the_new_life_has_a_whole_one(node: Node) -> None:
    await node.life(1)
    restore = node.goes_on().info.restore
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


async def test_a_segment_of_an_older_layout_stays_until_the_new_one_is_whole(node: Node) -> None:
    ranks = await node.life(1)
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


async def test_what_a_rank_is_being_given_is_not_taken_for_needless(node: Node) -> None:
    """Memory for a layout in which the life before committed nothing: both ask for it at once, and
    who is given it first has the agent look for what nobody needs."""
    grown = layout_of(5000)
    for rank in await node.life(1):
        await rank.needs(grown)
    node.goes_on()
    ranks = await node.ranks()
    given = await asyncio.gather(*(rank.needs(grown) for rank in ranks))
    assert all(here.fresh for here in given)
    await node.both(ranks, 2)


async def test_a_newer_checkpointer_is_given_what_the_one_before_had_asked_for(node: Node) -> None:
    (rank, _) = await node.life()
    rank.say(rank.wanted(layout_of(5000)))
    newer = await node.rank(0)
    assert (await newer.needs(layout_of(9000))).fresh


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
        patch.setattr(memory, "map_allocated", lambda *_: 1 / 0)
        here = await rank.asks(rank.wanted(LAYOUT), s.SegmentHere)
    assert "without snapshots: ZeroDivisionError" in here.reason
    assert (await rank.needs(LAYOUT)).ok


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


async def test_a_shard_that_is_not_here_is_fetched_from_who_holds_it(one_of_three: Node) -> None:
    node = one_of_three
    node.begin(2, restore=m.Restore(ONE, 5, 4))
    rank = await node.rank(0)
    saver = await node.saver(port=4000)
    there = (await node.master.until(lambda h: h.saver, m.Holdings)).saver
    assert there == Endpoint("10.0.0.1", 4000)
    assert not rank.resume.same
    rank.say(s.WantShard(3))
    asked = await node.master.until(lambda _: True, m.WhereIs)
    assert asked == m.WhereIs(ONE, 5, 3)
    node.snapshots.attached()  # another master has not heard it
    assert await node.master.until(lambda _: True, m.WhereIs) == asked
    node.snapshots.obey(m.Holder(ONE, 5, 3, 2, Endpoint("10.0.0.2", 99), ""))
    fetch = await saver.copies()
    assert (fetch.host, fetch.port, fetch.rank) == ("10.0.0.2", 99, 2)
    assert saver.slots == [0]
    assert await rank.hears(s.ShardHere) == s.ShardHere(True, "", 2, 0, 5)
    assert rank.fds
    assert (await rank.asks(s.IsWhole(3), s.Whole)).ok
    rank.say(s.WantShard(2))
    await node.master.until(lambda _: True, m.WhereIs)
    node.snapshots.obey(m.Holder(ONE, 5, 2, 2, None, "its node is gone"))
    here = await rank.hears(s.ShardHere)
    assert (here.ok, here.reason) == (False, "its node is gone")


async def test_a_shard_is_compared_while_ranks_start_and_a_bad_one_counts_not(node: Node) -> None:
    _, saver = await node.life_with_saver(1)
    opened = await saver.hears(s.SegmentOpen)
    hashing = await saver.hears(s.HashSnapshot)
    assert hashing.key == opened.key
    assert saver.fds
    node.snapshots.ranks_gone(done=False)
    await saver.hears(s.SegmentOpen)
    await saver.hears(s.HashSnapshot)
    node.goes_on()
    await saver.checks(1)
    await saver.checks(1, False, "flipped")
    rank = await node.rank(1)
    whole = await compared(rank, 1)
    assert (whole.ok, whole.reason) == (False, "flipped")
    rank.say(s.CannotRestore(1, "block 3 is not what was written"))
    bad = await node.master.until(lambda _: True, m.ShardBad)
    assert bad == m.ShardBad(ONE, 1, 1, "block 3 is not what was written")
    assert node.held() == [(1, 1, (CONTENT, 0), False)]


@pytest.mark.parametrize(
    ("saver", "why"),
    [
        ("gone", "nothing was compared: the saver ended (killed by signal 9)"),
        ("mute", "nothing was compared: the saver has not answered"),
        ("new", "step 1 had not been hashed"),
    ],
)
async def test_what_cannot_be_compared_is_said_to_go_unverified(
    node: Node, saver: str, why: str, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(savers_module, "STARTS_MOST", 1)
    if saver == "mute":
        monkeypatch.setattr(shards_module, "CHECK_LIMIT", 0.2)
    _, here = await node.life_with_saver(1)
    if saver == "gone":
        await node.saver_dies(here)
    node.goes_on()
    if saver == "new":
        await here.checks(2, True, why)
    whole = await compared(await node.rank(0), 0)
    assert whole.ok
    assert why in whole.reason
    assert f"step 1 is not verified: {why}" in caplog.text


# ---------------------------------------------------------------- the saver's lives


async def test_a_saver_that_did_its_work_is_always_started_again(node: Node, monkeypatch) -> None:
    """Only one that keeps dying before it has written anything is of no use."""
    monkeypatch.setattr(savers_module, "STARTS_MOST", 2)
    await node.life(1)
    for number in range(4):
        saver = await node.saver()
        attempt = f"a{number}"
        node.snapshots.obey(persist(1, attempt=attempt))
        assert (await saver.writes()).attempt == attempt
        await node.master.until(lambda p: p.ok, m.Persisted)
        node.snapshots.obey(m.PersistOver(attempt, ONE, 1, False, "tried again"))
        await node.saver_dies(saver)
    for _ in range(2):
        await node.saver_dies(await node.saver())
    assert node.spawners.orders.empty()
    with pytest.raises(savers_module.SaverGone, match="not restarted for a while"):
        await node.snapshots.savers.wait_connected()


@pytest.mark.parametrize("refused", [True, False])
async def test_a_saver_that_cannot_be_started_is_tried_again_and_writes(
    node: Node, refused: bool, monkeypatch, caplog
) -> None:
    """No process is to be had for a while (a pids limit), or no thread, so that it ends before it
    has said a word: nothing is given up, and what was to be written is."""
    monkeypatch.setattr(savers_module, "RETRY_FIRST", 0.001)
    await node.life(1)
    node.snapshots.obey(persist(1))
    for _ in range(2 * savers_module.STARTS_MOST):
        key = (await asyncio.wait_for(node.spawners.orders.get(), LIMIT)).key
        why = "no saver could be started: Resource temporarily unavailable"
        end = SpawnFailed(key, why) if refused else Exited(key, 1, 1, 0)
        node.snapshots.savers.on_child_message(node.spawners.children[key], end)
    await (await node.saver()).writes()
    assert (await node.master.until(lambda _: True, m.Persisted)).ok
    assert sum("retrying within 10 s" in text for text in caplog.messages) == 1


async def test_a_saver_that_went_with_its_fork_server_counts_not(node: Node, monkeypatch) -> None:
    monkeypatch.setattr(savers_module, "STARTS_MOST", 1)
    await node.life()
    for key in (1, 2, 3):
        await node.saver()
        node.snapshots.savers.lost(node.spawners.children[key])
    await node.saver()


async def test_a_saver_of_several_nodes_has_a_secret_and_an_address(one_of_three: Node) -> None:
    await one_of_three.life()
    order = await one_of_three.spawners.orders.get()
    assert order.host == "10.0.0.1"
    assert len(order.secret) == 64
    assert order.secret != one_of_three.identity.token
    assert order.env["OMP_NUM_THREADS"] == "1"


# ---------------------------------------------------------------- checkpoints


async def test_a_wanted_step_is_pinned_written_committed_and_free_again(node: Node) -> None:
    ranks = await node.life()
    saver = await node.saver()
    slots = [rank.commit(1, persist=True) for rank in ranks]
    await node.master.until(lambda said: said.held and said.held[0].wanted, m.Holdings)
    await node.both(ranks, 2)
    assert [rank.segment.free_slot() for rank in ranks] == [None, None]
    node.snapshots.obey(persist(1))
    order = await saver.writes(nbytes=4096, seconds=0.5)
    assert (order.step, order.folder, order.keep_last, order.coordinates) == (1, "/runs/a", 3, True)
    parts = [(part.rank, part.slot, part.shared) for part in order.parts]
    assert parts == [(0, slots[0], True), (1, slots[1], False)]
    done = await node.master.until(lambda _: True, m.Persisted)
    assert done == m.Persisted("a1", True, False, "", 4096, 0.5)
    node.snapshots.obey(persist(1))  # a master that has not heard it asks again
    assert await node.master.until(lambda _: True, m.Persisted) == done
    node.snapshots.obey(m.CommitCheckpoint("a1"))
    assert await saver.next(s.CommitNow) == s.CommitNow("a1", 2)
    saver.say(s.CommitDone("a1", True, ""))
    assert (await node.master.until(lambda p: p.committed, m.Persisted)).ok
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, True, ""))
    assert [rank.segment.free_slot() for rank in ranks] == slots


async def test_what_is_being_written_stays_pinned_over_a_new_life(node: Node) -> None:
    _, saver = await node.life_with_saver(1)
    node.snapshots.obey(persist(1, reason="breakpoint"))
    node.goes_on()
    ranks = await node.ranks()
    await node.both(ranks, 2)
    assert ranks[0].segment.free_slot() is None
    await saver.writes()
    await node.master.until(lambda p: p.ok, m.Persisted)
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, True, ""))
    assert ranks[0].segment.free_slot() is not None


async def test_a_step_that_is_not_here_any_more_is_not_written(node: Node) -> None:
    await node.life()
    node.snapshots.obey(persist(1))
    said = await node.master.until(lambda _: True, m.Persisted)
    assert (said.ok, said.reason) == (False, "step 1 of rank 0 is no longer in memory here")
    node.snapshots.obey(m.CommitCheckpoint("another"))
    said = await node.master.until(lambda p: p.committed, m.Persisted)
    assert not said.ok
    assert "no longer knows that attempt" in said.reason


async def test_a_saver_that_dies_ends_its_attempt_and_another_one_is_started(node: Node) -> None:
    _, saver = await node.life_with_saver(1)
    node.snapshots.obey(persist(1))
    await saver.checks()
    await saver.next(s.PersistParts)
    await node.saver_dies(saver)
    said = await node.master.until(lambda _: True, m.Persisted)
    assert (said.ok, said.reason) == (False, "the saver ended (killed by signal 9)")
    node.snapshots.obey(m.PersistOver("a1", ONE, 1, False, said.reason))
    node.snapshots.obey(persist(1, attempt="a2"))
    assert (await (await node.saver()).writes()).attempt == "a2"


async def test_a_saver_that_answers_no_ping_is_killed(node: Node, monkeypatch) -> None:
    """It stands still in the middle of an attempt; the attempt ends with that as the reason."""
    monkeypatch.setattr(savers_module, "PING_EVERY", 0.01)
    _, saver = await node.life_with_saver(1)
    node.snapshots.obey(persist(1))
    for _ in range(3):  # as long as something is wanted of it
        saver.say(s.SaverPong((await saver.next(s.PingSaver)).number))
    monkeypatch.setattr(savers_module, "ANSWER_LIMIT", 0.1)
    await saver.next(s.PingSaver)
    await asyncio.to_thread(
        await_true, lambda: node.snapshots.savers._kill_reason, "end of patience"
    )
    await node.saver_dies(saver)
    said = await node.master.until(lambda _: True, m.Persisted)
    assert said.reason == "the saver has not answered for 0.1 s: it hangs, and was killed"


async def test_an_attempt_is_given_up_here_when_its_time_is_over(node: Node) -> None:
    ranks, saver = await node.life_with_saver(1)
    node.snapshots.obey(persist(1, limit=0.05))
    assert (await saver.next(s.GiveUp)).attempt == "a1"
    said = await node.master.until(lambda _: True, m.Persisted)
    assert not said.ok
    assert "not written within 0.05 s" in said.reason
    assert not any(ranks[0].segment.pinned(slot) for slot in range(2))


async def test_a_wanted_step_that_nobody_writes_does_not_stop_snapshots(shm: Path) -> None:
    async with opened(shm, limit=0.05) as node, asyncio.timeout(LIMIT):
        ranks = await node.life()
        slot = ranks[0].commit(1, persist=True)
        await node.heard(ranks)
        while ranks[0].segment.pinned(slot):
            await node.heard(ranks)


# ---------------------------------------------------------------- strangers


async def test_peers_that_break_the_protocol_are_hung_up_on(node: Node, caplog) -> None:
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
    assert "it must introduce itself once, in its first message" in caplog.text
    assert "it claims to be rank 1 of 2, but is rank 0 of 2" in caplog.text
    assert "no such saver was started" in caplog.text
    assert (await node.rank(0)).resume.step == NONE  # and goes on with whoever is right


async def test_who_says_nothing_is_hung_up_on(node: Node, monkeypatch) -> None:
    monkeypatch.setattr(peers, "INTRODUCTION_LIMIT", 0.05)
    name, _ = read_place(node.snapshots.place(0))
    assert await (await node.call(Client, name)).hangs_up()


async def test_there_are_not_more_connections_than_there_can_be(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "INTRODUCTION_LIMIT", 2 * LIMIT)
    name, _ = read_place(node.snapshots.place(0))
    for _ in range(4 * 2 + peers.SPARE):
        await node.call(Client, name)
    one_more = await node.call(Client, name)
    assert await one_more.hangs_up()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_not_listened_to(node: Node, caplog) -> None:
    dial = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect('\\0' + sys.argv[1]); s.settimeout(240); sys.exit(len(s.recv(1)))"
    )
    name, _ = read_place(node.snapshots.place(0))
    command = [sys.executable, "-c", dial, name]
    done = await asyncio.to_thread(subprocess.run, command, timeout=240, check=False)
    assert done.returncode == 0
    assert "a process of another user" in caplog.text


SPEAK = """
import os, socket, sys
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.snapshots.shm.segment import VERSION
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
    with subprocess.Popen(command, start_new_session=leads, **pipes) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def test_a_rank_that_names_another_folder_is_refused(node: Node, caplog) -> None:
    """Its state would be written into the first one's folder, and restored from its own."""
    node.begin(1)
    first = await node.rank(0)
    second = await node.call(Client, read_place(node.snapshots.place(1))[0])
    refused = await second.asks(s.RankHere(VERSION, 1, 1, 2, "/runs/b", 2, 0), s.RankRefused)
    assert refused.reason.startswith(
        "the Checkpointers of ranks 1 and 0 differ: folder='/runs/b' and '/runs/a', "
        "Keep.last=2 and 3. Give all ranks the same options"
    )
    assert refused.reason in caplog.text
    assert (await first.needs(LAYOUT)).ok


async def test_a_life_with_another_folder_does_not_go_on_from_memory(node: Node, caplog) -> None:
    """The script has begun its second phase, say: what memory holds is the first one's state."""
    await node.life(1)
    start = node.goes_on()
    rank = await node.call(Rank, node.snapshots.place(0), start, "/runs/b")
    assert rank.resume.step == NONE
    assert "step 1 in memory is not used: its checkpoints are in /runs/a" in caplog.text


async def test_a_child_of_a_rank_does_not_take_its_place(node: Node, caplog) -> None:
    node.begin(1)
    rank = await node.rank(0)
    await rank.needs(LAYOUT)

    def a_child_comes() -> str:
        with speaks(node, 0) as answer:
            return answer

    assert await asyncio.to_thread(a_child_comes) == "hung up"
    assert f"process {os.getpid()} takes that rank's snapshots" in caplog.text
    rank.commit(1)
    await node.heard([rank])
    newer = await node.rank(0)  # a later Checkpointer of the same process
    assert await rank.hangs_up()
    assert (await newer.needs(LAYOUT)).ok


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


async def test_ranks_of_an_older_life_are_not_heard_any_more(node: Node) -> None:
    node.begin(1)
    old = await node.rank(0)
    node.begin(2)
    assert await old.hangs_up()
    with pytest.raises(AssertionError, match="hung up"):  # it says its old place
        await node.call(Rank, node.snapshots.place(0), changed(node.start, world_size=9))


async def test_no_socket_is_left_and_none_has_a_path(node: Node) -> None:
    name, local_rank = read_place(node.snapshots.place(1))
    assert local_rank == 1
    assert name.startswith("elasticrun-")
    assert len(name) == 43
    with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError):
        other.bind(address(name))


# ---------------------------------------------------------------- saves that fail on one rank


def told(said: m.Holdings) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(one.step, one.contents, one.wanted) for one in said.held]


async def test_a_step_that_one_rank_could_not_save_is_told_without_it(node: Node) -> None:
    """The others do not wait for it: the master says at once what becomes of the step."""
    ranks = await node.life(1)
    ranks[1].say(s.SaveFailed(2, True, "no memory"))
    bad = await node.master.until(lambda said: True, m.ShardBad)
    assert (bad.round, bad.step, bad.rank, bad.reason) == (ONE, 2, 1, "no memory")
    ranks[0].commit(2, persist=True)
    await node.master.until(
        lambda said: (2, (CONTENT, 0), True) in told(said),
        m.Holdings,
    )
    waits = asyncio.create_task(ranks[0].asks(s.AwaitRoom(NONE), s.RoomThere))
    node.snapshots.obey(m.PersistOver("", ONE, 2, False, "rank 1 could not save it"))
    node.snapshots.obey(m.Watermark(ONE, 1, 2))
    await waits


async def test_a_step_that_no_rank_could_save_is_told_as_wanted(node: Node) -> None:
    ranks = await node.life(1)
    for rank in ranks:
        rank.say(s.SaveFailed(2, True, "no memory"))
    await node.master.until(
        lambda said: (2, (0, 0), True) in told(said),
        m.Holdings,
    )


@pytest.mark.parametrize("how", ["its connection breaks", "it sends garbage"])
async def test_a_rank_that_is_not_heard_any_more_holds_nobody_up(
    node: Node, monkeypatch, how: str
) -> None:
    monkeypatch.setattr(snapshots_module, "CUT_OFF_AFTER", 0.1)
    ranks = await node.life(1)
    if how == "it sends garbage":
        ranks[1].socket.sendall(b"\xff" * 64)
    else:
        ranks[1].close()
    ranks[0].commit(2, persist=True)
    bad = await node.master.until(lambda said: said.step == 2, m.ShardBad)
    assert (bad.rank, bad.reason) == (1, "it is no longer connected to its agent")
    ranks[0].say(s.SaveFailed(3, False, "no memory"))
    await node.master.until(lambda said: said.step == 3, m.ShardBad)
