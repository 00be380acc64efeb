"""Fine-tunes a causal language model with Hugging Face's Trainer; one callback adds snapshots.

    elasticrun --nproc-per-node=2 --max-restarts=3 examples/finetune_hf.py --model gpt2

Without `--model` it trains a tiny GPT-2 from random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from elasticrun.testing import step as report_step  # does nothing outside of elasticrun's tests
from elasticrun.training.huggingface import Snapshots


class Windows(Dataset[dict[str, torch.Tensor]]):
    """A text in windows of the same number of tokens."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.windows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


class Report(TrainerCallback):
    """Tells a test which step is done."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        report_step(state.global_step)


def model_and_tokens(name: str, text: str) -> tuple[Any, list[int]]:
    """The named model, and the text as it reads it; or a tiny model that reads bytes."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), tokenizer(text)["input_ids"]
    shape = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    return GPT2LMHeadModel(shape), list(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a causal language model.")
    parser.add_argument("--model", default="", help="name or folder of a model")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="[default: this file]")
    parser.add_argument("--dir", default="runs/finetune", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokens = model_and_tokens(args.model, args.text.read_text(encoding="utf-8"))
    arguments = TrainingArguments(
        output_dir=args.dir, max_steps=args.steps, per_device_train_batch_size=4,
        learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    snapshots = Snapshots(f"{args.dir}/snapshots", every_steps=5, persist_every_steps=100)
    trainer = Trainer(
        model, arguments, train_dataset=Windows(tokens, 32), callbacks=[snapshots, Report()]
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"done step={result.global_step} loss={result.training_loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
