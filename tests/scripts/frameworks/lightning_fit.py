"""Lightning's Trainer as its users write it: two processes, gloo, a line to learn; with arguments
(told.py) it has our callback.

Every batch is the same one, as a plain data loader begins its epoch again when Lightning resumes.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning as L
import torch
from told import FOLDER, LIFE, SNAPSHOTS, Steps, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.training.lightning import Snapshots

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Line(L.LightningModule):
    """y = w x + b, by Adam with a rate that falls, and the losses it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        noise = torch.randn_like(batch[0])  # of the global generator
        loss = nn.functional.mse_loss(self.layer(batch[0] + noise), 2 * batch[0] + 1)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Fate(L.Callback):
    def __init__(self) -> None:
        self.steps = Steps()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.seen(trainer.global_rank, trainer.global_step)


def main() -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    fate = Fate()
    callbacks: list[L.Callback] = [fate]
    if SNAPSHOTS:
        place = os.path.join(FOLDER, "snapshots")
        callbacks.insert(0, Snapshots(place, every_steps=1, on_busy="wait"))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    model = Line()
    data = torch.tensor([[0.7]]).repeat(64, 1)
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4))
    return {
        "rank": trainer.global_rank, "world": trainer.world_size, "life": LIFE,
        "began": fate.steps.first, "ended": trainer.global_step, "epochs": trainer.current_epoch,
        "first": model.losses[0], "last": model.losses[-1],
        "weight": f"{model.layer.weight.item().hex()} {model.layer.bias.item().hex()}",
        "rate": trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0],
    }  # fmt: skip


if __name__ == "__main__":
    tell(main)
