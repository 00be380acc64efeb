"""Lightning's Trainer with our callback; told so, a rank is killed in its first life.

argv: a folder, and the step after which rank 1 of the first life is killed (0: never). Every batch
is the same one, as a plain data loader begins its epoch again when Lightning resumes.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import warnings
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.training.lightning import Snapshots

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Line(L.LightningModule):
    """y = w x + b, by Adam with a rate that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        noise = torch.randn_like(batch[0])  # of the global generator
        return nn.functional.mse_loss(self.layer(batch[0] + noise), 2 * batch[0] + 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Fate(L.Callback):
    """Sees where training begins, and ends it once."""

    first = 0

    def __init__(self, dies_after: int) -> None:
        self.dies_after = dies_after

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.first = self.first or trainer.global_step
        if LIFE == 0 and trainer.global_rank == 1 and trainer.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, dies_after: int) -> None:
    L.seed_everything(7, verbose=False)
    fate = Fate(dies_after)
    snapshots = Snapshots(os.path.join(folder, "snapshots"), every_steps=1, on_busy="wait")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[snapshots, fate],
    )  # fmt: skip
    model = Line()
    data = torch.tensor([[0.7]]).repeat(64, 1)
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4))
    result = {
        "rank": trainer.global_rank, "life": LIFE, "first": fate.first,
        "last": trainer.global_step, "epochs": trainer.current_epoch,
        "weights": [model.layer.weight.item().hex(), model.layer.bias.item().hex()],
        "rate": trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0],
    }  # fmt: skip
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    # What DDP holds of gloo must be gone before the interpreter is, or torch 2.13 may abort in its
    # threads (seen under torchrun on a busy machine, one run of nine).
    del trainer, model
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
