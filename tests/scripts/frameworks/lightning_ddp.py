"""Lightning's Trainer as its users write it: two processes, gloo, a line to learn."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Line(L.LightningModule):
    """y = w x + b, and the losses it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def main() -> None:
    L.seed_everything(7, verbose=False)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8)
    model = Line()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp", max_epochs=8, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    result = {
        "rank": trainer.global_rank, "world": trainer.world_size,
        "first": model.losses[0], "last": model.losses[-1],
        "weight": round(model.layer.weight.item(), 6),
    }  # fmt: skip
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    # What DDP holds of gloo must be gone before the interpreter is, or torch 2.13 may abort in its
    # threads (seen under torchrun on a busy machine, one run of nine).
    del trainer, model
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
