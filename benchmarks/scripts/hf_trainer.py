"""An HF Trainer on a tiny model; rank 1 dies once, after argv[1] seconds of training."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from report import report
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points that satisfy a linear rule; only seven are different."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.full((8,), float(index % 7))
        return {"inputs": inputs, "labels": inputs.sum().unsqueeze(0)}


class Line(nn.Module):
    """A model that returns its own loss, as Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class FaultCallback(TrainerCallback):
    """Reports the first step. After argv[1] seconds, kills rank 1 in the first life, and ends
    training in the second."""

    began = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.began:
            self.began = time.monotonic()
            report("allreduce")
        elif time.monotonic() - self.began > float(sys.argv[1]):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
                control.should_training_stop = True
            elif os.environ["RANK"] == "1":
                report("dies")
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    """Train."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=100_000,
            per_device_train_batch_size=4,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(Line(), arguments, train_dataset=Points(), callbacks=[FaultCallback()]).train()


if __name__ == "__main__":
    main()
