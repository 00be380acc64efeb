"""DDP on the CPU, a step told to the agent each time; ranks differ in what they do besides.

Arguments: how many steps, seconds of own work in each, "rank=seconds" for ranks that have more or
less to do. With "early" torch is imported before elasticrun.training, as a preload does. With
"stored" the collectives are stored.py's.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

if "early" in sys.argv:
    import torch.distributed

from elasticrun.training import progress  # isort: skip

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, WORK = int(sys.argv[1]), float(sys.argv[2])
OTHERS = dict(word.split("=") for word in sys.argv[3:] if "=" in word)

if "stored" in sys.argv:
    sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
    importlib.import_module("stored")  # which registers it
dist.init_process_group("stored" if "stored" in sys.argv else "gloo")
work = float(OTHERS.get(os.environ["RANK"], WORK))
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(STEPS):
    time.sleep(work)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    progress(number)
if os.environ["RANK"] == "0":
    from elasticrun.training.recorder import read_recorders

    print("recorded", len(read_recorders().collectives), flush=True)
dist.barrier()
dist.destroy_process_group()
