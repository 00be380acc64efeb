"""DDP on a small regression, written for torchrun; after a failure it starts over.

`snapshots_ddp.py` is this script with five lines changed.

    torchrun --nproc-per-node=2 examples/ddp.py --steps 300
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
"""Examples per step, over all ranks."""


def network() -> nn.Module:
    """Three linear layers with 140,000 weights."""
    return nn.Sequential(
        *(nn.Linear(32, 256), nn.GELU()),
        *(nn.Linear(256, 512), nn.GELU()),
        nn.Linear(512, 1),
    )


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's examples of a step, and their targets. All ranks together always have the same
    examples in a step, whatever their number."""
    inputs = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    mine = inputs[rank::world_size]
    return mine, (mine.sin().sum(1, keepdim=True) - mine[:, :1] * mine[:, 1:2])


def digest(model: nn.Module) -> str:
    """16 hexadecimal digits that are equal for two runs with exactly the same weights."""
    weights = (p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(weights)).hexdigest()[:16]


def train(steps: int) -> None:
    """Train up to this step, and print the progress."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.manual_seed(0)
    net = DistributedDataParallel(network())
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    print(f"start rank={rank} life={life} pid={os.getpid()}\n", end="", flush=True)
    for step in range(steps):
        inputs, wanted = batch(step, rank, world_size)
        loss = nn.functional.mse_loss(net(inputs), wanted)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step={step + 1} life={life} loss={loss.item():.4f}\n", end="", flush=True)
    if rank == 0:
        print(f"done life={life} weights={digest(net)}", flush=True)


def main() -> None:
    """Read the arguments, join the process group, train."""
    parser = argparse.ArgumentParser(description="A small regression on any number of ranks.")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
