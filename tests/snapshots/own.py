"""Two ranks with equal weights and a number each that is theirs alone.

    own.py --out FOLDER --ckpt FOLDER --steps N

Rank 1 is killed, once, while it is asked for its number at step 5, when rank 0 holds that step.
Each rank appends a line of JSON to OUT/rank-R.jsonl: what it resumed from, and its number then."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticrun.training import Checkpointer

DIES_AT = 5


class Mine:
    """The number of this rank: how many steps it has done."""

    def __init__(self, rank: int, out: Path) -> None:
        self.rank, self.out, self.number = rank, out, 0
        self.dies = rank == 1 and not (out / "died").exists()

    def state_dict(self) -> dict[str, Any]:
        if self.dies and self.number == DIES_AT:
            dist.barrier()  # rank 0 holds it
            (self.out / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ckpt", required=True)
    options.add_argument("--steps", type=int, required=True)
    args = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine, weights = Mine(rank, args.out), torch.zeros(100)
    ckpt = Checkpointer(
        args.ckpt,
        weights=weights,
        every_steps=1,
        persist_every_seconds=None,
        on_busy="wait",
        slots=2,
    )
    ckpt.per_rank("mine", mine)
    start = ckpt.restore()
    with open(args.out / f"rank-{rank}.jsonl", "a") as file:
        file.write(json.dumps({"start": start, "number": mine.number}) + "\n")
    first = not (args.out / "died").exists()
    for step in range(start + 1, args.steps + 1):
        weights += 1
        mine.number += 1
        dist.barrier()
        ckpt.step(step)
        if first and rank == 0 and step == DIES_AT:
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
