"""Trains on work that the master hands out, and counts the samples: each is used once per epoch.

Ranks take shards of 512 samples. One whose batch is empty takes part in the collectives with weight
0, until nothing is left anywhere. After a failure or a resize the ranks get exactly what was not
used by the restored step, so the count at the end is samples x epochs.

    elasticrun --nnodes=1:4 --nproc-per-node=3 examples/handed_out.py --samples 20000
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticrun import training
from elasticrun.training import Checkpointer

BATCH = 32


def batches(inputs: Tensor, epochs: int) -> Iterator[Tensor]:
    """This rank's batches, as long as there is work."""
    for shard in training.shards("train", len(inputs), 512, epochs=epochs, shuffle=7):
        while taken := shard.indices[:BATCH]:
            shard.done(len(taken))  # before the step that uses them is reported
            yield inputs[taken.start : taken.stop]


def train(samples: int, epochs: int) -> None:
    """Train until every sample of every epoch is used."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    seen = {"samples": 0}
    ckpt = Checkpointer("runs/handed", model=model, optim=optimizer, seen=seen, every_steps=5)
    step = ckpt.restore()
    mine = 0
    for batch in batches_of_all(batches(inputs, epochs)):
        total = torch.tensor(float(len(batch)))
        dist.all_reduce(total)
        loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True), reduction="sum")
        optimizer.zero_grad()
        (loss / total).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step, mine = step + 1, mine + len(batch)
        seen["samples"] += int(total)
        ckpt.step(step)
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"step={step} samples={seen['samples']}", flush=True)
    print(f"rank {dist.get_rank()} used {mine} samples; all ranks {seen['samples']}", flush=True)


def batches_of_all(source: Iterator[Tensor]) -> Iterator[Tensor]:
    """The batches of `source`, then empty ones until no rank has any left."""
    while True:
        batch = next(source, torch.zeros(0, 8))
        left = torch.tensor(len(batch))
        dist.all_reduce(left)
        if not left:
            return
        yield batch


def main() -> None:
    """Read the arguments, join the process group, train."""
    parser = argparse.ArgumentParser(description="A regression on work that is handed out.")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.samples, arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
