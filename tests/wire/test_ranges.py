"""Ranks in few letters."""

from __future__ import annotations

import random

import pytest

from elasticrun.wire.messages import MAX_RANKS
from elasticrun.wire.types import read_ranges, write_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([1, 0], "0,1"),
        ([0, 5], "0,5"),
        ([0, 1, 8, 9], "0,1,8,9"),
        ([0, 1, 2], "0-2"),
        ([*range(42), *range(43, 64)], "0-41,43-63"),
        (range(0, 63, 2), "0-62:2"),
        ([0, 2, 3, 4, 9], "0,2-4,9"),
    ],
)
def test_both_ways(ranks: list[int], text: str) -> None:
    assert write_ranges(ranks) == text
    assert sorted(ranks) == list(read_ranges(text, MAX_RANKS))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((7,), "7"), (range(42), "0-41"), ([0, 5], "0,5"), ([0, 1, 8, 9], "0-1,8-9")],
)
def test_two_neighbours_may_be_a_range(ranks: list[int], text: str) -> None:
    assert write_ranges(ranks, pairs=True) == text


def test_any_set_comes_back() -> None:
    draw = random.Random(1)
    for _ in range(200):
        ranks = set(draw.choices(range(draw.choice([4, 20, 300])), k=draw.randrange(60)))
        assert set(read_ranges(write_ranges(ranks), MAX_RANKS)) == ranks


def test_a_claim_beyond_the_world_costs_nothing() -> None:
    assert read_ranges("0-9999999999", limit=4) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="stride"):
        read_ranges("0-4:0", MAX_RANKS)
