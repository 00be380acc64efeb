"""A training loop with accelerate: prepare, backward, gather."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from told import tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(8):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach().unsqueeze(0)).mean().item())
    weight = accelerator.unwrap_model(model).weight.item()
    return {
        "rank": accelerator.process_index, "world": accelerator.num_processes,
        "first": losses[0], "last": losses[-1], "weight": round(weight, 6),
    }  # fmt: skip


if __name__ == "__main__":
    tell(main)
