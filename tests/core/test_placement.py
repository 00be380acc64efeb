from __future__ import annotations

from hypothesis import given, strategies as st

from elasticrun.core.rounds.round import Candidate, choose, is_loopback, lay_out
from elasticrun.wire.types import Endpoint


def node(
    name: str, order: int, *, rank: int = -1, size: int = 1, role: str = "default", host: str = ""
) -> Candidate:
    return Candidate(name, rank, order, size, role, Endpoint(host or f"10.0.0.{order + 1}", 4000))


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
    world = lay_out(members, before)
    shuffled = list(members)
    shuffler.shuffle(shuffled)
    assert lay_out(shuffled, before) == world, "the order of asking must not matter"
    size = {one.node: one for one in members}
    assert [place.group_rank for place in world.places] == list(range(len(members)))
    next_rank = 0
    next_in_role = {"x": 0, "y": 0}
    for place in world.places:
        one = size[place.node]
        assert place.first_rank == next_rank
        assert place.role_first_rank == next_in_role[one.role]
        next_rank += one.local_world_size
        next_in_role[one.role] += one.local_world_size
    assert world.world_size == next_rank
    assert {role: n for role, n in next_in_role.items() if n} == world.role_sizes


def test_given_ranks_then_survivors_then_order_of_first_join() -> None:
    members = [node("a", 0), node("b", 1, rank=0), node("c", 2), node("d", 3)]
    assert [p.node for p in lay_out(members, {}).places] == ["b", "a", "c", "d"]
    assert [p.node for p in lay_out(members, {"c": 3, "a": 2}).places] == ["b", "d", "a", "c"]


def test_a_survivor_beyond_the_smaller_world_moves_into_the_gap() -> None:
    survivors = [node("a", 0), node("c", 2), node("d", 3)]
    world = lay_out(survivors, {"a": 0, "b": 1, "c": 2, "d": 3})
    assert [place.node for place in world.places] == ["a", "d", "c"]


def test_members_are_chosen_before_those_who_come_later() -> None:
    crowd = [node("late", 5), node("old", 9), node("early", 1), node("ranked", 7, rank=1)]
    assert [one.node for one in choose(crowd, 3, {"old": 0})] == ["old", "ranked", "early"]


def test_the_store_is_where_others_can_dial_it() -> None:
    here = [node("a", 0, host="127.0.0.1"), node("b", 1, host="127.0.0.1")]
    assert lay_out(here, {}).store_host == "a"
    mixed = [node("a", 0, host="127.0.0.1"), node("b", 1, host="192.168.1.5")]
    assert lay_out(mixed, {}).store_host == "b"
    assert all(map(is_loopback, ("localhost", "127.0.1.1", "::1")))
    assert not is_loopback("10.127.0.1")
