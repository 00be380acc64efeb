"""What the agent tells its saver of checkpoints that are not to be removed, and its master of state
that one rank alone has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import Skip
from tests.agent.snapshots.played import LAYOUT, ONE, Node, Rank, persist


@pytest.mark.parametrize(
    ("writers", "source", "kept"),
    [
        (2, "storage", (3, ())),  # each rank has taken a snapshot since: nobody reads any more
        (1, "storage", (3, (40,))),  # a slow rank may still read what the others went on from
        (1, "memory", (3, ())),
        (1, "", (0, ())),  # nobody has said yet which it is: all are kept
    ],
)
async def test_a_checkpoint_that_ranks_may_be_reading_is_not_removed(
    node: Node, writers: int, source: str, kept: tuple[int, tuple[int, ...]]
) -> None:
    ranks = await node.life()
    saver = await node.saver()
    if source:
        ranks[0].say(s.Restored(40, source))
    await node.both(ranks, 41)
    one = (0,) if writers == 1 else (0, 1)
    node.snapshots.obey(persist(41, ranks=one, writers=writers, rewound_from=60))
    order = await saver.writes(writers)
    assert (order.keep_last, order.in_use) == kept
    assert order.rewound_from == 60


async def test_what_an_older_life_left_is_written_while_the_next_one_restores(node: Node) -> None:
    """Its ranks may be reading any checkpoint; they have not said which."""
    ranks = await node.life()
    saver = await node.saver()
    ranks[0].say(s.Restored(0, "nothing"))
    await node.both(ranks, 1)
    node.goes_on(skip=Skip(5))
    assert (await node.rank(0)).resume.skip == Skip(5)
    node.snapshots.obey(persist(1, reason="breakpoint"))
    order = await saver.writes()
    assert (order.keep_last, order.in_use) == (0, ())


@pytest.mark.parametrize(
    ("source", "step", "told"),
    [("memory", 3, 3), ("memory", None, None), ("storage", 3, None), ("", 3, None)],
)
async def test_the_master_is_told_how_far_ranks_came_from_what_they_put_back(
    node: Node, source: str, step: int | None, told: int | None
) -> None:
    """Once they are gone; a rank that failed before, or took a checkpoint, says nothing of it."""
    await node.life(1)
    start = node.goes_on()
    ranks = await node.ranks()
    if source:
        ranks[1].say(s.Restored(1, source))
        await node.heard(ranks)
    if step is not None:
        node.snapshots._generation.ranks[1].held.segment.current = step
    assert node.snapshots.holdings().went_on is None, "they live"
    node.snapshots.ranks_gone(done=False)
    went_on = node.snapshots.holdings().went_on
    assert went_on == (None if told is None else m.WentOn(start.round, told))
    node.begin(3, restore=m.Restore(ONE, 1, 2))
    node.snapshots.ranks_gone(done=False)
    assert node.snapshots.holdings().went_on is None


async def test_the_master_is_told_of_state_that_one_rank_alone_has(node: Node) -> None:
    ranks = await node.life(1)
    first = await node.master.until(lambda said: said.held, m.Holdings)
    assert not first.held[0].own
    need = replace(Rank.wanted(LAYOUT), own=True)
    assert (await ranks[1].asks(need, s.SegmentHere)).ok
    await node.both(ranks, 2)
    assert (await node.master.until(lambda said: said.held[0].step == 2, m.Holdings)).held[0].own
