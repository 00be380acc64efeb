"""A script whose setup takes seconds, for both launchers: then an all_reduce at intervals.

argv: seconds between two steps. Environment: BENCH_SETUP, seconds of the setup; BENCH_RECOVERS, set
if a recoverable function is to keep the setup. The first step of each round is reported.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from report import report

from elasticrun import training


def set_up() -> torch.Tensor:
    """Stands for a dataset's index, a compilation, and the like: training does not change it."""
    time.sleep(float(os.environ["BENCH_SETUP"]))
    return torch.ones(1000)


def train() -> None:
    """Step until killed."""
    recovers = "BENCH_RECOVERS" in os.environ
    made = training.keep("setup", set_up, stateless=True) if recovers else set_up()
    dist.init_process_group("gloo")
    step = 0
    while True:
        dist.all_reduce(made.clone())
        step += 1
        if step == 1:
            report("allreduce")
        training.progress(step)
        time.sleep(float(sys.argv[1]))


if __name__ == "__main__":
    (training.recoverable(train) if "BENCH_RECOVERS" in os.environ else train)()
