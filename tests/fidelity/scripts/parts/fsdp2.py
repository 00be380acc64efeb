"""FSDP2 with dropout."""

import torch
import witness
from torch.distributed.fsdp import fully_shard

from parts.model import make, steps


def run(name):
    model = make()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    witness.generators(f"{name}: sharded", *witness.ALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, (torch.rand(4, 8) for _ in range(5)), name)
    witness.weights(model, name)
