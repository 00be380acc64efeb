"""A Lightning Trainer on a tiny model; rank 1 dies once, after argv[1] seconds of training."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning
import torch
from report import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class FaultCallback(lightning.Callback):
    """Reports the first step. After argv[1] seconds, kills rank 1 in the first life, and ends
    training in the second."""

    began = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not self.began:
            self.began = time.monotonic()
            report("allreduce")
        elif time.monotonic() - self.began > float(sys.argv[1]):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
                trainer.should_stop = True
            elif os.environ["RANK"] == "1":
                report("dies")
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    """Train."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=100_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FaultCallback()],
    )
    data = TensorDataset(torch.rand(100_000, 8))
    trainer.fit(Line(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
