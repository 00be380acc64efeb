"""Checkpoints written out of hand-made segments, and what they hold."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from elasticrun.snapshots.saver import parts as saver_parts
from elasticrun.snapshots.saver.part_written import PartWritten
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.wire.snapshots import PartOf, PersistParts
from tests.snapshots.dcp.slots import NAMED, HandMade


def save(
    folder: Folder,
    ranks: Sequence[HandMade],
    *,
    step: int = 7,
    attempt: str = "a",
    image_problem: str = "",
    alone: Sequence[int] = (),
    **about: Any,
) -> list[PartWritten]:
    """Parts of all ranks, those in `alone` without their shared items, and the commit; `about`:
    what is said of that."""
    order = ordered(step=step, attempt=attempt)
    parts = [
        saver_parts.write_part(
            one.segment(step),
            PartOf(key=0, slot=0, sequence=1, rank=one.rank, shared=one.rank not in alone),
            order,
            folder,
            image_problem=image_problem,
        )
        for one in ranks
    ]
    commit(folder, parts, step=step, attempt=attempt, **about)
    return parts


def commit(folder: Folder, parts: Sequence[PartWritten], **changes: Any) -> None:
    """`changes`: fields of the order."""
    saver_parts.commit(folder, ordered(world_size=len(parts), **changes), parts)


def ordered(**changes: Any) -> PersistParts:
    """An order that this node coordinates; where it writes and whose parts is the caller's."""
    order = PersistParts(
        attempt="a",
        round=NAMED,
        step=7,
        folder="",
        world_size=1,
        parts=(),
        coordinates=True,
        coordinator_host="",
        coordinator_port=0,
        reason="periodic",
        keep_last=3,
        keep_every=0,
    )
    return replace(order, **changes)


def load(path: str, into: dict[str, Any]) -> dict[str, Any]:
    """By plain torch, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=path, no_dist=True)
    return into


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """All that two equal tensors have in common."""
    flat = tensor.detach().contiguous().flatten()
    return tensor.dtype, tensor.shape, bytes(flat.view(torch.uint8).numpy()) if len(flat) else b""


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in wanted.items()}


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def marker(folder: Folder, step: int = 7) -> Path:
    return Path(folder.path(step)) / ".metadata"
