"""What is written out, and when that is over; by hand, and in the master."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from elasticrun.config import EXIT_FAILED
from elasticrun.core import events as fx
from elasticrun.core.snapshots.checkpoints import MAX_TRIES, WAIT_FOR_ALL
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import SPEC, Master, failure
from tests.core.snapshots.saves import R1, R2, SAVER, Saves, step_of

# ---------------------------------------------------------------- what is written


def test_a_checkpoint_is_written_and_over() -> None:
    saves = Saves()
    saves.both(100, wanted=100)
    assert saves.taken() == [("ab", "Watermark"), ("a", "Persist"), ("b", "Persist")]
    assert saves.checkpoints.activity == "step 100 is being saved"
    saves.does("try1", marks=False)
    assert saves.taken() == [("a", "CommitCheckpoint")]
    saves.does("another")
    saves.persisted("b", m.Persisted("try1", True, True, "", 0, 0.1), 2.0)
    assert saves.checkpoints.written is None, "only the coordinator writes the marker"
    saves.does("try1", 3.1)
    assert saves.says() == "the checkpoint of step 100 is written: 2 parts, 20 B in 3.1 s"
    assert saves.checkpoints.written == m.Restore(R1, 100, 2)
    assert saves.taken() == [("ab", "PersistOver")]
    saves.both(100, now=4.0, wanted=100)
    assert saves.taken() == [("a", "PersistOver"), ("b", "PersistOver")], "it had not read it yet"
    assert not saves.checkpoints.activity


def test_every_rank_writes_its_own_and_one_of_each_content_the_shared() -> None:
    saves = Saves()
    saves.both(100, wanted=100, content=7)
    persists = [order for _, order in saves.outbox.orders if isinstance(order, m.Persist)]
    assert [(one.ranks, one.shared) for one in persists] == [((0,), (0,)), ((1,), ())]
    assert [one.coordinator for one in persists] == [None, SAVER["a"]]
    assert [one.writers for one in persists] == [2, 2]


def test_a_step_that_some_lack_waits_for_them_a_while() -> None:
    """Where one rank has all the state its step is whole, but the others' own items would lack."""
    saves = Saves()
    saves.both(90, content=7)
    saves.holds("a", 90, 100, wanted=100, content=7, now=1.0)
    saves.proceed(1.0)
    assert not any(name == "Persist" for _, name in saves.taken())
    assert saves.checkpoints.activity
    assert saves.next_deadline() == 1.0 + WAIT_FOR_ALL
    saves.proceed(1.0 + WAIT_FOR_ALL)
    assert saves.taken() == [("a", "Persist")]


def test_the_newest_that_is_wanted_waits_and_older_ones_are_let_go() -> None:
    saves = Saves()
    saves.both(100, wanted=100)
    for step in (110, 120):
        saves.both(100, step, wanted=step)
    saves.taken()
    saves.does("try1", 5.0)
    saves.proceed(5.0)
    orders = [order for _, order in saves.outbox.orders]
    assert [one.step for one in orders if isinstance(one, m.Persist)] == [120, 120]
    saves.outbox.orders.clear()
    saves.holds("a", 110, 120, wanted=110)
    over = saves.last()
    assert (over.attempt, over.step, over.ok) == ("", 110, False)


def test_failed_attempts_are_made_again_later_and_later_until_they_are_given_up() -> None:
    saves = Saves()
    saves.both(100, wanted=100)
    waits, now = [], 0.0
    for number in range(1, MAX_TRIES + 1):
        saves.does(f"try{number}", now, ok=False)
        due = saves.next_deadline()
        if due is not None:
            waits.append(due - now)
            saves.proceed(due - 0.01)
            assert saves.next_deadline() == due, "not before its time"
            now = due
            saves.proceed(now)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert "5 attempts have failed in a row: this one is given up" in saves.says()
    assert not saves.checkpoints.activity
    assert saves.taken()[-2:] == [("a", "PersistOver"), ("b", "PersistOver")], "no longer wanted"
    saves.both(100, now=99.0, wanted=100)
    assert "Persist" not in dict(map(reversed, saves.taken())), "and not begun again"


