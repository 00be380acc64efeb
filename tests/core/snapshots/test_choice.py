"""Which snapshot is gone on from: what is whole, suspect or asked for, and what storage tells; by
hand."""

from __future__ import annotations

import pytest

from elasticrun.core import events as fx
from elasticrun.core.persisted import Facts, SnapshotFacts
from elasticrun.core.snapshots.choice import Choice
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName, Skip, dumps, loads
from tests.core.by_hand import Master, failure, hello
from tests.core.snapshots.saves import R1, R2, SAVER, Saves, answer, fails_soon, holding, step_of
from tests.starts import changed


def test_the_watermark_is_told_once_when_it_rises() -> None:
    saves = Saves()
    saves.holds("a", 100)
    assert saves.taken() == []
    saves.holds("b", 100)
    assert saves.taken() == [("ab", "Watermark")]
    saves.both(100)
    assert saves.taken() == []
    saves.both(100, 110)
    assert saves.taken() == [("ab", "Watermark")]
    saves.both(100)
    assert saves.points.watermark == 110, "it never falls"
    assert saves.taken() == []


def test_steps_that_can_never_be_whole_are_given_up() -> None:
    """Two slots each, of which one has the watermark: b came too late for 110, a for 111. Nothing
    that they hold above 100 can become whole, and nothing else could be written for ever."""
    saves = Saves()
    saves.both(100)
    saves.taken()
    saves.holds("a", 100, 110)
    assert saves.taken() == [], "b may still be copying 110"
    saves.holds("b", 100, 111)
    (nodes, order), saves.outbox.orders = saves.outbox.orders[-1], []
    assert nodes == ("a", "b")
    assert order == m.Watermark(R1, 100, 111)
    assert step_of(saves) == 100
    saves.holds("b", 100, 110)  # whatever is said of them from now on
    assert saves.taken() == []
    assert step_of(saves) == 100
    saves.attached("a", 1.0, member=True)
    assert saves.last() == m.Watermark(R1, 100, 111), "a new stream is told again"
    saves.taken()
    saves.both(100, 120)
    assert saves.last() == m.Watermark(R1, 120)
    assert step_of(saves) == 120


def test_equal_state_is_never_given_up() -> None:
    """Whoever has it has it for all."""
    saves = Saves()
    saves.both(100, content=5)
    saves.holds("a", 100, 110, content=5)
    saves.holds("b", 100, 111, content=5)
    assert saves.points.watermark == 111
    assert all(getattr(order, "given_up", -1) == -1 for _, order in saves.outbox.orders)


def test_steps_of_two_rounds_are_not_combined() -> None:
    """a holds 101 of the old round, b of the new one: they are not the same state."""
    saves = Saves()
    saves.both(100)
    saves.holds("a", 100, 101)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    assert step_of(saves) == 100, "what a holds of 101 is of a time that was given up"
    held = (holding(R1, 100), holding(R2, 101))
    saves.on_holdings("b", m.Holdings(SAVER["b"], held), 0.0)
    assert saves.points.choose().restore == m.Restore(R1, 100, 2)
    saves.begin_round(m.RoundInfo(RoundName(1, 3, "z"), 2, restore=m.Restore(R1, 100, 2)))
    assert saves.points.choose().restore == m.Restore(R1, 100, 2)


def test_the_older_round_still_serves_when_the_newer_step_is_lost() -> None:
    saves = Saves()
    saves.both(100, content=7)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    rank_a = m.Holding(R2, 101, 0, 2, (7,), wanted=False)
    rank_b = m.Holding(R2, 90, 1, 2, (7,), wanted=False)
    saves.on_holdings("a", m.Holdings(SAVER["a"], (rank_a,)), 0.0)
    old = m.Holding(R1, 100, 1, 2, (7,), wanted=False)
    saves.on_holdings("b", m.Holdings(SAVER["b"], (old, rank_b)), 0.0)
    assert saves.points.choose().restore == m.Restore(R2, 101, 2)
    saves.forget("a", 1.0, gone_because="is dead")
    choice = saves.points.choose()
    assert choice.restore == m.Restore(R2, 90, 2)
    assert choice.why == "step 101 cannot be restored from memory: no node holds it"
    saves.on_holdings("b", m.Holdings(SAVER["b"], (old,)), 1.0)
    assert saves.points.choose().restore == m.Restore(R1, 100, 2)


def test_where_nothing_is_whole_there_is_a_reason() -> None:
    saves = Saves()
    assert saves.points.choose() == saves.points.choose()
    assert saves.points.choose().why == ""
    saves.both(100)
    saves.forget("b", 1.0)
    assert saves.points.choose().restore is None
    assert "node b held the only copy of rank 1" in saves.points.choose().why
    saves.holds("b", 100)
    assert step_of(saves) == 100, "its stream stands again"


