"""The master's brain by hand. Whole jobs are in scripts/ and in tests/sim."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.config import SLUGGISH_DEAD
from elasticrun.core import events as fx
from elasticrun.core.reasons import RankFailed, text_and_code
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import DONE, SPEC, Master, failure, hello
from tests.starts import changed


def test_before_the_first_agent_there_is_nothing_to_do() -> None:
    master = Master(None)
    assert master.feed(fx.Tick()) == []
    assert master.job.next_deadline() is None
    assert master.job.status().reason == "no agent has attached yet"


def test_without_numbers_of_its_own_it_takes_the_first_agents() -> None:
    master = Master(None)
    master.feed(fx.Attached(1, hello("a", spec=replace(SPEC, min_nodes=1, max_nodes=9))))
    master.feed(fx.Attached(2, hello("b", spec=replace(SPEC, max_nodes=5))))
    notes = [e.text for e in master.effects if isinstance(e, fx.Note)]
    assert notes == ["node b was started with different settings: min_nodes=2 (the job: 1), "
                     "max_nodes=5 (the job: 9)"]  # fmt: skip
    assert master.job.status().max_nodes == 9


def test_a_beat_changes_nothing_but_the_nodes_deadline() -> None:
    master = Master()
    master.running()
    master.now = 58.0
    master.both(m.Beat(1))
    assert master.job.next_deadline() == 60.0, "the record of a round that is no longer young"
    master.now = 60.0
    assert [type(effect) for effect in master.feed(fx.Tick())] == [fx.Record]
    before = master.job.status()
    master.now = 70.0
    assert master.feed(fx.Heard(1, m.Beat(2))) == []
    assert master.feed(fx.Heard(2, m.Beat(2))) == []
    assert master.job.status() == before
    assert master.job.next_deadline() == 130.0


def test_a_report_that_is_no_news_ends_a_mass_silence() -> None:
    """The streams stand, and the silent nodes say nothing but how far they are."""
    master = Master(replace(SPEC, min_nodes=3, max_nodes=3))
    for session, node in enumerate("abc", start=1):
        master.feed(fx.Attached(session, hello(node)))
        master.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
    (start,) = master.orders(3)
    assert isinstance(start, m.Start)
    for session in (1, 2, 3):
        master.hear(session, m.Running(start.round, (10 * session,)))
    master.now = SLUGGISH_DEAD
    master.feed(fx.Tick())
    assert "fell silent together" in master.job.status().reason
    for session in (1, 2, 3):
        master.job.next_deadline()
        master.hear(session, m.Steps(start.round, 5, 5, 0.1, 0.1, 0.0))
    assert [e.text for e in master.effects if isinstance(e, fx.Note)] == [
        "nodes are reachable again"
    ]
    assert master.job.status().reason == ""


def test_a_report_that_is_sent_again_is_charged_once() -> None:
    master = Master()
    name = master.running()
    report = m.RanksFailed(name, (failure(0),))
    master.hear(1, report, report)
    master.come_back(1, name)
    master.hear(1, report)
    master.come_back(2, name)
    (start,) = master.orders(1)
    assert (start.info.restart_count, start.round.number) == (1, 2)
    master.hear(1, report, m.Stopped(name))
    assert master.effects == [], "it is of a round that is over"
    status = master.job.status()
    assert (status.phase, status.restart_count, status.restarts_left) == ("running", 1, 2)


def test_failures_on_two_nodes_are_one_restart() -> None:
    master = Master()
    name = master.running()
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert master.orders(2) == [m.Stop(name, *text_and_code(RankFailed(0, "a", "boom")))]
    master.hear(2, m.RanksFailed(name, (failure(2), failure(3))))
    master.both_back(name)
    assert master.job.status().restart_count == 1


def test_the_status_names_the_cause_and_not_who_lost_it_as_a_peer() -> None:
    master = Master()
    name = master.running()
    echo = replace(failure(0), kind=m.FailureKind.PEER_LOST)
    master.hear(1, m.RanksFailed(name, (echo,)))
    assert "rank 0" in master.job.status().last_failure
    master.hear(2, m.RanksFailed(name, (failure(2),)))
    master.both_back(name)
    assert master.job.status().last_failure == "rank 2 on node b: boom"


def test_a_node_that_was_suspect_is_told_as_dead_once_it_is() -> None:
    """The status shows the cause as it was settled, not as it was suspected."""
    master = Master(replace(SPEC, min_nodes=1))
    name = master.running()
    master.feed(fx.Detached(2, clean=False))
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert master.job.status().last_failure == "node b is suspect"
    master.come_back(1, name)
    while master.job.status().phase != "running":
        due = master.job.next_deadline()
        assert due is not None
        master.now = due
        master.feed(fx.Tick())
        assert master.now < 60.0
    assert master.job.status().last_failure.startswith("node b is dead: its connection broke")
    assert master.job.status().restart_count == 0


def test_a_join_alone_is_no_word_about_the_ranks() -> None:
    """It may have been said before the Start was read; the round goes on."""
    master = Master()
    name = master.running()
    master.hear(1, m.Join(Endpoint("10.0.0.1", 5000)))
    assert master.effects == []
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    master.hear(1, m.Join(Endpoint("10.0.0.1", 5001)))
    master.come_back(2, name)
    assert master.job.status().phase == "stopping"
    master.hear(1, m.Stopped(name), m.Join(Endpoint("10.0.0.1", 5002)))
    (start,) = master.orders(2)
    assert isinstance(start, m.Start)
    assert start.store.port == 5002


def test_every_attach_is_told_the_whole_desired_state() -> None:
    master = Master()
    name = master.running()
    (start,) = (order for order in master.told[2] if isinstance(order, m.Start))

    def attach(session: int, attached: m.Start | None) -> list[m.Order]:
        master.feed(fx.Attached(session, hello("b", attached=attached)))
        assert fx.Hangup(session - 1) in master.effects
        welcome, *rest = master.orders(session)
        assert isinstance(welcome, m.Welcome)
        return rest

    assert attach(3, start) == [], "it runs what it should"
    assert attach(4, None) == [start], "its Start was lost"
    other = changed(start, RoundName(0, 9, "old"))
    assert attach(5, other) == [start]
    master.hear(1, m.RanksFailed(name, (failure(0),)))
    assert attach(6, start) == [m.Stop(name, *text_and_code(RankFailed(0, "a", "boom")))]


def test_after_the_end_whoever_comes_is_told_it() -> None:
    master = Master()
    name = master.running()
    master.both(m.Finished(name))
    assert master.orders(1) == [DONE]
    assert fx.JobOver(0, DONE.reason, code=DONE.code) in master.effects
    master.feed(fx.Attached(9, hello("late")))
    assert master.orders(9)[1:] == [DONE]
    master.feed(fx.Detached(1, True))
    assert master.job.next_deadline() is None
    assert master.job.status().phase == "ended"
