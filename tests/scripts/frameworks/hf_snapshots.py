"""HF's Trainer with our callback; told so, a rank is killed in its first life.

argv: a folder, and the step after which rank 1 of the first life is killed (0: never).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
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

LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count modulo eleven; more of them than the run uses."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (1 + index // 11) + index) % 11
        return {"input_ids": ids, "labels": ids}


class Fate(TrainerCallback):
    """Sees where training begins, and ends it once."""

    first = 0

    def __init__(self, dies_after: int) -> None:
        self.dies_after = dies_after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.first = self.first or state.global_step
        if LIFE == 0 and args.process_index == 1 and state.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, dies_after: int) -> None:
    set_seed(7)
    sizes = {"vocab_size": 11, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    shape = GPT2Config(**sizes, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=24, per_device_train_batch_size=8,
        learning_rate=3e-2, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    fate = Fate(dies_after)
    snapshots = Snapshots(os.path.join(folder, "snapshots"), every_steps=1, on_busy="wait")
    trainer = Trainer(
        GPT2LMHeadModel(shape), arguments, train_dataset=Counting(), callbacks=[snapshots, fate]
    )
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    told = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values()))
    result = {
        "rank": arguments.process_index, "life": LIFE, "first": fate.first,
        "last": trainer.state.global_step, "weights": told.hexdigest(),
        "rate": trainer.lr_scheduler.get_last_lr()[0],
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
    main(sys.argv[1], int(sys.argv[2]))
