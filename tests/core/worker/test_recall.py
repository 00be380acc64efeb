"""Ranks that leave a round and keep their process, by hand. Failures at every moment of it are in
`tests/sim`: a third of its seeds has recoverable ranks."""

from __future__ import annotations

import pytest

from elasticrun.config import MIN_RECALL_LIMIT, RECALL_LIMIT
from elasticrun.core import events as fx
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName
from tests.core.by_hand import NEXT, ROUND, START, STOPPED, STORE, Agent, ended, own
from tests.starts import changed

SECOND = changed(START, RoundName(1, 2, "bb"), store=NEXT, restart_count=1)
STOP = m.Stop(ROUND, "why")


def armed(*local_ranks: int) -> Agent:
    """An agent whose ranks 0 and 1 run; these are recoverable."""
    agent = Agent().running()
    for local_rank in local_ranks:
        assert agent.feed(fx.RankArmed(local_rank, True)) == []
    return agent


def left(agent: Agent, local_rank: int) -> list[fx.AgentEffect]:
    return agent.feed(fx.RankLeft(local_rank))


def waiting() -> Agent:
    """An agent whose two ranks wait for the next round."""
    agent = armed(0, 1)
    agent.feed(fx.StoreReady(NEXT))
    agent.order(STOP)
    left(agent, 0)
    left(agent, 1)
    agent.feed(fx.RanksSwept(()))
    return agent


def test_the_others_are_recalled_and_the_failed_one_is_started_anew() -> None:
    agent = armed(0, 1)
    agent.feed(fx.StoreReady(NEXT))
    boom = own(0)
    assert agent.exit(0, 1, failure=boom) == [
        fx.Say(m.RanksFailed(ROUND, (boom,))),
        fx.RanksStopping(),
        fx.RecallRanks((1,)),
        fx.Say(m.Stopping(ROUND, RECALL_LIMIT + 10.0)),
    ]
    assert left(agent, 1) == [fx.SweepRanks(10.0)]
    assert agent.feed(fx.RanksSwept(())) == [*STOPPED, fx.Say(m.Join(NEXT))]
    assert agent.order(SECOND) == [
        fx.ReleaseStore(STORE),
        fx.SpawnRanks(SECOND, 1, kept=(1,)),
        fx.PrepareStore(),
    ]
    agent.feed(fx.RankSpawned(1, 51))
    assert agent.feed(fx.RankSpawned(0, 60)) == [fx.Say(m.Running(SECOND.round, (60, 51)))]
    assert agent.exit(0, 1)[2] == fx.RecallRanks((1,)), "it can be recalled again"


def test_ranks_that_are_not_recoverable_are_signalled_and_killed_in_their_own_time() -> None:
    agent = armed(1)
    assert agent.order(STOP) == [
        fx.RanksStopping(),
        fx.RecallRanks((1,)),
        fx.SignalRanks((0,), 15),
        fx.Say(m.Stopping(ROUND, RECALL_LIMIT + 10.0)),
    ]
    agent.now = 2.0
    assert left(agent, 1) == []
    assert agent.wait() == [fx.SignalRanks((0,), 9)]
    assert agent.now == 10.0


def test_a_rank_that_does_not_leave_is_stopped_like_any_other() -> None:
    agent = armed(0, 1)
    agent.order(STOP)
    left(agent, 0)
    assert agent.wait() == [fx.SignalRanks((1,), 15)]
    assert agent.now == RECALL_LIMIT
    assert left(agent, 1) == [], "it was signalled, and may be about to exit"
    assert agent.wait() == [fx.SignalRanks((1,), 9)]
    assert agent.now == RECALL_LIMIT + 10.0
    agent.exit(1, -9)
    agent.feed(fx.RanksSwept(()))
    agent.feed(fx.StoreReady(NEXT))
    assert fx.SpawnRanks(SECOND, 1, kept=(0,)) in agent.order(SECOND)