def test_a_storage_that_is_away_is_not_asked_again_and_again() -> None:
    """However often the ranks want a checkpoint: a minute lies between two attempts in the end, and
    between them slots are free for snapshots."""
    saves = Saves()
    tried, now, step = [], 0.0, 100
    for _ in range(300):
        step, now = step + 1, now + 1.0
        saves.both(step - 1, step, now=now, wanted=step)
        if any(name == "Persist" for _, name in saves.taken()):
            tried.append(now)
            saves.does(f"try{len(tried)}", now, ok=False)
    assert [b - a for a, b in itertools.pairwise(tried)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert saves.says().count("; retrying in") == MAX_TRIES - 1
    saves.both(step, step + 1, now=now + 60, wanted=step + 1)
    saves.does(f"try{len(tried) + 1}", now + 61)
    saves.taken()
    saves.both(step + 1, step + 2, now=now + 62, wanted=step + 2)
    assert ("a", "Persist") in saves.taken(), "it works again: no waiting"


def test_a_failure_is_not_made_to_wait_for_storage() -> None:
    """What ranks have lost is tried at once, whatever came of periodic checkpoints before."""
    saves = Saves()
    saves.both(100, wanted=100)
    for number in range(1, MAX_TRIES + 1):
        saves.does(f"try{number}", 0.0, ok=False)
        saves.proceed(saves.next_deadline() or 0.0)
    saves.both(100, 110)
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 110, 2)))
    saves.taken()
    saves.checkpoints.save(m.Restore(R1, 110, 2), 0.0)
    assert ("a", "Persist") in saves.taken()


def test_an_attempt_that_hangs_is_over_at_its_limit() -> None:
    saves = Saves(limit=10.0)
    saves.both(100, wanted=100)
    assert saves.next_deadline() == 10.0
    saves.overslept(3.0)
    saves.proceed(10.0)
    assert saves.checkpoints.activity, "nobody listened for three seconds of it"
    saves.taken()
    saves.proceed(13.0)
    assert saves.taken() == [("ab", "PersistOver")]
    assert "not finished within 10 s" in saves.says()


def test_a_node_that_goes_ends_an_attempt_unless_its_part_is_in() -> None:
    saves = Saves()
    saves.both(100, wanted=100)
    saves.taken()
    saves.forget("b", 1.0, gone_because="is dead")
    saves.proceed(1.0)
    assert saves.taken() == [("a", "PersistOver"), ("a", "PersistOver")], "over, and not wanted"
    assert "node b held the only copy of rank 1" in saves.says()
    saves = Saves()
    saves.both(100, wanted=100)
    saves.persisted("b", m.Persisted("try1", True, False, "", 10, 0.1), 1.0)
    saves.forget("b", 1.0, gone_because="is dead")
    saves.persisted("a", m.Persisted("try1", True, False, "", 10, 0.1), 1.0)
    saves.persisted("a", m.Persisted("try1", True, True, "", 0, 0.1), 1.0)
    assert saves.checkpoints.written == m.Restore(R1, 100, 2)


def test_a_stream_that_breaks_does_not_end_an_attempt() -> None:
    saves = Saves()
    saves.both(100, wanted=100)
    saves.forget("b", 1.0)
    saves.taken()
    saves.attached("b", 2.0, member=True)
    assert saves.taken() == [("b", "Persist"), ("b", "Watermark")]
    saves.does("try1", 3.0, marks=False)
    saves.forget("a", 4.0)
    saves.taken()
    saves.attached("a", 5.0, member=True)
    assert saves.taken() == [("a", "CommitCheckpoint"), ("a", "Watermark")]
    saves.forget("b", 5.0)
    saves.does("try1", 6.0)
    saves.taken()
    saves.attached("b", 7.0, member=False)
    assert saves.taken() == [("b", "PersistOver")], "it was away when that was told"


