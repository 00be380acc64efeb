"""What stopped training, in the records of the master; the brain by hand."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.master.outward import report
from elasticrun.master.trace.words import incident_in_words
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import SPEC, Master, failure, hello
from tests.core.sight import worlds


def filed(master: Master) -> IncidentRow:
    return [one.incident for one in master.effects if isinstance(one, fx.Filed)][-1]


def notes(master: Master) -> list[str]:
    return [one.text for one in master.effects if isinstance(one, fx.Note)]


def trains(master: Master, step: int) -> RoundName:
    name = master.running()
    master.both(m.Steps(name, step, step, 0.1, 0.1, 0.0))
    return name


def starts(master: Master) -> RoundName:
    (start,) = master.orders(2)
    assert isinstance(start, m.Start)
    master.now += 0.5
    master.hear(1, m.Running(start.round, (1, 2)))
    master.hear(2, m.Running(start.round, (3, 4)))
    return start.round


def fails(master: Master, name: RoundName, one: m.Failure) -> None:
    master.now += 10.0
    master.hear(1, m.RanksFailed(name, (one,)))
    echo = replace(failure(2), kind=m.FailureKind.PEER_LOST)
    master.hear(2, m.RanksFailed(name, (echo, replace(echo, rank=3))))
    master.now += 1.0
    master.come_back(1, name)
    master.now += 2.0
    master.come_back(2, name)


def test_a_failing_rank_from_its_death_to_the_next_step() -> None:
    master = Master()
    broken = trains(master, 40)
    fails(master, broken, failure(0))
    name = starts(master)
    master.hear(1, m.LastLines(broken, 0, "boom"))
    master.hear(1, m.LastLines(name, 0, "of another round"))
    master.now += 1.5
    master.hear(1, m.Quiet(name, 0.0, first=1.5, counted=True))
    assert notes(master) == [], "its steps are told, so the first of them is waited for"
    master.hear(1, m.Steps(name, 31, 1, 0.1, 0.1, 0.0, restored=1.0))
    assert notes(master) == [
        "incident 1: rank 0 on node a failed (boom); restarted in 3.50 s, "
        "first step after 4.90 s, 10 steps repeated"
    ]
    row = filed(master)
    told = [one.order for one in master.effects if isinstance(one, fx.Send)]
    assert told[-1] == m.Recovery(name, row.restarted, row.first_step, 10)
    assert (row.restarted, row.first_step) == (3.5, pytest.approx(4.9))
    assert [(phase.name, phase.seconds) for phase in row.phases] == [
        ("stop", 3.0),
        ("gather", 0.0),
        ("spawn", 0.5),
        ("restore", 0.5),
        ("warm", pytest.approx(0.9)),
    ]
    assert (row.cause, row.node, row.rank, row.round) == ("rank_failed", "a", 0, 1)
    assert (row.over, row.slot_seconds, row.steps_lost, row.last_lines) == (
        True,
        pytest.approx(19.6),
        10,
        "boom",
    )
    assert row.followed == "ranks 2,3: lost its connection to another rank"
    assert row.decision == "restart 1: rank 0 on node a: boom; 2 left"
    assert master.job._sight.incidents.page()[0].number == 1


def test_all_count_the_steps_of_one_event_alike() -> None:
    """The newest that any rank had come to counts, also where it was told only at its end."""
    master = Master()
    broken = trains(master, 40)
    master.now += 1.0
    master.hear(1, m.RanksFailed(broken, (failure(0),), newest=42))
    master.hear(1, m.Stopped(broken, newest=42), m.Join(Endpoint("10.0.0.1", 9001)))
    master.hear(2, m.Stopped(broken, newest=43), m.Join(Endpoint("10.0.0.2", 9002)))
    assert master.job.picture().incidents[-1].step == 43
    name = starts(master)
    master.now += 1.0
    master.hear(1, m.Steps(name, 31, 1, 0.1, 0.1, 0.0))
    (told,) = (one for one in master.orders(2) if isinstance(one, m.Recovery))
    assert told.repeated == 13  # which the terminal shows
    master.hear(2, m.Steps(name, 31, 1, 0.1, 0.1, 0.0))
    closed = master.job.picture().incidents[-1]
    assert (closed.over, closed.steps_lost) == (True, 13)
    goodput = master.job.goodput()
    assert goodput is not None
    assert "13 steps repeated" in goodput.line
    master.now += 1.0
    master.hear(2, m.RanksFailed(name, (failure(2),)))  # what was lost before counts no more
    assert master.job.picture().incidents[-1].step == 31


@pytest.mark.parametrize("said", ["", "its own"])
def test_the_last_lines_are_of_the_rank_that_failed_first(said: str) -> None:
    """Who lost it as a peer is reported before it, with a traceback."""
    master = Master()
    name = trains(master, 40)
    echo = replace(failure(0), kind=m.FailureKind.PEER_LOST, traceback="Connection reset by peer")
    master.hear(1, m.RanksFailed(name, (echo,)), m.LastLines(name, 0, "Connection reset by peer"))
    assert filed(master).last_lines == "Connection reset by peer"
    master.hear(2, m.RanksFailed(name, (failure(2),)))
    if said:
        master.hear(2, m.LastLines(name, 2, said))
    master.both_back(name)
    row = master.job.picture().incidents[-1]
    assert (row.rank, row.last_lines) == (2, said)


def test_so_are_they_if_the_job_ends_with_it() -> None:
    """The rank's traceback stands for its last lines, which may never arrive."""
    master = Master(replace(SPEC, max_restarts=0))
    name = trains(master, 40)
    echo = replace(failure(0), kind=m.FailureKind.PEER_LOST, traceback="Connection reset by peer")
    master.hear(1, m.RanksFailed(name, (echo,)))
    master.hear(2, m.RanksFailed(name, (replace(failure(2), traceback="ValueError: bad"),)))
    master.now += SPEC.heartbeat_timeout + 1.0
    master.both(m.Beat(1))
    master.feed(fx.Tick())
    row = master.job.picture().incidents[-1]
    assert (row.rank, row.last_lines, row.ended) == (2, "ValueError: bad", True)


