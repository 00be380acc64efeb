"""When the master takes itself for the one that is cut off."""

from __future__ import annotations

import pytest

from elasticrun.config import MASS_SILENCE_HOLD
from elasticrun.core.nodes.membership import MassSilence


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
    assert until is not None
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
    rule.settled("a")
    assert rule.holds_until("bc", 4, 20.0) is None
    assert not rule.reason()


def test_it_is_over_when_the_last_is_heard_again_or_has_gone() -> None:
    rule = MassSilence()
    rule.holds_until("abc", 4, 10.0)
    for node in "ab":
        rule.settled(node)
        assert rule.reason()
    rule.settled("c")
    assert not rule.reason()
    assert rule.holds_until("abc", 4, 500.0) == 500.0 + MASS_SILENCE_HOLD, "counted anew"
