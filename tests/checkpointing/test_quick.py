"""What makes a restore quick comes to the same as the long way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elasticrun.checkpointing import copying
from elasticrun.checkpointing.modules import state_of
from elasticrun.checkpointing.state import Known, State
from elasticrun.dcp.collecting import no_collection
from elasticrun.dcp.image import arrange
from elasticrun.dcp.items import Flat, flatten
from elasticrun.wire.layout import Layout, decode


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def wrapped() -> nn.Module:
    model = small()
    model[2] = checkpoint_wrapper(model[2])
    return model


def sharded() -> nn.Module:
    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


WAYS: list[Callable[[], nn.Module]] = [
    small,
    wrapped,
    sharded,
    lambda: DistributedDataParallel(small()),
    lambda: DistributedDataParallel(wrapped()),
    lambda: nn.Sequential(DistributedDataParallel(small()), nn.Linear(2, 2)),
    lambda: torch.compile(small()),  # type: ignore[return-value]
    lambda: nn.Sequential(torch.compile(DistributedDataParallel(small())), nn.Linear(2, 2)),
]


@pytest.mark.parametrize("make", WAYS)
def test_names_are_torchs_own(make: Callable[[], nn.Module], group: None) -> None:
    module = make()
    mine, theirs = state_of(module), get_model_state_dict(module)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].shape == value.shape
        assert mine[name].dtype == value.dtype


def test_names_cost_no_import_of_the_compiler() -> None:
    """That takes half a second, of every life of every rank."""
    text = (
        "import sys, torch\n"
        "from elasticrun.checkpointing.state import Known, State\n"
        "model = torch.nn.Linear(2, 2)\n"
        "state = State({'model': model}, 0)\n"
        "assert len(state.take().tensors) == 2\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


# ---------------------------------------------------------------- plans


def a_state(seed: int = 0, steps: int = 1, **more: Any) -> State:
    torch.manual_seed(seed)
    model = small()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 4)).sum().backward()
        optim.step()
    state = State({"model": model, "optim": optim, "n": {"x": 1, "t": torch.ones(3)}, **more}, 0)
    state.add_own("own", {"random": torch.ones(5, dtype=torch.uint8)}, None)
    return state


def known(state: State, layout: Layout, filled: bool) -> Known:
    """What a restore leaves of this layout, having filled all tensors that fit, or none."""
    flat = flatten(state.whole()) if filled else Flat({}, {})
    there = ((item.fqn, item.sizes, flat.values.get(item.fqn)) for item in layout.tensors)
    fit = {n: v for n, size, v in there if isinstance(v, torch.Tensor) and v.shape == size}
    return Known(layout, fit)


@pytest.mark.parametrize("filled", [False, True])
def test_a_plan_that_is_known_is_the_plan_that_is_made(filled: bool) -> None:
    made = a_state().take()
    layout = arrange(made.pieces, 4096)
    state = a_state(1)
    state.known = known(state, decode(layout.encode(), layout.key), filled)
    found = state.take()
    assert found.layout is not None
    assert arrange(found.pieces, 4096) == layout == found.layout
    twin = a_state(1).take()
    assert all(map(torch.equal, found.tensors, twin.tensors))
    assert found.values == twin.values
    assert state.take() is found  # and it is watched as any


@pytest.mark.parametrize(
    "other",
    [
        lambda: a_state(steps=0),
        lambda: a_state(more=3),
        lambda: a_state(n={"x": 1, "t": torch.ones(4)}),
        lambda: a_state(n={"x": torch.ones(1), "t": torch.ones(3)}),
        lambda: a_state(n={"x": 1, "t": torch.ones(3, dtype=torch.float64)}),
        lambda: a_state(n={"x": 1, "t": torch.ones(3, requires_grad=True)}),
        lambda: a_state(n={"x": 1, "u": torch.ones(3)}),
    ],
)
@pytest.mark.parametrize("filled", [False, True])
def test_a_state_that_is_another_is_not_taken_for_the_known_one(other: Any, filled: bool) -> None:
    state = other()
    layout = arrange(a_state().take().pieces, 4096)
    state.known = known(state, layout, filled)
    plan = state.take()
    assert plan.layout is None
    assert arrange(plan.pieces, 4096) == arrange(other().take().pieces, 4096) != layout


class Words(dict[str, Any]):
    """A mapping of another type."""


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1, "c": [1, 2], "d": {}, 3: {"e": None}}, "f": (1, {"g": 2})},
        {"groups": [{"lr": 0.1, "params": ["x", "y"]}, {"lr": 0.2, "params": []}]},
        {"deep": [[1, [2]], [3, [{"a": 1}]], torch.ones(1)], "flat": [[1], [[2]], (3,)]},
        {"t": torch.ones(2), "p": nn.Parameter(torch.ones(2)), "l": [torch.ones(1), 2, None]},
        {"words": Words(a=1, b={"c": torch.ones(1)}), "empty": [], "set": {1}, "seen": [{1}, {}]},
        {"sparse": torch.eye(3).to_sparse(), "buffer": nn.Buffer(torch.ones(1))},
    ],
)
def test_states_are_flattened_as_torch_does(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    found = flatten(state)
    assert list(found.values) == list(values)
    assert found.paths == paths
    assert all(found.values[name] is value for name, value in values.items())


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})


# ---------------------------------------------------------------- copies


def test_several_threads_copy_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "threads_for", lambda nbytes: 3)
    shapes = [(1000, 7), (), (0, 3), (5,), (400, 400), (3, 3)]
    for dtype in (torch.float32, torch.bfloat16):
        sources = [torch.randn(shape).to(dtype) for shape in shapes]
        sources.append(torch.randn(6, 300).t())  # not in a row
        targets = [torch.zeros(s.shape) for s in sources]
        parameter = nn.Parameter(torch.zeros(1000, 7))
        copying.copy_in([*targets, parameter], [*sources, sources[0]])
        assert all(torch.equal(t, s.float()) for t, s in zip(targets, sources, strict=True))
        assert torch.equal(parameter.data, sources[0].float())


def test_what_one_thread_cannot_copy_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "threads_for", lambda nbytes: 2)
    with pytest.raises(RuntimeError, match="size"):
        copying.copy_in([torch.zeros(9), torch.zeros(3)], [torch.ones(9), torch.ones(4)])


def test_ranks_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    found = []
    for local in ("1", "2", "4", "8", "none"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        found.append(copying.threads_for(1 << 40))
    assert found == [6, 3, 1, 1, 6]
    assert copying.threads_for(1000) == 1


def test_garbage_is_collected_again_afterwards() -> None:
    def collects() -> bool:
        with no_collection():
            return gc.isenabled()

    assert (collects(), gc.isenabled()) == (False, True)
