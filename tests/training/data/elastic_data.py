"""A training that records what it uses: elastic_data.py OUT CKPT STEPS.

It waits before step N until the number in OUT/until is higher.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun import testing
from elasticrun.training import Checkpointer, ElasticBatchSampler
from tests.snapshots.train import wait_for
from tests.training.data.record import Record

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED = 101, 24, 5, 3
"""Neither the epochs divide by the batch, nor the batch by the world sizes of the test."""


def main() -> None:
    out, ckpt_folder, total = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(1, 1)  # DDP and optimizers import torch._dynamo in every life of a rank
    dataset = TensorDataset(torch.arange(SAMPLES))
    sampler = ElasticBatchSampler(
        dataset, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=SEED, total_steps=total
    )
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    ckpt = Checkpointer(ckpt_folder, model=model, sampler=sampler, every_steps=3)
    start = ckpt.restore()
    batches = iter(loader)
    record = Record(out)
    for step in range(start, total):
        wait_for(out / "until", step)
        used = []
        model.zero_grad()
        for weight in sampler.weights(step):
            (x,) = next(batches)
            (weight * model(x[:, None] / SAMPLES).square().mean()).backward()
            used += x.tolist() if weight else []
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad
        record.used(step, used)
        ckpt.step(step + 1)
        testing.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
