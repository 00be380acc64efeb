"""WHAT A TRAINING SCRIPT MAY IMPORT; every part of it works without an agent.

`progress(step)`, once a step after the optimizer's, lets the job find a node that is slow; without
an agent it does nothing. `quiet("judge", minutes=20)` is a block in which the rank is not to be
taken for hung. `Checkpointer` keeps the state in memory and in storage; with its name
comes torch, so it is imported when it is first asked for.
Forbidden here: to raise into the script or to block it (but for what `Checkpointer` says of
itself), a thread or a hook in it, to import torch for `progress` (what the script has imported is
used), and every other room but `checkpointing`, `monitor.recorders` and a few names of `wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrun.training.telling import progress, quiet

if TYPE_CHECKING:
    from elasticrun.training.checkpointing.checkpointer import Checkpointer, Keep

__all__ = ["Checkpointer", "Keep", "progress", "quiet"]


def __getattr__(name: str) -> Any:
    if name in ("Checkpointer", "Keep"):
        from elasticrun.training.checkpointing import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
