"""As snapshot_lives.py, without snapshots: after a restart the state is loaded from a checkpoint on
disk.

argv: GiB of state, number of tensors, lives. The checkpoint is written once, in the first life, and
its pages stay in the kernel's cache: the best case of a load from disk.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import report
from state import State


def main() -> None:
    """Load, train, die; the last life succeeds."""
    gib, count, lives = float(sys.argv[1]), *map(int, sys.argv[2:4])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = State(gib, count)
    folder = os.path.join(os.environ["BENCH_STEPS"], "checkpoint")
    contents = {"model": state.state_dict()}
    if life == 0:
        state.fill(1.0)
        dcp.save(contents, checkpoint_id=folder)
    else:
        dcp.load(contents, checkpoint_id=folder)
        assert state.weights[-1][-1].item() == 1.0
    dist.all_reduce(torch.ones(1))
    report("again")
    if life < lives - 1:
        report("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
