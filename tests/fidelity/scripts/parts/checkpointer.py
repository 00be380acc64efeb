"""A Checkpointer around DistributedDataParallel: a later life goes on where the first one ended.

Under torchrun it writes checkpoints at each step and reads them; under elasticrun the state comes
back from memory. Both restore generators, so the steps that follow must be the same bit by bit.
"""

import os
import warnings

import torch
import witness
from torch.nn.parallel import DistributedDataParallel

from elasticrun.training import Checkpointer
from parts.model import make, steps


warnings.filterwarnings("ignore", "elasticrun: this process was not started by elasticrun")


def run(name):
    net = make()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder = os.path.join(witness.OUT, "checkpoints")
    every = {"every_steps": 1, "persist_every_steps": 1, "on_busy": "wait"}
    kept = Checkpointer(folder, model=net, optim=optimizer, **every)
    restored = kept.restore()
    witness.say(f"{name}: restored", restored)
    witness.generators(f"{name}: made", *witness.ALL)
    for number in range(restored, restored + 5):
        steps(model, optimizer, [torch.rand(4, 8)], name)
        kept.step(number + 1)
    witness.weights(net, name)
