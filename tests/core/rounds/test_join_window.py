"""When an event counts as over, and when newcomers are let in."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.core.reasons import Pending
from elasticrun.core.rounds.join_window import Debounce, JoinWindow, LastCall
from tests.simulator.script import DEFAULT_SPEC


def test_the_first_answer_is_never_held_back() -> None:
    one = Debounce(60.0)
    assert one.holds_until() is None
    for number in range(17):
        one.record(number, 0.1 * number)
    assert one.holds_until() is None


def test_what_happens_after_an_answer_waits_for_silence() -> None:
    one = Debounce(60.0)
    one.record("a", 0.0)
    one.answered(1.0)
    one.record("b", 8.0)
    for number in range(16):
        one.record(number, 8.0 + 0.1 * (number + 1))
    assert one.holds_until() == pytest.approx(9.6 + 60.0)
    one.answered(30.0)
    assert one.holds_until() is None


@pytest.mark.parametrize(
    ("wholly", "what", "at", "until"),
    [
        (True, "b", 8.0, 68.0),
        (True, "a", 20.0, None),  # the same node again is no spreading
        (True, "b", 121.0, None),  # things that are far apart are two events
        (False, "b", 3.0, 63.0),  # an answer that left some out keeps them open
    ],
)
def test_a_second_thing_after_an_answer(
    wholly: bool, what: str, at: float, until: float | None
) -> None:
    one = Debounce(60.0)
    one.record("a", 0.0)
    one.answered(1.0, wholly=wholly)
    assert one.holds_until() is None, "one alone is no series"
    one.record(what, at)
    assert one.holds_until() == until


def test_an_event_that_does_not_end_is_answered_and_then_no_more_waited_for() -> None:
    one = Debounce(60.0)
    one.record(0, 0.0)
    one.answered(1.0)
    for number in range(1, 40):
        one.record(number, 20.0 * number)
    assert one.holds_until() == 320.0, "300 s after the first that was not answered"
    one.answered(320.0)
    one.record("next", 800.0)
    assert one.holds_until() == 320.0, "long past"


# ---------------------------------------------------------------- the door


def entry(door: JoinWindow, size: int, possible: int, largest: int) -> tuple[float, str]:
    return door.admission(size, possible, largest, announced=False)


def begun(spec_max: int, *appear: float, grow: str = "auto") -> JoinWindow:
    door = JoinWindow(replace(DEFAULT_SPEC, min_nodes=1, max_nodes=spec_max, grow=grow))
    for number, when in enumerate(appear):
        door.appeared(f"n{number}", when)
    door.formed(appear[-1] + 2.0)
    door.job_began()
    return door


@pytest.mark.parametrize(
    ("largest", "grow", "appeared", "joined", "due"),
    [
        (4, "auto", 10.0, 10.4, 10.5),  # last call counts from the moment it appears
        (4, "auto", 10.0, 18.0, 18.0),  # also where its torch came from a slow disk
        (3, "auto", 10.0, 10.4, 10.4),  # nobody is waited for when the job is whole
        (8, "now", 400.0, 401.0, 401.0),  # nor for a start, nor for the round's age
    ],
)
def test_when_a_newcomer_is_let_in(
    largest: int, grow: str, appeared: float, joined: float, due: float
) -> None:
    door = begun(largest, 0.0, 0.1, grow=grow)
    door.appeared("x", appeared)
    door.joined("x", joined)
    assert entry(door, 2, 3, largest)[0] == due


def test_a_node_that_comes_and_goes_counts_when_it_joins() -> None:
    door = begun(4, 0.0, 0.1)
    door.appeared("x", 10.0)
    door.joined("x", 11.0)
    door.left("x")
    door.appeared("x", 12.0)
    door.joined("x", 14.0)
    assert entry(door, 2, 3, 4)[0] >= 15.0


def test_a_job_that_is_being_started_lets_them_in_together() -> None:
    door = begun(8, 0.0, 0.3)
    door.appeared("x", 8.0)
    door.joined("x", 9.0)
    due, reason = entry(door, 2, 3, 8)
    assert due == 68.0
    assert reason == Pending("start")
    door.appeared("y", 9.0)
    assert entry(door, 2, 4, 8)[1] == reason, "it does not change its mind at half"


@pytest.mark.parametrize(("appear", "slow"), [((0.0, 0.3, 0.5, 0.7), False), ((0.0, 4.0), True)])
def test_a_start_that_came_apart_is_one(appear: tuple[float, ...], slow: bool) -> None:
    door = begun(len(appear) + 2, *appear)
    door.appeared("x", 9.0)
    door.joined("x", 9.2)
    due, _ = entry(door, len(appear), len(appear) + 1, len(appear) + 2)
    assert (due > 10.0) is slow


def test_an_older_round_waits_for_the_cool_down() -> None:
    door = begun(8, 0.0, 0.3, 0.4, 0.5, 0.6)
    door.appeared("x", 400.0)
    door.joined("x", 401.0)
    due, reason = entry(door, 5, 6, 8)
    assert due == 602.6
    assert reason.until == "cooldown"


# ---------------------------------------------------------------- last call


def test_last_call() -> None:
    call = LastCall(30.0)
    call.arrival(0.0)
    call.start(0.0)
    assert call.ends(announced=False) == 0.5
    assert call.ends(announced=True) == 30.0
    call.arrival(6.0)
    assert call.ends(announced=False) == 18.0, "twice the largest gap"
    call.arrival(7.0)
    assert call.ends(announced=False) == 19.0
    call.arrival(50.0)
    assert call.ends(announced=False) == 80.0, "no silence is longer than the timeout"
    for when in range(60, 200, 10):
        call.arrival(float(when))
    assert call.ends(announced=True) == 150.0, "nor the whole than five times that"
    assert LastCall(0.0).started_at is None


def test_last_call_of_nothing_waits_for_nothing() -> None:
    call = LastCall(0.0)
    call.arrival(3.0)
    call.start(3.0)
    assert call.ends(announced=True) == 3.0
