"""Lightning's Trainer with an ElasticBatchSampler.

with_lightning.py OUT CKPT DIES_AFTER [STEPS]
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.training import ElasticBatchSampler
from elasticrun.training.lightning import Snapshots
from tests.training.data.record import Record
from tests.training.data.with_hf import GLOBAL_BATCH, SAMPLES, STEPS


class Line(L.LightningModule):
    def __init__(self, out: Path, dies_after: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self._out, self._dies_after = out, dies_after
        self._record: Record | None = None

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        step = self.trainer.global_step
        if step == self._dies_after and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._record = self._record or Record(self._out)
        self._record.used(step, batch[0].tolist())
        x = batch[0][:, None] / SAMPLES
        return (self.layer(x) - x.sin()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    out, ckpt, dies_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    steps = int(sys.argv[4]) if len(sys.argv) > 4 else STEPS
    L.seed_everything(7, verbose=False)
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = ElasticBatchSampler(data, global_batch=GLOBAL_BATCH, micro_batch=2)
    first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
    model = Line(out, dies_after if first else -1)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=out,
        accumulate_grad_batches=sampler.accumulation,
        callbacks=[Snapshots(ckpt, sampler=sampler, persist_every_steps=1, on_busy="wait")],
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_sampler=sampler))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"weights={hashlib.sha256(weights).hexdigest()[:16]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
