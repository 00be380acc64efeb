"""What makes a restore quick comes to the same as the long way."""

from __future__ import annotations

import gc
import os
import tracemalloc
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

from elasticrun.snapshots.dcp.garbage import no_collection
from elasticrun.snapshots.dcp.image import arrange
from elasticrun.snapshots.dcp.items import Flat, flatten
from elasticrun.snapshots.dcp.restoring import Cover
from elasticrun.snapshots.shm.layout import Item, ItemKind, Layout, decode, lay_out
from elasticrun.snapshots.shm.segment import VERSION
from elasticrun.training.checkpointing import restore
from elasticrun.training.checkpointing.agent_connection import AgentConnection
from elasticrun.training.checkpointing.capture import SnapshotTaker
from elasticrun.training.checkpointing.parts import StateError, state_of, unflatten
from elasticrun.training.checkpointing.restore import MemoryRestore, fetch_order
from elasticrun.training.checkpointing.state import KnownLayout, TrainingState
from elasticrun.wire.snapshots import RankHere, Resume, WantShard
from elasticrun.wire.types import RoundName
from tests.harness import program
from tests.training.checkpointing.played import playing


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
    lambda: torch.compile(small()),
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


@pytest.mark.slow
def test_names_cost_no_import_of_the_compiler() -> None:
    """That takes half a second, of every life of every rank."""
    text = (
        "import sys, torch\n"
        "from elasticrun.training.checkpointing.state import KnownLayout, TrainingState\n"
        "model = torch.nn.Linear(2, 2)\n"
        "state = TrainingState({'model': model}, 0)\n"
        "assert len(state.take().tensors) == 2\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = program("-c", text)
    assert not done.returncode, done.stderr


def a_state(seed: int = 0, steps: int = 1, **more: Any) -> TrainingState:
    torch.manual_seed(seed)
    model = small()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 4)).sum().backward()
        optim.step()
    state = TrainingState(
        {"model": model, "optim": optim, "n": {"x": 1, "t": torch.ones(3)}, **more}, 0
    )
    state.add_own("own", {"random": torch.ones(5, dtype=torch.uint8)}, None)
    return state


def known(state: TrainingState, layout: Layout, filled: bool) -> KnownLayout:
    """What a restore leaves of this layout, having filled all tensors that fit, or none."""
    flat = flatten(state.whole()) if filled else Flat({}, {})
    there = ((item.fqn, item.sizes, flat.values.get(item.fqn)) for item in layout.tensors)
    fit = {n: v for n, size, v in there if isinstance(v, torch.Tensor) and v.shape == size}
    return KnownLayout(layout, fit)


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


