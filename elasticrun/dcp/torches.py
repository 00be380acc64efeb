"""What stands elsewhere in older torches, or is called otherwise; and a pause of Python's garbage
collector, where torch and we make many objects that stay."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor  # type: ignore[attr-defined]

__all__ = ["DTensor", "load_alone", "save_alone"]


def load_alone(values: dict[str, Any], reader: Any, planner: Any = None) -> None:
    """`load` by this rank for itself, whether there is a process group or not."""
    if "no_dist" in inspect.signature(load).parameters:
        load(values, storage_reader=reader, planner=planner, no_dist=True)
    else:  # until torch 2.6 only the older function can be told so
        load_state_dict(values, reader, no_dist=True, planner=planner)


def save_alone(values: dict[str, Any], path: str) -> None:
    """`save` by a process that has no process group."""
    if "no_dist" in inspect.signature(save).parameters:
        save(values, checkpoint_id=path, no_dist=True)
    else:  # until torch 2.6 it sees that by itself
        save(values, checkpoint_id=path)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python looks for garbage whenever many objects were made; with all of torch in memory that
    takes longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