def test_the_end_of_an_attempt_is_told_again_on_a_new_stream() -> None:
    """It may have gone with the stream on which it was told."""
    saves = Saves()
    saves.both(100, wanted=100)
    saves.does("try1")
    saves.taken()
    for _ in range(2):
        saves.forget("b", 2.0)
        saves.attached("b", 3.0, member=False)
        assert saves.last() == m.PersistOver("try1", R1, 100, ok=True, reason="")
    saves.both(100, 105, wanted=105)
    saves.does("try2", ok=False)
    saves.forget("b", 2.0)
    saves.taken()
    saves.attached("b", 3.0, member=False)
    told = [order.attempt for _, order in saves.outbox.orders if isinstance(order, m.PersistOver)]
    assert told == ["try1", "try2"]
    saves.points.rewound_from = 110  # since then
    saves.taken()
    saves.attached("b", 4.0, member=False)
    told = [order.attempt for _, order in saves.outbox.orders if isinstance(order, m.PersistOver)]
    assert told == ["try2"], "or b would think that storage tells of that"
    saves.points.rewound_from = -1
    saves.forget("b", 5.0, gone_because="is dead")
    saves.taken()
    saves.attached("b", 6.0, member=False)
    assert saves.taken() == [("b", "PersistOver")] * 2, "it was given up, and lives"
    saves.forget("b", 7.0, gone_because="was replaced by a newer agent", replaced=True)
    saves.attached("b", 8.0, member=False)
    assert saves.taken() == [], "its next agent knows nothing of it"


def test_without_a_saver_an_attempt_waits_for_one() -> None:
    saves = Saves()
    saves.holds("a", 100, wanted=100, saver=False)
    saves.holds("b", 100, wanted=100, saver=False)
    assert saves.taken() == [("ab", "Watermark")]
    assert "no saver is ready" in saves.status()
    saves.holds("b", 100, wanted=100)
    orders = dict(saves.taken())
    assert orders["b"] == orders["a"] == "Persist"


def test_a_later_failure_takes_the_place_of_what_is_being_written() -> None:
    saves = Saves()
    saves.both(100)
    saves.checkpoints.save(m.Restore(R1, 100, 2), 0.0)
    saves.both(100, 110)
    saves.taken()
    saves.checkpoints.save(m.Restore(R1, 110, 2), 1.0)
    assert saves.taken() == [("ab", "PersistOver"), ("a", "Persist"), ("b", "Persist")]
    saves.checkpoints.save(m.Restore(R1, 110, 2), 1.0)
    assert saves.taken() == [], "it is under way"
    saves.does("try2", 2.0)
    saves.taken()
    saves.checkpoints.save(m.Restore(R1, 110, 2), 3.0)
    assert saves.taken() == [], "it was written"


@pytest.mark.parametrize("at_breakpoint", [True, False])
def test_a_node_that_goes_with_the_only_copy_gives_it_before(at_breakpoint: bool) -> None:
    saves = Saves(at_breakpoint=at_breakpoint)
    saves.both(100)
    saves.taken()
    saves.nodes_leave(["b"], 1.0)
    if not at_breakpoint:
        assert saves.taken() == []
        assert step_of(saves) is None, "it will be gone by the time that a round forms"
        return
    assert saves.taken() == [("a", "Persist"), ("b", "Persist")]
    assert step_of(saves) == 100, "it stays for that, and serves the next round"
    saves.both(100, 110, now=1.5)
    assert step_of(saves) == 100, "but for nothing else"
    saves.does("try1", 2.0)
    assert saves.taken()[-1] == ("ab", "PersistOver")
    assert step_of(saves) is None


def test_what_agents_withdraw_is_no_longer_written() -> None:
    saves = Saves()
    saves.both(90, 100, wanted=100)
    saves.taken()
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 90, 2)))
    assert ("ab", "PersistOver") in saves.taken()
    assert not saves.checkpoints.activity
    saves = Saves()
    saves.both(90, 100, wanted=90)
    saves.taken()
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    assert saves.checkpoints.activity == "step 90 is being saved", (
        "an older one is as good as before"
    )


