"""Who sits where in a round; a round tells each node its place, and only what it knows."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticrun.core.nodes.admission import Deaths
from elasticrun.core.nodes.node import Node, is_loopback
from elasticrun.core.persisted import Seat
from elasticrun.core.rounds.round import (
    Round,
    adopt,
    adopted_seat,
    choose_nodes,
    form_round,
    lay_out,
    store_host,
)
from elasticrun.wire.messages import RoundInfo
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import hello


def node(
    name: str, order: int, *, rank: int = -1, size: int = 1, role: str = "default", host: str = ""
) -> Node:
    said = hello(name, node_rank=rank, local_world_size=size, role=role)
    store = Endpoint(host or f"10.0.0.{order + 1}", 4000)
    return Node(name, said.incarnation, said, 1, 0.0, Deaths(), offered=store, order=order)


nodes = st.lists(
    st.tuples(st.integers(-1, 12), st.integers(1, 4), st.sampled_from("xy")),
    min_size=1,
    max_size=10,
)


@given(nodes, st.dictionaries(st.integers(0, 9), st.integers(0, 12)), st.randoms())
def test_every_rank_is_given_out_once(raw, previous, shuffler) -> None:  # type: ignore[no-untyped-def]
    members = [
        node(f"n{order}", order, rank=rank, size=size, role=role)
        for order, (rank, size, role) in enumerate(raw)
    ]
    before = {f"n{order}": seat for order, seat in previous.items()}
    places = lay_out(members, before)
    shuffled = list(members)
    shuffler.shuffle(shuffled)
    assert lay_out(shuffled, before) == places, "the order of asking must not matter"
    made = form_round(RoundInfo(RoundName(1, 1, "one"), 1), shuffled, len(members), None)
    assert [seat.group_rank for seat in made.members.values()] == list(range(len(members)))
    next_rank = 0
    next_in_role = {"x": 0, "y": 0}
    for seat in made.members.values():
        one = next(node for node in members if node.id == seat.node)
        assert (seat.first_rank, seat.ranks) == (next_rank, one.hello.local_world_size)
        assert seat.role_first_rank == next_in_role[one.hello.role]
        next_rank += seat.ranks
        next_in_role[one.hello.role] += seat.ranks
    assert made.info.world_size == next_rank
    for seat in made.members.values():
        role = next(node for node in members if node.id == seat.node).hello.role
        assert seat.role_world_size == next_in_role[role]


def test_given_ranks_then_survivors_then_order_of_first_join() -> None:
    members = [node("a", 0), node("b", 1, rank=0), node("c", 2), node("d", 3)]
    assert [one.id for one in lay_out(members, {})] == ["b", "a", "c", "d"]
    assert [one.id for one in lay_out(members, {"c": 3, "a": 2})] == ["b", "d", "a", "c"]


def test_a_survivor_beyond_the_smaller_world_moves_into_the_gap() -> None:
    survivors = [node("a", 0), node("c", 2), node("d", 3)]
    places = lay_out(survivors, {"a": 0, "b": 1, "c": 2, "d": 3})
    assert [one.id for one in places] == ["a", "d", "c"]


def test_members_are_chosen_before_those_who_come_later() -> None:
    crowd = [node("late", 5), node("old", 9), node("early", 1), node("ranked", 7, rank=1)]
    assert [one.id for one in choose_nodes(crowd, 3, {"old": 0})] == ["old", "ranked", "early"]


def test_the_store_is_where_others_can_dial_it() -> None:
    here = [node("a", 0, host="127.0.0.1"), node("b", 1, host="127.0.0.1")]
    assert store_host(here).id == "a"
    mixed = [node("a", 0, host="127.0.0.1"), node("b", 1, host="192.168.1.5")]
    assert store_host(mixed).id == "b"
    assert all(map(is_loopback, ("localhost", "127.0.1.1", "::1")))
    assert not is_loopback("10.127.0.1")


# ---------------------------------------------------------------- what a round tells

NAME = RoundName(2, 7, "seven")
STORE = Endpoint("10.0.0.1", 29400)
A = Seat("a", "one", 0, 0, 2, 0, 3)
B = Seat("b", "two", 1, 2, 1, 2, 3)


def of(*seats: Seat) -> Round:
    return Round(RoundInfo(NAME, 3, 4), STORE, "a", {seat.node: seat for seat in seats})


def test_each_member_is_told_its_own_place() -> None:
    first, second = of(A, B).start("a"), of(A, B).start("b")
    assert (first.group_rank, first.first_rank, first.role_first_rank) == (0, 0, 0)
    assert (second.group_rank, second.first_rank, second.role_first_rank) == (1, 2, 2)
    assert (first.host_store, second.host_store) == (True, False)
    for start in (first, second):
        assert (start.info, start.store) == (RoundInfo(NAME, 3, 4), STORE)
        assert (start.group_world_size, start.role_world_size) == (2, 3)


def test_who_has_no_place_is_told_none() -> None:
    assert of(A).start("b") is None


def test_an_adopted_round_knows_the_places_that_were_reported() -> None:
    first, second = of(A, B).start("a"), of(A, B).start("b")
    adopted = adopt(first)
    adopted.add_seat(adopted_seat(hello("b", incarnation="two", local_world_size=1), second))
    assert adopted.info == first.info
    assert adopted.seats == {"b": 1}
    assert adopted.members["b"] == B


@pytest.mark.parametrize(
    ("term", "number", "later"),
    [(2, 8, True), (2, 7, False), (2, 6, False), (3, 0, True), (1, 9, False)],
)
def test_which_of_two_rounds_is_the_later(term: int, number: int, later: bool) -> None:
    assert of(A).is_older_than(RoundName(term, number, "other")) is later
