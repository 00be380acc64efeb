"""THE API FOR TRAINING SCRIPTS; every part of it works without an agent.

`progress(step)`, called once a step after the optimizer's step, lets the job find slow nodes.
Without an agent it is a no-op. `quiet("judge", minutes=20)` is a block in which the rank does not
count as hung. `Checkpointer` keeps the state in memory and in storage. `ElasticBatchSampler`
chooses the samples of each step, `shards` takes those that the master hands out. `recoverable` lets
a healthy rank call a function again in the same process. The last four are imported on first
access: most of them import torch or threading.
Forbidden here: raising into the script or blocking it (except as `Checkpointer`, `shards` and
`recoverable` document), a thread or a hook in it (except in `recoverable`), importing torch for
`progress` (it uses what the script has imported), and every other folder except `checkpointing`,
`monitor.recorders` and a few names of `wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrun.training.reporting import progress, quiet

if TYPE_CHECKING:
    from elasticrun.training.checkpointing.checkpointer import Checkpointer, Keep
    from elasticrun.training.data import ElasticBatchSampler
    from elasticrun.training.recovery import RoundOver, keep, recoverable
    from elasticrun.training.work import WorkShard, shards

__all__ = [
    "Checkpointer",
    "ElasticBatchSampler",
    "Keep",
    "RoundOver",
    "WorkShard",
    "keep",
    "progress",
    "quiet",
    "recoverable",
    "shards",
]


def __getattr__(name: str) -> Any:
    if name in ("Checkpointer", "Keep"):
        from elasticrun.training.checkpointing import checkpointer

        return getattr(checkpointer, name)
    if name == "ElasticBatchSampler":
        from elasticrun.training import data

        return data.ElasticBatchSampler
    if name in ("WorkShard", "shards"):
        from elasticrun.training import work

        return getattr(work, name)
    if name in ("RoundOver", "keep", "recoverable"):
        from elasticrun.training import recovery

        return getattr(recovery, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