@pytest.mark.parametrize("all_of_the_node", [True, False])
def test_a_rank_of_another_node_that_ended_early_is_named(*, all_of_the_node: bool) -> None:
    """As on one node; where others of its node go on, the stop tells of it."""
    master = Master(replace(SPEC, max_restarts=0))
    name = master.running()
    if all_of_the_node:
        master.hear(2, m.Finished(name))
    lost = replace(failure(0), kind=m.FailureKind.PEER_LOST)
    master.hear(1, m.RanksFailed(name, (lost,)))
    if not all_of_the_node:
        master.hear(2, m.Stopping(name, 30.0, (1,)))
    master.now += SPEC.heartbeat_timeout + 1.0
    master.both(m.Beat(1))
    master.feed(fx.Tick())
    who = "ranks 2,3" if all_of_the_node else "rank 3"
    row = master.job.picture().incidents[-1]
    assert row.sentence == (
        f"{who} exited with 0 while others continued; rank 0 on node a lost its connection"
    )
    assert report.verdict(row) == "script"
    assert f"{who} had exited with 0" in master.job.status().outcome


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_a_job_whose_nodes_were_told_to_leave_has_no_incident(min_nodes: int) -> None:
    """One after the other: the first one begins the job's end."""
    master = Master(replace(SPEC, min_nodes=min_nodes))
    trains(master, 40)
    filed_ever: list[fx.JobEffect] = []
    for session in (1, 2):
        master.hear(session, m.Leaving("received SIGINT", 2))
        filed_ever += [one for one in master.effects if isinstance(one, fx.Filed)]
        assert not master.job.picture().incidents
    assert master.job.status().outcome == "all nodes were ordered to leave"
    assert not filed_ever


