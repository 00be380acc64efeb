"""A small training whose every number depends on the step alone: a resumed run must end with the
same bits as one that was never killed.

    train.py --mode ddp|fsdp2|late|counter --steps N --out FOLDER --ckpt FOLDER
             [--every N] [--persist-every N] [--die RANK:STEP:HOW]... [--poison STEP]
             [--early LIVES] [--gate FILE] [--print-at STEP]... [--timeout SECONDS] [--busy skip]
             [--lingers RANK] [--pause SECONDS] [--cannot RANK:STEP]

Each rank appends a line of JSON to OUT/rank-R.jsonl at its start (what it resumed from) and at its
end (a hash of the whole weights and optimizer state). `--die 1:5:kill` ends rank 1, once, when all
ranks have taken the snapshot of step 5; HOW is kill, raise, term, or any signal's name (after
`stop` the others' collectives fail when `--timeout` is over). With `--poison 6` rank 1 raises in
the second step of every life that goes on from step 6. With `--early 6` it ends in so many lives
after the first before it has a process group, by an exception and by SIGKILL in turn. With `--gate
FILE` the ranks wait before the first step of all and after each step until the file's number is
above that of the step (0 before the first). `--print-at 7` has the hash of the state written in
step 7 (`at`; `skipped`: the snapshots that were left out so far), and when a life goes on from
there (`again`). A rank that lingers does not end by SIGTERM. A training without an end has a pause
after each step, or it would take the cores from those who test it. With `--cannot 1:6` rank 1 has
no state to save from step 6 on; the line at the end has each rank's longest `step()` (`stall`).

In mode `late` each rank has all of the data, and a layer that is idle up to step LATE: its part of
the optimizer's state comes into being then, and the layout of the state changes.

Mode `counter` is for tests of what is around a training: the ranks meet once a step and count it,
without DDP and an optimizer, each of which imports `torch._dynamo` in every life of a rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inotify_simple import INotify, flags
from torch import nn
from torch.distributed.tensor import DTensor

from elasticrun.testing import step as tell_step
from elasticrun.training import Checkpointer, Keep

LATE = 5


@dataclass
class Place:
    """A class that only this script knows, in the state: nobody else may have to import it."""

    seen: int = 0


class Unsaved:
    """State that is there until a step; then the rank has no memory for it."""

    def __init__(self, until: int) -> None:
        self.until, self.step = until, 0

    def state_dict(self) -> dict[str, int]:
        if self.step >= self.until:
            raise MemoryError("no memory for the state")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Idle(nn.Module):
    """A layer that does nothing before step LATE."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.awake = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if self.awake else inputs


