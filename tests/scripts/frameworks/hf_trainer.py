"""HF's Trainer with a tiny language model of random weights, on CPU; nothing is downloaded."""

from __future__ import annotations

import gc
import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count modulo eleven: easy to learn in a few steps."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + index) % 11
        return {"input_ids": ids, "labels": ids}


def main(folder: str) -> None:
    set_seed(7)
    shape = GPT2Config(vocab_size=11, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=24, per_device_train_batch_size=8,
        learning_rate=3e-2, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weight = trainer.accelerator.unwrap_model(trainer.model).transformer.wpe.weight.sum().item()
    result = {
        "rank": arguments.process_index, "world": arguments.world_size,
        "first": float(losses[0]), "last": float(losses[-1]), "weight": round(weight, 6),
    }  # fmt: skip
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    # What DDP holds of gloo must be gone before the interpreter is, or torch 2.13 may abort in its
    # threads (seen under torchrun on a busy machine, one run of nine).
    accelerator = trainer.accelerator
    accelerator.free_memory()
    del trainer
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
