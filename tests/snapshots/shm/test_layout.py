"""Layouts: what is told of a snapshot's items can be believed, or is refused with a sentence."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticrun.snapshots.shm import layout
from elasticrun.snapshots.shm.layout import LINE, PAGE, Item, ItemKind, LayoutError, decode, lay_out


def tensor(name: str, *sizes: int, own: bool = False, head: int = 704, tail: int = 873) -> Item:
    """A whole float32 tensor."""
    zeros = (0,) * len(sizes)
    return Item(
        *(name, tuple(name.split(".")), ItemKind.TENSOR, own, "float32"),
        *(sizes, zeros, sizes, False, 0, head, 4 * math.prod(sizes), tail),
    )


def value(name: str, *, own: bool = False) -> Item:
    return Item(name, (name,), ItemKind.BYTES, own)


items = st.lists(
    st.one_of(
        st.builds(
            lambda n, own, sizes, head, tail: tensor(
                f"t{n}", *sizes, own=own, head=head, tail=tail
            ),
            st.integers(0, 10**6),
            st.booleans(),
            st.lists(st.integers(0, 7), max_size=3),
            st.integers(0, 2000),
            st.integers(0, 2000),
        ),
        st.builds(lambda n, own: value(f"v{n}", own=own), st.integers(0, 10**6), st.booleans()),
    ),
    max_size=20,
)


@given(items, st.integers(0, 100_000))
def test_what_is_laid_out_comes_back_and_nothing_overlaps(given: list[Item], room: int) -> None:
    made = lay_out(given, room, "2.13.0")
    assert decode(made.encode()) == made
    assert len(made.items) == len(given)
    assert made.values_capacity >= room
    ends = {True: made.own_bytes, False: made.own_bytes + made.shared_bytes}
    at = 0
    for item in made.tensors:
        assert item.extent % LINE == 0
        assert at <= item.extent
        at = item.extent + item.length
        assert at <= ends[item.own]
    assert made.own_bytes % PAGE == made.shared_bytes % PAGE == made.slot_bytes % PAGE == 0
    assert [i.own for i in made.tensors] == sorted((i.own for i in made.tensors), reverse=True)
    assert [i.own for i in made.values] == sorted((i.own for i in made.values), reverse=True)


def test_content_is_what_is_shared_wherever_it_lies() -> None:
    one = lay_out([tensor("w", 4), tensor("rng", 8, own=True), value("lr")], 64, "2.13.0")
    other = lay_out([value("lr"), tensor("w", 4)], 640, "2.14.0")
    assert one.content == other.content != 0
    assert one.key != other.key
    assert one.content != lay_out([tensor("w", 5), value("lr")], 64, "2.13.0").content


def test_a_chunk_is_not_another_chunk() -> None:
    def chunk(at: int) -> Item:
        return Item(
            *("w", ("w",), ItemKind.SHARD, False, "float32", (8,), (at,), (4,), False),
            *(0, 704, 16, 873),
        )

    contents = {lay_out([chunk(at)], 0, "2.13.0").content for at in (0, 4)}
    assert len(contents) == 2


def plain() -> list[object]:
    made = lay_out([tensor("a", 4, own=True), tensor("b", 4), value("v")], 64, "2.13.0")
    found = json.loads(zlib.decompress(made.encode()))
    assert isinstance(found, list)
    return found


def encoded(changed: object) -> bytes:
    return zlib.compress(json.dumps(changed).encode())


def test_the_helper_of_this_test_changes_nothing() -> None:
    assert len(decode(encoded(plain())).items) == 3


FORMS, ROWS, NAMES = 5, 6, 7
"""Places in a layout's plain form."""


@pytest.mark.parametrize(
    ("where", "to"),
    [
        ((ROWS, 0, 1), 10**6),  # an extent beyond its stretch
        ((ROWS, 0, 1), 8),  # at no line
        ((ROWS, 1, 1), 0),  # a shared one among the own
        ((ROWS, 0, 1), True),
        ((ROWS, 0, 0), 3),  # no such form
        ((ROWS, 0, 0), -1),
        ((ROWS, 0, 0), "0"),
        ((ROWS, 0, 2), 1.5),
        ((ROWS, 0, 2), ["a"]),
        ((ROWS, 0), "row"),
        ((ROWS, 0), []),
        ((ROWS,), 7),
        ((FORMS, 0, 8), 15),  # a size of no type
        ((FORMS, 0, 8), -16),
        ((FORMS, 0, 4), [1]),  # a chunk beyond its tensor
        ((FORMS, 0, 3), [4, 4]),
        ((FORMS, 0, 3), 4),
        ((FORMS, 0, 0), "picture"),
        ((FORMS, 0, 1), 1),
        ((FORMS, 0, 2), None),
        ((FORMS, 0, 6), "no"),
        ((FORMS, 0), []),
        ((FORMS,), {}),
        ((NAMES,), {"3": "c"}),
        ((NAMES,), {"-1": "c"}),
        ((NAMES,), {"0": 7}),
        ((NAMES,), {"x": "c"}),
        ((NAMES,), []),
        ((1,), 5),
        ((2,), -4096),
        ((0,), 2),
    ],
)
def test_what_cannot_be_true_is_refused(where: tuple[int, ...], to: object) -> None:
    changed = plain()
    inner: Any = changed
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = to
    with pytest.raises(LayoutError):
        decode(encoded(changed))


def test_values_of_one_rank_stand_before_those_of_all() -> None:
    changed: Any = plain()
    own = [*changed[FORMS][2]]
    own[1] = True
    changed[FORMS].append(own)
    changed[ROWS].append([3, 0, "other"])
    with pytest.raises(LayoutError):
        decode(encoded(changed))


def test_a_name_that_does_not_follow_from_the_path_is_kept() -> None:
    odd = tensor("a.b", 4)._replace(fqn="another")
    made = lay_out([tensor("a", 4), odd, value("v")], 64, "2.13.0")
    for key in (None, made.key):
        assert [item.fqn for item in decode(made.encode(), key).items] == ["a", "another", "v"]


def test_what_is_believed_by_its_key_is_the_same() -> None:
    made = lay_out([tensor("a", 4, own=True), tensor("b.0", 4), value("v")], 64, "2.13.0")
    known = decode(made.encode(), made.key)
    assert known == made == decode(made.encode())
    assert (known.key, known.content) == (made.key, made.content)
    with pytest.raises(LayoutError, match="not the expected one"):
        decode(made.encode(), made.key ^ 1)


@pytest.mark.parametrize(
    "bad", [b"", b"x", encoded([1]), encoded({}), encoded([1, 0, 0, 0, [], [], {}])]
)
def test_what_is_no_layout_is_refused(bad: bytes) -> None:
    with pytest.raises(LayoutError):
        decode(bad)


def test_a_cut_or_endless_one_is_refused(monkeypatch) -> None:
    whole = lay_out([tensor("a", 4)], 0, "2.13.0").encode()
    with pytest.raises(LayoutError):
        decode(whole[:-3])
    monkeypatch.setattr(layout, "MAX_LAYOUT_BYTES", 1000)
    with pytest.raises(LayoutError):
        decode(zlib.compress(b" " * 1_000_000))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(LayoutError):
        decode(zlib.compress(noise))
