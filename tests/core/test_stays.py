"""Brief stays: a node whose agent dies whenever it trains, beside those that only had bad luck."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import EXCLUDE_BRIEF_AFTER, RESTART_HEALTHY_AFTER
from elasticrun.core.nodes.admission import BAR_UNIT, MAX_RECORDS, MEMORY, Stays
from elasticrun.core.persisted import Facts
from elasticrun.wire import messages as m
from elasticrun.wire.records import dumps, loads
from tests.core.by_hand import Master


def stay(stays: Stays, node: str, began: float, seconds: float) -> float:
    """One life in one round; until when it waits after that, counted from its death."""
    stays.formed([node, "other"], began)
    stays.lost(node, began + seconds, began + seconds)
    return stays.barred_until(node, began + seconds) - (began + seconds)


def test_the_third_brief_stay_is_one_too_many_and_each_further_one_costs_double() -> None:
    stays = Stays()
    waits = [stay(stays, "x", 40.0 * time, 10.0) for time in range(EXCLUDE_BRIEF_AFTER + 2)]
    assert waits == [0.0] * (EXCLUDE_BRIEF_AFTER - 1) + [BAR_UNIT, 2 * BAR_UNIT, 4 * BAR_UNIT]
    assert stays.barred_until("other", 0.0) == 0.0


@pytest.mark.parametrize(
    ("every", "seconds"), [(60.0, RESTART_HEALTHY_AFTER), (MEMORY / 2 + 1.0, 10.0)]
)
def test_who_stays_or_dies_seldom_is_let_in(every: float, seconds: float) -> None:
    stays = Stays()
    assert {stay(stays, "x", every * time, seconds) for time in range(9)} == {0.0}


def test_a_stay_goes_on_over_rounds() -> None:
    """Others come and go, each time with a new round: that makes nobody's stay brief."""
    stays = Stays()
    for time in range(9):
        stays.formed(["x", f"other{time}"], 10.0 * time)
    stays.lost("x", 90.0, 90.0)
    assert stays.record(90.0) == ()


def test_who_leaves_in_good_order_has_not_died() -> None:
    master = Master()
    name = master.running()
    for _ in range(EXCLUDE_BRIEF_AFTER):
        master.hear(2, m.Leaving("received SIGTERM", 15), m.Stopped(name))
    assert master.facts is not None
    assert master.facts.fickle == ()


def test_a_successor_knows_it_and_blames_nobody_for_what_it_has_not_seen() -> None:
    stays = Stays()
    for time in range(EXCLUDE_BRIEF_AFTER):
        stay(stays, "x", 40.0 * time, 10.0)
    now = 40.0 * EXCLUDE_BRIEF_AFTER
    master = Master()
    master.running()
    assert master.facts is not None
    facts = replace(master.facts, fickle=stays.record(now))
    following = Stays()
    following.restore(loads(dumps(facts), Facts).fickle, 5000.0)
    left = stays.barred_until("x", now) - now
    assert following.barred_until("x", 5000.0) == 5000.0 + left > 5000.0
    assert following.record(5000.0) == facts.fickle
    following.taken_over(["y"])
    following.lost("y", 5001.0, 5001.0)
    following.lost("z", 5001.0, 5001.0)
    assert [one.node for one in following.record(5001.0)] == ["x"]


def test_it_is_bounded() -> None:
    stays = Stays()
    for number in range(MAX_RECORDS + 5):
        stay(stays, f"n{number}", 0.0, 1.0)
    assert len(stays.record(1.0)) == MAX_RECORDS
