"""HF's Trainer in one process, without an agent: hf_in_two_parts.py FOLDER.

Trains to the end; then once more up to the middle of an epoch, and from there with another Trainer.
Prints the weights of both.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
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

STEPS, EPOCH, BATCH = 8, 6, 4


class Counting(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return EPOCH * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) + index) % 11
        return {"input_ids": ids, "labels": ids}


class StopAfter(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step, self.first = step, -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.first = state.global_step if self.first < 0 else self.first

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def train(folder: str, until: int) -> tuple[int, str]:
    """The step that it begins with, and its weights at `until`."""
    set_seed(7)
    shape = GPT2Config(vocab_size=11, n_positions=6, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=3e-2, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    stop = StopAfter(until)
    snapshots = Snapshots(f"{folder}/snapshots", persist_every_steps=1, on_busy="wait")
    trainer = Trainer(
        GPT2LMHeadModel(shape), arguments, train_dataset=Counting(), callbacks=[snapshots, stop]
    )
    trainer.train()
    weights = trainer.model.state_dict().values()
    told = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights))
    return stop.first, told.hexdigest()


def main() -> None:
    folder = sys.argv[1]
    print("whole", *train(f"{folder}/whole", EPOCH))
    print("part", *train(f"{folder}/parts", 4))
    print("rest", *train(f"{folder}/parts", EPOCH))


if __name__ == "__main__":
    main()
