"""Random states are part of a snapshot: what is drawn after a restore is what would have been."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.state import RNG, RandomPart
from elasticrun.wire.snapshots import NeedSegment, Remark
from tests.further import cases
from tests.training.checkpointing.played import PlayedAgent, playing
from tests.training.checkpointing.ranks import USUAL, fork_server, life

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, DIES_AT = 6, 4


@pytest.fixture(autouse=True)
def states_of_the_other_tests() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> list[float]:
    """One number of each generator; of those that draw two and keep one, a second one is left."""
    return [random.gauss(0, 1), float(np.random.randn()), torch.randn(1).item()]


def new(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, n={"x": 1}, **{**USUAL, **options})


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_what_is_drawn_after_a_restore_is_what_would_have_been(
    source: str, agent: PlayedAgent, tmp_path: Path, monkeypatch
) -> None:
    if source == "storage":
        monkeypatch.delenv("ELASTICRUN_SNAPSHOTS")
    seed(1)
    one = new(tmp_path, persist_every_steps=1)
    one.restore()
    draw()
    one.step(1)
    expected = draw() + draw()
    one.close()
    if source == "memory":
        agent.next_life(1, 1)
        monkeypatch.setenv("ELASTICRUN_SNAPSHOTS", agent.place(0))
    seed(2)
    other = new(tmp_path)
    draw()  # a model is made
    assert other.restore() == 1
    assert other.stats.source == source
    assert draw() + draw() == expected
    draw()  # a loader is made, and what was drawn already is passed over
    other.restore_rng()
    assert draw() + draw() == expected
    other.close()


def test_a_snapshot_draws_nothing_and_keeps_its_layout(agent: PlayedAgent, tmp_path: Path) -> None:
    seed(1)
    expected = [draw() for _ in range(4)]
    seed(1)
    ckpt = new(tmp_path)
    drawn = []
    for step in range(1, 5):
        drawn.append(draw())
        ckpt.step(step)
    assert drawn == expected
    assert ckpt.stats.snapshots == 4
    assert len(agent.of(NeedSegment)) == 1
    ckpt.close()


@pytest.mark.parametrize(("saved", "wanted"), [(True, False), (False, True), (False, False)])
def test_left_out_they_are_as_the_script_has_them(
    saved: bool, wanted: bool, agent: PlayedAgent, tmp_path: Path
) -> None:
    """So it is with a snapshot of an older version, too, which has none; that is said."""
    seed(1)
    one = new(tmp_path, rng=saved)
    one.step(1)
    agent.next_life(1, 1)
    seed(2)
    expected = draw()
    seed(2)
    other = new(tmp_path, rng=wanted)
    assert other.restore() == 1
    assert draw() == expected
    told = [m.text for m in (agent.until(Remark) if wanted else agent.of(Remark))]
    text = "random states are not restored: "
    assert told == ([text + "those of rank 0 were not saved"] if wanted else [])
    one.close()
    other.close()


def test_any_reader_of_torch_finds_them_as_bytes(tmp_path: Path) -> None:
    ckpt = new(tmp_path, persist_every_steps=1)
    ckpt.step(1)
    ckpt.close()
    found: dict[str, Any] = {"n": {"x": 0}}
    dcp.load(found, checkpoint_id=str(tmp_path / "step-000000001"), no_dist=True)
    assert found == {"n": {"x": 1}}
    states = RandomPart(lambda _: None).loose()
    found = {"__rank0": {RNG: torch.zeros_like(states)}}
    dcp.load(found, checkpoint_id=str(tmp_path / "step-000000001"), no_dist=True)
    assert torch.equal(found["__rank0"][RNG], states)
    assert states.dtype == torch.uint8
    assert 10_000 < states.numel() < 12_000


def test_another_generator_of_numpy_is_told(agent: PlayedAgent, tmp_path: Path) -> None:
    before: Any = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        ckpt = new(tmp_path)
        ckpt.restore()
        ckpt.step(1)
        ckpt.step(2)
    finally:
        np.random.set_bit_generator(before)
    assert [m.text for m in agent.until(Remark)] == [
        "the state of numpy's global generator, a PCG64, is not saved"
    ]
    ckpt.close()


class Device:
    """A module of devices as torch.cuda is one: two of them, each with a state of 16 bytes."""

    def __init__(self, current: int, initialised: bool = True) -> None:
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(2)]
        self.is_initialized = lambda: initialised
        self.current_device = lambda: current
        self.device_count = lambda: len(self.states)

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state


def test_a_rank_on_another_device_takes_its_state_along(monkeypatch) -> None:
    monkeypatch.setattr(torch, "xpu", Device(0))
    saved = RandomPart(lambda _: None).loose()
    for initialised, states in ((True, [1, 0]), (False, [0, 1])):
        monkeypatch.setattr(torch, "xpu", now := Device(1, initialised))
        now.states = [torch.full((16,), 9, dtype=torch.uint8) for _ in range(2)]
        part = RandomPart(pytest.fail)
        part.adopt({(): saved})
        part.put_back()
        assert [int(state[0]) for state in now.states] == states
    monkeypatch.setattr(torch, "xpu", Device(0, initialised=False))
    assert RandomPart(lambda _: None).loose().numel() < saved.numel()


def test_their_name_is_taken(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="reserved for random states"):
        new(tmp_path).per_rank(RNG, {})


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with fork_server("torch.distributed.fsdp", "torch._dynamo"):
        yield


def train(folder: str, kind: str, dies: bool) -> tuple[int, list[float]]:
    """Data and noise from the global generator, which differs from rank to rank."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    ckpt = Checkpointer(folder, model=model, optim=optimizer, **USUAL)
    start = ckpt.restore()
    for step in range(start, STEPS):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step + 1)
        if dies and step + 1 == DIES_AT:
            break
    ckpt.close()
    weights = [getattr(p, "_local_tensor", p).detach().flatten() for p in model.parameters()]
    del model, optimizer
    return start, torch.cat(weights).tolist()


@pytest.mark.parametrize("kind", cases(["ddp", "fsdp2"], kept=["ddp"]))
def test_a_training_that_was_cut_off_ends_as_well(kind: str, server: None, tmp_path: Path) -> None:
    with playing(2) as agent:
        never = life(train, str(tmp_path), kind, False, world=2, agent=agent)
    with playing(2) as agent:
        life(train, str(tmp_path), kind, True, world=2, agent=agent)
        agent.next_life(DIES_AT, 2)
        again = life(train, str(tmp_path), kind, False, world=2, agent=agent)
    assert [start for start, _ in again] == [DIES_AT] * 2
    assert [weights for _, weights in again] == [weights for _, weights in never]


def test_another_number_of_ranks_has_fresh_ones_and_says_so(tmp_path: Path, server: None) -> None:
    with playing(2) as agent:
        life(steps_of_two, str(tmp_path), world=2, agent=agent)
        agent.next_life(2, 2, ranks=1)
        assert life(steps_of_two, str(tmp_path), world=1, agent=agent) == [(2, True)]
        assert [m.text for m in agent.until(Remark)] == [
            "random states are not restored: the job had 2 ranks before"
        ]


def steps_of_two(folder: str) -> tuple[int, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        fresh = torch.get_rng_state()
        ckpt = new(Path(folder))
        start = ckpt.restore()
        same = torch.equal(torch.get_rng_state(), fresh)
        torch.rand(int(os.environ["RANK"]) + 1)
        ckpt.step(start + 1)
        ckpt.step(start + 2)
        ckpt.close()
    return start, same
