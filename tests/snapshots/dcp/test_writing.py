"""The slower way: torch's own bytes, item by item, out of a slot."""

from __future__ import annotations

import io

import pytest
import torch

from elasticrun.snapshots.dcp.writing import write_data
from elasticrun.snapshots.shm.layout import items_of
from tests.snapshots.dcp.checkpoints import bits, saved
from tests.snapshots.dcp.slots import HandMade


def test_each_item_stands_where_it_is_said_to() -> None:
    tensor = torch.randn(7, 3).bfloat16()
    one = HandMade().tensor("w", is_=tensor).tensor("none", is_=torch.zeros(0, 2)).value("v", is_=5)
    segment, layout = one.segment(), one.layout()
    out = io.BytesIO()
    values = [memoryview(saved(5))]
    places = write_data(items_of(layout, True), segment.payload(0), values, out.write)
    found = [torch.load(io.BytesIO(out.getvalue()[a : a + n])) for a, n in places]
    assert bits(found[0]) == bits(tensor)
    assert bits(found[1]) == bits(torch.zeros(0, 2))
    assert found[2] == 5
    assert sum(n for _, n in places) == len(out.getvalue())


def test_what_cannot_be_written_is_heard() -> None:
    def full(_data: memoryview) -> None:
        raise OSError("no room")

    one = HandMade().tensor("w", is_=torch.ones(3))
    with pytest.raises(OSError, match="no room"):
        write_data(items_of(one.layout(), True), one.segment().payload(0), [], full)


def test_torchs_settings_are_as_they_were() -> None:
    before = torch.serialization.get_crc32_options()
    one = HandMade().tensor("w", is_=torch.ones(3))
    write_data(items_of(one.layout(), True), one.segment().payload(0), [], lambda _data: None)
    assert torch.serialization.get_crc32_options() == before
