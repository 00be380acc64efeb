"""A recoverable training that records its entries: recovering.py KIND OUT CKPT STEPS.

It waits before step N until the number in OUT/until is higher. KIND: ddp, fsdp2, hsdp or compiled;
`fails`: rank 0 raises a ValueError at step 5 of the second round;
`hangs`: rank 0 waits in another collective than the others at step 5 of the first round;
`loop`: rank 0 does not take part in the collectives, and is in Python code when others fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elasticrun import testing, training
from tests.harness import until_file

KIND, OUT, CKPT, STEPS = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
HANG = ("hangs", 5, 0, "0")
"""Kind, step, rank, and restart count."""


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    return torch.compile(model, backend="eager") if KIND == "compiled" else model


def parallel(kept: nn.Module) -> nn.Module:
    """The model of this round; only a plain module outlives it."""
    if KIND == "fsdp2":
        return fully_shard(build())
    if KIND == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        return fully_shard(build(), mesh=mesh)
    return DistributedDataParallel(kept)


def record(start: int, kept: nn.Module) -> None:
    line = {
        "pid": os.getpid(),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "start": start,
        "kept": id(kept),
    }
    with open(OUT / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def weights(model: nn.Module) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


@training.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    kept = training.keep("model", build)
    model = parallel(kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = training.Checkpointer(CKPT, model=model, optim=optimizer, every_steps=1, rng=True)
    start = ckpt.restore()
    record(start, kept)
    if KIND == "loop" and dist.get_rank() == 0:
        while int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
            os.sched_yield()
    for step in range(start, STEPS):
        until_file(OUT / "until", lambda text: int(text) > step)  # noqa: B023
        generator = torch.Generator().manual_seed(step)
        if KIND == "fails" and step == 5 and dist.get_rank() == 0:
            assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
            raise ValueError("its own")
        if (KIND, step, dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]) == HANG:
            dist.broadcast(torch.zeros(1), src=1)
        x = torch.randn(6, 8, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        ckpt.step(step + 1)
        testing.step(step)
        training.progress(step)
    found = weights(model)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(f"weights={train()}\n", end="", flush=True)
