"""The agent's brain by hand, one event after another. Whole lives are in scripts/."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from elasticrun.config import (
    EXIT_BAD_NODE,
    EXIT_FAILED,
    EXIT_FINAL,
    EXIT_OK,
    SPAWN_TIMEOUT,
    STUCK_AFTER,
)
from elasticrun.core import events as fx
from elasticrun.core.worker.group import TABLE, WorkerGroup, draw
from elasticrun.core.worker.ranks import MAX_LOSSES
from elasticrun.core.worker.states import State, UnexpectedEvent
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName

STORE, NEXT = Endpoint("here", 4001), Endpoint("here", 4002)
ROUND = RoundName(1, 1, "aa")
START = m.Start(
    round=ROUND,
    group_rank=0,
    group_world_size=1,
    first_rank=0,
    world_size=2,
    role_first_rank=0,
    role_world_size=2,
    restart_count=0,
    store=STORE,
    host_store=True,
)
WELCOME = m.Welcome(1, "x", "job", 1, 1.0, 600.0, "")


def failed(rank: int, code: int = 1, kind: str = "script") -> m.Failure:
    return m.Failure("here", rank, rank, 50 + rank, code, 1, m.FailureKind(kind), "boom", "", "")


class Agent:
    """A group of two ranks and its clock."""

    def __init__(self, **settings: float | None) -> None:
        values: dict[str, float | None] = {"restart_grace": 10.0, "shutdown_timeout": 20.0}
        self.group = WorkerGroup(nproc=2, **(values | settings))  # type: ignore[arg-type]
        self.now = 0.0

    def feed(self, event: fx.AgentEvent) -> list[fx.AgentEffect]:
        effects = self.group.step(event, self.now)
        return [effect for effect in effects if not isinstance(effect, fx.Note)]

    def order(self, order: m.Order) -> list[fx.AgentEffect]:
        return self.feed(fx.Ordered(order))

    def wait(self) -> list[fx.AgentEffect]:
        deadline = self.group.next_deadline()
        assert deadline is not None
        self.now = deadline
        return self.feed(fx.Tick())

    @property
    def alive(self) -> bool:
        return self.state is not State.OVER

    @property
    def state(self) -> State:
        return self.group.status().state

    def joined(self) -> Agent:
        assert self.group.next_deadline() == 0.0
        assert self.feed(fx.Tick()) == [fx.PrepareStore()]
        self.feed(fx.LinkBack())
        self.order(WELCOME)
        assert self.feed(fx.StoreReady(STORE)) == [fx.Say(m.Join(STORE))]
        return self

    def started(self) -> Agent:
        self.joined()
        assert self.order(START) == [fx.SpawnRanks(START, 0), fx.PrepareStore()]
        return self

    def running(self) -> Agent:
        self.started()
        assert self.feed(fx.RankSpawned(0, 50)) == []
        assert self.feed(fx.RankSpawned(1, 51)) == [fx.Say(m.Running(ROUND, (50, 51)))]
        return self


def test_every_pair_is_listed_or_raises() -> None:
    kinds = {kind for _, kind in TABLE}
    assert len(kinds) == 25
    missing = [(s, k) for s, k in itertools.product(State, kinds) if (s, k) not in TABLE]
    impossible = {fx.RankSpawned, fx.RankExited, fx.RanksSwept}
    assert {kind for _, kind in missing} == impossible, "all else can happen at any time"
    agent = Agent().joined()
    with pytest.raises(UnexpectedEvent, match="joined cannot be told RankExited"):
        agent.feed(fx.RankExited(0, 0, None))


def test_the_drawing_names_every_state_and_event() -> None:
    drawing = draw()
    assert all(state.value in drawing.splitlines()[0] for state in State)
    assert "| RankExited |" in drawing
    assert len(drawing.splitlines()) == 2 + len({kind for _, kind in TABLE})


def test_architecture_shows_the_table_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    assert draw().rstrip() in page, "put what draw() gives into ARCHITECTURE.md again"


def test_a_failure_stops_the_others_at_once_and_joins_with_the_prepared_store() -> None:
    agent = Agent().running()
    agent.feed(fx.StoreReady(NEXT))
    boom = failed(0)
    assert agent.feed(fx.RankExited(0, 1, boom)) == [
        fx.Say(m.RanksFailed(ROUND, (boom,))),
        fx.SignalRanks((1,), 15),
        fx.Say(m.Stopping(ROUND, 10.0)),
    ]
    assert agent.feed(fx.RankExited(1, -15, failed(1, -15))) == [fx.SweepRanks(10.0)]
    assert agent.feed(fx.RanksSwept(())) == [fx.Say(m.Stopped(ROUND)), fx.Say(m.Join(NEXT))]
    second = replace(START, round=RoundName(1, 2, "bb"), store=NEXT, restart_count=1)
    assert agent.order(second) == [
        fx.ReleaseStore(STORE),
        fx.SpawnRanks(second, 1),
        fx.PrepareStore(),
    ]


def test_sigterm_first_then_sigkill_then_stuck() -> None:
    agent = Agent().running()
    assert agent.order(m.Stop(ROUND, "why")) == [
        fx.SignalRanks((0, 1), 15),
        fx.Say(m.Stopping(ROUND, 10.0)),
    ]
    assert agent.wait() == [fx.SignalRanks((0, 1), 9)]
    assert agent.now == 10.0
    said, ended = agent.wait()
    assert agent.now == 10.0 + STUCK_AFTER
    assert isinstance(said, fx.Say)
    assert isinstance(said.report, m.Leaving)
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_BAD_NODE
    assert "50, 51" in ended.reason


def test_a_fork_server_that_never_answers_ends_the_agent() -> None:
    agent = Agent().started()
    agent.feed(fx.RankSpawned(0, 50))
    assert agent.group.next_deadline() == SPAWN_TIMEOUT
    said, outcome = agent.wait()
    sentence = "the fork server was asked for the ranks 300 s ago and has not started all of them"
    assert said == fx.Say(m.Leaving(sentence, 0))
    assert outcome == fx.Exit(EXIT_FAILED, sentence, (), 0)
    agent = Agent().running()
    assert agent.group.next_deadline() is None, "those that run have time"


def test_a_later_and_better_cause_is_told_too() -> None:
    agent = Agent().running()
    echo, cause = failed(0, kind="peer-lost"), failed(1)
    agent.feed(fx.RankExited(0, 1, echo))
    effects = agent.feed(fx.RankExited(1, 1, cause))
    assert effects[0] == fx.Say(m.RanksFailed(ROUND, (echo, cause)))


def test_our_own_signals_are_no_failures() -> None:
    agent = Agent().running()
    agent.order(m.Stop(ROUND, "why"))
    assert agent.feed(fx.RankExited(0, -15, failed(0, -15, "signal"))) == []
    assert agent.feed(fx.RankExited(1, 143, failed(1, 143))) == [fx.SweepRanks(10.0)]


def test_a_sigkill_that_is_not_ours_is_a_failure_also_while_we_stop_the_ranks() -> None:
    """We had sent SIGTERM only: whoever sent SIGKILL, it was no obedience."""
    agent = Agent().running()
    agent.order(m.Stop(ROUND, "why"))
    killed = failed(0, -9, "signal")
    assert agent.feed(fx.RankExited(0, -9, killed)) == [fx.Say(m.RanksFailed(ROUND, (killed,)))]


@pytest.mark.parametrize(("delay", "kind"), [(4.9, "stopped"), (5.1, "signal")])
def test_a_signal_that_the_agent_got_too_within_five_seconds(delay: float, kind: str) -> None:
    agent = Agent().running()
    agent.now = 100.0
    agent.feed(fx.Signalled(10, "SIGUSR1", False))
    agent.group._ranks._sent.clear()  # as if the rank had it from elsewhere
    agent.now += delay
    said = agent.feed(fx.RankExited(0, -10, failed(0, -10, "signal")))[0]
    assert isinstance(said, fx.Say)
    assert isinstance(said.report, m.RanksFailed)
    assert said.report.failures[0].kind == kind


def test_oom_is_oom_whoever_sent_the_signal() -> None:
    agent = Agent().running()
    agent.order(m.Stop(ROUND, "why"))
    agent.wait()  # SIGKILL
    said = agent.feed(fx.RankExited(0, -9, failed(0, -9, "oom")))
    assert said == [fx.Say(m.RanksFailed(ROUND, (failed(0, -9, "oom"),)))]


def test_stop_before_all_ranks_were_spawned() -> None:
    agent = Agent().started()
    agent.feed(fx.RankSpawned(0, 50))
    assert agent.order(m.Stop(ROUND, "why"))[0] == fx.SignalRanks((0,), 15)
    assert agent.feed(fx.RankSpawned(1, 51)) == [fx.SignalRanks((1,), 15)]
    agent.wait()
    agent.feed(fx.RankExited(0, -9, failed(0, -9)))
    assert agent.feed(fx.RankExited(1, -9, failed(1, -9)))[0] == fx.SweepRanks(5.0)


def test_orders_for_another_round_are_ignored() -> None:
    agent = Agent().running()
    assert agent.order(m.Stop(RoundName(1, 1, "other"), "why")) == []
    assert agent.order(START) == []
    assert agent.state is State.RUNNING


def test_a_newer_start_while_ranks_live_stops_them_first() -> None:
    agent = Agent().running()
    newer = replace(START, round=RoundName(1, 2, "bb"))
    assert agent.order(newer)[0] == fx.SignalRanks((0, 1), 15)
    assert agent.state is State.STOPPING


def test_a_start_with_a_store_that_is_gone_is_handed_back() -> None:
    agent = Agent().joined()
    assert agent.feed(fx.StoreLost(STORE)) == [fx.PrepareStore()]
    assert agent.order(START) == [fx.Say(m.Stopped(ROUND))]
    assert agent.state is State.PREPARING
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


def test_stores_that_end_again_and_again_end_the_agent() -> None:
    agent = Agent().joined()
    store = STORE
    for attempt in range(MAX_LOSSES - 1):
        assert agent.feed(fx.StoreLost(store)) == [fx.PrepareStore()]
        store = Endpoint("here", 5000 + attempt)
        agent.feed(fx.StoreReady(store))
    (ended,) = agent.feed(fx.StoreLost(store))
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_FAILED


def test_death_signal_is_forwarded_as_it_is_and_the_second_keeps_the_deadline() -> None:
    agent = Agent().running()
    assert agent.feed(fx.Signalled(2, "SIGINT", True)) == [
        fx.Say(m.Leaving("received SIGINT", 2)),
        fx.SignalRanks((0, 1), 2),
        fx.Say(m.Stopping(ROUND, 20.0)),
    ]
    agent.now = 3.0
    assert agent.feed(fx.Signalled(15, "SIGTERM", True)) == [fx.SignalRanks((0, 1), 15)]
    assert agent.group.next_deadline() == 20.0
    agent.feed(fx.RankExited(0, -2, failed(0, -2)))
    assert agent.feed(fx.RankExited(1, 0, None)) == [fx.SweepRanks(17.0)]
    said, ended = agent.feed(fx.RanksSwept(()))
    assert said == fx.Say(m.Stopped(ROUND))
    assert ended == fx.Exit(EXIT_FAILED, "received SIGINT", (), 2)
    assert agent.feed(fx.Signalled(15, "SIGTERM", True)) == []


def test_death_signal_before_the_first_ranks() -> None:
    agent = Agent().joined()
    said, ended = agent.feed(fx.Signalled(15, "SIGTERM", True))
    assert said == fx.Say(m.Leaving("received SIGTERM", 15))
    assert ended == fx.Exit(EXIT_FAILED, "received SIGTERM", (), 15)


def test_forward_only_signals_change_nothing_else() -> None:
    agent = Agent().running()
    assert agent.feed(fx.Signalled(12, "SIGUSR2", False)) == [fx.SignalRanks((0, 1), 12)]
    assert agent.state is State.RUNNING
    assert Agent().joined().feed(fx.Signalled(12, "SIGUSR2", False)) == []


def test_the_outcome_of_the_job_ends_the_agent_after_its_ranks() -> None:
    agent = Agent().running()
    cause = failed(7)
    effects = agent.order(m.End(1, "it failed", (cause,)))
    assert effects == [fx.SignalRanks((0, 1), 15), fx.Say(m.Stopping(ROUND, 20.0))]
    agent.feed(fx.RankExited(0, -15, failed(0, -15)))
    agent.feed(fx.RankExited(1, -15, failed(1, -15)))
    assert agent.feed(fx.RanksSwept(()))[-1] == fx.Exit(1, "it failed", (cause,), 0)


def test_finished_then_stopped_then_joins_again() -> None:
    agent = Agent(exit_barrier_timeout=50.0).running()
    agent.feed(fx.StoreReady(NEXT))
    assert agent.feed(fx.RankExited(1, 0, None)) == []
    assert agent.feed(fx.RankExited(0, 0, None)) == [fx.Say(m.Finished(ROUND))]
    assert agent.group.next_deadline() == 50.0
    assert agent.order(m.Stop(ROUND, "a peer failed")) == [fx.SweepRanks(10.0)]
    assert agent.feed(fx.RanksSwept(()))[-1] == fx.Say(m.Join(NEXT))
    assert agent.group.next_deadline() is None


def test_a_process_that_cannot_be_killed_is_never_exit_0() -> None:
    agent = Agent().running()
    agent.feed(fx.RankExited(0, 0, None))
    agent.feed(fx.RankExited(1, 1, failed(1)))
    said, ended = agent.feed(fx.RanksSwept((4711,)))
    assert isinstance(said, fx.Say)
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_BAD_NODE
    assert "4711" in ended.reason


def test_no_master_for_too_long() -> None:
    agent = Agent().running()
    agent.feed(fx.LinkLost("refused"))
    agent.feed(fx.LinkLost("refused"))
    assert agent.group.next_deadline() == 600.0
    assert agent.wait()[0] == fx.SignalRanks((0, 1), 15), "the fence of the next round rests on it"
    agent.feed(fx.RankExited(0, -15, failed(0, -15)))
    agent.feed(fx.RankExited(1, -15, failed(1, -15)))
    ended = agent.feed(fx.RanksSwept(()))[-1]
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_FAILED


def test_the_final_word_of_a_script_that_no_master_heard() -> None:
    agent = Agent().running()
    agent.feed(fx.LinkLost("refused"))
    agent.feed(fx.RankExited(0, 93, failed(0, 93, "final")))
    agent.feed(fx.RankExited(1, -15, failed(1, -15)))
    agent.feed(fx.RanksSwept(()))
    (ended,) = agent.wait()
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_FINAL


def test_no_master_for_too_long_after_success() -> None:
    agent = Agent().running()
    agent.feed(fx.LinkLost("refused"))
    agent.feed(fx.RankExited(0, 0, None))
    agent.feed(fx.RankExited(1, 0, None))
    (ended,) = agent.wait()
    assert isinstance(ended, fx.Exit)
    assert ended.code == EXIT_OK
    assert "unknown" in ended.reason


def test_what_was_said_in_vain_is_said_again() -> None:
    agent = Agent().running()
    agent.feed(fx.StoreReady(NEXT))
    agent.feed(fx.LinkLost("refused"))
    agent.feed(fx.RankExited(0, 1, failed(0)))
    agent.feed(fx.RankExited(1, -15, failed(1, -15)))
    agent.feed(fx.RanksSwept(()))
    assert agent.feed(fx.LinkBack()) == [
        fx.Say(m.RanksFailed(ROUND, (failed(0),))),
        fx.Say(m.Stopped(ROUND)),
        fx.Say(m.Join(NEXT)),
    ]
    report = agent.group.attached()
    assert report is not None
    assert report.round == ROUND
    agent.order(WELCOME)
    assert agent.group.next_deadline() is None


def test_a_master_of_a_lower_term_is_not_obeyed() -> None:
    agent = Agent().running()
    agent.order(replace(WELCOME, term=5))
    agent.order(replace(WELCOME, term=4))
    assert agent.order(m.Stop(ROUND, "I am the old one")) == []
    assert agent.state is State.RUNNING
    assert agent.group.next_deadline() == 600.0
    agent.order(replace(WELCOME, term=6))
    assert agent.order(m.Stop(ROUND, "I am the new one")) != []


def test_the_spawner_takes_its_ranks_with_it() -> None:
    agent = Agent().running()
    said, stopped, prepare = agent.feed(fx.SpawnerLost("killed by signal 9", time_us=77))
    assert isinstance(said, fx.Say)
    assert isinstance(said.report, m.RanksFailed)
    assert [f.kind for f in said.report.failures] == ["spawner", "spawner"]
    assert said.report.failures[0].time_us == 77
    assert (stopped, prepare) == (fx.Say(m.Stopped(ROUND)), fx.PrepareStore())
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


def test_who_ends_anyway_does_not_speak_of_a_lost_master() -> None:
    agent = Agent().running()
    agent.feed(fx.Signalled(2, "SIGINT", True))
    assert agent.state is State.ENDING
    assert agent.group.step(fx.LinkLost("the job is over"), agent.now) == []
