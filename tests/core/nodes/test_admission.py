"""Which nodes are not let in: left out for a while, since they never stay, or excluded."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import EXCLUDE_BRIEF_AFTER, RESTART_HEALTHY_AFTER, STRAGGLERS_PER_HOUR
from elasticrun.core.nodes.admission import (
    BACKOFF_UNIT,
    FAILED,
    HOUR,
    MAX_RECORDS,
    MEMORY,
    SLOW,
    Backoffs,
    Exclusions,
    FlapHistory,
)
from elasticrun.core.persisted import Facts
from elasticrun.core.reasons import Excluded, text
from elasticrun.wire import messages as m
from elasticrun.wire.messages import MAX_EXCLUDED, CheckSpec, ExcludedNode
from elasticrun.wire.types import dumps, loads, plain, typed
from tests.core.by_hand import Master
from tests.master.facts import facts


def test_each_waits_its_time_with_its_reason() -> None:
    bars = Backoffs()
    bars.put("b", 120.0, "it fell silent too often")
    bars.put("c", 60.0, "its ranks kept failing")
    assert (len(bars), "b" in bars, bars.next()) == (2, True, 60.0)
    assert bars.sentence("b", 20.4) == "in backoff: it fell silent too often; may rejoin in 100 s"
    assert bars.due(59.0) == []
    assert bars.due(60.0) == ["c"]
    assert "c" not in bars
    bars.lift("b")
    bars.lift("b")
    assert (list(bars), bars.next(), bars.due(1e9)) == ([], None, [])


def test_the_newest_word_counts() -> None:
    bars = Backoffs()
    bars.put("b", 120.0, "one")
    bars.put("b", 30.0, "another")
    assert bars.sentence("b", 0.0) == "in backoff: another; may rejoin in 30 s"
    assert bars.due(30.0) == ["b"]


# ---------------------------------------------------------------- brief stays


def stay(flaps: FlapHistory, node: str, began: float, seconds: float) -> float:
    """One life in one round; until when it waits after that, counted from its death."""
    flaps.formed([node, "other"], began)
    flaps.lost(node, began + seconds, began + seconds)
    return flaps.backoff_until(node, began + seconds) - (began + seconds)


def test_the_third_brief_stay_is_one_too_many_and_each_further_one_costs_double() -> None:
    flaps = FlapHistory()
    waits = [stay(flaps, "x", 40.0 * time, 10.0) for time in range(EXCLUDE_BRIEF_AFTER + 2)]
    assert [one / BACKOFF_UNIT for one in waits] == [0] * (EXCLUDE_BRIEF_AFTER - 1) + [1, 2, 4]
    assert flaps.backoff_until("other", 0.0) == 0.0


@pytest.mark.parametrize(
    ("every", "seconds"), [(60.0, RESTART_HEALTHY_AFTER), (MEMORY / 2 + 1.0, 10.0)]
)
def test_who_stays_or_dies_seldom_is_let_in(every: float, seconds: float) -> None:
    flaps = FlapHistory()
    assert {stay(flaps, "x", every * time, seconds) for time in range(9)} == {0.0}


def test_a_stay_goes_on_over_rounds() -> None:
    """Others come and go, each time with a new round: that makes nobody's stay brief."""
    flaps = FlapHistory()
    for time in range(9):
        flaps.formed(["x", f"other{time}"], 10.0 * time)
    flaps.lost("x", 90.0, 90.0)
    assert flaps.facts(90.0).fickle == ()


def test_who_leaves_in_good_order_has_not_died() -> None:
    master = Master()
    name = master.running()
    for _ in range(EXCLUDE_BRIEF_AFTER):
        master.hear(2, m.Leaving("received SIGTERM", 15), m.Stopped(name))
    assert master.facts.flaps.fickle == ()


def test_a_successor_knows_it_and_blames_nobody_for_what_it_has_not_seen() -> None:
    flaps = FlapHistory()
    for time in range(EXCLUDE_BRIEF_AFTER):
        stay(flaps, "x", 40.0 * time, 10.0)
    now = 40.0 * EXCLUDE_BRIEF_AFTER
    master = Master()
    master.running()
    recorded = replace(master.facts, flaps=flaps.facts(now))
    following = FlapHistory()
    following.restore(loads(dumps(recorded), Facts).flaps, 5000.0)
    left = flaps.backoff_until("x", now) - now
    assert following.backoff_until("x", 5000.0) == 5000.0 + left > 5000.0
    assert following.facts(5000.0) == recorded.flaps
    following.taken_over(["y"])
    following.lost("y", 5001.0, 5001.0)
    following.lost("z", 5001.0, 5001.0)
    assert [one.node for one in following.facts(5001.0).fickle] == ["x"]


def test_it_is_bounded() -> None:
    flaps = FlapHistory()
    for number in range(MAX_RECORDS + 5):
        stay(flaps, f"n{number}", 0.0, 1.0)
    assert len(flaps.facts(1.0).fickle) == MAX_RECORDS


# ---------------------------------------------------------------- excluded


def of(*nodes: str, kind: str = FAILED, now: float = 0.0, seconds: float = 60.0) -> Exclusions:
    exclusions = Exclusions()
    for node in nodes:
        exclusions.add(node, "h1", Excluded(kind, "it is bad"), seconds=seconds, now=now)
    return exclusions


