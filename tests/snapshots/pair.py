"""A GAN's two models with their optimizers, and an average of the first one's weights.

    pair.py --out FOLDER --ckpt FOLDER [--two] [--die RANK:STEP]

With `--two` each model has a Checkpointer, else one has all. Each rank appends a line of JSON to
OUT/rank-R.jsonl at its start and its end, as train.py does.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticrun.training import Checkpointer
from tests.snapshots.train import bytes_of, die, tell

STEPS = 8


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Pair:
    """Of the same shapes, so that one's values fit into the other."""

    def __init__(self) -> None:
        self.gen, self.disc = layers(1), layers(2)
        self.ema = AveragedModel(self.gen, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.gen_optim = torch.optim.AdamW(self.gen.parameters(), lr=0.01)
        self.disc_optim = torch.optim.AdamW(self.disc.parameters(), lr=0.02)

    def step(self, step: int) -> None:
        noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for optimizer, sign in ((self.disc_optim, 1.0), (self.gen_optim, -1.0)):
            optimizer.zero_grad()
            (sign * self.disc(self.gen(noise))).sigmoid().mean().backward()
            optimizer.step()
        self.ema.update_parameters(self.gen)

    def fingerprint(self) -> str:
        found = hashlib.sha256()
        for model in (self.gen, self.disc, self.ema):
            for value in model.state_dict().values():
                found.update(bytes_of(value))
        for optimizer in (self.gen_optim, self.disc_optim):
            for entries in optimizer.state.values():
                for value in entries.values():
                    found.update(bytes_of(value))
        return found.hexdigest()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ckpt", required=True)
    options.add_argument("--two", action="store_true")
    options.add_argument("--die", default="")
    args = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), Pair()
    paces = {"every_steps": 1, "persist_every_steps": 4, "on_busy": "wait"}
    if args.two:
        ckpt = Checkpointer(f"{args.ckpt}/gen", model=pair.gen, **paces)
        other = Checkpointer(f"{args.ckpt}/disc", model=pair.disc, **paces)
        other.restore()
    else:
        ckpt = Checkpointer(args.ckpt, **vars(pair), **paces)
    start = ckpt.restore()
    tell(args.out, rank, start=start, world=dist.get_world_size())
    for step in range(start, STEPS):
        pair.step(step)
        ckpt.step(step + 1)
        dist.barrier()
        if args.die == f"{rank}:{step + 1}" and not start:
            die("kill")
    dist.barrier()
    tell(args.out, rank, end=pair.fingerprint())
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