def test_the_page_says_what_there_is() -> None:
    saves = Saves()
    assert saves.status() == ""
    saves.both(100, wanted=100)
    whole = "step 100 is complete in memory"
    assert saves.status() == f"{whole}; step 100 is being saved (0 of 2 nodes done)"
    saves.does("try1")
    assert saves.status() == f"{whole}; step 100 is the newest checkpoint"


def test_the_page_counts_the_snapshots_that_this_round_has_skipped() -> None:
    saves = Saves()
    saves.both(100)
    saves.taken()
    for node, skipped in (("a", 3), ("b", 1)):
        report = replace(saves.points.reports[node], last=m.RoundInfo(R1, 2), skipped=skipped)
        saves.on_holdings(node, report, 0.0)
    assert not saves.taken(), "it is for people: nothing follows from it"
    whole = "step 100 is complete in memory"
    assert saves.status() == f"{whole}; 3 snapshots skipped in this round: no slot was free"
    saves.begin_round(m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2)))
    assert saves.status() == whole, "what nodes have said was of the round before"


# ---------------------------------------------------------------- in the master

SAVING = replace(SPEC, max_restarts=0, saves=m.SaveSpec(at_breakpoint=True, limit=20.0))


def two_with_a_step(spec: m.JobSpec = SAVING) -> tuple[Master, RoundName]:
    master = Master(spec)
    name = master.running()
    for session, first in ((1, 0), (2, 2)):
        one = m.Holding(name, 100, first, 4, (first + 1, first + 2), wanted=False)
        master.hear(session, m.Holdings(Endpoint("h", 7000), (one,)))
    return master, name


def kinds(master: Master, session: int) -> list[str]:
    return [type(order).__name__ for order in master.orders(session)]


def test_the_end_waits_for_the_save_and_no_longer_than_its_limit() -> None:
    master, name = two_with_a_step()
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert kinds(master, 2) == ["Stop"]
    master.both_back(name)
    assert "Persist" in kinds(master, 1)
    assert master.job.status().reason.startswith("step 100 is being saved before the job ends")
    master.now += 19.9
    master.feed(fx.Tick())
    assert "End" not in kinds(master, 1)
    master.now += 0.2
    master.feed(fx.Tick())
    assert kinds(master, 1)[-2:] == ["PersistOver", "End"]
    end = master.orders(2)[-1]
    assert isinstance(end, m.End)
    assert end.exit_code == EXIT_FAILED


def test_a_job_that_is_to_end_does_not_change_its_mind() -> None:
    """A node dies while the last step is saved: that is no reason to begin again."""
    master, name = two_with_a_step()
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    master.both_back(name)
    master.feed(fx.Detached(2, clean=False))
    master.now += 30.0
    master.feed(fx.Tick())
    assert master.job.status().phase == "ended"


def test_without_the_flag_a_failed_job_ends_at_once() -> None:
    master, name = two_with_a_step(replace(SAVING, saves=m.SaveSpec()))
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert kinds(master, 2) == ["End"]


def test_the_record_has_what_was_restored_and_what_was_written() -> None:
    master, name = two_with_a_step(replace(SAVING, max_restarts=3))
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    master.both_back(name)
    start = next(order for order in master.orders(1) if isinstance(order, m.Start))
    assert start.info.restore == m.Restore(name, 100, 4)
    (persist,) = [order for order in master.orders(1) if isinstance(order, m.Persist)]
    master.both(m.Persisted(persist.attempt, True, False, "", 1, 0.1))
    master.hear(1, m.Persisted(persist.attempt, True, True, "", 0, 0.1))
    master.now += 30.0
    master.both(m.Beat(1))
    master.feed(fx.Tick())
    assert master.facts.snapshots.written == start.info.restore
    assert master.facts.rendezvous.round.restore == start.info.restore
