"""THE API FOR TRAINING SCRIPTS; every part of it works without an agent.

`progress(step)`, called once a step after the optimizer's step, lets the job find slow nodes.
Without an agent it is a no-op. `quiet("judge", minutes=20)` is a block in which the rank does not
count as hung. `Checkpointer` keeps the state in memory and in storage. `ElasticBatchSampler`
chooses the samples of each step. These two import torch, so they are imported on first access.
Forbidden here: raising into the script or blocking it (except as `Checkpointer` documents), a
thread or a hook in it, importing torch for `progress` (it uses what the script has imported), and
every other folder except `checkpointing`, `monitor.recorders` and a few names of `wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrun.training.reporting import progress, quiet

if TYPE_CHECKING:
    from elasticrun.training.checkpointing.checkpointer import Checkpointer, Keep
    from elasticrun.training.data import ElasticBatchSampler

__all__ = ["Checkpointer", "ElasticBatchSampler", "Keep", "progress", "quiet"]


def __getattr__(name: str) -> Any:
    if name in ("Checkpointer", "Keep"):
        from elasticrun.training.checkpointing import checkpointer

        return getattr(checkpointer, name)
    if name == "ElasticBatchSampler":
        from elasticrun.training import data

        return data.ElasticBatchSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
