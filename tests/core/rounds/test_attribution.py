"""The node or the script? Whole jobs are in scripts/poison_*.txt."""

from __future__ import annotations

from dataclasses import replace

from elasticrun.core.nodes.admission import MAX_BACKOFF
from elasticrun.core.reasons import RankFailed, text
from elasticrun.core.rounds.attribution import MAX_RECORDS, PROBATION, TRAIL, Attribution, Cause


def cause(node: str, rank: int = 3, *, first: int = 2, others: bool = False) -> Cause:
    return Cause(node, rank, first, others, RankFailed(rank, node, "ended"))


def after(*causes: Cause) -> Attribution:
    past = Attribution(3)
    for one in causes:
        past.add_cause(one)
    return past


def test_a_node_is_blamed_after_three_rounds_in_a_row() -> None:
    assert not after().why_suspect(cause("b"), 0.0)
    assert not after(cause("b")).why_suspect(cause("b"), 0.0)
    why = after(cause("b"), cause("b", 2)).why_suspect(cause("b"), 0.0)
    assert text(why) == (
        "its ranks were the first to fail in 3 rounds in a row, and no rank of another node did: "
        "rank 3 on node b: ended"
    )
    assert not after(cause("b"), cause("b"), cause("c")).why_suspect(cause("b"), 0.0)


def test_not_if_ranks_of_others_die_by_themselves() -> None:
    assert not after(cause("b"), cause("b", others=True)).why_suspect(cause("b"), 0.0)
    assert not after(cause("b"), cause("b")).why_suspect(cause("b", others=True), 0.0)


def test_unless_it_held_other_ranks_and_was_the_first_all_the_same() -> None:
    moved = after(cause("b"), cause("b", others=True)).why_suspect(cause("b", 7, first=6), 0.0)
    assert moved is not None
    assert moved.moved


def test_it_waits_longer_each_time_and_is_on_probation_when_it_is_back() -> None:
    past = after(cause("b"), cause("b"))
    assert past.back_off(cause("b"), 100.0) == 120.0
    assert past.backoff_until("b", 110.0) == 220.0
    assert past.backoff_until("b", 500.0) == 500.0
    past.add_cause(cause("c", 0))
    assert "fail again" in text(past.why_suspect(cause("b"), 500.0))
    assert past.back_off(cause("b"), 500.0) == 240.0
    late = 740.0 + PROBATION + 1.0
    past.add_cause(cause("c", 0))
    assert not past.why_suspect(cause("b"), late), "an hour later its record is clean"
    for _ in range(8):
        past.back_off(cause("b"), late)
    assert past.back_off(cause("b"), late) == MAX_BACKOFF


def test_the_same_rank_elsewhere_acquits_it() -> None:
    past = after(cause("b"), cause("b"))
    past.back_off(cause("b", 3), 100.0)
    assert past.clear_node(cause("c", 1), 130.0) == ""
    assert past.clear_node(cause("b", 3), 130.0) == ""
    assert past.clear_node(cause("c", 3), 130.0) == "b"
    assert past.clear_node(cause("c", 3), 130.0) == "", "once"
    assert past.backoff_until("b", 130.0) == 130.0


def test_the_node_that_got_the_rank_is_not_left_out_in_its_turn() -> None:
    """Leaving a node out charges no restart, so a script that always fails must not have the nodes
    take turns. That the rank failed once elsewhere, some time ago, does not make it the script."""
    past = after(cause("b", 3), cause("b", 3))
    past.back_off(cause("b", 3), 100.0)
    for count in range(5):
        assert not past.why_suspect(cause("c", 3), 101.0 + count)
        past.add_cause(cause("c", 3))
    again = after(cause("b", 3), cause("c", 3), cause("c", 3))
    assert again.why_suspect(cause("c", 3), 100.0)


def test_what_the_rounds_say_together() -> None:
    assert after().in_words(cause("b"), 2) == ""
    assert "node b: " not in after(cause("b")).in_words(cause("b"), 1), "there is only one"
    assert "the node may be at fault" in after(cause("b")).in_words(cause("b"), 2)
    rank = after(cause("b"), cause("b")).in_words(cause("c"), 2)
    assert rank == (
        "rank 3 was the first to fail in the last 3 rounds, on 2 different nodes: the script fails "
        "at that rank on any node"
    )
    assert "the script is at fault" in after(cause("b", 3)).in_words(cause("c", 4), 2)
    assert "the script is at fault" in after(cause("b", others=True)).in_words(cause("b"), 2)


def test_a_successor_counts_on() -> None:
    past = after(cause("b"))
    past.back_off(cause("x", 9), 0.0)
    past.add_cause(cause("b"))
    past.add_cause(cause("b"))
    heir = Attribution(3)
    heir.restore(past.record(50.0), 1000.0)
    assert heir.backoff_until("x", 1000.0) == 1070.0
    assert heir.why_suspect(cause("b"), 1000.0)
    assert heir.clear_node(cause("b", 9), 1001.0) == "x"


def test_it_is_bounded() -> None:
    past = Attribution(3)
    for number in range(3 * MAX_RECORDS):
        past.back_off(cause(f"n{number}"), float(number))
    assert len(past.record(3.0 * MAX_RECORDS)) <= MAX_RECORDS + 1
    for _ in range(3 * TRAIL):
        past.add_cause(cause("b"))
    entry = past.record(3.0 * MAX_RECORDS)[-1]
    assert (entry.node, entry.rounds) == ("b", TRAIL)


def test_failures_that_are_days_apart_are_no_row() -> None:
    past = Attribution(after=3)
    for at in (0.0, 86_400.0):
        past.add_cause(replace(cause("b"), at=at))
    assert not past.why_suspect(replace(cause("b"), at=2 * 86_400.0), 2 * 86_400.0)
    past.add_cause(replace(cause("b"), at=2 * 86_400.0))
    past.add_cause(replace(cause("b"), at=2 * 86_400.0 + 60.0))
    assert past.why_suspect(replace(cause("b"), at=2 * 86_400.0 + 120.0), 2 * 86_400.0 + 120.0)
