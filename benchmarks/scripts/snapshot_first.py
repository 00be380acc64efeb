"""Measures how the memory for snapshots, prepared while training goes on, affects the steps.

argv: GiB of state per rank. Steps without a Checkpointer come first and last. Between them are
steps with one: those until the first snapshot, that of the first snapshot, and later ones. The
seconds of each step of rank 0 go to $BENCH_STEPS/figures. The ranks wait for each other in every
step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrun.training import Checkpointer

TENSORS = 64
WORK = 20
"""Products of matrices per step: about 50 ms of one core."""

ALONE = 20
LATER = 4
"""Steps without a Checkpointer on either side, and with snapshots after the first one."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gib = float(sys.argv[1])
    place = Path(os.environ["BENCH_STEPS"])
    state = {str(n): torch.ones(int(gib * (1 << 30) / 4 / TENSORS)) for n in range(TENSORS)}
    matrix = torch.rand(512, 512)
    figures = []

    def train() -> None:
        for _ in range(WORK):
            torch.mm(matrix, matrix)
        dist.barrier()

    def add(name: str, began: float) -> None:
        seconds = time.perf_counter() - began
        figures.append({"name": name, "life": 0, "seconds": seconds})

    def alone() -> None:
        for _ in range(ALONE):
            began = time.perf_counter()
            train()
            add("alone", began)

    alone()
    folder = str(place / "checkpoints")
    ckpt = Checkpointer(folder, state=state, every_steps=1, persist_every_seconds=None)
    step = ckpt.restore()
    most = 0
    while most < LATER:
        before, began = ckpt.stats.snapshots, time.perf_counter()
        train()
        if not before:
            add("train", began)
        step += 1
        ckpt.step(step)
        taken = ckpt.stats.snapshots > before
        add("later" if before else "first" if taken else "until", began)
        count = torch.tensor([ckpt.stats.snapshots])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        most = int(count)
    ckpt.close()
    alone()
    if dist.get_rank() == 0:
        with (place / "figures").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in figures)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
