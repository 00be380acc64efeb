"""Uses each sample exactly once per epoch, in spite of failures and changes of the world size.

The global batch is 96 samples on any number of ranks, in micro-batches of at most 16. After a
failure or a resize the ranks continue with the next sample. If the world size does not change, a
run with failures ends with bitwise the same weights as one without.

    elasticrun --nnodes=1:4 --nproc-per-node=2 examples/elastic_data.py --steps 300
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.training import Checkpointer, ElasticBatchSampler


def dataset() -> TensorDataset:
    """2,000 samples of a small regression."""
    inputs = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def train(total: int) -> None:
    """Train up to step `total`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    data = dataset()
    sampler = ElasticBatchSampler(data, global_batch=96, micro_batch=16, total_steps=total)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
    ckpt = Checkpointer("runs/data", model=model, optim=optimizer, sampler=sampler, every_steps=5)
    start = ckpt.restore()
    batches = iter(loader)
    ckpt.restore_rng()  # the iterator has drawn a seed for its workers
    for step in range(start, total):
        for weight in sampler.weights(step):
            inputs, wanted = next(batches)
            (weight * nn.functional.mse_loss(model(inputs), wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step + 1)
        if dist.get_rank() == 0 and (step + 1) % 25 == 0:
            print(f"step={step + 1} ranks={dist.get_world_size()}", flush=True)
    if dist.get_rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"done weights={hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


def main() -> None:
    """Read the arguments, join the process group, train."""
    parser = argparse.ArgumentParser(description="A regression that uses each sample once.")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
