"""The script of set_up.py for NVRx's in-process restart, with its default options.

argv: seconds between two steps. Environment: BENCH_SETUP, seconds of the setup, and what a launcher
sets. The first step of each round is reported. It runs in an environment with
nvidia-resiliency-ext; no launcher is used, because the survivors must not be killed.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]
from report import report

_made: list[torch.Tensor] = []


def train(call_wrapper: Any = None) -> None:
    """Step until killed. The wrapper fills in its handle, by the annotation."""
    if not _made:
        time.sleep(float(os.environ["BENCH_SETUP"]))
        _made.append(torch.ones(1000))
    dist.init_process_group("gloo")
    step = 0
    while True:
        dist.all_reduce(_made[0].clone())
        step += 1
        if step == 1:
            report("allreduce")
        time.sleep(float(sys.argv[1]))


if __name__ == "__main__":
    train.__annotations__["call_wrapper"] = inprocess.CallWrapper
    own_store = {"port": int(os.environ["MASTER_PORT"]) + 1, "timeout": timedelta(seconds=60)}
    inprocess.Wrapper(store_kwargs=own_store)(train)()
