"""Facts that have lain in a record for a while."""

from __future__ import annotations

from msgspec import structs

from elasticrun.core.persisted import Blamed, LeftOut, aged
from elasticrun.wire.messages import ExcludedNode
from tests.master.facts import facts, round_facts

MADE = facts(
    round=round_facts(silent=2.0),
    charges=(1.0, 50.0),
    left_out=(LeftOut("a", (3.0,), 1, 100.0), LeftOut("b", (3.0,), 1, 5.0)),
    fickle=(LeftOut("c", (3.0, 1.0), 1, 100.0),),
    blamed=(Blamed("c", 2, 1, 7, 30.0),),
    starved=4.0,
    excluded=(ExcludedNode("d", "h", "failed", "it is bad", 3.0, 50.0),),
    slow_ages=(20.0, 4.0),
)


def test_ages_grow_and_remainders_shrink() -> None:
    older = aged(MADE, 10.0)
    assert older.round is not None
    assert (older.round.age, older.round.silent) == (11.5, 12.0)
    assert older.charges == (11.0, 60.0)
    assert [entry.remaining for entry in older.left_out] == [90.0, 0.0]
    assert [entry.silences for entry in older.left_out] == [(13.0,), (13.0,)]
    assert older.fickle == (LeftOut("c", (13.0, 11.0), 1, 90.0),)
    assert [entry.remaining for entry in older.blamed] == [20.0]
    assert older.excluded == (ExcludedNode("d", "h", "failed", "it is bad", 13.0, 40.0),)
    assert older.slow_ages == (30.0, 14.0)


def test_a_wait_for_nodes_stands_still_while_there_is_no_master() -> None:
    assert aged(MADE, 1e6).starved == MADE.starved


def test_all_else_is_as_it_was_and_no_time_is_no_change() -> None:
    assert aged(MADE, 0.0) == aged(MADE, -5.0) == MADE
    assert (
        structs.replace(
            aged(MADE, 5.0),
            round=MADE.round,
            charges=MADE.charges,
            left_out=MADE.left_out,
            fickle=MADE.fickle,
            blamed=MADE.blamed,
            excluded=MADE.excluded,
            slow_ages=MADE.slow_ages,
        )
        == MADE
    )
    assert aged(facts(round=None), 5.0) == facts(round=None)
