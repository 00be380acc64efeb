"""A restore from storage: which step, whether it is whole, and into the tensors of now.

Rank 0 looks into the folder; the others are told. There is no collective in it, in the load either.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from elasticrun.checkpointing.parts import StateError, unflatten
from elasticrun.checkpointing.state import State
from elasticrun.dcp.items import OWN_PREFIX, own_key
from elasticrun.storage.folder import Folder
from elasticrun.wire.layout import Item, ItemKind


class SpoiledError(RuntimeError):
    """A checkpoint is not what was written, or cannot be read; it is not used again. A sentence."""


def load_step(folder: Folder, step: int, state: State, world_size: int, verify: bool) -> None:
    """Load a checkpoint into the state. SpoiledError, StateError."""
    if verify:
        wrong = folder.verify(step, state.rank, world_size)
        if wrong:
            _condemn(folder, step, wrong)
    reader = _reader(folder, step)
    with _reading(folder, step):
        saved, ranks = saved_in(reader.read_metadata())
    own = ranks == world_size and own_key(state.rank) in {str(i.path[0]) for i in saved.values()}
    targets = state.targets(saved, own)
    for fqn, target in targets.items():
        if tuple(target.shape) != saved[fqn].shape:
            raise StateError(
                f"{fqn} was saved with shape {saved[fqn].shape} and is now {tuple(target.shape)}"
            )
    values: dict[str, Any] = {**targets, **dict.fromkeys(state.wanted_values(saved, own))}
    with _reading(folder, step):
        _load(values, reader)
    state.adopt(saved, values, own)
    if not own and state.own:
        _resize(state, saved, ranks, reader)


def _condemn(folder: Folder, step: int, sentence: str) -> None:
    folder.condemn(step, sentence)
    raise SpoiledError(f"{sentence}; it will not be taken again")


@contextmanager
def _reading(folder: Folder, step: int) -> Iterator[None]:
    """What cannot be read is spoiled; a storage that does not do its work spoils nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in (None, errno.ENOENT):
            raise
        _condemn(folder, step, f"step {step} in {folder.url} cannot be read ({error!r:.200})")
    except Exception as error:  # torch's reader and pickle raise many kinds
        _condemn(folder, step, f"step {step} in {folder.url} cannot be read ({error!r:.200})")


def _reader(folder: Folder, step: int) -> Any:
    if folder.is_local:
        return FileSystemReader(folder.path(step))
    # torch's own reader for URLs; its module has no public name
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(folder.path(step))


def _load(values: dict[str, Any], reader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this rank loads alone is meant so
        try:
            load(values, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            failures: list[Any] = list(error.failures.values())
            raise failures[0][0] from error


def saved_in(metadata: Metadata) -> tuple[dict[str, Item], int]:
    """What a checkpoint has, by name, and of how many ranks it has own state."""
    paths: Mapping[str, Any] = metadata.planner_data or {}
    found: dict[str, Item] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        path = tuple(paths.get(fqn, (fqn,)))
        if isinstance(stored, BytesStorageMetadata):
            found[fqn] = Item(fqn, path, ItemKind.BYTES, False)
            continue
        shape = tuple(stored.size)
        whole = len(stored.chunks) == 1 and tuple(stored.chunks[0].sizes) == shape
        kind = ItemKind.TENSOR if whole else ItemKind.SHARD
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        found[fqn] = Item(fqn, path, kind, False, dtype, shape, (0,) * len(shape), shape)
    ranks = {str(i.path[0]) for i in found.values() if str(i.path[0]).startswith(OWN_PREFIX)}
    return found, len(ranks)


def _resize(state: State, saved: Mapping[str, Item], ranks: int, reader: Any) -> None:
    """Another number of ranks: hand the state of all old ones to who can make use of it."""
    for name, own in state.own.items():
        if own.on_resize is None or not ranks:
            state.remarks.append(
                f"per-rank state {name} is left as it is: the checkpoint has that of {ranks} ranks"
            )
            continue
        template, states = own.part.loose(), []
        for rank in range(ranks):
            prefix = (own_key(rank), name)
            items = [item for item in saved.values() if item.path[:2] == prefix]
            values: dict[str, Any] = {
                item.fqn: None
                if item.kind is ItemKind.BYTES
                else torch.empty(item.shape, dtype=getattr(torch, item.dtype))
                for item in items
            }
            _load(values, reader)
            nested = {item.path[2:]: values[item.fqn] for item in items}
            states.append(unflatten(nested, template) if nested else None)
        own.on_resize(states)
