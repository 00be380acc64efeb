"""DDP with an ElasticBatchSampler that records the loss of each rank: ddp_losses.py OUT CKPT STEPS.

It waits before step N until the number in OUT/until is higher.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elasticrun import testing
from elasticrun.training import Checkpointer, ElasticBatchSampler
from tests.snapshots.train import wait_for
from tests.training.data.record import Record


def main() -> None:
    out, ckpt_folder, total = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(101, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = ElasticBatchSampler(data, global_batch=24, micro_batch=5, total_steps=total)
    loader = DataLoader(data, batch_sampler=sampler)
    ckpt = Checkpointer(ckpt_folder, model=model, optim=optimizer, sampler=sampler, every_steps=2)
    start = ckpt.restore()
    batches = iter(loader)
    ckpt.restore_rng()
    record = Record(out)
    for step in range(start, total):
        wait_for(out / "until", step)
        losses = [str(dist.get_rank())]
        for weight in sampler.weights(step):
            x, y = next(batches)
            loss = weight * nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
        record.used(step, [" ".join(losses)])
        ckpt.step(step + 1)
        testing.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
