"""How long a place may be waited for."""

from __future__ import annotations

import pytest

from elasticrun.core.sight.hangs.stillness import MAX_PLACES, Place, Places, place_of


@pytest.mark.parametrize(
    ("line", "library", "place"),
    [
        ("train.py:88 load_shard", "", "train.py load_shard"),
        ("train.py:91 load_shard", "", "train.py load_shard"),
        ("train.py:88 save", "torch.serialization", "train.py save torch.serialization"),
        ("", "", ""),
    ],
)
def test_a_place_has_no_line_number(line: str, library: str, place: str) -> None:
    assert place_of(line, library) == place


@pytest.mark.parametrize(
    ("place", "learnt", "first", "limit"),
    [
        ("train.py load", [], False, 300.0),
        ("train.py save torch.serialization", [], False, 1800.0),
        ("train.py step torch._inductor", [], False, 1800.0),
        ("train.py main TCPStore", [], False, 600.0),
        ("train.py load", [], True, 1800.0),
        ("train.py load", [30.0, 20.0], False, 150.0),
        ("train.py load", [6.0], False, 60.0),
        ("train.py load", [2.0], False, 300.0),
        ("train.py save torch.serialization", [600.0], False, 3000.0),
        ("train.py load", [1000.0], False, 3600.0),
    ],
)
def test_limits(place: str, learnt: list[float], first: bool, limit: float) -> None:
    places = Places()
    for seconds in learnt:
        places.learn(Place(place), seconds)
    assert places.limit(Place(place), first=first) == limit
    successor = Places()
    successor.restore(places.record())
    assert successor.limit(Place(place), first=first) == limit


def test_no_more_is_remembered_than_fits() -> None:
    places = Places()
    for number in range(MAX_PLACES + 5):
        places.learn(Place(f"{number}"), 10.0)
    assert len(places.record()) == MAX_PLACES
