"""What an agent copies of other nodes' ranks: where it goes, what is told of it, when it goes."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.snapshots.played import BOTH, CONTENT, ONE, Node, Saver, layout_of, opened

WHERE = Endpoint("10.0.0.2", 99)


def order(step: int, *ranks: int, round: RoundName = ONE) -> m.Replicate:
    return m.Replicate(round, step, 6, ranks, tuple(CONTENT for _ in ranks), WHERE)


@pytest.fixture
def node(shm: Path) -> AbstractAsyncContextManager[Node]:
    return opened(shm, several=True)


async def there(node: Node) -> Saver:
    """The saver of a node whose ranks are here, in their first life."""
    node.begin(1)
    await node.rank(0)
    return await node.saver(port=4000)


async def told(node: Node, *steps: int, rank: int | None = None) -> m.Holdings:
    """The inventory, once it lists replicas of exactly these steps; all of `rank` alone."""

    def good(said: m.Holdings) -> bool:
        found = [one for one in said.held if one.replica]
        alone = all((one.first_rank, len(one.contents)) == (rank, 1) for one in found)
        return (alone or rank is None) and sorted(one.step for one in found) == list(steps)

    return await node.master.until(good, m.Holdings)


async def copied(node: Node, saver: Saver, step: int, *ranks: int) -> None:
    node.snapshots.obey(order(step, *ranks))
    for _ in ranks:
        await saver.copies()


async def holds_two(node: Node) -> Saver:
    """Step 5 of two ranks has been copied to this node, and told."""
    saver = await there(node)
    await copied(node, saver, 5, 0, 1)
    await told(node, 5)
    return saver


async def keeps_rank_one(node: Node) -> None:
    """Of those two, only what rank 1 had is kept, in the step that followed too."""
    await told(node, 5, 6, rank=1)
    (held,) = node.snapshots._segments.held
    assert held.replica == 1


async def test_what_is_copied_is_told_like_what_is_held(node: Node) -> None:
    saver = await there(node)
    node.snapshots.obey(order(5, 0, 1))
    fetches = [await saver.copies(), await saver.copies()]
    assert {one.rank for one in fetches} == {0, 1}
    whence = {(one.replica, one.step, one.host, one.port) for one in fetches}
    assert whence == {(True, 5, "10.0.0.2", 99)}
    (held,) = (await told(node, 5)).held
    while held.contents != BOTH:
        (held,) = (await told(node, 5)).held
    assert held == m.Holding(ONE, 5, 0, 6, BOTH, wanted=False, replica=True)
    node.snapshots.obey(order(5, 0, 1))  # once more: nothing is to be done
    await copied(node, saver, 6, 0)
    await told(node, 5, 6)


async def test_the_newest_copy_is_never_written_over(node: Node) -> None:
    saver = await there(node)
    for step in (5, 6, 7, 8):
        await copied(node, saver, step, 0)
        await told(node, *([step] if step == 5 else [step - 1, step]))
    assert saver.slots == [0, 1, 0, 1]
    (held,) = node.snapshots._segments.held
    assert held.sizes.slots == 2


async def test_ranks_of_a_later_life_restore_from_it(node: Node) -> None:
    """Without a question to the master; what came after the chosen step is gone."""
    saver = await there(node)
    await copied(node, saver, 5, 0)
    await told(node, 5)
    await copied(node, saver, 6, 0)
    await told(node, 5, 6)
    node.begin(2, restore=m.Restore(ONE, 5, 6))
    await told(node, 5)
    rank = await node.rank(0)
    rank.say(s.WantShard(0))
    here = await rank.hears(s.ShardHere)
    assert here == s.ShardHere(True, "", 0, 0, 5)
    rank.say(s.IsWhole(0))
    check = await saver.next(s.CheckSnapshot)
    saver.say(s.Checked(check.key, check.slot, check.sequence, False, "a bit"))
    whole = await rank.hears(s.Whole)
    assert (whole.ok, whole.reason) == (False, "a bit")
    rank.say(s.CannotRestore(0, "a bit"))
    bad = await node.master.until(lambda _: True, m.ShardBad)
    assert (bad.step, bad.rank) == (5, 0)
    node.snapshots.ranks_gone(done=False)
    await told(node)


async def test_what_cannot_be_copied_is_said(node: Node) -> None:
    saver = await there(node)

    async def why(step: int) -> str:
        said = await node.master.until(lambda _: True, m.NotReplicated)
        assert (said.round, said.step) == (ONE, step)
        return said.reason

    node.snapshots.obey(order(5, 0))
    fetch = await saver.next(s.Fetch)
    saver.say(s.FetchSize(fetch.key, False, "cannot connect", 0, 0))
    assert await why(5) == "cannot connect"

    node.snapshots.obey(order(6, 0))
    await saver.gives_size(slot_bytes=1 << 50)
    assert "no memory for replicas" in await why(6)

    node.snapshots.obey(order(7, 0))
    fetch = await saver.gives_size()
    await saver.next(s.FetchInto)
    os.close(saver.memory.pop(fetch.key))
    saver.say(s.Fetched(fetch.key, False, "block 1 of 2 is not what was written"))
    assert await why(7) == "block 1 of 2 is not what was written"

    node.snapshots.obey(order(8, 0))
    await saver.next(s.Fetch)
    await node.saver_dies(saver)
    assert "the saver ended" in await why(8)
    assert not node.held()

    unknown = RoundName(7, 9, "n9")
    node.snapshots.obey(order(8, 0, round=unknown))
    said = await node.master.until(lambda _: True, m.NotReplicated)
    assert said == m.NotReplicated(unknown, 8, "its ranks are of another round")


async def test_of_several_orders_the_newest_counts(node: Node) -> None:
    saver = await there(node)
    node.snapshots.obey(order(5, 0))
    fetch = await saver.gives_size()
    for step in (6, 7):
        node.snapshots.obey(order(step, 0))
    await saver.fills(fetch)
    assert (await saver.copies()).step == 7
    await told(node, 5, 7)


async def test_a_copy_that_comes_too_late_does_not_count(node: Node) -> None:
    """Its ranks have gone back behind it meanwhile."""
    saver = await there(node)
    await copied(node, saver, 5, 0)
    await told(node, 5)
    node.snapshots.obey(order(6, 0))
    fetch = await saver.gives_size()
    into = await saver.next(s.FetchInto)
    node.begin(2, restore=m.Restore(ONE, 5, 6))
    node.snapshots.obey(m.Replicate(ONE, 5, 6, (1,), (CONTENT,), WHERE))
    saver.waiting.insert(0, into)
    await saver.fills(fetch)
    await saver.copies()
    said = await node.master.until(
        lambda said: bool(said.held) and len(said.held[0].contents) == 2, m.Holdings
    )
    assert [(one.step, one.contents) for one in said.held] == [(5, (CONTENT, CONTENT))]


async def test_what_no_order_names_any_more_goes(node: Node) -> None:
    """The ring has changed: another node holds it now."""
    saver = await holds_two(node)
    node.begin(2, restore=m.Restore(ONE, 5, 6))
    two = RoundName(7, 2, "n2")
    await node.rank(0)
    node.snapshots.obey(order(6, 1, round=two))
    await saver.copies()
    await told(node, 5, 6)
    assert len(node.snapshots._segments.held) == 2
    node.snapshots.obey(m.Watermark(two, 6))
    await keeps_rank_one(node)


async def test_what_could_have_gone_while_a_copy_went_on_goes_at_its_end(node: Node) -> None:
    saver = await holds_two(node)
    node.snapshots.obey(order(6, 1))
    fetch = await saver.gives_size()
    node.snapshots.obey(m.Watermark(ONE, 6))
    assert len(node.snapshots._segments.held) == 2
    await saver.fills(fetch)
    await keeps_rank_one(node)


@pytest.mark.parametrize("life", [1, 2])
async def test_nothing_goes_once_more_is_copied_or_a_life_begins(node: Node, life: int) -> None:
    """What was whole then is not what counts now."""
    saver = await holds_two(node)
    node.snapshots.obey(order(6, 1))
    fetch = await saver.gives_size()
    node.snapshots.obey(m.Watermark(ONE, 6))
    if life == 2:
        node.begin(2, restore=m.Restore(ONE, 6, 6))
    else:
        node.snapshots.obey(order(7, 1))
    await saver.fills(fetch)
    if life == 1:
        await saver.copies()
    assert node.snapshots._replicas._task is not None
    await node.snapshots._replicas._task
    assert len(node.snapshots._segments.held) == 2


async def test_what_a_rank_had_before_its_state_grew_goes(node: Node) -> None:
    """Else each change would leave two slots of the state behind."""
    saver = await holds_two(node)
    node.snapshots.obey(m.Watermark(ONE, 5))
    assert len(node.snapshots._segments.held) == 2
    saver.layout = layout_of(5000)
    await copied(node, saver, 6, 0)
    await told(node, 5, 6)
    assert len(node.snapshots._segments.held) == 3  # until the step counts
    node.snapshots.obey(m.Watermark(ONE, 6))
    await told(node, 6, rank=0)
    (held,) = node.snapshots._segments.held
    assert (held.replica, held.sizes.layout) == (0, saver.layout.key)
