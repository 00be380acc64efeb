"""Pretrains a small GPT on characters, in the style of nanoGPT, on any number of ranks.

Failures and changes of the world size cost no sample: the global batch is the same at every size,
and training continues from the last step in memory.

    elasticrun --nnodes=1:4 --nproc-per-node=2 --save-at-breakpoint examples/pretrain.py

The default text is Python's own help. `--text FILE` trains on another one.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elasticrun.testing import step as report_step  # does nothing outside of elasticrun's tests
from elasticrun.training import Checkpointer, ElasticBatchSampler, progress


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text: the characters, and the one that follows each."""

    def __init__(self, text: str, length: int) -> None:
        self.vocabulary = sorted(set(text))
        number = {character: index for index, character in enumerate(self.vocabulary)}
        self.data = torch.tensor([number[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index * self.length
        window = self.data[at : at + self.length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next character at each position."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(at)))


def learning_rate(step: int, total: int) -> float:
    """The factor of a step: linear warm-up, then a cosine."""
    warm = max(1, total // 20)
    return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / total))


def train(args: argparse.Namespace, text: str) -> None:
    """Train up to the last step; one line every ten steps."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.cuda else "cpu"
    if args.cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    data = Characters(text, args.length)
    net = GPT(len(data.vocabulary), args.length, args.width, args.layers).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, args.steps)
    )
    sampler = ElasticBatchSampler(
        data, global_batch=args.batch, micro_batch=args.micro_batch, total_steps=args.steps
    )
    loader = DataLoader(data, batch_sampler=sampler)
    ckpt = Checkpointer(
        args.dir, model=model, optim=optimizer, schedule=schedule, sampler=sampler,
        every_steps=5, persist_every_steps=args.persist,
    )  # fmt: skip
    start = ckpt.restore()
    batches = iter(loader)
    ckpt.restore_rng()  # the iterator has drawn a seed for its workers
    for step in range(start, args.steps):
        total = torch.zeros((), device=device)
        for weight in sampler.weights(step):
            tokens, wanted = (part.to(device) for part in next(batches))
            loss = cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
            (weight * loss).backward()
            total += loss.detach() / len(sampler.weights(step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ckpt.step(step + 1)
        progress(step + 1, loss=total.item())  # for `elasticrun top` and progress.csv
        report_step(step)
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step={step + 1} ranks={dist.get_world_size()} loss={total:.3f}", flush=True)
    ckpt.save_now(args.steps)


def main() -> None:
    """Read the arguments and the text, join the process group, train."""
    parser = argparse.ArgumentParser(description="Pretrains a GPT on characters.")
    parser.add_argument("--text", type=Path, help="a file of text [default: Python's help]")
    parser.add_argument("--dir", default="runs/pretrain", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64, help="windows per step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=16, help="windows per rank at a time")
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--persist", type=int, default=100, help="steps between two checkpoints")
    args = parser.parse_args()
    args.cuda = torch.cuda.is_available()
    if args.text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    else:
        text = args.text.read_text(encoding="utf-8")
    dist.init_process_group("nccl" if args.cuda else "gloo")
    train(args, text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
