"""Who is alive, and when the master takes itself for the one that is cut off."""

from __future__ import annotations

import pytest

from elasticrun.config import (
    MASS_SILENCE_HOLD,
    REDIAL_GRACE,
    SLUGGISH_DEAD,
    STOPPED_AFTER,
    SUSPECT_CONFIRM,
)
from elasticrun.core.events import Detached
from elasticrun.core.nodes.membership import Admission, MassSilence, Membership
from elasticrun.core.nodes.node import Health, Nodes
from elasticrun.core.reasons import NodeTaken, Superseded
from tests.core.by_hand import hello

TIMEOUT = 5.0


class Crowd:
    """A membership with handles that are short."""

    def __init__(self, *names: str) -> None:
        self.nodes = Nodes()
        self.m = Membership(self.nodes, heartbeat_timeout=TIMEOUT)
        self.sessions: dict[str, int] = {}
        for name in names:
            assert self.attach(name).refusal is None

    def attach(self, name: str, life: str = "1", now: float = 0.0) -> Admission:
        session = len(self.sessions) + int(now * 10) + 1000 * int(life)
        admission = self.m.attach(session, hello(name, incarnation=name + life), now)
        if not admission.refusal:
            self.sessions[name] = session
        return admission

    def breaks(
        self,
        name: str,
        now: float,
        corroborated: bool = False,
        silent: float = 0.0,
        quiet: float = 0.0,
    ) -> str | None:
        event = Detached(self.sessions[name], False, silent, quiet)
        return self.m.detached(event, now, corroborated=corroborated)

    def backoff_until(self, name: str) -> float:
        return self.nodes[name].silences.backoff_until

    def deaths(self, now: float) -> list[str]:
        return [d.node for d in self.m.due(now, lambda _: True, len(self.sessions))]

    def health(self, name: str) -> Health:
        return self.nodes[name].health


@pytest.mark.parametrize("report_first", [True, False])
def test_ranks_that_fail_elsewhere_are_a_second_witness(report_first: bool) -> None:
    crowd = Crowd("a", "b")
    crowd.breaks("b", 10.0, corroborated=report_first)
    if not report_first:
        crowd.m.corroborate("b", lambda _: True, 10.1)
        assert crowd.m.next_deadline() == 10.0 + TIMEOUT, "a node is no witness of itself"
        crowd.m.corroborate("a", lambda _: True, 10.1)
    assert crowd.deaths(10.0 + SUSPECT_CONFIRM) == ["b"]


def test_a_witness_that_comes_late_kills_at_once() -> None:
    crowd = Crowd("a", "b")
    crowd.breaks("b", 10.0)
    crowd.m.corroborate("a", lambda _: True, 13.0)
    assert crowd.deaths(13.0) == ["b"]


def test_missing_beats_alone_take_a_minute_and_close_the_stream() -> None:
    crowd = Crowd("a", "b")
    crowd.m.on_message(crowd.sessions["a"], 30.0)
    assert crowd.deaths(SLUGGISH_DEAD - 0.1) == []
    death = crowd.m.due(SLUGGISH_DEAD, lambda _: True, 2)
    assert [(d.node, d.session) for d in death] == [("b", crowd.sessions["b"])]
    assert crowd.m.on_message(crowd.sessions["b"], 61.0) is None


def test_mass_silence_is_the_masters_own_trouble_for_a_while() -> None:
    crowd = Crowd("a", "b", "c")
    crowd.breaks("a", 10.0)
    crowd.breaks("b", 11.0)
    assert crowd.deaths(15.0) == []
    assert crowd.m.mass_silence.reason()
    assert crowd.deaths(15.0 + MASS_SILENCE_HOLD - 0.1) == []
    assert sorted(crowd.deaths(15.0 + MASS_SILENCE_HOLD)) == ["a", "b"]
    assert not crowd.m.mass_silence.reason()


def test_mass_silence_ends_when_they_are_heard_again() -> None:
    crowd = Crowd("a", "b", "c")
    crowd.breaks("a", 10.0)
    crowd.breaks("b", 11.0)
    assert crowd.deaths(16.0) == []
    crowd.attach("a", now=17.0)
    crowd.attach("b", now=18.0)
    assert not crowd.m.mass_silence.reason()
    assert crowd.deaths(50.0) == []


