"""Sets of positions as spans, and what was used of all datasets as one text.

A position counts samples over all epochs of a dataset, with each shard as long as the longest: the
k-th shard starts at position k x size. The text is in the record, in the order that writes a
checkpoint and in its manifest; only this module reads it.
"""

from __future__ import annotations

import base64
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from elasticrun.wire.messages import DatasetSpec, batched
from elasticrun.wire.types import INT64


class Spans:
    """A set of integers of at least 0. Adding a span costs O(log n), plus moving the later ones."""

    def __init__(self, edges: Iterable[int] = ()) -> None:
        """`edges`: start and end of each span, ascending."""
        self._edges = list(edges)

    def add(self, start: int, stop: int) -> None:
        """Add the integers from `start` to `stop` - 1."""
        if start >= stop:
            return
        low, high = bisect_left(self._edges, start), bisect_right(self._edges, stop)
        self._edges[low:high] = [start] * (low % 2 == 0) + [stop] * (high % 2 == 0)

    def gaps(self, upto: int) -> list[tuple[int, int]]:
        """The spans below `upto` that are not in the set."""
        edges = [0, *self._edges[: bisect_left(self._edges, upto)]]
        if len(edges) % 2:
            edges.append(upto)
        return [(start, stop) for start, stop in batched(tuple(edges)) if start < stop]

    def copy(self) -> Spans:
        return Spans(self._edges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return batched(tuple(self._edges))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._edges == other._edges

    def __repr__(self) -> str:
        return f"Spans({self._edges})"

    def encode(self) -> str:
        """The differences between the edges, seven bits in a byte, in base 85."""
        data, before = bytearray(), 0
        for edge in self._edges:
            left, before = edge - before, edge
            while left > 127:
                data.append(left & 127 | 128)
                left >>= 7
            data.append(left)
        return base64.b85encode(bytes(data)).decode()

    @classmethod
    def decode(cls, text: str) -> Spans:
        """The inverse of `encode`. Raises ValueError."""
        edges: list[int] = []
        at = number = shift = 0
        for byte in base64.b85decode(text):
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                if (number < 1 and edges) or at + number > INT64:
                    raise ValueError("the edges of spans do not ascend")
                at += number
                edges.append(at)
                number = shift = 0
        if shift or len(edges) % 2:
            raise ValueError("a span has no end")
        return cls(edges)


def encode_used(used: Mapping[str, tuple[DatasetSpec, Spans]]) -> str:
    """What was used of each dataset, as a text; "" if there is no dataset."""
    if not used:
        return ""
    rows = [[*msgspec.structs.astuple(spec), spans.encode()] for spec, spans in used.values()]
    return json.dumps(rows, separators=(",", ":"))


def decode_used(text: str) -> dict[str, tuple[DatasetSpec, Spans]]:
    """The inverse of `encode_used`. Raises ValueError."""
    rows: Any = json.loads(text) if text else []
    if not isinstance(rows, list):
        raise ValueError("it does not list datasets")
    try:
        specs = [(msgspec.convert(row[:-1], _Row), str(row[-1])) for row in rows]
    except (msgspec.ValidationError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"it does not name datasets: {error}") from None
    return {row[0]: (DatasetSpec(*row), Spans.decode(spans)) for row, spans in specs}


_Row = tuple[str, int, int, int, int]
