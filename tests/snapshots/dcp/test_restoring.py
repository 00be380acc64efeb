"""Chunks of one number of ranks into chunks of another."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from elasticrun.snapshots.dcp.image import arrange
from elasticrun.snapshots.dcp.items import Piece
from elasticrun.snapshots.dcp.restoring import Cover, RestoreError, copy, overlap
from elasticrun.snapshots.shm.layout import Item, ItemKind, Layout
from tests.further import examples

Place = tuple[int, ...]


def item(name: str, shape: Place, offsets: Place, sizes: Place) -> Item:
    return Item(
        *(name, (name,), ItemKind.SHARD, False, "float32"),
        *(shape, offsets, sizes),
        nbytes=4 * math.prod(sizes),
    )


def value(name: str) -> Item:
    return Item(name, (name,), ItemKind.BYTES, False)


def layout(*items: Item) -> Layout:
    return arrange([Piece(one, None) for one in items], 100)


def rows(cuts: list[int], height: int, width: int) -> list[Item]:
    """One chunk of whole rows for each stretch between the cuts."""
    edges = [0, *sorted(cuts), height]
    return [item("t", (height, width), (a, 0), (b - a, width)) for a, b in pairwise(edges)]


def columns(cuts: list[int], height: int, width: int) -> list[Item]:
    edges = [0, *sorted(cuts), width]
    return [item("t", (height, width), (0, a), (height, b - a)) for a, b in pairwise(edges)]


def part(whole: torch.Tensor, chunk: Item) -> torch.Tensor:
    for axis, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(axis, at, size)
    return whole


CUTS = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=examples(20), deadline=None)
@given(CUTS, CUTS, st.booleans())
def test_any_cut_into_any_other(old: list[int], new: list[int], turned: bool) -> None:
    """Empty chunks among them, as of ranks beyond a tensor's end."""
    whole = torch.arange(35.0).reshape(7, 5)
    saved = rows(old, 7, 5)
    wanted = columns(new, 7, 5) if turned else rows(new, 7, 5)
    targets = [torch.full(one.sizes, -1.0) for one in wanted]
    cover = Cover(wanted)
    for source, chunk in enumerate(saved):
        assert cover.whole or cover.missing == ["t"]
        cover.offer(source, layout(chunk))
    assert cover.whole
    copy(cover.moves, {i: [part(whole, one).clone()] for i, one in enumerate(saved)}, targets)
    for chunk, target in zip(wanted, targets, strict=True):
        assert torch.equal(target, part(whole, chunk))


def test_a_chunk_that_two_ranks_hold_counts_once() -> None:
    half = item("t", (4,), (0,), (2,))
    cover = Cover([item("t", (4,), (0,), (4,))])
    cover.offer(0, layout(half))
    cover.offer(1, layout(half))
    assert not cover.whole
    assert len(cover.moves) == 1
    cover.offer(2, layout(item("t", (4,), (2,), (2,))))
    assert cover.whole


def test_saved_chunks_that_lie_over_each_other_are_refused() -> None:
    cover = Cover([item("t", (4,), (0,), (4,))])
    cover.offer(0, layout(item("t", (4,), (0,), (3,))))
    with pytest.raises(RestoreError, match="overlap"):
        cover.offer(1, layout(item("t", (4,), (2,), (2,))))


def test_another_shape_is_refused_with_both() -> None:
    cover = Cover([item("t", (4,), (0,), (4,))])
    with pytest.raises(RestoreError, match=r"shape \(5,\) and is now \(4,\)"):
        cover.offer(0, layout(item("t", (5,), (0,), (5,))))


def test_values_are_found_with_their_places() -> None:
    cover = Cover([], ["b", "c"])
    cover.offer(3, layout(value("a"), value("b")))
    assert cover.values == {"b": (3, 1)}
    assert cover.missing == ["c"]
    cover.offer(4, layout(value("b"), value("c")))
    assert cover.values == {"b": (3, 1), "c": (4, 1)}
    assert cover.whole


def test_a_scalar_overlaps_itself() -> None:
    assert overlap(((), ()), ((), ())) == ((), ())
    assert overlap(((0,), (2,)), ((2,), (2,))) is None
