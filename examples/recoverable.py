"""Trains with ranks that keep their process when another rank or node fails.

    elasticrun --nnodes=1:4 --nproc-per-node=2 examples/recoverable.py

Kill a rank (`kill -9`): the others call `train` again, with the model that they have kept, and
continue from the last completed step.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticrun import training


def build_model() -> nn.Module:
    """Stands for all setup that takes long and does not depend on the number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


@training.recoverable
def train(steps: int, pause: float) -> None:
    """Runs from its first line in every round; of the previous round only what `keep` returned
    remains."""
    dist.init_process_group("gloo")
    model = training.keep("model", build_model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    ckpt = training.Checkpointer("checkpoints", model=model, optim=optimizer, every_steps=1)
    start = ckpt.restore()
    print(f"rank={dist.get_rank()} of {dist.get_world_size()} pid={os.getpid()} from step {start}")
    for step in range(start, steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        ckpt.step(step + 1)
        time.sleep(pause)
    total = sum(value.double().sum().item() for value in model.parameters())
    print(f"rank={dist.get_rank()} weights={total!r}")
    del ddp  # before its group: torch may hang otherwise
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each step")
    args = parser.parse_args()
    train(args.steps, args.pause)
