"""A Fabric script as Lightning's command line starts it."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from told import tell
from torch import nn


def main() -> dict[str, Any]:
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
    return {
        "rank": fabric.global_rank, "world": fabric.world_size, "first": losses[0],
        "last": losses[-1], "weight": round(model.weight.item(), 6),
        "port": os.environ["MASTER_PORT"],
    }  # fmt: skip


if __name__ == "__main__":
    tell(main)
