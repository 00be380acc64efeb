"""An agent that holds what is being written stays until that is over, and no second longer."""

from __future__ import annotations

from typing import get_args

from msgspec.structs import replace

from elasticrun.config import EXIT_FAILED
from elasticrun.core import events as fx
from elasticrun.core.worker.leaving import MAX_PERSISTS
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from tests.core.by_hand import PERSIST, ROUND, STOPPED, WELCOME, Agent, ended, own

OVER = m.PersistOver("a1", ROUND, 7, True, "")
END = m.End(1, "the budget is spent", ())


def holding(agent: Agent | None = None) -> Agent:
    """One whose job is over while its part is being written."""
    agent = agent or Agent().joined()
    assert agent.order(PERSIST) == [fx.Obey(PERSIST)]
    assert agent.order(END) == []
    assert agent.state is State.HOLDING
    return agent


def test_orders_about_attempts_are_passed_on_in_any_state() -> None:
    for agent in (Agent().joined(), Agent().started(), Agent().running(), holding()):
        assert agent.order(PERSIST) == [fx.Obey(PERSIST)]
        assert agent.order(OVER)[0] == fx.Obey(OVER)


def test_orders_without_a_rule_here_go_to_other_parts() -> None:
    """Each other order has a rule: none that was forgotten goes to the wrong part."""
    here = {kind for _, kinds, _ in Agent().group.rules() for kind in kinds}
    of_the_session = {m.Challenge, m.Echo}
    of_snapshots = {m.CommitCheckpoint, m.Holder, m.Replicate, m.Watermark, m.WorkGrant}
    of_snapshots |= {m.CompareReplicas, m.KeepStep}
    for_people = {m.Inspect, m.Recovery, m.Warn}
    assert set(get_args(m.Order)) - here == of_the_session | of_snapshots | for_people
    assert Agent().group.is_changed_by(END)
    assert not Agent().group.is_changed_by(m.Warn("a node is slow"))


def test_the_end_waits_for_what_is_being_written() -> None:
    agent = holding()
    assert "stays until its part of a checkpoint is saved" in agent.group.status().reason
    assert agent.order(OVER) == [fx.Obey(OVER), fx.Exit(1, "the budget is spent", (), 0)]
    assert agent.state is State.OVER


def test_what_is_over_holds_nobody() -> None:
    agent = Agent().joined()
    agent.order(PERSIST)
    agent.order(OVER)
    assert agent.order(END) == [fx.Exit(1, "the budget is spent", (), 0)]


def test_it_is_held_for_as_long_as_the_order_gave_it() -> None:
    agent = holding()
    assert agent.group.next_deadline() == 30.0
    assert agent.wait() == [fx.Exit(1, "the budget is spent", (), 0)]


def test_an_order_that_comes_again_gives_no_more_time() -> None:
    agent = Agent().joined()
    agent.order(PERSIST)
    agent.now = 20.0
    agent.order(PERSIST)
    agent.order(END)
    assert agent.group.next_deadline() == 30.0


def test_an_attempt_whose_time_is_over_holds_nobody() -> None:
    agent = Agent().joined()
    agent.order(PERSIST)
    agent.now = 31.0
    agent.order(m.PersistOver("other", ROUND, 6, True, ""))
    assert agent.order(END) == [fx.Exit(1, "the budget is spent", (), 0)]


def test_the_next_attempt_holds_it_too() -> None:
    agent = holding()
    agent.now = 10.0
    agent.order(replace(PERSIST, attempt="a2"))
    assert agent.order(OVER) == [fx.Obey(OVER)]
    assert agent.group.next_deadline() == 40.0
    assert agent.wait() == [fx.Exit(1, "the budget is spent", (), 0)]


def test_a_second_signal_ends_it_at_once() -> None:
    agent = Agent().running()
    agent.order(PERSIST)
    agent.feed(fx.Signalled(15, "SIGTERM", True))
    said = agent.reaped()
    assert said == STOPPED
    assert agent.state is State.HOLDING
    assert agent.feed(fx.Signalled(10, "SIGUSR1", False)) == []
    (only,) = agent.feed(fx.Signalled(15, "SIGTERM", True))
    outcome = ended([only])
    assert (outcome.code, outcome.signum) == (EXIT_FAILED, 15)


def test_ranks_get_no_second_more_than_without() -> None:
    with_one, without = Agent().running(), Agent().running()
    with_one.order(PERSIST)
    for agent in (with_one, without):
        agent.now = 5.0
    signal = fx.Signalled(15, "SIGTERM", True)
    assert with_one.feed(signal) == without.feed(signal)
    assert with_one.group.next_deadline() == without.group.next_deadline()
    assert with_one.wait() == without.wait() == [fx.SignalRanks((0, 1), 9)]


def test_an_excluded_node_stays_too() -> None:
    agent = Agent().joined()
    agent.order(PERSIST)
    assert agent.order(m.Refused("this node is excluded", 75)) == []
    assert agent.order(OVER)[1:] == [fx.Exit(75, "this node is excluded", (), 0)]


def test_while_it_is_held_nothing_begins_and_the_master_is_told_why() -> None:
    agent = holding()
    for order in (END, m.Refused("x", 75), m.Wait("y"), m.Stop(ROUND, "z")):
        assert agent.order(order) == []
    agent.feed(fx.LinkLost("gone"))
    # it stays for a checkpoint alone: without a master for 20 s, and not for the checkpoint's 30 s
    assert agent.group.next_deadline() == 20.0
    assert agent.feed(fx.LinkBack()) == [fx.Say(m.Leaving("the budget is spent", 0))]
    assert agent.order(WELCOME) == []
    assert agent.feed(fx.SpawnerLost("killed")) == []
    assert agent.state is State.HOLDING


def test_what_cannot_be_ended_is_not_waited_for() -> None:
    agent = Agent().running()
    agent.order(PERSIST)
    agent.exit(0, 1, failure=own(0))
    agent.exit(1, -15, failure=own(1, -15, "stopped"))
    assert ended(agent.feed(fx.RanksSwept((77,))))


def test_there_are_not_more_attempts_than_can_be() -> None:
    agent = Agent().joined()
    for number in range(MAX_PERSISTS):
        assert agent.order(replace(PERSIST, attempt=f"n{number}"))
    assert agent.order(replace(PERSIST, attempt="one more")) == []