def test_a_recall_ends_before_another_round_could_begin_without_this_node() -> None:
    """A master that hears nothing of a node waits for `master_lost_timeout` and a grace period."""
    agent = Agent(master_lost_timeout=8.0).running()
    agent.order(m.Welcome(1, "x", "job", 1, 1.0, 8.0, ""))
    agent.feed(fx.RankArmed(0, True))
    agent.feed(fx.RankArmed(1, True))
    assert agent.order(STOP)[-1] == fx.Say(m.Stopping(ROUND, 18.0))
    assert agent.wait() == [fx.SignalRanks((0, 1), 15)]
    assert agent.now == 8.0


def next_round(agent: Agent, round_id: int) -> m.Start:
    """Start the next round in both ranks."""
    agent.feed(fx.RanksSwept(()))
    store = STORE if round_id % 2 else NEXT
    agent.feed(fx.StoreReady(store))
    name = RoundName(1, round_id, "bb")
    start = changed(START, name, store=store, restart_count=round_id - 1)
    agent.order(start)
    for local_rank in (0, 1):
        agent.feed(fx.RankSpawned(local_rank, 50 + local_rank))
    return start


def limit_of(agent: Agent, start: m.Start) -> float:
    """Stop the round; return the seconds that its ranks have to leave it."""
    effects = agent.order(m.Stop(start.round, "why"))
    assert effects[1] == fx.RecallRanks((0, 1))
    stopping = next(one.report for one in effects if isinstance(one, fx.Say))
    assert isinstance(stopping, m.Stopping)
    return stopping.remaining - 10.0


@pytest.mark.parametrize(
    ("taken", "limit"), [(0.1, MIN_RECALL_LIMIT), (2.0, 20.0), (4.0, RECALL_LIMIT)]
)
def test_the_limit_is_learnt_from_the_slowest_rank(taken: float, limit: float) -> None:
    agent = armed(0, 1)
    assert limit_of(agent, START) == RECALL_LIMIT
    left(agent, 0)
    agent.now = taken
    left(agent, 1)
    assert limit_of(agent, next_round(agent, 2)) == limit


def test_a_limit_that_was_too_short_is_learnt_anew() -> None:
    agent = armed(0, 1)
    limit_of(agent, START)
    left(agent, 0)
    agent.now = 0.1
    left(agent, 1)
    limit_of(agent, next_round(agent, 2))
    left(agent, 0)
    assert agent.wait() == [fx.SignalRanks((1,), 15)]
    assert agent.now == 0.1 + MIN_RECALL_LIMIT
    agent.exit(1, -15)
    start = next_round(agent, 3)
    agent.feed(fx.RankArmed(1, True))
    assert limit_of(agent, start) == RECALL_LIMIT


def test_a_recalled_rank_that_exits_is_not_kept() -> None:
    agent = armed(0, 1)
    agent.order(STOP)
    left(agent, 0)
    assert agent.exit(1, 0) == [fx.SweepRanks(10.0)]


def test_the_loss_of_a_peer_is_reported_while_its_rank_leaves() -> None:
    agent = armed(0, 1)
    echo = own(1, kind="peer-lost")
    assert agent.feed(fx.RankRaised(1, echo)) == [
        fx.Say(m.RanksFailed(ROUND, (echo,))),
        fx.RanksStopping(),
        fx.RecallRanks((0, 1)),
        fx.Say(m.Stopping(ROUND, RECALL_LIMIT + 10.0)),
    ]
    cause = own(0, -9, "signal")
    assert agent.exit(0, -9, failure=cause)[0] == fx.Say(m.RanksFailed(ROUND, (echo, cause)))


def test_an_exception_of_its_own_is_the_failure_of_that_rank() -> None:
    agent = armed(0, 1)
    assert agent.feed(fx.RankRaised(1, own(1))) == [fx.LetRankFail(1)]
    assert agent.state is State.RUNNING
    assert agent.exit(1, 1, failure=own(1))[2] == fx.RecallRanks((0,))


