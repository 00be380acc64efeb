"""A checkpoint that is about to be restored: whether it is whole, and into the tensors of now.

Only what is missing, short or other than its hashes is spoiled. What is whole and cannot be loaded
(a class that the script no longer has, memory, a storage that is away) stays as it is. There is no
collective in it, in the load either.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from elasticrun.checkpointing.parts import StateError, unflatten
from elasticrun.checkpointing.state import State
from elasticrun.dcp.items import OWN_PREFIX, own_key
from elasticrun.dcp.loading import Loading, NotAllowed, read_metadata
from elasticrun.dcp.torches import load_alone
from elasticrun.storage.errors import StorageError
from elasticrun.storage.folder import MARKER, Folder
from elasticrun.wire.layout import Item, ItemKind


class SpoiledError(RuntimeError):
    """Checkpoints are not what was written, and no other can be taken in this life. A sentence."""


class UnreadableError(RuntimeError):
    """A checkpoint that is whole cannot be loaded; it stays as it is. A sentence."""


class Stored:
    """One checkpoint, as one rank of many sees it. StorageError if it cannot be reached."""

    def __init__(
        self,
        folder: Folder,
        step: int,
        rank: int,
        world_size: int,
        verify: bool,
        weights_only: bool = True,
    ) -> None:
        self._folder = folder
        self._step = step
        self._rank = rank
        self._world_size = world_size
        self._verify = verify
        self._weights_only = weights_only
        self._where = f"step {step} in {folder.url}"
        self._reader = _reader(folder, step)
        self._metadata: Metadata | None = None
        self._saved: tuple[dict[str, Item], int] = ({}, 0)

    # ------------------------------------------------------------ is it whole?

    def fault(self) -> str:
        """What is not as it was written, in a sentence; "" if nothing is found. The ranks share the
        work; nothing is loaded. StorageError, UnreadableError: nobody can tell."""
        if self._verify:
            wrong = self._folder.verify(self._step, self._rank, self._world_size)
            if wrong:
                return wrong
        try:
            self._metadata = read_metadata(self._reader, self._weights_only)
            self._saved = saved_in(self._metadata)
        except Exception as error:  # torch's reader and pickle raise many kinds
            return self._blamed(error)
        if self._rank == 0 and not (self._verify and self._folder.has_manifest(self._step)):
            return self._short()
        return ""

    def condemn(self, sentence: str) -> str:
        """Have no later start take it. The sentence, with what is in the way of that."""
        try:
            self._folder.condemn(self._step, sentence)
        except (OSError, StorageError) as error:
            return f"{sentence}; that could not be noted there ({error!s:.200})"
        return f"{sentence}; it will not be taken again"

    def _short(self) -> str:
        """Whether a file is missing or short, by what torch's marker has of it; "" if none is."""
        least: dict[str, int] = {}
        places = self._metadata.storage_data if self._metadata is not None else None
        for place in (places or {}).values():
            if isinstance(place, _StorageInfo):  # what another writer says is its own
                end = place.offset + place.length
                least[place.relative_path] = max(end, least.get(place.relative_path, 0))
        wrong = self._folder.short(self._step, least)
        return f"{self._where} is spoiled: {wrong}" if wrong else ""

    def _blamed(self, error: Exception) -> str:
        """Why it is spoiled, after it could not be read. Whatever does not say that is raised."""
        if isinstance(error, NotAllowed):
            raise UnreadableError(f"{self._where} is not loaded: {error}") from error
        if isinstance(error, StorageError):
            raise error
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            why = error.strerror or repr(error)
            raise StorageError(f"{self._where} cannot be read: {why}") from error
        wrong = self._folder.verify(self._step, 0, 0)
        if wrong:
            return wrong
        if self._folder.has_manifest(self._step):
            if self._verify:
                found = "is whole"
            else:
                found = "was not compared with its hashes (verify=True does that)"
        else:
            if self._metadata is None and type(error).__name__ in ("EOFError", "UnpicklingError"):
                return f"{self._where} is spoiled: {MARKER} cannot be read ({error})"
            if wrong := self._short():
                return wrong
            found = "has all its bytes"
        raise UnreadableError(
            f"{self._where} {found} and could not be loaded: {error!r:.300}; it stays as it is: "
            "mend the script (or the storage), or move that folder away to go on from an older one"
        ) from error

    # ------------------------------------------------------------ into the state

    def load(self, state: State) -> None:
        """After `fault`. SpoiledError, UnreadableError, StateError, StorageError."""
        saved, ranks = self._saved
        own = ranks == self._world_size and own_key(self._rank) in {
            str(item.path[0]) for item in saved.values()
        }
        targets = state.targets(saved, own)
        for fqn, target in targets.items():
            if tuple(target.shape) != saved[fqn].shape:
                raise StateError(
                    f"{fqn} was saved with shape {saved[fqn].shape} and is now "
                    f"{tuple(target.shape)}"
                )
        values: dict[str, Any] = {**targets, **dict.fromkeys(state.wanted_values(saved, own))}
        self._fill(values)
        state.adopt(saved, values, own)
        if not own and state.own:
            self._resize(state, saved, ranks)

    def _fill(self, values: dict[str, Any]) -> None:
        try:
            _load(values, self._reader, self._weights_only)
        except Exception as error:  # torch's reader and pickle raise many kinds
            raise SpoiledError(self.condemn(self._blamed(error))) from error

    def _resize(self, state: State, saved: Mapping[str, Item], ranks: int) -> None:
        """Another number of ranks: hand the state of all old ones to who can make use of it."""
        for name, own in state.own.items():
            if own.on_resize is None or not ranks:
                state.not_had(name, f"the checkpoint has that of {ranks} ranks")
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
                self._fill(values)
                nested = {item.path[2:]: values[item.fqn] for item in items}
                states.append(unflatten(nested, template) if nested else None)
            own.on_resize(states)


def _reader(folder: Folder, step: int) -> Any:
    if folder.is_local:
        return FileSystemReader(folder.path(step))
    # torch's own reader for URLs; its module has no public name
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(folder.path(step))


def _load(values: dict[str, Any], reader: Any, weights_only: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this rank loads alone is meant so
        try:
            load_alone(values, reader, Loading(weights_only))
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
