"""A job that does nothing but snapshots, and whose whole state follows from two numbers: the life
of the ranks that made it, and the step. What is restored can be judged bit by bit, and a state that
is torn, or mixed from two steps or two lives, is known at once.

    steady.py --out FOLDER --ckpt FOLDER --until FILE [--job N] [--mib N] [--keep N]

There is no collective in a step: the ranks drift as far apart as the slots let them. Each appends
to OUT/rank-R.log, a word at a time: `start LIFE STEP SOURCE OF PID` (OF: the life that had made
what was restored), then `b STEP` before each snapshot and `d STEP` after it. They train up to the
step that stands in FILE, once it is there. What a rank restores and finds to be wrong ends it, with
the line `torn SENTENCE`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elasticrun.training import Checkpointer, Keep

WORDS_PER_MIB = 1 << 18
JOB = 1000
"""Lives of one job; they are told apart over the jobs of a test."""


def mark(life: int, step: int) -> int:
    """What is added to every number of the state."""
    return life * 100_003 + step * 17


def sharded(mib: int, world: int) -> torch.Tensor:
    """The state that all ranks have a share of, at mark 0: `mib` MiB each."""
    return torch.arange(world * mib * WORDS_PER_MIB, dtype=torch.int32)


def common(mib: int) -> torch.Tensor:
    """The state that all ranks have, at mark 0."""
    return torch.arange(mib * WORDS_PER_MIB // 4, dtype=torch.int32) * 3


class Steady:
    """The state of one rank."""

    def __init__(self, mib: int, rank: int, world: int) -> None:
        self._share = sharded(mib, world).chunk(world)[rank].clone()
        self._common = common(mib)
        self.share, self.same = self._share.clone(), self._common.clone()
        mesh = init_device_mesh("cpu", (world,))
        self.state = {
            "share": DTensor.from_local(self.share, mesh, [Shard(0)], run_check=False),
            "same": self.same,
            "name": {"life": 0, "step": 0},
        }
        self.own = {"rank": rank, "life": 0, "step": 0}

    def adopt(self) -> None:
        """What stands in the state was restored."""
        self.share, self.same = self.state["share"].to_local(), self.state["same"]

    def become(self, life: int, step: int) -> None:
        torch.add(self._share, mark(life, step), out=self.share)
        torch.add(self._common, mark(life, step), out=self.same)
        for names in (self.state["name"], self.own):
            names.update(life=life, step=step)

    def wrong(self, step: int, rank: int) -> str:
        """What is not as it was at `step`, "" for nothing."""
        life = self.state["name"]["life"]
        if self.state["name"]["step"] != step or self.own != {**self.state["name"], "rank": rank}:
            return f"step {step} was promised: {self.state['name']}, own {self.own}"
        for name, found, base in (
            ("share", self.share, self._share),
            ("same", self.same, self._common),
        ):
            if not torch.equal(found, base + mark(life, step)):
                return f"{name} is not that of life {life}, step {step}"
        return ""


def last(file: Path) -> float:
    """The step that all train up to."""
    return int(file.read_text()) if file.exists() else float("inf")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ckpt", required=True)
    options.add_argument("--until", type=Path, required=True)
    options.add_argument("--job", type=int, default=0)
    options.add_argument("--mib", type=int, default=16)
    options.add_argument("--keep", type=int, default=3)
    args = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = os.open(args.out / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*what: Any) -> None:
        os.write(log, (" ".join(map(str, what)) + "\n").encode())

    life = args.job * JOB + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steady = Steady(args.mib, rank, world)
    checkpointer = Checkpointer(
        args.ckpt,
        state=steady.state,
        every_steps=1,
        persist_every_steps=10,
        keep=Keep(last=args.keep),
        slots=3,
        on_busy="wait",
        strict_save=True,
    )
    checkpointer.per_rank("own", steady.own)
    step = checkpointer.restore()
    steady.adopt()
    wrong = steady.wrong(step, rank) if step else ""
    if wrong:
        tell("torn", wrong)
        raise RuntimeError(wrong)
    source = checkpointer.stats.source
    tell("start", life, step, source, steady.state["name"]["life"], os.getpid())
    while step < last(args.until):
        step += 1
        steady.become(life, step)
        tell("b", step)
        checkpointer.step(step)
        tell("d", step)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
