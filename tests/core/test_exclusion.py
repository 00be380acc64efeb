"""Who is refused, why, and until when."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.config import STRAGGLERS_PER_HOUR
from elasticrun.core.nodes.admission import FAILED, HOUR, SLOW, Exclusions
from elasticrun.core.persisted import Facts, aged
from elasticrun.wire.messages import MAX_EXCLUDED, CheckSpec, ExcludedNode
from elasticrun.wire.records import dumps, loads, plain, typed
from tests.master.facts import facts


def of(*nodes: str, kind: str = FAILED, now: float = 0.0, seconds: float = 60.0) -> Exclusions:
    exclusions = Exclusions()
    for node in nodes:
        exclusions.add(node, "h1", kind=kind, reason="it is bad", seconds=seconds, now=now)
    return exclusions


def test_a_node_is_refused_on_its_host_until_its_time_is_over() -> None:
    exclusions = of("a", now=100.0)
    assert exclusions.refusal("a", "h1", 110.0) == (
        "node a on h1 is excluded for 50 s more: it is bad"
    )
    assert exclusions.refusal("a", "h2", 110.0) == "", "another machine under the same id"
    assert exclusions.refusal("b", "h1", 110.0) == ""
    assert exclusions.refusal("a", "h1", 160.0) == ""


def test_the_page_shows_who_is_refused_now() -> None:
    exclusions = of("a", now=100.0)
    exclusions.add("b", "h2", kind=SLOW, reason="slow", seconds=10.0, now=105.0)
    assert exclusions.page(110.0) == (
        ExcludedNode("a", "h1", FAILED, "it is bad", 10.0, 50.0),
        ExcludedNode("b", "h2", SLOW, "slow", 5.0, 5.0),
    )
    assert [one.node for one in exclusions.page(120.0)] == ["a"]
    assert exclusions.page(200.0) == ()


def test_a_second_verdict_begins_the_time_anew() -> None:
    exclusions = of("a")
    exclusions.add("a", "h1", kind=FAILED, reason="again", seconds=60.0, now=50.0)
    (one,) = exclusions.page(60.0)
    assert (one.reason, one.remaining) == ("again", 50.0)


def test_so_many_slow_nodes_in_an_hour_also_when_they_may_be_back() -> None:
    exclusions = Exclusions()
    for number in range(STRAGGLERS_PER_HOUR):
        assert exclusions.may_be_slow(10.0)
        exclusions.add(f"n{number}", "h", kind=SLOW, reason="", seconds=1.0, now=10.0)
    assert not exclusions.may_be_slow(20.0)
    assert exclusions.page(20.0) == ()
    assert exclusions.may_be_slow(10.0 + HOUR)


def test_a_node_that_is_excluded_as_slow_twice_counts_twice() -> None:
    exclusions = Exclusions()
    for number in range(STRAGGLERS_PER_HOUR):
        at = 100.0 * number
        assert exclusions.may_be_slow(at)
        exclusions.add("n0", "h", kind=SLOW, reason="", seconds=50.0, now=at)
    last = 100.0 * (STRAGGLERS_PER_HOUR - 1)
    assert not exclusions.may_be_slow(last + 60.0)
    assert not exclusions.may_be_slow(HOUR - 1.0)
    assert exclusions.may_be_slow(HOUR), "the first verdict is an hour old"
    exclusions.add("n0", "h", kind=SLOW, reason="", seconds=50.0, now=HOUR)
    assert not exclusions.may_be_slow(HOUR + 1.0)
    assert len(exclusions.slow_ages(HOUR)) == STRAGGLERS_PER_HOUR, "no more are kept"


def test_slow_verdicts_outlive_a_master() -> None:
    """Also while it was away, and of nodes that are refused no longer."""
    first = Exclusions()
    for _ in range(STRAGGLERS_PER_HOUR):
        first.add("n0", "h", kind=SLOW, reason="", seconds=1.0, now=10.0)
    recorded = facts(excluded=first.page(20.0), slow_ages=first.slow_ages(20.0))
    read = aged(loads(dumps(recorded), Facts), 100.0)
    assert (read.excluded, read.slow_ages) == ((), (110.0,) * STRAGGLERS_PER_HOUR)
    successor = Exclusions()
    successor.restore(read.excluded, read.slow_ages, 5000.0)
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
    recorded = facts(excluded=of("a", now=0.0).page(20.0))
    read = aged(loads(dumps(recorded), Facts), 10.0)
    assert read.excluded == (ExcludedNode("a", "h1", FAILED, "it is bad", 30.0, 30.0),)
    exclusions = Exclusions()
    exclusions.restore(read.excluded, (), 7000.0)
    assert "for 25 s more" in exclusions.refusal("a", "h1", 7005.0)
    assert aged(read, 100.0).excluded[0].remaining == 0.0


def test_a_record_of_before_exclusions_is_read() -> None:
    old = plain(facts())
    del old["excluded"]
    del old["slow_ages"]
    del old["spec"]["checks"]
    read = typed(old, Facts)
    assert read == facts(spec=replace(facts().spec, checks=CheckSpec()))
