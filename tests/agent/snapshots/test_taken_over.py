"""Memory that a killed agent has left, in the hands of the next one: what that tells the master,
what its ranks are given, and when it goes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from elasticrun.snapshots.shm.segment import NONE
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import RoundName, Skip
from tests.agent.snapshots.played import BOTH, LAYOUT, ONE, Node, Rank, opened

TWO, NEW = RoundName(7, 2, "n2"), RoundName(8, 1, "new")
FROM_1 = m.Restore(ONE, 1, 2)


def folder_of(node: Node) -> Path:
    folder = node.snapshots._segments._folder
    return Path(folder.path)


@asynccontextmanager
async def follower(node: Node, *, nproc: int = 2) -> AsyncIterator[Node]:
    """The next agent, which finds what `node` would leave if it were killed now."""
    await node.snapshots._segments.note(node.snapshots._inventory.rounds())
    with tempfile.TemporaryDirectory(prefix="elasticrun-test-", dir="/dev/shm") as base:
        left = folder_of(node)
        shutil.copytree(left, Path(base) / left.name)
        async with opened(Path(base), nproc=nproc) as after:
            yield after


async def said(node: Node) -> m.Holdings:
    """By a new agent, to the first master that it meets."""
    node.master.reports.clear()
    node.snapshots.attached()
    return await node.master.until(lambda report: True, m.Holdings)


async def test_it_says_what_the_last_round_had_gone_on_from(node: Node) -> None:
    await node.life(1)
    node.begin(2, restore=FROM_1, skip=Skip(5))
    ranks = await node.ranks()
    async with follower(node) as after:  # before it took a step
        report = await said(after)
        assert [(one.round, one.step) for one in report.held] == [(ONE, 1)]
        assert report.last == m.RoundInfo(TWO, 2, 2, FROM_1, Skip(5))
    await node.both(ranks, 3)
    async with follower(node) as after:
        report = await said(after)
        assert [(one.round, one.step) for one in report.held] == [(TWO, 3), (ONE, 1)]
        assert [one.contents for one in report.held] == [BOTH] * 2


async def test_what_was_taken_back_is_told_until_a_checkpoint_says_so(node: Node) -> None:
    node.begin(1, skip=Skip(5))
    await node.both(await node.ranks(), 1)
    lives = folder_of(node) / "lives.json"
    for step, told in ((6, 5), (4, -1)):
        node.snapshots.obey(m.PersistOver("a", ONE, step, ok=True, reason=""))
        await node.snapshots._segments.note(node.snapshots._inventory.rounds())
        assert [row["info"]["skip"]["storage_from"] for row in json.loads(lives.read_text())] == [
            told
        ]
        last = node.snapshots._inventory.last()
        assert last.skip.storage_from == told


async def test_its_ranks_go_on_from_it_and_it_goes_when_they_have_more(node: Node) -> None:
    await node.life(1)
    async with follower(node) as after:
        after.begin(1, round=NEW, restore=FROM_1)
        ranks = await after.ranks()
        assert {(rank.resume.step, rank.resume.same) for rank in ranks} == {(1, True)}
        await after.both(ranks, 2)
        await after.both(ranks, 3)
        report = await said(after)
        assert {(one.round, one.step) for one in report.held} == {(NEW, 2), (NEW, 3)}
        assert report.last == m.RoundInfo(NEW, 2, 2, FROM_1)


async def test_another_training_of_the_same_name_does_not_go_on_from_it(node: Node) -> None:
    """Its checkpoints are in another folder: neither its memory nor the step is of any use."""
    await node.life(7)
    async with follower(node) as after:
        start = after.begin(1, round=NEW, restore=m.Restore(ONE, 7, 2))
        place = [after.snapshots.place(local) for local in (0, 1)]
        ranks = [await after.call(Rank, where, start, "/runs/b") for where in place]
        assert [rank.resume.step for rank in ranks] == [NONE, NONE]
        assert not (await ranks[0].asks(s.WantShard(0), s.ShardHere)).ok
        for rank in ranks:
            assert (await rank.needs(LAYOUT)).ok
        await after.both(ranks, 1)
        await after.both(ranks, 2)
        assert after.held() == [(1, 2, BOTH, False), (1, 1, BOTH, False)]


async def test_fewer_local_ranks_go_on_from_what_more_of_them_had(node: Node) -> None:
    await node.life(1)
    async with follower(node, nproc=1) as after:
        report = await said(after)
        assert [one.contents for one in report.held] == [BOTH]
        after.begin(1, round=NEW, restore=FROM_1, world_size=1)
        rank = await after.rank(0)
        for old in (0, 1):
            shard = await rank.asks(s.WantShard(old), s.ShardHere)
            assert (shard.ok, shard.rank) == (True, old)
        assert (await rank.needs(LAYOUT)).ok
        assert len(list(folder_of(after).glob("1-*"))) == 1
        await after.both([rank], 2)
        await after.snapshots._segments._tasks.wait(240)  # what it gives back, and what it makes
        assert not list(folder_of(after).glob("1-*")), "nobody needs the other's any more"
