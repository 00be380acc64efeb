"""State to items: DCP's names and chunks, and nothing lost of what tensors there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elasticrun.snapshots.dcp.image import arrange
from elasticrun.snapshots.dcp.items import flatten, in_order, is_array, pieces, serialise
from elasticrun.snapshots.dcp.loading import deserialise
from elasticrun.snapshots.shm.layout import ItemKind
from elasticrun.training.checkpointing.state import TrainingState


def many() -> dict[str, Any]:
    """Tensors of all sorts, and values of all sorts."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.ones(5, dtype=torch.bfloat16)
    return {
        "model": {"w": base, "columns": base.t()[1:], "tied": tied, "again": tied},
        "odd": {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "flag": torch.tensor(True),
        },
        "nested": [{"lr": 0.1, "t": torch.ones(2)}, {"lr": 0.2, "t": torch.zeros(2)}],
        "words": ["a", "b"],
        "number": 7,
        "__rank3": {"rng": torch.arange(9, dtype=torch.uint8), "at": 5},
    }


def test_names_kinds_and_chunks_are_those_of_torch() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(many(), None, True)
    plan = planner.create_local_plan()
    found = {one.item.fqn: one.item for one in pieces(many(), "__rank3")}
    assert found.keys() == {item.index.fqn for item in plan.items}
    for item in plan.items:
        mine = found[item.index.fqn]
        assert mine.path == tuple(plan.planner_data[mine.fqn])
        if item.tensor_data is None:
            assert mine.kind is ItemKind.BYTES
            continue
        assert mine.shape == tuple(item.tensor_data.size)
        assert mine.offsets == tuple(item.tensor_data.chunk.offsets)
        assert mine.sizes == tuple(item.tensor_data.chunk.sizes)
        assert f"torch.{mine.dtype}" == str(item.tensor_data.properties.dtype)


def test_pieces_are_the_tensors_and_not_copies() -> None:
    state = many()
    found = {one.item.fqn: one.value for one in pieces(state)}
    assert found["model.w"].data_ptr() == state["model"]["w"].data_ptr()
    assert found["model.columns"].stride() == (1, 6)
    assert found["model.tied"].data_ptr() == found["model.again"].data_ptr()
    assert found["number"] == 7


def test_only_what_is_below_its_key_is_a_ranks_own() -> None:
    own = [one.item.fqn for one in pieces(many(), "__rank3") if one.item.own]
    assert own == ["__rank3.rng", "__rank3.at"]
    assert not any(one.item.own for one in pieces(many(), "__rank4"))


def test_order_is_own_first_and_tensors_before_values() -> None:
    ordered = [one.item for one in in_order(pieces(many(), "__rank3"))]
    groups = [(item.kind is ItemKind.BYTES, not item.own) for item in ordered]
    assert groups == sorted(groups)
    assert ordered[0].fqn == "__rank3.rng"


def test_a_tensor_that_is_no_array_is_an_opaque_value() -> None:
    sparse = torch.eye(3).to_sparse()
    assert not is_array(sparse)
    (piece,) = pieces({"s": sparse})
    assert piece.item.kind is ItemKind.BYTES
    assert torch.equal(deserialise(serialise(piece.value)).to_dense(), torch.eye(3))


def test_what_has_no_elements_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"a\.b is on the meta device"):
        pieces({"a": {"b": torch.empty(3, device="meta")}})


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})


def test_ranks_that_share_an_optimizer_among_them_are_no_replicas() -> None:
    """As ZeRO does beside DDP: each rank has the optimizer's state of some of the parameters."""

    def content(layer: int) -> int:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model[layer].parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        parts = {"model": model, "optim": optimizer}
        return arrange(TrainingState(parts, 0).take().pieces, 1 << 16).content

    assert content(0) == content(0) != content(1)
