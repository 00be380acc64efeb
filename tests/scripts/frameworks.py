"""A training of one layer by a framework: `frameworks.py hf|pl [loop]`.

It loads its points with a worker and goes on until it is ended. With `loop`, rank 1 comes to a loop
in a callback, at the line that ends in `# here`; where the frameworks train is `# trains`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

AT = 20
"""The step after which a test may do what it likes."""


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points with a linear rule."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.full((8,), float(index % 7))
        return {"inputs": inputs, "labels": inputs.sum().unsqueeze(0)}


def came_to(step: int) -> None:
    """Of both frameworks' callbacks."""
    if step == AT and os.environ["RANK"] == "1":
        print("rank 1 trains", flush=True)
        while "loop" in sys.argv:  # here
            pass


def hf() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(inputs)
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    class Story(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            came_to(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=1_000_000, per_device_train_batch_size=4, use_cpu=True,
            ddp_backend="gloo", dataloader_num_workers=1, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(Line(), arguments, train_dataset=Points(), callbacks=[Story()])
        trainer.train()  # trains


def pl() -> None:
    import lightning

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(batch["inputs"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Story(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            came_to(trainer.global_step)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
        max_steps=1_000_000, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Story()],
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(Points(), batch_size=4, num_workers=1))  # trains


if __name__ == "__main__":
    {"hf": hf, "pl": pl}[sys.argv[1]]()
