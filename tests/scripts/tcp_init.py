"""Initialises by tcp:// with the port of its first argument and sums over the ranks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group(
    "gloo",
    init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
    timeout=timedelta(seconds=240),
)
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value.item()))
dist.destroy_process_group()