def test_a_round_that_fails_by_itself_twice_ends_its_snapshot() -> None:
    saves = Saves()
    saves.both(90, 100)
    saves.points.failed_by_itself()
    assert step_of(saves) == 100, "the round was not restored from anything"
    for number in (2, 3):
        fails_soon(saves, RoundName(1, number, "y"), m.Restore(R1, 100, 2))
    assert step_of(saves) == 90
    assert "step 100 is suspect" in saves.says()
    again = Snapshots(m.SaveSpec(), str)
    again.restore(saves.facts(0.0), 0.0)
    again.begin_round(m.RoundInfo(RoundName(1, 3, "y"), 2, restore=m.Restore(R1, 100, 2)))
    for rank, node in enumerate("ab"):
        held = tuple(m.Holding(R1, s, rank, 2, (rank + 1,), wanted=False) for s in (90, 100))
        again.on_holdings(node, m.Holdings(None, held), 0.0)
    assert step_of(again) == 90, "the next master knows it too"


def test_complaints_about_shards_come_to_an_end() -> None:
    """Whatever ranks complain of, something is chosen less: free restarts are not for ever."""
    saves = Saves()
    saves.both(90, 100)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    assert saves.points.shard_bad("a", m.ShardBad(R1, 100, 0, "it does not have its hash"))
    assert step_of(saves) == 90
    assert saves.points.rewound_from == -1, "storage may have a good copy of the very same step"
    saves = Saves()
    saves.both(90, 100)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    other = m.ShardBad(R1, 100, 1, "its shape is another")
    assert saves.points.shard_bad("a", other), "a holds no rank 1"
    assert step_of(saves) == 90
    saves.begin_round(m.RoundInfo(RoundName(1, 3, "z"), 2, restore=m.Restore(R1, 90, 2)))
    assert not saves.points.shard_bad("a", m.ShardBad(R1, 100, 0, "late")), (
        "of a round that is over"
    )
    assert not saves.points.shard_bad("a", m.ShardBad(RoundName(9, 9, "u"), 1, 0, "unknown"))


def test_a_node_that_serves_badly_is_not_named_again() -> None:
    saves = Saves()
    saves.both(100, content=7)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    asked = m.WhereIs(R1, 100, 1)
    assert answer(saves, "a", asked).saver == SAVER["b"]
    saves.points.shard_bad("a", m.ShardBad(R1, 100, 1, "it does not have its hash"))
    assert step_of(saves) == 100, "a has the same"
    holder = answer(saves, "c", asked)
    assert (holder.saver, holder.holds) == (SAVER["a"], 0)
    nobody = answer(saves, "a", asked)
    assert (nobody.saver, nobody.holds) == (None, -1)
    assert nobody.reason


def test_a_shard_that_comes_back_in_a_moment_is_waited_for() -> None:
    """b's stream breaks, or it has no saver yet, while a asks for what only b has: a step that is
    whole must not count as lost for that."""
    saves = Saves()
    saves.both(100)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    asked = m.WhereIs(R1, 100, 1)
    saves.forget("b", 1.0)
    saves.taken()
    saves.points.locate("a", asked)
    assert saves.taken() == [], "b has not gone"
    saves.holds("b", 100, saver=False)
    assert saves.taken() == [], "its saver is not ready"
    saves.holds("b", 100)
    assert saves.taken() == [("a", "Holder")]
    saves.forget("b", 2.0)
    saves.points.locate("a", asked)
    saves.forget("b", 3.0, gone_because="is dead")
    order = saves.last()
    assert (order.saver, order.reason) == (None, "no node holds it now")
    saves.holds("b", 100, saver=False)
    saves.points.locate("a", asked)
    saves.forget("a", 4.0, gone_because="is dead")
    saves.taken()
    saves.holds("b", 100)
    assert saves.taken() == [], "nobody asks any more"


def test_who_comes_back_without_it_is_not_waited_for() -> None:
    """A node that tells of other things has said before what it holds, if it holds anything."""
    saves = Saves()
    saves.both(100)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    saves.forget("b", 1.0)
    saves.points.locate("a", m.WhereIs(R1, 100, 1))
    saves.taken()
    saves.points.stop_expecting("c")
    assert saves.taken() == [], "it is b that may have it"
    saves.points.stop_expecting("b")
    order = saves.last()
    assert (order.saver, order.reason) == (None, "no node holds it now")


# ---------------------------------------------------------------- training that is taken back


