"""HF's Trainer with a tiny language model of random weights; with arguments (told.py) it has our
callback."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from told import FOLDER, LIFE, SNAPSHOTS, Steps, tell
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from elasticrun.training.huggingface import Snapshots


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count modulo eleven, easy to learn; more of them than the run uses."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + index) % 11
        return {"input_ids": ids, "labels": ids}


class Fate(TrainerCallback):
    def __init__(self) -> None:
        self.steps = Steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.seen(args.process_index, state.global_step)


def main() -> dict[str, Any]:
    set_seed(7)
    shape = GPT2Config(vocab_size=11, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=FOLDER, use_cpu=True, max_steps=24, per_device_train_batch_size=8,
        learning_rate=3e-2, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    fate = Fate()
    callbacks: list[TrainerCallback] = [fate]
    if SNAPSHOTS:
        place = os.path.join(FOLDER, "snapshots")
        callbacks.insert(0, Snapshots(place, every_steps=1, on_busy="wait"))
    trainer = Trainer(
        GPT2LMHeadModel(shape), arguments, train_dataset=Counting(), callbacks=callbacks
    )
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    told = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values()))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rank": arguments.process_index, "world": arguments.world_size, "life": LIFE,
        "began": fate.steps.first, "ended": trainer.state.global_step,
        "first": float(losses[0]), "last": float(losses[-1]), "weight": told.hexdigest(),
        "rate": trainer.lr_scheduler.get_last_lr()[0],
    }  # fmt: skip


if __name__ == "__main__":
    tell(main)
