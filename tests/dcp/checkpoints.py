"""Checkpoints written out of hand-made segments, and what they hold."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from elasticrun.saver import parts as persist
from elasticrun.saver.parts import PartWritten
from elasticrun.storage.folder import Folder
from tests.dcp.slots import NAMED, HandMade


def save(
    folder: Folder,
    ranks: Sequence[HandMade],
    *,
    step: int = 7,
    attempt: str = "a",
    distrusted: str = "",
    alone: Sequence[int] = (),
    **about: Any,
) -> list[PartWritten]:
    """Parts of all ranks, those in `alone` without their shared items, and the commit; `about`:
    what is said of that."""
    parts = [
        persist.write_part(
            *(one.segment(step), 0, 1, folder),
            rank=one.rank,
            shared=one.rank not in alone,
            round=NAMED,
            step=step,
            attempt=attempt,
            distrusted=distrusted,
        )
        for one in ranks
    ]
    commit(folder, parts, step=step, attempt=attempt, **about)
    return parts


def commit(
    folder: Folder,
    parts: Sequence[PartWritten],
    *,
    step: int = 7,
    attempt: str = "a",
    reason: str = "periodic",
    rewound_from: int = -1,
) -> None:
    persist.commit(
        folder,
        round=NAMED,
        step=step,
        parts=parts,
        world_size=len(parts),
        attempt=attempt,
        reason=reason,
        rewound_from=rewound_from,
    )


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