def poisoned(saves: Saves) -> None:
    """Two rounds that went on from step 100 of the first one have failed by themselves."""
    saves.both(90, 100)
    for number in (2, 3):
        fails_soon(saves, RoundName(1, number, "y"), m.Restore(R1, 100, 2))


def persists(saves: Saves) -> list[m.Persist]:
    orders, saves.outbox.orders = saves.outbox.orders, []
    return [order for _, order in orders if isinstance(order, m.Persist)]


def test_the_lowest_step_counts_and_the_next_master_knows_it() -> None:
    saves = Saves()
    poisoned(saves)
    for number in (4, 5):
        fails_soon(saves, RoundName(1, number, "y"), m.Restore(R1, 90, 2))
    again = Choice(m.Restore(R1, 90, 2), skip=Skip(90, memory=True))
    assert saves.points.choose() == again, "100 was withdrawn"
    assert saves.points.rewound_from == 90
    again = Snapshots(m.SaveSpec(), str)
    again.restore(saves.facts(0.0), 0.0)
    assert again.points.rewound_from == 90


@pytest.mark.parametrize(
    ("reached", "suspect"), [(None, False), (100, False), (101, True), (110, True), (111, False)]
)
def test_suspect_is_what_ranks_trained_on_from_for_a_few_steps(
    reached: int | None, suspect: bool
) -> None:
    saves = Saves()
    saves.both(90, 100)
    for number in range(2, 8):
        name = RoundName(1, number, "y")
        if reached is None:  # they failed before they had put anything back
            saves.begin_round(m.RoundInfo(name, 2, restore=m.Restore(R1, 100, 2)))
            saves.points.failed_by_itself()
        else:
            fails_soon(saves, name, m.Restore(R1, 100, 2), reached)
        if suspect and number == 3:
            break
    assert step_of(saves) == (90 if suspect else 100)
    assert saves.points.rewound_from == (100 if suspect else -1)


def test_what_an_earlier_round_did_says_nothing_of_this_one() -> None:
    """An agent says on each stream how far its newest life came."""
    saves = Saves()
    saves.both(90, 100)
    fails_soon(saves, R2, m.Restore(R1, 100, 2))
    for number in (3, 4):
        saves.begin_round(m.RoundInfo(RoundName(1, number, "y"), 2, restore=m.Restore(R1, 100, 2)))
        saves.on_holdings("a", saves.points.reports["a"], 0.0)
        saves.points.failed_by_itself()
    assert step_of(saves) == 100


def test_a_suspect_step_is_better_than_none() -> None:
    saves = Saves()
    saves.both(100)
    for number in (2, 3):
        fails_soon(saves, RoundName(1, number, "y"), m.Restore(R1, 100, 2))
    choice = saves.points.choose()
    assert (choice.restore, choice.skip.memory) == (m.Restore(R1, 100, 2), True)
    saves.begin_round(m.RoundInfo(RoundName(1, 4, "y"), 2, restore=choice.restore))
    assert saves.points.choose().skip.memory, "while nothing else is whole"
    for node in "ab":
        saves.holds(node, 101, name=RoundName(1, 4, "y"))
    assert saves.points.choose() == Choice(m.Restore(RoundName(1, 4, "y"), 101, 2), skip=Skip(100))


# ---------------------------------------------------------------- a step that a person asks for


def asks_for(step: int) -> Saves:
    saves = Saves()
    Snapshots.__init__(saves, m.SaveSpec(restore_step=step), lambda: "try1")
    return saves


ASKED = Choice(None, skip=Skip(91, all_but=90))


def test_the_step_that_is_asked_for_and_no_other() -> None:
    saves = asks_for(90)
    assert saves.points.choose() == ASKED, "storage may have it"
    for node, rank in (("a", 0), ("b", 1)):
        rows = tuple(m.Holding(R1, s, rank, 2, (rank + 1,), wanted=False) for s in (90, 100))
        saves.on_holdings(node, m.Holdings(SAVER[node], rows, last=m.RoundInfo(R1, 2)), 0.0)
    assert saves.points.choose() == ASKED, "of a master of the same term"
    saves = asks_for(90)
    saves.begin_round(m.RoundInfo(R1, 2))
    saves.both(90, 100)
    assert saves.points.choose().restore == m.Restore(R1, 100, 2), "that is what came of it"
    again = asks_for(90)
    again.restore(SnapshotFacts(rewound_from=91, restore_step=90), 0.0)
    again.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 95, 2)))
    for node in "ab":
        again.holds(node, 95)
    assert step_of(again) == 95, "the master before this one saw to it"


