"""Measures the cost of a snapshot in every step of a small model: blocks of steps with and without
snapshots.

argv: pairs of blocks, steps per block. The seconds per step of each block of rank 0 go to
$BENCH_STEPS/figures. The ranks wait for each other in every step, so that its time is that of all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticrun.training import Checkpointer

BATCH = 512
"""Images per step and rank: about 40 ms of one core."""


def network() -> nn.Module:
    """A convolutional network for 8 x 8 images: 12,000 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4, 10)),
    )


def train(pairs: int, steps: int) -> None:
    """Train in alternating blocks, and write the samples."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    place = Path(os.environ["BENCH_STEPS"])
    checkpointer = Checkpointer(
        str(place / "checkpoints"), model=model, optim=optimizer, every_steps=1
    )
    images, labels = torch.rand(BATCH, 1, 8, 8), torch.randint(10, (BATCH,))
    step = checkpointer.restore()
    report("again")
    with (place / "figures").open("a") as file:
        for block in range(2 * pairs + 2):
            saves = block % 2 == 0
            dist.barrier()
            before, began = checkpointer.stats.snapshots, time.perf_counter()
            for _ in range(steps):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if saves:
                    checkpointer.step(step)
            took = time.perf_counter() - began
            taken = checkpointer.stats.snapshots - before
            if block > 1 and dist.get_rank() == 0:  # the first two warm up
                name = "with snapshots" if saves else "without"
                line = {"name": name, "life": 0, "seconds": took / steps, "taken": taken}
                file.write(json.dumps(line) + "\n")
    checkpointer.close()


def main() -> None:
    """Train in a function, so that the model is deleted before its process group is destroyed: a
    DDP that has the last reference to the group waits, holding the interpreter's lock, for a thread
    that needs the lock."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(*map(int, sys.argv[1:3]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