def test_a_rank_that_fails_by_itself_is_not_stopped_before_it_has_exited() -> None:
    """Else its own failure would be lost, and the loss of a peer be the cause."""
    agent = armed(0, 1)
    agent.feed(fx.RankRaised(1, own(1)))
    echo = own(0, kind="peer-lost")
    assert agent.feed(fx.RankRaised(0, echo)) == [
        fx.Say(m.RanksFailed(ROUND, (echo,))),
        fx.RanksStopping(),
        fx.RecallRanks((0,)),
        fx.Say(m.Stopping(ROUND, RECALL_LIMIT + 10.0)),
    ]
    left(agent, 0)
    cause = own(1)
    assert agent.exit(1, 1, failure=cause)[0] == fx.Say(m.RanksFailed(ROUND, (echo, cause)))


def test_one_that_does_not_exit_is_stopped_after_all() -> None:
    agent = armed(1)
    agent.feed(fx.RankRaised(1, own(1)))
    assert agent.order(STOP)[1] == fx.SignalRanks((0,), 15)
    agent.exit(0)
    assert agent.wait() == [fx.SignalRanks((1,), 15)]
    assert agent.now == RECALL_LIMIT


def test_a_node_that_leaves_lets_its_ranks_fail() -> None:
    agent = armed(0, 1)
    agent.feed(fx.Signalled(15, "SIGTERM", True, step=3))
    assert agent.feed(fx.RankRaised(1, own(1, kind="peer-lost"))) == [fx.LetRankFail(1)]


def test_a_rank_that_has_returned_is_signalled() -> None:
    agent = armed(0, 1)
    agent.feed(fx.RankArmed(0, False))
    assert agent.order(STOP)[1:3] == [fx.RecallRanks((1,)), fx.SignalRanks((0,), 15)]


def test_a_waiting_rank_that_exits_is_started_anew() -> None:
    agent = waiting()
    assert agent.exit(0, -9, failure=own(0, -9)) == []
    assert fx.SpawnRanks(SECOND, 1, kept=(1,)) in agent.order(SECOND)


def test_waiting_ranks_end_with_their_node() -> None:
    agent = waiting()
    assert agent.order(m.End(1, "over", ()))[0] == fx.SignalRanks((0, 1), 15)
    agent.exit(0)
    assert agent.exit(1) == [fx.SweepRanks(20.0)]
    assert ended(agent.feed(fx.RanksSwept(()))).code == 1


def test_ranks_that_wait_as_the_others_are_swept_end_with_their_node() -> None:
    agent = armed(1)
    agent.exit(0, 1, failure=own(0))
    left(agent, 1)
    assert agent.state is State.SWEEPING
    agent.order(m.End(1, "over", ()))
    assert fx.SignalRanks((1,), 15) in agent.feed(fx.RanksSwept(()))
    agent.exit(1)
    assert ended(agent.feed(fx.RanksSwept(()))).code == 1


def test_recalled_ranks_are_signalled_when_their_node_ends() -> None:
    agent = armed(0, 1)
    agent.order(STOP)
    assert fx.SignalRanks((0, 1), 15) in agent.order(m.End(1, "over", ()))
    assert left(agent, 0) == []
    assert agent.wait() == [fx.SignalRanks((0, 1), 9)]
    assert agent.now == 20.0, "the grace period of a node that ends, without the recall's"


def test_waiting_ranks_die_with_their_fork_server() -> None:
    agent = waiting()
    agent.feed(fx.SpawnerLost("killed"))
    agent.feed(fx.StoreReady(NEXT))
    assert fx.SpawnRanks(SECOND, 1) in agent.order(SECOND)


@pytest.mark.parametrize("spawned_first", [True, False])
def test_a_stop_may_arrive_before_a_kept_rank_has_started(spawned_first: bool) -> None:
    agent = waiting()
    agent.order(SECOND)
    if spawned_first:
        agent.feed(fx.RankSpawned(0, 50))
    assert fx.RecallRanks((0, 1)) in agent.order(m.Stop(SECOND.round, "why"))
    if not spawned_first:
        assert agent.feed(fx.RankSpawned(0, 50)) == [], "it is not signalled"
    agent.feed(fx.RankSpawned(1, 51))
    left(agent, 0)
    assert left(agent, 1)[0] == fx.SweepRanks(10.0)
