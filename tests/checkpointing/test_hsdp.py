"""HSDP: shards in one dimension of the mesh, copies in the other. A rank's shard stands on another
node too, under the same content key, and either of them is as good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from elasticrun.training import Checkpointer
from elasticrun.wire.snapshots import NeedSegment, Restored, WantShard
from tests.checkpointing.played import playing
from tests.checkpointing.ranks import Ranks, fork_server
from tests.torches import DTensor, fully_shard

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORLD = 4


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with fork_server("torch.distributed.fsdp", "torch._dynamo"):
        yield


def two_steps(folder: str, seed: int) -> tuple[int, list[list[float]], list[list[float]]]:
    """From what is restored, two steps on: where that was, and this rank's part of the model and of
    the optimizer's state before and after."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(
        folder,
        model=model,
        optim=optimizer,
        every_steps=1,
        persist_every_seconds=None,
        on_busy="wait",
    )

    def parts() -> list[list[float]]:
        moments = [of["exp_avg"] for of in optimizer.state.values()]
        every = [*model.parameters(), *moments]
        assert all(isinstance(one, DTensor) for one in every)
        return [one.to_local().flatten().tolist() for one in every if isinstance(one, DTensor)]

    start = ckpt.restore()
    before = parts()
    for step in (start + 1, start + 2):
        data = torch.Generator().manual_seed(step * WORLD + dist.get_rank())
        model(torch.randn(4, 8, generator=data)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
    assert ckpt.stats.failed == 0, ckpt.stats.error
    after = parts()
    ckpt.close()
    return start, before, after


def test_a_copy_of_a_shard_stands_for_it(tmp_path: Path) -> None:
    """Ranks 2 and 3 are lost with their memory: 0 and 1 have the same, bit by bit."""
    with playing(WORLD) as agent:
        places = [agent.place(rank) for rank in range(WORLD)]
        first = Ranks(two_steps, str(tmp_path), 1, world=WORLD, places=places).results()
        contents = [agent.of(NeedSegment, rank)[-1].content for rank in range(WORLD)]
        assert contents[:2] == contents[2:]
        assert contents[0] != contents[1]
        agent.next_life(2, WORLD)
        agent.no_shard = {2, 3}
        second = Ranks(two_steps, str(tmp_path), 2, world=WORLD, places=places).results()
        assert [(start, before) for start, before, _ in second] == [(2, end) for _, _, end in first]
        assert first[0][2] == first[2][2] != first[1][2] == first[3][2]
        restored = {one.source for one in agent.of(Restored)[WORLD:]}
        assert restored == {"memory"}
        assert {one.rank for one in agent.of(WantShard, 3)} >= {1, 3}
