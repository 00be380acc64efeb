"""The agent's brain while this machine is probed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import EXIT_BAD_NODE, MASTER_LOST_TIMEOUT
from elasticrun.core import events as fx
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from tests.core.by_hand import NEXT, START, STORE, Agent

ALONE = m.Probe("c1", False, "", 0, 1, 0, 2, STORE, 60.0)
PAIR = m.Probe("c2", False, "n1", 1, 2, 2, 4, STORE, 60.0)


def passed(check: str) -> m.Probed:
    done = m.ProbePhase.DONE
    return m.Probed(check, True, done, False, False, "", 0.01, 2.7e8, (), 0.4, 0.2)


def probing(agent: Agent | None = None) -> Agent:
    agent = agent or Agent().joined()
    assert agent.order(ALONE) == [fx.RunProbe(ALONE)]
    assert agent.state == State.PROBING
    return agent


def test_before_the_store_is_ready_too() -> None:
    agent = Agent()
    agent.feed(fx.Tick())
    assert agent.order(ALONE) == [fx.RunProbe(ALONE)]
    assert agent.feed(fx.StoreReady(STORE)) == [fx.Say(m.Join(STORE))]
    assert agent.state == State.PROBING
    agent.feed(fx.ProbeEnded(passed("c1")))
    assert agent.state == State.JOINED


def test_the_same_check_again_is_no_second_probe_and_is_answered_again() -> None:
    agent = probing()
    assert agent.order(ALONE) == []
    agent.feed(fx.ProbeEnded(passed("c1")))
    assert agent.order(ALONE) == [fx.Say(passed("c1"))]
    assert agent.state == State.JOINED


def test_a_newer_check_takes_its_place() -> None:
    agent = probing()
    assert agent.order(PAIR) == [fx.CallOffProbe(), fx.RunProbe(PAIR)]
    assert agent.feed(fx.ProbeEnded(passed("c1"))) == []
    assert agent.state == State.PROBING, "an answer of the one that was called off"
    assert agent.feed(fx.ProbeEnded(passed("c2"))) == [fx.Say(passed("c2"))]


def test_the_operator_is_told_with_whom_and_why_it_failed() -> None:
    group = Agent().joined().group
    note, _ = group.step(fx.Ordered(PAIR), 0.0)
    assert note == fx.Note("this machine is being probed with n1")
    assert group.status().reason == note.text
    failed = replace(passed("c2"), ok=False, phase=m.ProbePhase.COMM, reason="no route to n1")
    note, say = group.step(fx.ProbeEnded(failed), 1.0)
    assert note == fx.Note("the probe of this machine failed in comm: no route to n1", "warning")
    assert say == fx.Say(failed)
    group.step(fx.Ordered(replace(PAIR, check="c3")), 1.0)
    excused = replace(failed, check="c3", excused=True, reason="n1 failed")
    note, _ = group.step(fx.ProbeEnded(excused), 2.0)
    assert note == fx.Note("the probe of this machine did not finish: n1 failed")


def test_a_place_in_a_round_calls_it_off() -> None:
    agent = probing()
    assert agent.order(START) == [
        fx.CallOffProbe(),
        fx.SpawnRanks(START, 0),
        fx.PrepareStore(),
    ]
    assert agent.feed(fx.ProbeEnded(passed("c1"))) == []
    assert agent.state == State.STARTING


@pytest.mark.parametrize(
    "order", [m.End(0, "done", ()), m.Refused("this node is excluded: slow", EXIT_BAD_NODE)]
)
def test_the_end_and_a_refusal_call_it_off(order: m.End | m.Refused) -> None:
    agent = probing()
    assert agent.order(order) == [
        fx.CallOffProbe(),
        fx.Exit(order.exit_code, order.reason, (), 0),
    ]


def test_a_death_signal_calls_it_off() -> None:
    agent = probing()
    effects = agent.feed(fx.Signalled(15, "SIGTERM", death=True))
    assert effects[:2] == [fx.Say(m.Leaving("received SIGTERM", 15)), fx.CallOffProbe()]
    assert isinstance(effects[2], fx.Exit)


def test_no_master_for_too_long_calls_it_off() -> None:
    agent = probing()
    agent.feed(fx.LinkLost("reset"))
    assert agent.state == State.PROBING
    agent.now += MASTER_LOST_TIMEOUT
    effects = agent.feed(fx.Tick())
    assert fx.CallOffProbe() in effects
    assert isinstance(effects[-1], fx.Exit)


def test_a_lost_spawner_is_an_own_failure_and_a_new_join_follows() -> None:
    agent = probing()
    effects = agent.feed(fx.SpawnerLost("killed by signal 9"))
    said, prepare = effects
    assert isinstance(said, fx.Say)
    assert isinstance(said.report, m.Probed)
    assert said.report.check == "c1"
    assert not said.report.ok
    assert said.report.own
    assert said.report.phase is m.ProbePhase.START
    assert "killed by signal 9" in said.report.reason
    assert prepare == fx.PrepareStore()
    assert agent.state == State.PREPARING
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


def test_a_lost_store_is_replaced_meanwhile_and_offered_at_once() -> None:
    agent = probing()
    assert agent.feed(fx.StoreLost(STORE)) == [fx.PrepareStore()]
    assert agent.state == State.PROBING
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]
    agent.feed(fx.ProbeEnded(passed("c1")))
    assert agent.state == State.JOINED


def test_an_answer_before_the_new_store_is_ready_waits_for_it() -> None:
    agent = probing()
    agent.feed(fx.StoreLost(STORE))
    assert agent.feed(fx.ProbeEnded(passed("c1"))) == [fx.Say(passed("c1"))]
    assert agent.state == State.PREPARING
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


def test_a_new_stream_is_told_the_join_and_the_answer() -> None:
    agent = probing()
    assert agent.feed(fx.LinkBack()) == [fx.Say(m.Join(STORE))]
    agent.feed(fx.ProbeEnded(passed("c1")))
    assert agent.feed(fx.LinkBack()) == [fx.Say(m.Join(STORE)), fx.Say(passed("c1"))]


def test_where_ranks_live_no_probe_is_run() -> None:
    agent = Agent().running()
    assert agent.order(ALONE) == []
    assert agent.state == State.RUNNING
