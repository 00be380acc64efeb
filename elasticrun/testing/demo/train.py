"""The training script of `elasticrun demo`: a small network learns to tell three spirals apart.

An ordinary script for data-parallel training on the CPU, with a Checkpointer. `step` reports each
step to the demo. The demo controls it with two files in the working folder: `finish` ends the
training, and `mistake` makes rank 0 call a barrier that no other rank calls.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elasticrun.testing import step
from elasticrun.testing.demo import ACCURACY, FINISH, MISTAKE
from elasticrun.training import Checkpointer

ARMS = 3
BATCH = 64
RATE = 0.003


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three noisy spirals, and the spiral of each."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    noise = 0.1 * torch.randn(count, generator=random)
    angle = 2 * math.pi * (radius + arm / ARMS) + noise
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1) * 2, arm


def network() -> nn.Module:
    """Two hidden layers: 17,000 weights."""
    return nn.Sequential(
        *(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, ARMS))
    )


def average(model: nn.Module, finish: bool) -> bool:
    """Average the gradients of all ranks. Returns whether a rank wants to finish."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([*(each.flatten() for each in gradients), torch.tensor([float(finish)])])
    dist.all_reduce(flat)
    at = 0
    for each in gradients:
        each.copy_(flat[at : at + each.numel()].view_as(each) / dist.get_world_size())
        at += each.numel()
    return bool(flat[-1] > 0)


def main() -> None:
    """Train from the newest snapshot, if there is one, until told to finish; then test."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    ckpt = Checkpointer("checkpoints", model=model, optim=optimizer, every_steps=10, rng=False)
    number = ckpt.restore()
    finished = False
    while not finished:
        if rank == 0 and os.path.exists(MISTAKE):
            os.remove(MISTAKE)
            dist.barrier()  # the mistake: no other rank calls it
        points, arms = spirals(BATCH, seed=number * 1000 + rank)
        loss = nn.functional.cross_entropy(model(points), arms)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        finished = average(model, finish=os.path.exists(FINISH))
        optimizer.step()
        number += 1
        ckpt.step(number)
        step(number)
    if rank == 0:
        points, arms = spirals(2000, seed=-1)
        right = (model(points).argmax(1) == arms).float().mean()
        Path(ACCURACY).write_text(f"{float(right):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