def test_a_node_that_is_told_to_leave_is_an_incident_once_the_others_have_stopped() -> None:
    """They form the next round, or wait for nodes; also where they are told to leave later."""
    master = Master()
    name = trains(master, 40)
    master.hear(1, m.Leaving("received SIGINT", 2))
    master.now += 1.0
    master.both(m.Stopping(name, 30.0), m.Stopped(name))
    assert [(one.name, one.seconds) for one in filed(master).phases[:1]] == [("stop", 1.0)]
    master.hear(2, m.Join(Endpoint("10.0.0.2", 4001)))
    (row,) = master.job.picture().incidents
    assert (row.number, row.cause, row.over) == (1, "preempted", False)
    master.hear(2, m.Leaving("received SIGINT", 2))
    row = filed(master)
    assert (row.number, row.over) == (1, True)
    assert row.decision == "the job ends with code 1: all nodes were ordered to leave"


def test_the_only_node_of_a_job_that_is_told_to_leave_is_no_incident() -> None:
    """As on Ctrl-C, with a Checkpointer or without."""
    master = Master(replace(SPEC, min_nodes=1, max_nodes=1))
    master.feed(fx.Attached(1, hello("a")))
    master.hear(1, m.Join(Endpoint("10.0.0.1", 4000)))
    (start,) = master.orders(1)
    assert isinstance(start, m.Start)
    master.hear(1, m.Running(start.round, (11, 12)), m.Leaving("received SIGINT", 2))
    assert master.job.status().outcome == "all nodes were ordered to leave"
    assert not master.job.picture().incidents


def test_a_hang_counts_from_the_last_move_and_keeps_the_stacks() -> None:
    master = Master()
    name = master.running()
    group = m.StackGroup("k", "1", 1, "", "train.py:88 load_shard")
    for session in (1, 2):
        master.hear(session, m.Quiet(name, 5.0, waiting=1))
    master.feed(fx.Requested(1, m.Request("stacks")))
    for session, groups in ((1, (group,)), (2, ())):
        master.hear(session, m.Inspected(name, 1, 0, (), ()))
        master.hear(session, m.Stacks(name, 1, groups))
    hung = replace(failure(0), kind=m.FailureKind.HUNG, message="all wait for it")
    fails(master, name, hung)
    new = starts(master)
    master.hear(2, m.Quiet(new, 0.0, first=1.0))
    row = filed(master)
    assert (row.cause, row.sentence) == ("hang", "all wait for it")
    assert [one.text for one in row.stacks] == ["train.py:88 load_shard"]
    assert row.over


@pytest.mark.parametrize("waiting", [0, 1])
def test_only_ranks_that_wait_for_others_have_hung_before_a_failure(waiting: int) -> None:
    master = Master()
    name = master.running()
    master.now = 20.0
    for session in (1, 2):
        master.hear(session, m.Quiet(name, 20.0, waiting=waiting))
    fails(master, name, failure(0))
    master.hear(2, m.Quiet(starts(master), 0.0, first=1.0))
    row = filed(master)
    assert (row.phases[0].name == "detect") == bool(waiting)
    assert (row.restarted > 20.0) == bool(waiting)


@pytest.mark.parametrize("verb", ["stop", "restart"])
def test_what_ends_a_round_that_hangs_keeps_the_hang_and_its_stacks(verb: str) -> None:
    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        load = 500.0 if (step, rank) == (8, 3) else 0.1
        return [("compute", 0.5), ("load", load), ("world", 0.0)]

    master = worlds.Training(plan).run(100.0).master
    master.feed(fx.Requested(1, m.Request(verb, who="me@here")))
    row = filed(master)
    assert (row.cause, row.sentence) == ("operator", f"{verb}{'p' * (verb == 'stop')}ed by me@here")
    assert row.hang.startswith("strong: rank 3 (node a) is idle at train.py:41 load for ")
    assert (row.phases[0].name, row.phases[0].seconds > 60.0) == ("detect", True)
    assert row.slot_seconds > 60.0
    assert row.stacks
    assert "- **Hang before it**: strong: rank 3" in report.page(row)
    line = master.job.goodput().line
    assert f"{'the end' if verb == 'stop' else '1 interruption'} cost " in line
    assert "in a hang" not in line, "what an incident has is not told again"


