"""When the master takes itself for the one that is cut off."""

from __future__ import annotations

import pytest

from elasticrun.config import MASS_SILENCE_HOLD
from elasticrun.core.mass_silence import MassSilence


@pytest.mark.parametrize(
    ("silent", "size", "held"),
    [(1, 1, False), (2, 2, False), (1, 3, False), (2, 3, True), (2, 4, False), (3, 4, True)],
)
def test_more_than_half_of_three_at_least(silent: int, size: int, held: bool) -> None:
    rule = MassSilence()
    assert rule.holds_until(silent, size, 10.0) == (10.0 + MASS_SILENCE_HOLD if held else None)
    assert bool(rule.reason()) is held


def test_the_hold_is_counted_from_its_beginning_and_ends() -> None:
    rule = MassSilence()
    until = rule.holds_until(3, 4, 10.0)
    assert until is not None
    assert rule.holds_until(4, 4, until - 1.0) == until
    rule.overslept(5.0)
    assert rule.holds_until(4, 4, until) == until + 5.0, "what the master slept does not count"
    assert rule.holds_until(4, 4, until + 5.0) is None, "they are silent still: given up"


def test_it_is_over_when_enough_are_heard_again() -> None:
    rule = MassSilence()
    rule.holds_until(3, 4, 10.0)
    assert rule.holds_until(2, 4, 20.0) is None
    assert not rule.reason()
    rule.holds_until(3, 4, 30.0)
    rule.over()
    assert not rule.reason()
    assert rule.holds_until(3, 4, 50.0) == 50.0 + MASS_SILENCE_HOLD, "counted anew"
