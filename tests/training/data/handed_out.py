"""A training on work that is handed out, which records what it uses: handed_out.py OUT CKPT.

It waits before step N until the number in OUT/until is higher. With CKPT "-" there is no
Checkpointer, and no collective: each rank counts its own steps. With a third word, `recoverable`,
ranks keep their process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elasticrun import testing, training
from elasticrun.training import Checkpointer
from tests.snapshots.train import wait_for
from tests.training.data.record import Record

TOTAL, SIZE, EPOCHS, BATCH = 203, 8, 3, 3
"""Neither the epochs divide by the shards, nor the shards by the batches."""


def batches(batch: int) -> Iterator[list[int]]:
    """Up to `batch` samples of one shard at a time; each as epoch * TOTAL + index."""
    for shard in training.shards("train", TOTAL, SIZE, epochs=EPOCHS, shuffle=7):
        while shard.indices:
            taken = list(shard.indices[:batch])
            shard.done(len(taken))
            yield [shard.epoch * TOTAL + index for index in taken]


def train(out: Path, folder: str) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.0)
    ckpt = Checkpointer(folder, model=model, every_steps=2, persist_every_steps=20)
    step = ckpt.restore()
    record = Record(out)
    source = batches(BATCH)
    while True:
        wait_for(out / "until", step)
        mine = next(source, [])
        total = torch.tensor(len(mine))
        dist.all_reduce(total)
        if not total:  # nothing is left anywhere
            break
        model.zero_grad()
        if mine:
            inputs = torch.tensor(mine, dtype=torch.float32)[:, None] / (TOTAL * EPOCHS)
            model(inputs).square().sum().backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.data -= 0.01 * gradient / total
        record.used(step, mine)
        step += 1
        ckpt.step(step)
        testing.step(step)
    ckpt.save_now(step)


def main(out: Path, folder: str) -> None:
    dist.init_process_group("gloo")
    if folder == "-":
        record = Record(out)
        for number, mine in enumerate(batches(BATCH)):
            record.used(number, mine)
            testing.step(number)
            wait_for(out / "until", number + 1)
    else:
        train(out, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    run = training.recoverable(main) if "recoverable" in sys.argv else main
    run(Path(sys.argv[1]), sys.argv[2])
