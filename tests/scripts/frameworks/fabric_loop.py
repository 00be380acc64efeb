"""A Fabric script as Lightning's command line starts it."""

from __future__ import annotations

import gc
import json
import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn


def main() -> None:
    fabric = Fabric()  # launched, with accelerator and devices, by the command line
    fabric.seed_everything(7, verbose=False)
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
    x = torch.linspace(-1, 1, 32).unsqueeze(1)[fabric.global_rank :: fabric.world_size]
    losses = []
    for _ in range(24):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), 2 * x + 1)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    result = {
        "rank": fabric.global_rank, "world": fabric.world_size, "first": losses[0],
        "last": losses[-1], "weight": round(model.weight.item(), 6),
        "port": os.environ["MASTER_PORT"],
    }  # fmt: skip
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    # What DDP holds of gloo must be gone before the interpreter is, or torch 2.13 may abort in its
    # threads (seen under torchrun on a busy machine, one run of nine).
    del model, optimizer, loss
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
