"""A rank whose every snapshot is written as a checkpoint, one at a time.

argv: GiB of state, number of tensors, samples. It reports `ready` before each snapshot, and
`written` when the checkpoint's marker exists; the seconds from the end of `step()` until then go to
$BENCH_STEPS/figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import report
from state import State

from elasticrun.testing.processes import Deadline, Waiter
from elasticrun.training import Checkpointer, Keep

PAUSE = 1.0
"""Seconds before each snapshot, so that nothing else is in progress."""

LIMIT = 60.0
"""Seconds within which a checkpoint must be complete."""


def wait_for(folder: Path, name: str) -> None:
    """Wait until the marker of this checkpoint exists. Raises TimeoutError."""
    watch, deadline = Waiter(), Deadline(LIMIT)
    try:
        watch.folder(str(folder))
        step = folder / name
        seen = False
        while not (step / ".metadata").exists():
            if not seen and step.exists():
                watch.folder(str(step))
                seen = True
            elif not watch.wait(deadline.left()):
                raise TimeoutError(f"{name} was not written within {LIMIT:g} s")
    finally:
        watch.close()


def main() -> None:
    """Save and wait, several times."""
    gib, count, samples = float(sys.argv[1]), *map(int, sys.argv[2:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = State(gib, count)
    state.fill(1.0)
    place = Path(os.environ["BENCH_STEPS"])
    folder = place / "checkpoints"
    folder.mkdir(exist_ok=True)
    kept = Keep(last=1)
    with (place / "figures").open("a") as file:
        checkpointer = Checkpointer(
            str(folder), model=state, every_steps=1, persist_every_steps=1, keep=kept
        )
        start = checkpointer.restore()
        for step in range(start + 1, start + samples + 2):
            time.sleep(PAUSE)
            report("ready")
            checkpointer.step(step)
            began = time.perf_counter()
            wait_for(folder, f"step-{step:09d}")
            took = time.perf_counter() - began
            report("written")
            name = "first persist" if step == start + 1 else "persist"
            file.write(json.dumps({"name": name, "life": 0, "seconds": took}) + "\n")
            file.flush()
        time.sleep(PAUSE)
        report("ready")
        checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