def test_a_node_is_refused_on_its_host_until_its_time_is_over() -> None:
    exclusions = of("a", now=100.0)
    assert text(exclusions.refusal("a", "h1", 110.0)) == (
        "node a on h1 is excluded for 50 s more: it is bad; `elasticrun include a` admits it sooner"
    )
    assert exclusions.refusal("a", "h2", 110.0) is None, "another machine under the same id"
    assert exclusions.refusal("b", "h1", 110.0) is None
    assert exclusions.refusal("a", "h1", 160.0) is None


def test_the_page_shows_who_is_refused_now() -> None:
    exclusions = of("a", now=100.0)
    exclusions.add("b", "h2", Excluded(SLOW, "slow"), seconds=10.0, now=105.0)
    assert exclusions.page(110.0) == (
        ExcludedNode("a", "h1", FAILED, "it is bad", 10.0, 50.0),
        ExcludedNode("b", "h2", SLOW, "slow", 5.0, 5.0),
    )
    assert [one.node for one in exclusions.page(120.0)] == ["a"]
    assert exclusions.page(200.0) == ()


def test_a_second_verdict_begins_the_time_anew() -> None:
    exclusions = of("a")
    exclusions.add("a", "h1", Excluded(FAILED, "again"), seconds=60.0, now=50.0)
    (one,) = exclusions.page(60.0)
    assert (one.reason, one.remaining) == ("again", 50.0)


def test_so_many_slow_nodes_in_an_hour_also_when_they_may_be_back() -> None:
    exclusions = Exclusions()
    for number in range(STRAGGLERS_PER_HOUR):
        assert exclusions.may_be_slow(10.0)
        exclusions.add(f"n{number}", "h", Excluded(SLOW, ""), seconds=1.0, now=10.0)
    assert not exclusions.may_be_slow(20.0)
    assert exclusions.page(20.0) == ()
    assert exclusions.may_be_slow(10.0 + HOUR)


def test_a_node_that_is_excluded_as_slow_twice_counts_twice() -> None:
    exclusions = Exclusions()
    for number in range(STRAGGLERS_PER_HOUR):
        at = 100.0 * number
        assert exclusions.may_be_slow(at)
        exclusions.add("n0", "h", Excluded(SLOW, ""), seconds=50.0, now=at)
    last = 100.0 * (STRAGGLERS_PER_HOUR - 1)
    assert not exclusions.may_be_slow(last + 60.0)
    assert not exclusions.may_be_slow(HOUR - 1.0)
    assert exclusions.may_be_slow(HOUR), "the first verdict is an hour old"
    exclusions.add("n0", "h", Excluded(SLOW, ""), seconds=50.0, now=HOUR)
    assert not exclusions.may_be_slow(HOUR + 1.0)
    assert len(exclusions.facts(HOUR).slow_ages) == STRAGGLERS_PER_HOUR, "no more are kept"


def test_slow_verdicts_outlive_a_master() -> None:
    """Also while it was away, and of nodes that are refused no longer."""
    first = Exclusions()
    for _ in range(STRAGGLERS_PER_HOUR):
        first.add("n0", "h", Excluded(SLOW, ""), seconds=1.0, now=10.0)
    recorded = facts(exclusions=first.facts(20.0))
    read = loads(dumps(recorded), Facts)
    successor = Exclusions()
    successor.restore(read.exclusions, 4900.0)
    told = successor.facts(5000.0)
    assert (told.excluded, told.slow_ages) == ((), (110.0,) * STRAGGLERS_PER_HOUR)
    assert not successor.may_be_slow(5000.0 + HOUR - 111.0)
    assert successor.may_be_slow(5000.0 + HOUR - 110.0)


def test_failed_nodes_do_not_count_as_slow_ones() -> None:
    assert of(*"abcdef").may_be_slow(1.0)


def test_the_oldest_are_forgotten() -> None:
    exclusions = of(*(f"n{number}" for number in range(MAX_EXCLUDED + 1)))
    assert len(exclusions.page(1.0)) == MAX_EXCLUDED
    assert not exclusions.refusal("n0", "h1", 1.0)
    assert exclusions.refusal("n1", "h1", 1.0)


def test_a_successor_goes_on_with_what_is_left_of_the_time() -> None:
    recorded = facts(exclusions=of("a", now=0.0).facts(20.0))
    read = loads(dumps(recorded), Facts)
    exclusions = Exclusions()
    exclusions.restore(read.exclusions, 6990.0)
    found = exclusions.facts(7000.0).excluded
    assert found == (ExcludedNode("a", "h1", FAILED, "it is bad", 30.0, 30.0),)
    assert "for 25 s more" in text(exclusions.refusal("a", "h1", 7005.0))
    late = Exclusions()
    late.restore(read.exclusions, 6900.0)
    assert not late.refusal("a", "h1", 7000.0)


def test_a_record_of_before_exclusions_is_read() -> None:
    old = plain(facts())
    del old["exclusions"]
    del old["spec"]["checks"]
    read = typed(old, Facts)
    assert read == facts(spec=replace(facts().spec, checks=CheckSpec()))
