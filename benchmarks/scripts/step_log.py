"""The script of the elastic table, which depends on no launcher: an all_reduce at intervals, each
step in a log.

argv: seconds between two steps. The log is one file per process in $BENCH_STEPS, with a line per
step: CLOCK_MONOTONIC, world size, number of the step. The first step of a process is also reported
by datagram, so that the benchmark need not watch files.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from report import report


def main() -> None:
    """Train until killed."""
    pause = float(sys.argv[1])
    dist.init_process_group("gloo")
    name = f"steps-{os.environ['BENCH_NODE']}-{dist.get_rank()}-{os.getpid()}"
    path = os.path.join(os.environ["BENCH_STEPS"], name)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    value = torch.ones(1000)
    step = 0
    while True:
        dist.all_reduce(value)
        step += 1
        os.write(log, f"{time.monotonic():.6f} {dist.get_world_size()} {step}\n".encode())
        if step == 1:
            report("allreduce")
        time.sleep(pause)


if __name__ == "__main__":
    main()
