"""Sets of positions, against Python's sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from elasticrun.core.work.spans import Spans, decode_used, encode_used
from elasticrun.wire.messages import DatasetSpec

SPEC = DatasetSpec("train", 100, 10, 2, -1)
edges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=30)


def members(spans: Spans) -> list[int]:
    return [one for start, stop in spans for one in range(start, stop)]


@given(edges)
def test_it_is_the_set_of_what_was_added(added: list[tuple[int, int]]) -> None:
    spans, plain = Spans(), set[int]()
    for start, stop in added:
        spans.add(start, stop)
        plain.update(range(start, stop))
        assert members(spans) == sorted(plain)
        found = list(spans)
        assert all(one[1] < other[0] for one, other in pairwise(found)), found
    for upto in (0, 7, 30, 70):
        gaps = [one for start, stop in spans.gaps(upto) for one in range(start, stop)]
        assert gaps == [one for one in range(upto) if one not in plain]
    assert Spans.decode(spans.encode()) == spans
    assert decode_used(encode_used({"train": (SPEC, spans)})) == {"train": (SPEC, spans)}


def test_ten_thousand_ranks_fit_into_an_order() -> None:
    """Each has used a part of its lease of a thousand samples."""
    spans = Spans()
    for rank in range(10_000):
        spans.add(rank * 1000, rank * 1000 + 500 + rank % 97)
    text = encode_used({"train": (SPEC, spans)})
    assert len(text) < 60_000
    assert decode_used(text)["train"][1] == spans


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "{}",
        '[["train"]]',
        '[["train",1,1,1,-1,"00"]]',
        "[[]]",
        "[",
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_used(text)
