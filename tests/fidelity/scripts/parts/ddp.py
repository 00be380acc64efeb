"""DistributedDataParallel with dropout and a sampler; data that draws from three generators."""

import random

import numpy as np
import torch
import witness
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from parts.model import make, steps


class Noise(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = np.random.rand(8).astype(np.float32) + random.random() + index
        return torch.from_numpy(drawn) + torch.rand(8)


def seed_worker(_):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


LOADERS = {"none": {}}


def run(name):
    for kind, options in LOADERS.items():
        model = DistributedDataParallel(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = Noise()
        loader = DataLoader(data, 4, sampler=DistributedSampler(data), **options)
        steps(model, optimizer, loader, f"{name}, workers: {kind}")
        witness.weights(model.module, f"{name}, workers: {kind}")
        witness.generators(f"{name}, workers: {kind}", *witness.ALL)