def test_nodes_whose_streams_stood_are_heard_again_and_the_next_mass_silence_is_held_too() -> None:
    crowd = Crowd("a", "b", "c")
    assert crowd.deaths(SLUGGISH_DEAD) == []
    assert crowd.m.mass_silence.reason()
    for name in "abc":
        crowd.m.on_message(crowd.sessions[name], SLUGGISH_DEAD + 1.0)
    assert not crowd.m.mass_silence.reason()
    for name in "abc":
        crowd.m.on_message(crowd.sessions[name], 1000.0)
    assert crowd.deaths(1000.0 + SLUGGISH_DEAD) == []
    crowd.m.left("a", "it was told to go")
    assert sorted(crowd.deaths(1000.0 + SLUGGISH_DEAD + MASS_SILENCE_HOLD)) == ["b", "c"]
    assert not crowd.m.mass_silence.reason()


def test_a_name_is_not_taken_from_the_living_but_from_the_lost() -> None:
    crowd = Crowd("a")
    refused = crowd.attach("a", life="2", now=1.0)
    assert refused.refusal == NodeTaken("a", "host-a", leaving=False)
    crowd.breaks("a", 2.0)
    taken = crowd.attach("a", life="2", now=3.0)
    assert (taken.refusal, taken.superseded, taken.silent_since) == (None, True, 2.0)
    again = crowd.attach("a", life="1", now=4.0)
    assert again.refusal == Superseded("a")


def test_the_dead_may_come_back_unless_superseded() -> None:
    crowd = Crowd("a", "b")
    crowd.breaks("a", 1.0)
    assert crowd.deaths(6.0) == ["a"]
    assert crowd.attach("a", now=7.0).returned
    crowd.breaks("a", 8.0)
    assert crowd.deaths(13.0) == ["a"]
    assert crowd.attach("a", life="2", now=14.0) == Admission(newer=True)


def test_a_leaving_node_keeps_its_name_while_its_stream_stands() -> None:
    crowd = Crowd("a", "b")
    crowd.m.left("a", "received SIGTERM")
    assert len(crowd.m.present) == 1
    assert crowd.attach("a", life="2", now=1.0).refusal == NodeTaken("a", "host-a", leaving=True)
    crowd.breaks("a", 2.0)
    assert crowd.health("a") is Health.LEFT
    assert crowd.attach("a", life="2", now=3.0) == Admission(newer=True)


def test_a_new_stream_of_the_same_life_replaces_the_old_one() -> None:
    crowd = Crowd("a")
    old = crowd.sessions["a"]
    assert crowd.attach("a", now=5.0).old_session == old
    assert crowd.m.detached(Detached(old, False), 6.0, corroborated=False) is None
    assert crowd.health("a") is Health.ALIVE


def test_a_node_that_keeps_falling_silent_waits_longer_and_longer() -> None:
    crowd = Crowd("a", "b")
    now = 0.0
    waits = []
    for _ in range(4):
        crowd.breaks("a", now)
        now += TIMEOUT
        assert crowd.deaths(now) == ["a"]
        crowd.m.on_message(crowd.sessions["b"], now)
        waits.append(max(0.0, crowd.backoff_until("a") - now))
        now += 1.0
        crowd.attach("a", now=now)
    assert waits == [0.0, 120.0, 240.0, 480.0]


def test_who_dies_again_while_it_waits_waits_on() -> None:
    """A bar may be longer than deaths are remembered for: one death more does not end it."""
    crowd = Crowd("a", "b")
    now = 0.0
    for _ in range(5):
        crowd.breaks("a", now)
        now += TIMEOUT
        assert crowd.deaths(now) == ["a"]
        crowd.m.on_message(crowd.sessions["b"], now)
        crowd.attach("a", now=now)
    until = crowd.backoff_until("a")
    assert until == now + 960.0
    crowd.breaks("a", now + 700.0)
    assert "a" in crowd.deaths(now + 700.0 + TIMEOUT)
    crowd.attach("a", now=now + 710.0)
    assert crowd.backoff_until("a") == until


