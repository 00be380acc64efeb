"""Trains with Lightning; one callback adds snapshots.

    elasticrun --nnodes=1:4 --nproc-per-node=2 examples/lightning_fit.py

Lightning must know how many nodes and ranks there are: both are in the environment of each rank.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.testing import step as report_step  # does nothing outside of elasticrun's tests
from elasticrun.training import ElasticBatchSampler
from elasticrun.training.lightning import Snapshots


class Regression(lightning.LightningModule):
    """Learns a sum of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, wanted = batch
        return nn.functional.mse_loss(self.net(inputs), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Report(lightning.Callback):
    """Tells a test which step is done."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        report_step(trainer.global_step)


def main() -> None:
    parser = argparse.ArgumentParser(description="A regression with Lightning.")
    parser.add_argument("--dir", default="runs/lightning", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    lightning.seed_everything(0)
    inputs = torch.randn(4096, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = ElasticBatchSampler(data, global_batch=64, micro_batch=16)
    snapshots = Snapshots(args.dir, sampler=sampler, every_steps=5, persist_every_steps=100)
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp", max_steps=args.steps, max_epochs=-1,
        use_distributed_sampler=False, accumulate_grad_batches=sampler.accumulation,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[snapshots, Report()],
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(data, batch_sampler=sampler))
    if trainer.global_rank == 0:
        print(f"done step={trainer.global_step} ranks={trainer.world_size}", flush=True)


if __name__ == "__main__":
    main()