def build(mode: str, width: int) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 3)
    )
    if mode == "counter":
        model = nn.ParameterList([torch.zeros(1)])
    elif mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        fully_shard(model[0])
        fully_shard(model)
    elif mode == "late":
        model = nn.Sequential(nn.Linear(8, width), Idle(width), nn.Linear(width, 3))
    if mode == "counter":
        return model, None
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, rank: int, world: int
) -> None:
    """Every rank takes its share of the same global batch."""
    if optimizer is None:
        share = torch.full((1,), 1 / world)
        dist.all_reduce(share)
        next(model.parameters()).data += share
        return
    for layer in model.modules():
        if isinstance(layer, Idle):
            layer.awake, rank, world = step >= LATE, 0, 1
    data = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(12, 8, generator=data)
    targets = torch.randint(0, 3, (12,), generator=data)
    share = slice(rank * 12 // world, (rank + 1) * 12 // world)
    loss = nn.functional.cross_entropy(model(inputs[share]), targets[share])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().cpu()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """Of all parameters, buffers and the optimizer's state; a collective where it is sharded."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.removeprefix("module.").encode() + bytes_of(whole(value)))
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                digest.update(name.encode() + bytes_of(whole(value)))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def tell(out: Path, rank: int, **what: Any) -> None:
    line = json.dumps({"rank": rank, "pid": os.getpid(), **what})
    with open(out / f"rank-{rank}.jsonl", "a") as file:
        file.write(line + "\n")


def die(how: str) -> None:
    if how == "raise":
        raise RuntimeError("planted by --die")
    os.kill(os.getpid(), signal.Signals["SIG" + how.upper()])
    signal.pause()


def wait_for(gate: Path | None, step: int) -> None:
    """Until the number in the file is above `step`; the test renames a new file to its place."""
    if gate is None:
        return
    with INotify() as changes:
        changes.add_watch(gate.parent, flags.MOVED_TO)
        while not gate.exists() or int(gate.read_text()) <= step:
            changes.read()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--mode", default="ddp")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--width", type=int, default=16)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ckpt", required=True)
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--persist-every", type=int)
    options.add_argument("--keep", type=int, default=3)
    options.add_argument("--die", action="append", default=[])
    options.add_argument("--poison", type=int)
    options.add_argument("--early", type=int, default=0)
    options.add_argument("--gate", type=Path)
    options.add_argument("--print-at", type=int, action="append", default=[])
    options.add_argument("--timeout", type=float, default=300)
    options.add_argument("--replicas", type=int, default=0)
    options.add_argument("--busy", default="wait")
    options.add_argument("--lingers", type=int)
    options.add_argument("--pause", type=float, default=0.0)
    options.add_argument("--cannot")
    args = options.parse_args()
    torch.set_num_threads(1)
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if 1 <= life <= args.early and os.environ["RANK"] == "1":
        die("raise" if life % 2 else "kill")
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == args.lingers:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model, optimizer = build(args.mode, args.width)
    progress: dict[str, Any] = {"seen": 0, "place": Place()}
    torch.serialization.add_safe_globals([Place])
    unable, first = map(int, (args.cannot or "-1:0").split(":"))
    unsaved = Unsaved(first if rank == unable else args.steps + 1)
    checkpointer = Checkpointer(
        args.ckpt,
        model=model,
        **({} if optimizer is None else {"optim": optimizer}),
        progress=progress,
        **({} if args.cannot is None else {"unsaved": unsaved}),
        every_steps=args.every,
        on_busy=args.busy,
        persist_every_steps=args.persist_every,
        persist_every_seconds=None,
        keep=Keep(last=args.keep),
        replicas=args.replicas,
    )
    start = checkpointer.restore()
    tell(args.out, rank, start=start, world=world, life=life, seen=progress["place"].seen)
    if start in args.print_at:
        tell(args.out, rank, again=fingerprint(model, optimizer))
    if start == 0:
        wait_for(args.gate, 0)
    stall = 0.0
    for step in range(start, args.steps):
        if start == args.poison and step == start + 1:
            dist.barrier()  # all have done the step before
            if rank == 1:
                die("raise")
        train_step(model, optimizer, step, rank, world)
        progress["seen"] += 12
        progress["place"].seen += 12
        unsaved.step, began = step + 1, time.monotonic()
        checkpointer.step(step + 1)
        stall = max(stall, time.monotonic() - began)
        tell_step(step + 1)
        if step + 1 in args.print_at:
            skipped = checkpointer.stats.skipped
            tell(args.out, rank, at=fingerprint(model, optimizer), skipped=skipped)
        planted = [one for one in args.die if int(one.split(":")[1]) == step + 1]
        if planted:
            dist.barrier()  # all have taken their snapshot
        for one in planted:
            who, _, how = one.split(":")
            done = args.out / f"died-{one}"
            if int(who) == rank and not done.exists():
                done.touch()
                die(how)
        wait_for(args.gate, step + 1)
        time.sleep(args.pause)
    dist.barrier()
    stats = str(checkpointer.stats)
    tell(args.out, rank, end=fingerprint(model, optimizer), stats=stats, stall=stall)
    checkpointer.close()
    del model, optimizer  # a DDP object that lives at exit can abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