def test_the_silence_for_which_pings_broke_a_stream_counts() -> None:
    """It fell silent 5 s ago, and that is told of the stream: only as long as a node that dials
    again needs is left. One that is reset has the whole limit."""
    crowd = Crowd("a", "b", "c", "d", "e")
    crowd.breaks("b", 10.0, silent=TIMEOUT)
    crowd.breaks("c", 10.0)
    assert crowd.deaths(10.0 + SUSPECT_CONFIRM) == []
    assert crowd.deaths(10.0 + REDIAL_GRACE) == ["b"]
    assert crowd.health("c") is Health.SUSPECT
    assert crowd.deaths(10.0 + TIMEOUT) == ["c"]


def test_two_witnesses_kill_at_once_only_where_the_kernel_closed_the_stream() -> None:
    """Of an agent that died nothing more can come; one whose pings failed has a network that may be
    back, and dials again."""
    crowd = Crowd("a", "b", "c")
    for node, quiet in (("a", 0.2), ("b", STOPPED_AFTER)):
        crowd.breaks(node, 10.0, corroborated=True, quiet=quiet)
    assert crowd.deaths(10.0 + SUSPECT_CONFIRM) == ["a"]
    assert crowd.deaths(10.0 + REDIAL_GRACE - 0.01) == []
    assert crowd.deaths(10.0 + REDIAL_GRACE) == ["b"]


def test_the_only_node_of_all_may_be_silent_for_longer() -> None:
    """It was stopped, and comes back; nobody could have taken its place meanwhile."""
    crowd = Crowd("a")
    crowd.breaks("a", 10.0, quiet=5.0)
    assert crowd.deaths(5.0 + SLUGGISH_DEAD - 0.1) == []
    assert crowd.deaths(5.0 + SLUGGISH_DEAD) == ["a"]


def test_the_only_node_of_all_that_dies_is_given_up_as_any_other() -> None:
    """The kernel closes the streams of a process that has died: the last beat is no second old."""
    crowd = Crowd("a")
    crowd.breaks("a", 10.0, quiet=0.9)
    assert crowd.deaths(10.0 + TIMEOUT) == ["a"]


@pytest.mark.parametrize(("comes", "dies"), [(11.0, 10.0 + TIMEOUT), (30.0, 30.0)])
def test_a_second_node_ends_the_patience_with_the_first(comes: float, dies: float) -> None:
    crowd = Crowd("a")
    crowd.breaks("a", 10.0, quiet=5.0)
    assert crowd.deaths(comes) == []
    crowd.attach("b", now=comes)
    assert crowd.m.next_deadline() == dies
    assert crowd.deaths(dies) == ["a"]


@pytest.mark.parametrize(
    ("silent", "size", "held"),
    [
        ("a", 1, False),
        ("ab", 2, False),
        ("a", 3, False),
        ("ab", 3, True),
        ("ab", 4, False),
        ("abc", 4, True),
    ],
)
def test_more_than_half_of_three_at_least(silent: str, size: int, held: bool) -> None:
    rule = MassSilence()
    assert rule.holds_until(silent, size, 10.0) == (10.0 + MASS_SILENCE_HOLD if held else None)
    assert bool(rule.reason()) is held


def test_the_hold_is_counted_from_its_beginning_and_ends() -> None:
    rule = MassSilence()
    until = rule.holds_until("abc", 4, 10.0)
    assert rule.holds_until("abcd", 4, until - 1.0) == until
    rule.overslept(5.0)
    assert rule.holds_until("abcd", 4, until) == until + 5.0, "what the master slept does not count"
    assert rule.holds_until("abcd", 4, until + 5.0) is None, "they are silent still: given up"


def test_who_falls_silent_during_the_hold_is_held_too() -> None:
    rule = MassSilence()
    until = rule.holds_until("ab", 3, 10.0)
    assert rule.holds_until("c", 3, 15.0) == until


def test_it_is_over_when_enough_are_heard_again() -> None:
    rule = MassSilence()
    rule.holds_until("abc", 4, 10.0)
    rule.remove("a")
    assert rule.holds_until("bc", 4, 20.0) is None
    assert not rule.reason()


def test_it_is_over_when_the_last_is_heard_again_or_has_gone() -> None:
    rule = MassSilence()
    rule.holds_until("abc", 4, 10.0)
    for node in "ab":
        rule.remove(node)
        assert rule.reason()
    rule.remove("c")
    assert not rule.reason()
    assert rule.holds_until("abc", 4, 500.0) == 500.0 + MASS_SILENCE_HOLD, "counted anew"