def test_a_lost_node_counts_from_its_last_word() -> None:
    master = Master(replace(SPEC, min_nodes=1))
    name = master.running()
    master.now = 60.0
    master.both(m.Beat(1))
    master.feed(fx.Detached(2, clean=False))
    while not any("is over" in text for text in notes(master)):
        due = master.job.next_deadline()
        assert due is not None
        master.now = due
        master.hear(1, m.Beat(2))
        master.feed(fx.Tick())
    row = filed(master)
    assert (row.cause, row.node, row.over) == ("node_lost", "b", False)
    assert [phase.name for phase in row.phases] == ["detect", "stop"]
    assert row.phases[0].seconds == master.now - 60.0
    master.come_back(1, name)
    (start,) = master.orders(1)
    assert isinstance(start, m.Start)
    assert "no restart used" in master.job._sight.incidents.page()[0].decision


def test_nodes_that_leave_or_come_are_no_failures() -> None:
    master = Master(replace(SPEC, min_nodes=1))
    name = master.running()
    master.hear(2, m.Leaving("received SIGTERM", 15))
    master.both(m.Stopped(name))
    assert filed(master).cause == "preempted"
    grown = Master(replace(SPEC, min_nodes=1, last_call_timeout=0.0, grow_cooldown=0.0))
    grown.feed(fx.Attached(1, hello("a")))
    grown.hear(1, m.Join(Endpoint("10.0.0.1", 4000)))
    (start,) = grown.orders(1)
    assert isinstance(start, m.Start)
    grown.hear(1, m.Running(start.round, (1, 2)))
    grown.now = 50.0
    grown.feed(fx.Attached(2, hello("b")))
    grown.hear(2, m.Join(Endpoint("10.0.0.2", 4000)))
    assert (filed(grown).cause, filed(grown).sentence) == ("scaled", "node b joined")


def test_the_end_of_a_job_closes_it_and_takes_the_last_lines() -> None:
    master = Master(replace(SPEC, max_restarts=0))
    name = master.running()
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert incident_in_words(filed(master)).startswith("incident 1 (over), rank_failed: rank 0")
    ended = "the job ends with code 1: no restarts left (--max-restarts is 0)"
    assert filed(master).decision == ended
    master.hear(1, m.LastLines(name, 0, "the last"))
    assert filed(master).last_lines == "the last"
    again = Master()
    fails(again, trains(again, 30), failure(0))
    again.both(m.Finished(starts(again)))
    assert filed(again).over
    assert filed(again).decision == "restart 1: rank 0 on node a: boom; 2 left", "as it helped"
    well = Master()
    name = well.running()
    well.both(m.Finished(name))
    assert not any(isinstance(effect, fx.Filed) for effect in well.effects)


def test_one_that_nothing_tells_of_is_over_with_the_next() -> None:
    master = Master()
    fails(master, master.running(), failure(0))
    name = starts(master)
    master.now += 20.0
    master.hear(2, m.RanksFailed(name, (failure(2),)))
    first, second = master.job._sight.incidents.page()
    assert (first.over, second.over, second.number, second.node) == (True, False, 2, "b")
    assert sum(phase.seconds for phase in first.phases) == 3.5, "not the time in which it trained"


def test_the_next_master_counts_on_and_closes_what_was_open() -> None:
    master = Master()
    name = master.running()
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert master.facts is not None
    later = Master(facts=master.facts)
    later.feed(fx.Tick())
    (row,) = later.job._sight.incidents.page()
    assert (row.number, row.over, row.sentence) == (1, False, "rank 0 on node a: boom")
    assert json.loads(json.dumps(row.cause)) == "master"
