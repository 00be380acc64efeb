"""Rank and world size of this process."""

from __future__ import annotations

import os

import torch.distributed as dist

from elasticrun.wire import env


def rank_and_world_size() -> tuple[int, int]:
    """Rank and world size of the default process group, or else from the environment; 0 and 1
    without either."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get(env.RANK, "0")), int(os.environ.get(env.WORLD_SIZE, "1"))
