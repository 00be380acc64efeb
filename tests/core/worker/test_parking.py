"""A node that is excluded and is to stay: when it begins, and every way in which it ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import EXIT_BAD_NODE
from elasticrun.core import events as fx
from elasticrun.core.reasons import Leaves, Reason, Said, Then, text
from elasticrun.core.worker.group import CONFIRM
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from tests.core.by_hand import NEXT, PERSIST, ROUND, START, STORE, WELCOME, Agent

WHY = "this node is excluded for 60 s: slow"
PARK = m.Park(WHY, 60.0)
BAD = fx.Exit(EXIT_BAD_NODE, WHY, (), 0)
END = m.End(0, "every rank ended with 0", ())
RECEIVED = Leaves("received SIGTERM", 15)
ENDED = fx.Exit(0, "every rank ended with 0", (), 0)
TERM = fx.Signalled(15, "SIGTERM", death=True)


def over(then: Reason, signum: int = 0) -> fx.Exit:
    """The end of a parked node."""
    why = Then(Said(WHY), then)
    return replace(BAD, reason=text(why), signum=signum, why=why)


def parked() -> Agent:
    agent = Agent().joined()
    assert agent.order(PARK) == [fx.ReleaseStore(STORE)]
    assert agent.state is State.PARKED
    return agent


def ending() -> Agent:
    agent = Agent().running()
    assert agent.order(PARK) == [fx.SignalRanks((0, 1), 15), fx.Say(m.Stopping(ROUND, 20.0))]
    assert agent.state is State.ENDING
    return agent


def test_its_ranks_are_ended_first() -> None:
    agent = ending()
    assert agent.reaped() == [fx.Say(m.Stopped(ROUND)), fx.ReleaseStore(STORE)]
    assert agent.state is State.PARKED
    assert WHY in agent.group.status().reason
    assert agent.group.attached() is None, "a new master must not adopt the round of this node"


def test_its_snapshot_is_written_out_first() -> None:
    agent = ending()
    agent.order(PERSIST)
    agent.reaped()
    assert agent.state is State.HOLDING
    agent.order(m.PersistOver(PERSIST.attempt, ROUND, 7, True, ""))
    assert agent.state is State.PARKED


def test_the_job_may_end_before_it_is_parked() -> None:
    agent = ending()
    assert agent.order(END) == []
    assert agent.reaped()[-1] == ENDED
    agent = ending()
    agent.order(PERSIST)
    agent.reaped()
    assert agent.order(END) == []
    assert agent.order(m.PersistOver(PERSIST.attempt, ROUND, 7, True, ""))[-1] == ENDED


def test_the_same_order_again_sets_its_time_anew() -> None:
    agent = parked()
    agent.now = 50.0
    assert agent.order(PARK) == []
    assert agent.group.next_deadline() == 110.0


def test_a_signal_ends_it() -> None:
    agent = parked()
    assert agent.feed(replace(TERM, death=False)) == []
    leaving, ended = agent.feed(TERM)
    assert leaving == fx.Say(m.Leaving("received SIGTERM", 15))
    assert ended == over(RECEIVED, signum=15)


def test_a_signal_before_it_is_parked_ends_it_as_soon_as_nothing_lives_here() -> None:
    agent = ending()
    agent.feed(TERM)
    assert agent.reaped()[-1] == over(RECEIVED, signum=15)
    agent = ending()
    agent.order(PERSIST)
    agent.reaped()
    assert agent.feed(TERM)[-1] == BAD


def test_a_refusal_ends_it() -> None:
    refused = m.Refused("this node is excluded for 9 s more: slow", EXIT_BAD_NODE)
    assert parked().order(refused) == [fx.Exit(EXIT_BAD_NODE, refused.reason, (), 0)]


def test_a_master_that_is_lost_while_its_ranks_end_is_not_forgotten() -> None:
    agent = Agent(master_lost_timeout=30.0).running()
    agent.order(replace(WELCOME, master_lost_timeout=30.0))
    agent.order(PARK)
    agent.feed(fx.LinkLost("refused"))
    agent.reaped()
    assert agent.state is State.PARKED
    assert agent.group.next_deadline() == 30.0


@pytest.mark.parametrize("knows", [False, True])
def test_a_new_master_has_to_say_so_again(knows: bool) -> None:
    agent = parked()
    agent.feed(fx.LinkLost("it died"))
    assert agent.feed(fx.LinkBack()) == [], "there is nothing that this node would say"
    agent.order(replace(WELCOME, term=2))
    if knows:
        agent.order(PARK)
        assert agent.group.next_deadline() == 60.0
        return
    *_, ended = agent.wait()
    assert agent.now == CONFIRM
    assert ended == over(Said("the new master does not know that it is excluded"))


def test_the_same_master_is_not_asked_again() -> None:
    agent = parked()
    agent.order(WELCOME)  # after a silence
    assert agent.group.next_deadline() == 60.0


def test_who_leaves_already_is_not_parked() -> None:
    agent = Agent().running()
    agent.feed(TERM)
    agent.order(PARK)
    assert agent.reaped()[-1] == fx.Exit(1, "received SIGTERM", (), 15, why=RECEIVED)


def test_nothing_is_begun_there() -> None:
    agent = parked()
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.ReleaseStore(NEXT)]
    assert agent.feed(fx.StoreLost(STORE)) == []
    assert agent.feed(fx.SpawnerLost("killed")) == []
    for order in (START, m.Stop(ROUND, "x"), m.Wait("y")):
        assert agent.order(order) == []
    assert agent.state is State.PARKED
