"""HF's Trainer with an ElasticBatchSampler: with_hf.py OUT CKPT DIES_AFTER."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from elasticrun.training import ElasticBatchSampler
from elasticrun.training.huggingface import Snapshots
from tests.training.data.record import Record

SAMPLES, GLOBAL_BATCH, STEPS = 40, 8, 14
"""Two epochs and four steps."""


class Line(PreTrainedModel):  # type: ignore[misc]
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.post_init()

    def forward(self, index: torch.Tensor, **_: Any) -> SequenceClassifierOutput:
        x = index[:, None] / SAMPLES
        return SequenceClassifierOutput(
            loss=(self.dropout(self.layer(x)) - x.sin()).square().mean()
        )


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index)}


class OneLine(Trainer):  # type: ignore[misc]
    sampler: ElasticBatchSampler
    record: Record
    dies_after: int

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_sampler=self.sampler)

    def compute_loss(self, model: Any, inputs: Any, *words: Any, **more: Any) -> Any:
        step = self.state.global_step
        if step == self.dies_after and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.record.used(step, inputs["index"].tolist())
        return super().compute_loss(model, inputs, *words, **more)


def main() -> None:
    out, ckpt, dies_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    set_seed(7)
    data = Numbers()
    sampler = ElasticBatchSampler(data, global_batch=GLOBAL_BATCH, micro_batch=2, total_steps=STEPS)
    arguments = TrainingArguments(
        output_dir=f"{out}/own", use_cpu=True, max_steps=STEPS, save_strategy="no", report_to=[],
        disable_tqdm=True, learning_rate=0.1, gradient_accumulation_steps=sampler.accumulation,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = OneLine(
        Line(PretrainedConfig()), arguments, train_dataset=data,
        callbacks=[Snapshots(ckpt, sampler=sampler, every_steps=1, on_busy="wait")],
    )  # fmt: skip
    trainer.sampler, trainer.record = sampler, Record(out)
    first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
    trainer.dies_after = dies_after if first else -1
    trainer.train()
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    print(f"weights={hashlib.sha256(weights).hexdigest()[:16]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