def test_it_is_asked_for_until_a_checkpoint_of_what_came_of_it_is_written() -> None:
    saves = asks_for(90)
    assert saves.points.rewound_from == 91
    saves.begin_round(m.RoundInfo(R1, 2))
    for node in "ab":
        saves.holds(node, 95)
    assert step_of(saves) == 95
    for node in "ab":
        saves.forget(node, 1.0, gone_because="is dead")
    assert saves.points.choose() == ASKED, "memory is lost"
    for node in "ab":
        saves.holds(node, 96, wanted=96)
    saves.does("try1")
    assert (saves.points.restore_step, saves.points.rewound_from) == (-1, -1)


def test_what_storage_has_of_a_later_step_is_not_written_before_it() -> None:
    """Step 110 is written and lost in memory: ranks go on from storage, not from 100."""
    saves = Saves()
    saves.both(100, 110, wanted=110)
    saves.does("try1")
    saves.both(100)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    saves.taken()
    saves.checkpoints.save(m.Restore(R1, 100, 2), 5.0)
    assert persists(saves) == []
    saves.points.rewound_from = 110
    saves.checkpoints.save(m.Restore(R1, 100, 2), 5.0)
    assert [order.rewound_from for order in persists(saves)] == [110, 110], "110 was left"


# ---------------------------------------------------------------- state of one rank alone


def held(saves: Saves, node: str, *steps: int, own: bool = True, name: RoundName = R1) -> None:
    rank = "ab".index(node)
    all_ = tuple(m.Holding(name, s, rank, 2, (7,), wanted=False, own=own) for s in steps)
    saves.on_holdings(node, m.Holdings(SAVER[node], all_), 0.0)


def test_a_living_rank_is_given_back_what_it_had_alone() -> None:
    """DDP, a rank a node: a has 8 and 7, b was killed while it copied 8."""
    saves = Saves()
    held(saves, "a", 7, 8)
    held(saves, "b", 7)
    choice = saves.points.choose()
    assert choice.restore == m.Restore(R1, 7, 2)
    assert choice.why == "step 7 is restored instead of step 8, which lacks the own state of rank 1"
    held(saves, "b", 7, 8)
    assert saves.points.choose().restore == m.Restore(R1, 8, 2)


@pytest.mark.parametrize("case", ["nothing of its own", "the node is lost", "no step has all"])
def test_nothing_is_lost_for_what_cannot_be_had(case: str) -> None:
    saves = Saves()
    own = case != "nothing of its own"
    held(saves, "a", 8) if case == "no step has all" else held(saves, "a", 7, 8, own=own)
    held(saves, "b", 7, own=own)
    if case == "the node is lost":
        saves.forget("b", 1.0, gone_because="is dead")
    assert saves.points.choose().restore == m.Restore(R1, 8, 2)


# ---------------------------------------------------------------- the whole master


def ranks_hold(
    master: Master, name: RoundName, *steps: int, went_on: m.WentOn | None = None
) -> None:
    for session in (1, 2):
        first = 2 * (session - 1)
        rows = tuple(m.Holding(name, s, first, 4, (first + 1, first + 2), False) for s in steps)
        saver = Endpoint("h", 70 + session)
        master.hear(session, m.Holdings(saver, rows, went_on=went_on))


def restores(master: Master) -> tuple[m.Start, RoundName]:
    """A round that goes on from step 100 of the first one, whose name is given too."""
    name = master.running()
    ranks_hold(master, name, 90, 100)
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    master.both_back(name)
    (start,) = [order for order in master.orders(2) if isinstance(order, m.Start)]
    assert start.info.restore == m.Restore(name, 100, 4)
    return start, name


def test_a_master_without_a_record_learns_what_was_restored() -> None:
    """Else step 100 would be of an unknown round for it, and lost with the first failure."""
    start, first = restores(Master())
    master = Master(now=50.0)
    for session, node in ((1, "a"), (2, "b")):
        attached = changed(start, group_rank=session - 1, first_rank=2 * (session - 1))
        master.feed(fx.Attached(session, hello(node, attached=attached)))
        master.hear(session, m.Running(start.round, (session, session + 10)))
    ranks_hold(master, first, 90, 100, went_on=m.WentOn(start.round, 101))
    master.hear(1, m.RanksFailed(start.round, (failure(0),)))
    master.both_back(start.round)
    (again,) = [order for order in master.orders(2) if isinstance(order, m.Start)]
    assert again.info.restore == m.Restore(first, 100, 4)
    assert [(one.step, one.times) for one in master.facts.snapshots.rejected] == [(100, 1)]
    assert loads(dumps(master.facts), Facts) == master.facts
