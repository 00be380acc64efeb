"""A round tells each node its place, and only what it knows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.core.persisted import Seat
from elasticrun.core.rounds.round import Round
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName

NAME = RoundName(2, 7, "seven")
STORE = Endpoint("10.0.0.1", 29400)
A = Seat("a", "one", 0, 0, 2, 0, 3)
B = Seat("b", "two", 1, 2, 1, 2, 3)


def of(*seats: Seat) -> Round:
    made = Round(NAME, 3, 4, STORE, store_node="a", why="grown")
    for seat in seats:
        made.seat(seat)
    return made


def test_each_member_is_told_its_own_place() -> None:
    first, second = of(A, B).start("a"), of(A, B).start("b")
    assert isinstance(first, m.Start)
    assert isinstance(second, m.Start)
    assert (first.group_rank, first.first_rank, first.role_first_rank) == (0, 0, 0)
    assert (second.group_rank, second.first_rank, second.role_first_rank) == (1, 2, 2)
    assert (first.host_store, second.host_store) == (True, False)
    for start in (first, second):
        assert (start.round, start.store, start.restart_count) == (NAME, STORE, 4)
        assert (start.group_world_size, start.world_size, start.role_world_size) == (2, 3, 3)


def test_who_has_no_place_is_told_nothing() -> None:
    assert of(A).start("b") is None


def test_of_an_adopted_round_nobody_is_told_a_part() -> None:
    """Its roles are not known here; its ranks run already."""
    adopted = of(A, replace(B, role_world_size=0))
    assert adopted.start("b") is None
    assert adopted.start("a") is not None
    assert adopted.seats == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("term", "number", "later"),
    [(2, 8, True), (2, 7, False), (2, 6, False), (3, 0, True), (1, 9, False)],
)
def test_which_of_two_rounds_is_the_later(term: int, number: int, later: bool) -> None:
    assert of(A).is_older_than(RoundName(term, number, "other")) is later
