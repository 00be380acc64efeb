"""A small real training script: DDP on gloo, a checkpoint every few steps, resumes where it stood.

Arguments: how many steps, the folder of the checkpoint, seconds between steps (0.05 if not given).
Of several ranks none goes beyond half of them: one of their nodes is to die before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticrun.testing import step

STEPS, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
PAUSE = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
saved = FOLDER / "checkpoint.pt"
first = 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    first = state["step"]
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for number in range(first, STEPS):
    x = torch.randn(4, 8)
    loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step(number)
    if number % 10 == 9 and dist.get_rank() == 0:
        draft = saved.with_suffix(f".{os.getpid()}")
        torch.save({"model": model.state_dict(), "step": number + 1}, draft)
        draft.rename(saved)
    time.sleep(PAUSE)
    while number >= STEPS // 2 and dist.get_world_size() > 1:
        signal.pause()
dist.destroy_process_group()