def turn(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("0.weight").t_()


def halve(module: nn.Module) -> None:
    module.get_buffer("1.running_mean").resize_(2)


def see_otherwise(module: nn.Module) -> None:
    weight = module.get_parameter("2.0.weight")
    weight.data = weight.data.view(4, 2)


@pytest.mark.parametrize("change", [turn, halve, see_otherwise])
def test_a_tensor_that_is_seen_otherwise_is_found_anew(change: Any) -> None:
    module = small()
    state = TrainingState({"model": module}, 0)
    state.take()
    plan = state.take()
    change(module)
    found = state.take()
    assert found is not plan
    now = dict(zip((item.fqn for item in found.items), found.tensors, strict=True))
    assert all(torch.equal(now[f"model.{n}"], value) for n, value in module.state_dict().items())


def test_an_optimizer_of_a_parameter_that_was_replaced_is_told_of() -> None:
    module = nn.Linear(4, 4)
    optim = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optim.step()
    state = TrainingState({"model": module, "optim": optim}, 0)
    state.take()
    module.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(
        StateError, match=r"optim has a parameter of shape \(4, 4\) that is no longer in any"
    ):
        state.take()


def test_plain_values_that_change_are_not_kept() -> None:
    values = {"order": list(range(20_000)), "small": [0] * 1000, "same": "word" * 100}
    state = TrainingState({"n": values}, 0)

    def snapshot() -> list[bytes]:
        values["order"] = [*values["order"][1:], 0]
        values["small"] = [int(values["small"][0]) + 1] * 1000
        return state.serialised(state.take().values)

    before = snapshot()
    tracemalloc.start()
    try:
        for _ in range(50):
            after = snapshot()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    assert sum(any(one is other for other in before) for one in after) == 1


def chunk(rank: int, world: int) -> Item:
    """This rank's share of 64 * 63 rows."""
    rows = 64 * 63 // world
    what = ("w", ("w",), ItemKind.SHARD, False, "uint8")
    return Item(*what, (64 * 63, 1), (rank * rows, 0), (rows, 1), 704, rows, 100)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(("old", "new"), [(64, 32), (64, 63), (8, 4), (4, 8), (2, 1)])
def test_no_more_shards_are_asked_for_than_needed(old: int, new: int, here: bool) -> None:
    """But for one that lies here."""
    shards = [lay_out([chunk(rank, old)], 4096, "2.13") for rank in range(old)]
    for rank in range(new):
        order = fetch_order(rank, new, old, here=here)
        assert sorted(order) == list(range(old))
        cover, asked = Cover([chunk(rank, new)]), 0
        while not cover.whole:
            cover.offer(order[asked], shards[order[asked]])
            asked += 1
        assert asked <= len({move.source for move in cover.moves}) + here


def test_a_rank_asks_first_where_what_it_needs_was() -> None:
    with playing(8) as agent:
        lines = [AgentConnection(agent.place(rank)) for rank in range(8)]
        for rank, line in enumerate(lines):
            line.request(RankHere(VERSION, rank, rank, 8, "/nowhere", 3, 0), Resume)
            state = TrainingState({"x": {"t": torch.full((5,), 7.0)}}, rank)
            SnapshotTaker(line, state, 2, RoundName(1, 1, "a")).take(1, persist=False, wait=0.0)
        agent.next_life(1, 8, ranks=4)
        tensor = torch.zeros(5)
        resume, _ = lines[3].request(agent.of(RankHere)[3], Resume)
        MemoryRestore(lines[3], TrainingState({"x": {"t": tensor}}, 3), resume).run(4)
        assert torch.equal(tensor, torch.full((5,), 7.0))
        assert [asked.rank for asked in agent.of(WantShard)] == [6]
        for line in lines:
            line.close()


BUFFER = getattr(nn, "Buffer", nn.Parameter)(torch.ones(1))  # torch 2.4 has none


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
        {"sparse": torch.eye(3).to_sparse(), "buffer": BUFFER},
    ],
)
def test_states_are_flattened_as_torch_does(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    found = flatten(state)
    assert list(found.values) == list(values)
    assert found.paths == paths
    assert all(found.values[name] is value for name, value in values.items())


@pytest.mark.parametrize(
    "state",
    [
        {"lr_lambdas": [{}], "last_epoch": 3},  # a LambdaLR of functools.partial's
        {"x": [{}, {"a": 1}]},
        {"x": [[{}], 3, {}]},
        {"y": {}, "z": []},
        {"e": [{"b": {}}, {"a": [1, 2]}]},
        {"deep": {"er": {"empty": {}, "full": (1, 2)}}},
    ],
)
def test_what_leaves_no_trace_in_a_checkpoint_comes_back_too(state: dict[str, Any]) -> None:
    flat = flatten(state)
    assert unflatten({flat.paths[fqn]: value for fqn, value in flat.values.items()}, state) == state


def test_several_threads_copy_what_one_does(monkeypatch) -> None:
    monkeypatch.setattr(restore, "threads_for", lambda nbytes: 3)
    shapes = [(1000, 7), (), (0, 3), (5,), (400, 400), (3, 3)]
    for dtype in (torch.float32, torch.bfloat16):
        sources = [torch.randn(shape).to(dtype) for shape in shapes]
        sources.append(torch.randn(6, 300).t())  # not in a row
        targets = [torch.zeros(s.shape) for s in sources]
        parameter = nn.Parameter(torch.zeros(1000, 7))
        restore.copy_in([*targets, parameter], [*sources, sources[0]])
        assert all(torch.equal(t, s.float()) for t, s in zip(targets, sources, strict=True))
        assert torch.equal(parameter.data, sources[0].float())


def test_what_one_thread_cannot_copy_is_raised(monkeypatch) -> None:
    monkeypatch.setattr(restore, "threads_for", lambda nbytes: 2)
    with pytest.raises(RuntimeError, match="size"):
        restore.copy_in([torch.zeros(9), torch.zeros(3)], [torch.ones(9), torch.ones(4)])


def test_whatever_a_thread_raises_is_raised(monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise IndexError("no such place")

    monkeypatch.setattr(restore, "threads_for", lambda nbytes: 2)
    monkeypatch.setattr(restore, "copy_all", fails)
    with pytest.raises(IndexError, match="no such place"):
        restore.copy_in([torch.zeros(9)], [torch.ones(9)])


def test_ranks_share_the_cores_of_their_node(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    found = []
    for local in ("1", "2", "4", "8", "none"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        found.append(restore.threads_for(1 << 40))
    assert found == [6, 3, 1, 1, 6]
    assert restore.threads_for(1000) == 1


def test_garbage_is_collected_again_afterwards() -> None:
    def collects() -> bool:
        with no_collection():
            return gc.isenabled()

    assert (collects(), gc.isenabled()) == (False, True)
