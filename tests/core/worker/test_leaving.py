"""A node that must leave waits for the step that its ranks save, and no longer than it may."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import EXIT_FAILED, EXIT_FINAL, EXIT_SAVED
from elasticrun.core import events as fx
from elasticrun.core.reasons import Leaves
from elasticrun.core.rounds.failures import what_happened
from elasticrun.core.worker.leaving import (
    MASTER_BACK_WITHIN,
    REPEAT_WITHIN,
    RESCUE_WITHIN,
    WAIT_FOR_SAVED,
)
from elasticrun.core.worker.ranks import SIGNAL_MEMORY, LocalRanks
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName
from tests.core.by_hand import FINISHED, PERSIST, ROUND, STOPPED, Agent

TERM = fx.Signalled(15, "SIGTERM", death=True, step=5, margin=3)
DEPARTING = m.Departing(ROUND, "received SIGTERM", 15, 5, 3)
ASK = m.SaveAt(ROUND, 8, "node a must leave")
SAVED = m.PersistOver("", ROUND, 8, True, "")
GIVEN_UP = m.PersistOver("", ROUND, 8, False, "no room")
LEAVING = fx.Say(m.Leaving("received SIGTERM", 15))
END = fx.Exit(EXIT_FAILED, "received SIGTERM", (), 15, why=Leaves("received SIGTERM", 15))
TOLD = [
    LEAVING,
    fx.RanksStopping(),
    fx.SignalRanks((0, 1), 15),
    fx.Say(m.Stopping(ROUND, 20.0)),
]


def departing(**settings: float) -> Agent:
    agent = Agent(**settings).running()
    assert agent.feed(TERM) == [fx.Say(DEPARTING)]
    assert agent.state is State.RUNNING
    return agent


@pytest.mark.parametrize(
    ("over", "code"),
    [
        (SAVED, EXIT_SAVED),
        (replace(SAVED, step=9), EXIT_SAVED),  # a later one has it all
        (replace(SAVED, step=7), EXIT_FAILED),
        (replace(SAVED, round=RoundName(1, 0, "old")), EXIT_FAILED),
        (GIVEN_UP, EXIT_FAILED),
    ],
)
def test_only_what_is_in_storage_ends_as_saved(over: m.PersistOver, code: int) -> None:
    agent = departing()
    agent.order(ASK)
    agent.order(over)
    agent.now += REPEAT_WITHIN
    agent.feed(fx.Signalled(15, "SIGTERM", death=True, step=8))  # the second is obeyed at once
    (*_, last) = [*agent.reaped(), *(agent.wait() if agent.alive else [])]
    assert last == replace(END, code=code, saved=over.step if code == EXIT_SAVED else -1)


def test_what_is_written_while_the_node_holds_counts() -> None:
    agent = departing()
    agent.order(ASK)
    agent.order(PERSIST)
    agent.now += REPEAT_WITHIN
    agent.feed(fx.Signalled(15, "SIGTERM", death=True, step=8))
    agent.reaped()
    assert agent.state is State.HOLDING
    over = m.PersistOver("a1", ROUND, 8, True, "")
    assert agent.order(over)[-1] == replace(END, code=EXIT_SAVED, saved=over.step)


def test_a_script_that_says_its_final_word_meanwhile_is_heard() -> None:
    agent = departing()
    agent.exit(0, EXIT_FINAL)
    agent.exit(1)
    agent.feed(fx.RanksSwept(()))
    (last,) = agent.wait()
    assert last == replace(END, code=EXIT_FINAL)


@pytest.mark.parametrize(("signum", "later"), [(2, 0.0), (15, REPEAT_WITHIN)])
def test_a_second_signal_is_obeyed_at_once(signum: int, later: float) -> None:
    agent = departing()
    agent.order(ASK)
    agent.now += later
    effects = agent.feed(fx.Signalled(signum, "SIGANY", death=True, step=6))
    assert fx.SignalRanks((0, 1), signum) in effects


def test_a_sigterm_that_is_said_again_is_no_second_one() -> None:
    """Slurm does so within milliseconds, at a time limit; a second ^C is meant as one."""
    agent = departing()
    assert agent.feed(TERM) == []
    agent = Agent().running()
    ctrl_c = replace(TERM, signum=2, name="SIGINT")
    agent.feed(ctrl_c)
    assert fx.SignalRanks((0, 1), 2) in agent.feed(ctrl_c)


def test_nobody_waits_where_there_is_no_grace() -> None:
    agent = Agent(departure_grace=0.0).running()
    assert agent.feed(TERM) == TOLD


def test_what_is_over_of_an_older_step_changes_nothing() -> None:
    agent = departing()
    early = m.PersistOver("", ROUND, 4, True, "")
    assert agent.order(early) == [fx.Obey(early)]
    agent.order(ASK)
    failed = m.PersistOver("a1", ROUND, 8, False, "the disk is full")  # it is tried again
    for order in (early, failed):
        assert agent.order(order) == [fx.Obey(order)]
    assert agent.state is State.RUNNING


def test_ranks_that_ended_by_the_signal_leave_what_they_saved() -> None:
    agent = departing()
    agent.order(ASK)
    agent.now = SIGNAL_MEMORY + 1.0  # they had put it off
    assert agent.exit(0) == []
    assert agent.exit(1) == []
    assert agent.order(PERSIST) == [fx.Obey(PERSIST)]
    assert agent.wait() == [
        LEAVING,
        fx.RanksStopping(),
        fx.SweepRanks(20.0),
    ]  # WAIT_FOR_SAVED is over
    assert agent.now == pytest.approx(SIGNAL_MEMORY + 1.0 + WAIT_FOR_SAVED)
    assert agent.feed(fx.RanksSwept(())) == STOPPED
    assert agent.state is State.HOLDING
    over = m.PersistOver("a1", ROUND, 7, True, "")
    assert agent.order(over) == [fx.Obey(over), END]


def test_ranks_that_ended_before_a_step_was_named_are_not_waited_for() -> None:
    agent = departing()
    agent.exit(0)
    agent.exit(1, 143)
    assert agent.wait() == [LEAVING, fx.RanksStopping(), fx.SweepRanks(20.0)]
    assert agent.now == 0.0


def test_it_stays_a_moment_for_what_the_master_may_want_of_it() -> None:
    agent = departing()
    agent.order(ASK)
    assert agent.order(GIVEN_UP)[1:] == TOLD
    assert agent.reaped() == STOPPED
    assert agent.state is State.HOLDING
    assert agent.wait() == [END]
    assert agent.now == RESCUE_WITHIN


def test_a_failure_meanwhile_is_told_and_the_node_leaves() -> None:
    agent = departing()
    said = [e.report for e in agent.exit(1, 1) if isinstance(e, fx.Say)]
    assert isinstance(said[0], m.RanksFailed)
    assert said[1] == m.Leaving("received SIGTERM", 15)
    assert agent.state is State.ENDING


def test_with_its_spawner_it_leaves() -> None:
    agent = departing()
    assert LEAVING in agent.feed(fx.SpawnerLost("killed"))
    assert agent.feed(fx.RanksSwept(()))[:2] == STOPPED


def test_ranks_that_are_done_are_done() -> None:
    agent = departing()
    agent.exit(0, 0)
    assert agent.exit(1, 0) == FINISHED
    agent.order(ASK)
    assert agent.order(SAVED) == [fx.Obey(SAVED)]  # the job may succeed all the same
    over = m.End(0, "every rank exited with 0", ())
    assert agent.order(over)[-1] == fx.Exit(0, "every rank exited with 0", (), 0)


@pytest.mark.parametrize("signum", [15, 2, 1, 10])
@pytest.mark.parametrize("shell", [False, True])
def test_a_rank_that_dies_of_the_agents_signal_was_stopped(signum: int, shell: bool) -> None:
    """A scheduler signals every process at once. Later it is a failure like another."""
    code = 128 + signum if shell else -signum
    for late, stopped in ((SIGNAL_MEMORY, True), (SIGNAL_MEMORY + 0.1, False)):
        ranks = LocalRanks(2, "here")
        ranks.new_round(0)
        ranks.signalled(signum, 10.0)
        failure = ranks.failed(fx.RankExited(1, code, None), 10.0 + late)
        assert (failure.kind is m.FailureKind.STOPPED) == stopped


def test_a_rank_that_loses_a_peer_names_those_that_were_through() -> None:
    kind, closed = m.FailureKind.PEER_LOST, "connection closed by peer"
    lost = m.Failure("h", 6, 2, 1, 1, 0, kind, closed, "", "")
    for through, told in (((0, 1), "; ranks 4,5 had exited with 0"), ((), "")):
        ranks = LocalRanks(3, "here")
        ranks.new_round(4)
        for local_rank in range(3):
            ranks.spawned(local_rank, 100 + local_rank)
        for local_rank in (*through, 2):
            del ranks.live[local_rank]
        failure = ranks.failed(fx.RankExited(2, 1, lost), 10.0)
        assert what_happened(failure) == f"lost its connection to another rank{told}"
        assert failure.message.endswith("closed by peer")
        cut_short = replace(lost, exitcode=-15, kind=m.FailureKind.STOPPED)  # as it printed that
        assert what_happened(cut_short) == "lost its connection to another rank"


# ---------------------------------------------------------------- where no rank runs

HOLDS = replace(TERM, step=-1, held=5)


@pytest.mark.parametrize("state", ["joined", "stopping", "beginning"])
def test_what_earlier_ranks_have_left_is_written_out_first(state: str) -> None:
    """Between two rounds, and as ranks begin, this node may have the only copy of something."""
    agent = Agent().joined() if state == "joined" else Agent().running()
    if state != "joined":
        if state == "stopping":
            agent.order(m.Stop(ROUND, "a rank has failed"))
        agent.feed(replace(HOLDS, fresh=state == "beginning"))
        for local_rank in (0, 1):
            agent.exit(local_rank)
        agent.feed(fx.RanksSwept(()))
    else:
        assert agent.feed(HOLDS)[0] == LEAVING
    assert agent.state is State.HOLDING
    assert agent.order(PERSIST) == [fx.Obey(PERSIST)]
    assert agent.feed(HOLDS) == []  # said again by Slurm
    over = m.PersistOver("a1", ROUND, 8, True, "")
    assert agent.order(over) == [fx.Obey(over), replace(END, code=EXIT_SAVED, saved=over.step)]


def test_nobody_waits_for_nothing() -> None:
    assert Agent().joined().feed(replace(HOLDS, held=-1)) == [LEAVING, END]
    assert Agent(departure_grace=0.0).joined().feed(HOLDS) == [LEAVING, END]


OVER = m.PersistOver("a1", ROUND, 5, True, "")


def between() -> Agent:
    """A rank has failed, and all have ended: the next round is waited for."""
    agent = Agent().running()
    agent.reaped(1)
    return agent


@pytest.mark.parametrize(
    ("over", "code"),
    [
        (OVER, EXIT_SAVED),
        (replace(OVER, step=6), EXIT_SAVED),
        (replace(OVER, step=4), EXIT_FAILED),  # the next round would not go on from there
        (replace(OVER, ok=False), EXIT_FAILED),
    ],
)
def test_between_two_rounds_what_they_had_is_all_there_is_to_save(
    over: m.PersistOver, code: int
) -> None:
    agent = between()
    assert agent.feed(HOLDS) == [LEAVING]
    agent.order(PERSIST)
    assert agent.state is State.HOLDING
    step = over.step if code == EXIT_SAVED else -1
    assert agent.order(over)[-1] == replace(END, code=code, saved=step)


def test_what_is_in_storage_by_then_counts() -> None:
    """It stays a moment all the same: the master may want what this node has for another."""
    agent = between()
    agent.order(OVER)
    assert agent.feed(HOLDS) == [LEAVING]
    assert agent.wait() == [replace(END, code=EXIT_SAVED, saved=OVER.step)]
    assert agent.now == RESCUE_WITHIN


@pytest.mark.parametrize(
    ("told", "code"), [(EXIT_SAVED, EXIT_SAVED), (EXIT_FAILED, EXIT_FAILED), (0, EXIT_FAILED)]
)
def test_the_end_of_the_job_tells_who_still_holds_that_others_have_saved_it(
    told: int, code: int
) -> None:
    agent = between()
    agent.feed(HOLDS)
    agent.order(m.End(told, "every node has left", (), saved=7))
    assert agent.wait() == [replace(END, code=code, saved=7 if code == EXIT_SAVED else -1)]


# ---------------------------------------------------------------- orders of a master that is gone


def welcome(term: int) -> m.Welcome:
    return m.Welcome(m.PROTOCOL_VERSION, "1", "a-job", term, 1.0, 600.0, "")


def test_an_attempt_of_a_master_that_is_gone_is_given_up_here() -> None:
    """Else this node would stay at its end until the time of that attempt is over."""
    agent = Agent().running()
    agent.order(welcome(1))
    agent.order(PERSIST)
    agent.feed(fx.LinkLost("the connection broke"))
    why = "the master that had ordered it is gone"
    over = m.PersistOver(PERSIST.attempt, PERSIST.round, PERSIST.step, False, why)
    assert fx.Obey(over) in agent.order(welcome(2))
    agent.feed(fx.Signalled(15, "SIGTERM", death=True, step=-1))
    agent.reaped()
    assert not agent.alive


def test_the_same_master_again_finishes_what_it_has_begun() -> None:
    agent = Agent().running()
    agent.order(welcome(1))
    agent.order(PERSIST)
    agent.feed(fx.LinkLost("the connection broke"))
    assert not [e for e in agent.order(welcome(1)) if isinstance(e, fx.Obey)]


def test_a_node_that_holds_waits_a_moment_for_a_new_master() -> None:
    agent = Agent().running()
    agent.order(welcome(1))
    agent.order(PERSIST)
    agent.feed(fx.Signalled(15, "SIGTERM", death=True, step=-1))
    agent.reaped()
    assert agent.state is State.HOLDING
    agent.feed(fx.LinkLost("the connection broke"))
    agent.wait()
    assert not agent.alive
    assert agent.now == MASTER_BACK_WITHIN
