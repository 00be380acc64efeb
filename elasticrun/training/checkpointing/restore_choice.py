"""Chooses the step that all ranks restore, before anything is loaded; loads checkpoints from
storage.

It chooses the newest step in memory or storage. A step is suspect if ranks failed soon after
restoring it. Suspect steps come last, but before a start from scratch. A step that the user
requests is the only candidate.

Rank 0 compares memory with storage and publishes its choice in the job's existing store, without a
collective. All ranks check a checkpoint in storage, each a part of it. If one finds it corrupt,
rank 0 chooses again. No restart is needed, because nothing has been loaded yet.

A checkpoint counts as corrupt only if files are missing, short or differ from their hashes. A valid
checkpoint that cannot be loaded (the script lacks a class, memory is short, storage is unreachable)
is left unchanged.
"""

from __future__ import annotations

import _thread
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from elasticrun.snapshots.dcp.items import OWN_PREFIX, own_key
from elasticrun.snapshots.dcp.loading import NotAllowed, SafeLoadPlanner, read_metadata
from elasticrun.snapshots.shm.layout import Item, ItemKind
from elasticrun.snapshots.storage.folder import MARKER, CheckpointFault, Folder
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training.checkpointing.parts import Path, StateError
from elasticrun.training.checkpointing.state import TrainingState
from elasticrun.wire import env
from elasticrun.wire.types import NO_SKIP, Skip

T = TypeVar("T")

LIMIT: Final = 300.0
"""Seconds that a rank waits for rank 0's choice."""

AGREE_LIMIT: Final = 1800.0
"""Seconds that a rank waits for all others to check a checkpoint: each reads a part of it."""

QUERY_LIMIT: Final = 10.0
"""Seconds for a query of the storage if a step in memory is an alternative. Without one, the query
continues, and the operator gets a message that the ranks wait for the storage.
"""

STORAGE_LIMIT: Final = LIMIT - 30.0
"""Seconds for a query of the storage if no step is in memory. Shorter than LIMIT, so that the other
ranks receive the reason before they stop waiting.
"""

MAX_CORRUPT: Final = 8
"""Maximum number of consecutive corrupt checkpoints in one restore: more suggest a storage
fault."""

MOST_NAMED: Final = 10
"""Maximum number of checkpoints listed in a message."""


class ExchangeError(RuntimeError):
    """The store cannot be reached, or a key is missing."""


class CorruptError(RuntimeError):
    """Checkpoints are corrupt, and no other can be used without a restart."""


class UnreadableError(RuntimeError):
    """A valid checkpoint cannot be loaded; it is left unchanged."""


class NotAgreed(RuntimeError):
    """Another rank cannot check the checkpoint."""


class StepNotAvailable(RuntimeError):
    """The requested step is not available."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of this rank that both backends need."""

    folder: Folder
    rank: int
    world_size: int
    slots: int
    keep_last: int
    keep_every: int
    verify: bool
    replicas: int = 0
    weights_only: bool = True
    least_slots: int = 0  # acceptable minimum without memory for more; 0: no fewer
    overlap: bool = False


def within_limit(
    limit: float, work: Callable[[], T], url: str, slow: Callable[[], None] = lambda: None
) -> T:
    """Call `work`, which accesses storage; raise StorageError if that takes longer than `limit`
    seconds. A call into a hanging file system cannot be interrupted, so it runs in a thread, which
    is then abandoned. `slow` is called after QUERY_LIMIT."""
    answer: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run_work() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:
            answer.put((None, error))

    try:
        # Not with `threading`: its start() waits forever if the new thread dies for lack of memory.
        _thread.start_new_thread(run_work, ())
    except RuntimeError as error:
        raise StorageError(str(error)) from error
    first = min(limit, QUERY_LIMIT)
    try:
        found, wrong = answer.get(timeout=first)
    except Empty:
        try:
            if limit > first:
                slow()
            found, wrong = answer.get(timeout=limit - first)
        except Empty:
            raise StorageError(f"{url} has not answered for {limit:.0f} s") from None
    if wrong is not None:
        raise wrong
    return found  # type: ignore[return-value]


class RankExchange:
    """Communication between ranks without a collective: keys under a prefix that is unique to
    this incarnation of the ranks. They are in the store of the default process group, or else in
    torch's store at MASTER_ADDR:MASTER_PORT, which every launcher provides. A single rank needs no
    store. Every method raises ExchangeError if the store fails."""

    def __init__(self, prefix: str, world_size: int) -> None:
        self._prefix = prefix
        self._world_size = world_size
        self._alone = world_size < 2
        self._store: Any = None

    def publish(self, key: str, text: str) -> None:
        """Publish a text; called by rank 0; does not wait."""
        if not self._alone:
            self._apply(key, lambda store, name: store.set(name, text))

    def _apply(self, key: str, act: Callable[[Any, str], Any]) -> Any:
        """Call `act` with the store and the full name of the key; return its result."""
        try:
            return act(self._connected_store(), f"{self._prefix}/{key}")
        except Exception as error:  # torch raises many types
            raise ExchangeError(f"{key} cannot be sent to the other ranks ({error})") from error

    def wait_for(self, key: str, limit: float = LIMIT, who: str = "rank 0 has") -> str:
        """Wait for rank 0's text under this key. Raises ExchangeError after `limit` seconds."""
        try:
            store, name = self._connected_store(), f"{self._prefix}/{key}"
            store.wait([name], timedelta(seconds=limit))
            return bytes(store.get(name)).decode()
        except Exception as error:
            raise ExchangeError(f"{who} not said {key} in {limit:.0f} s ({error})") from error

    def abort_agreement(self, key: str, objection: str) -> str:
        """Object to what all ranks must agree on (see `wait_for_agreement`); does not wait. Returns
        the first objection, which counts for all ranks."""
        if self._alone:
            return objection
        stands: str = self._apply(
            key, lambda store, name: _set_once(store, name, f"no {objection}")
        )
        return stands.partition(" ")[2]

    def wait_for_agreement(self, key: str) -> str:
        """Agree; wait until all ranks agree (return "") or one objects (return its objection).
        Raises ExchangeError if that takes longer than AGREE_LIMIT."""
        if self._alone:
            return ""

        def agree(store: Any, name: str) -> None:
            if store.add(f"{name}/ranks", 1) == self._world_size:
                _set_once(store, name, "yes")

        self._apply(key, agree)
        return self.wait_for(key, AGREE_LIMIT, "the ranks have").partition(" ")[2]

    def _connected_store(self) -> Any:
        c10d: Any = dist  # untyped
        if self._store is None:
            if dist.is_initialized():
                # private, but used throughout torch's own code; there is no other access
                self._store = c10d.distributed_c10d._get_default_store()
            else:
                address, port = os.environ[env.MASTER_ADDR], int(os.environ[env.MASTER_PORT])
                limit = timedelta(seconds=LIMIT)
                self._store = c10d.TCPStore(address, port, is_master=False, timeout=limit)
        return self._store


def _set_once(store: Any, name: str, text: str) -> str:
    """Set the key unless it exists; return its value. torch's older store server, which runs where
    the libuv one cannot, does not wake waiters for a key that compare_set creates. So the key is
    set a second time, to the same value."""
    stands = bytes(store.compare_set(name, "", text)).decode()
    store.set(name, stands)
    return stands


class StoredCheckpoint:
    """One checkpoint in storage, as one of many ranks sees it. Raises StorageError if the storage
    is unreachable."""

    def __init__(self, setting: RankOptions, step: int) -> None:
        self._setting, self._folder = setting, setting.folder
        self._step = step
        self._where = f"step {step} in {self._folder.url}"
        self._reader = _reader(self._folder, step)
        self._metadata: Metadata | None = None
        self._saved: tuple[dict[str, Item], int] = ({}, 0)

    def fault(self) -> CheckpointFault | None:
        """The first fault found; None if there is none. The ranks share the work; nothing is
        loaded. Raises StorageError or UnreadableError if the check is impossible."""
        setting = self._setting
        if setting.verify:
            found = self._folder.faults(self._step, setting.rank, setting.world_size)
            if (wrong := next(found, None)) is not None:
                return wrong
        try:
            self._metadata = read_metadata(self._reader, setting.weights_only)
            self._saved = saved_items(self._metadata)
        except Exception as error:  # torch's reader and pickle raise many types
            return self._corruption(error)
        if setting.rank == 0 and not (setting.verify and self._folder.has_manifest(self._step)):
            return self._short()
        return None

    def condemn(self, fault: CheckpointFault) -> str:
        """Mark the checkpoint as corrupt, so that no later start uses it. Return a message, also
        about a failure to mark it."""
        sentence = f"{self._where} {fault.clause}"
        try:
            self._folder.condemn(self._step, fault.what)
        except (OSError, StorageError) as error:
            return f"{sentence}; it could not be marked as corrupt ({error!s:.200})"
        return f"{sentence}; it will not be used again"

    def _short(self) -> CheckpointFault | None:
        """The first file that is missing or shorter than torch's metadata implies; None if there is
        none."""
        least: dict[str, int] = {}
        places = self._metadata.storage_data if self._metadata is not None else None
        for place in (places or {}).values():
            if isinstance(place, _StorageInfo):  # other writers have their own types
                end = place.offset + place.length
                least[place.relative_path] = max(end, least.get(place.relative_path, 0))
        wrong = self._folder.short(self._step, least)
        return CheckpointFault(wrong) if wrong else None

    def _corruption(self, error: Exception) -> CheckpointFault:
        """Why a checkpoint that could not be read is corrupt. Raises if another cause is
        possible."""
        if isinstance(error, NotAllowed):
            raise UnreadableError(f"{self._where} is not loaded: {error}") from error
        if isinstance(error, StorageError):
            raise error
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            why = error.strerror or repr(error)
            raise StorageError(f"{self._where} cannot be read: {why}") from error
        wrong = next(self._folder.faults(self._step, 0, 0), None)
        if wrong is not None:
            return wrong
        if self._folder.has_manifest(self._step):
            found = "was not compared with its hashes (verify=True does that)"
            if self._setting.verify:
                found = "is intact"
        else:
            if self._metadata is None and type(error).__name__ in ("EOFError", "UnpicklingError"):
                return CheckpointFault(f"{MARKER} cannot be read ({error})")
            if (wrong := self._short()) is not None:
                return wrong
            found = "has its full size"
        raise UnreadableError(
            f"{self._where} {found} but could not be loaded: {error!r:.300}; it is unchanged: "
            "fix the script (or the storage), or move that folder away to resume from an older one"
        ) from error

    def load(self, state: TrainingState) -> None:
        """Load the checkpoint; call `fault` first. Raises CorruptError, UnreadableError, StateError
        or StorageError."""
        saved, ranks = self._saved
        mine = own_key(self._setting.rank)
        own = ranks == self._setting.world_size and any(
            str(item.path[0]) == mine for item in saved.values()
        )
        targets = state.targets(saved, own)
        for fqn, target in targets.items():
            shape, now = saved[fqn].shape, tuple(target.shape)
            if now != shape:
                raise StateError(f"{fqn} was saved with shape {shape} and is now {now}")
        values: dict[str, Any] = {**targets, **dict.fromkeys(state.wanted_values(saved, own))}
        self._fill(values)
        state.adopt(saved, values, own)
        if not own:
            by = f"{ranks} rank{'s' * (ranks != 1)}"
            state.resize(ranks, f"the checkpoint was saved by {by}", self._own_of)

    def _fill(self, values: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about a load without collectives
                load(
                    values,
                    storage_reader=self._reader,
                    planner=SafeLoadPlanner(self._setting.weights_only),
                    no_dist=True,
                )
        except (Exception, CheckpointException) as error:  # torch's reader raises many types
            first: Any = error
            if isinstance(error, CheckpointException):  # not an Exception
                first = next(iter(error.failures.values()))[0]
            raise CorruptError(self.condemn(self._corruption(first))) from error

    def _own_of(self, rank: int, name: str) -> dict[Path, Any]:
        """The per-rank state of one old rank, {} if it has none."""
        prefix = (own_key(rank), name)
        items = [item for item in self._saved[0].values() if item.path[:2] == prefix]
        values: dict[str, Any] = {
            item.fqn: None
            if item.kind is ItemKind.BYTES
            else torch.empty(item.shape, dtype=getattr(torch, item.dtype))
            for item in items
        }
        self._fill(values)
        return {item.path[2:]: values[item.fqn] for item in items}


def _reader(folder: Folder, step: int) -> Any:
    if folder.is_local:
        return FileSystemReader(folder.path(step))
    # torch's reader for URLs; its module is private
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(folder.path(step))


def saved_items(metadata: Metadata) -> tuple[dict[str, Item], int]:
    """The items of a checkpoint by name, and the number of ranks with per-rank state in it."""
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


@dataclass(slots=True)
class RestoreChoice:
    """Chooses, with the other ranks, what to restore; loads it if it is in storage. Steps in `skip`
    come last."""

    setting: RankOptions
    exchange: RankExchange
    remark: Callable[[str], None]  # reports a sentence to the operator
    memory: int = -1  # the step available in memory, -1: none
    skip: Skip = NO_SKIP
    _corrupt: int = field(default=-1, init=False)  # the last corrupt step; only older ones are used
    _round: int = field(default=0, init=False)  # number of the choice

    def restore(self, state: TrainingState) -> tuple[str, int]:
        """Choose, and load a checkpoint if it is in storage; what is in memory is not loaded here.
        A corrupt checkpoint is marked, and the choice is repeated. Return the source ("memory",
        "storage", "nothing") and the step. Raises CorruptError,
        NotAgreed, StepNotAvailable, and what `StoredCheckpoint` raises."""
        for self._round in range(MAX_CORRUPT):
            source, step = self._choose()
            if source != "storage":
                return source, step
            stored, wrong = self._examine(step)
            if wrong is None:
                stored.load(state)
                return source, step
            if self.setting.rank == 0:
                self.remark(stored.condemn(wrong))
            self._corrupt = step
        raise CorruptError(
            f"{MAX_CORRUPT} checkpoints in {self.setting.folder.url} in a row are "
            "corrupt: check the storage; the next start tries older ones"
        )

    def _choose(self) -> tuple[str, int]:
        """The choice, the same on all ranks: rank 0 makes it."""
        key = f"from/{self._round}"
        if self.setting.rank != 0:
            source, _, what = self.exchange.wait_for(key).partition(" ")
            if source == "away":
                raise NotAgreed(f"rank 0 cannot determine what to resume from: {what}")
            return source, int(what)
        try:
            chosen = (
                self._newest_in_memory_or_storage() if self.skip.all_but < 0 else self._requested()
            )
        except Exception as error:  # release the other ranks, which wait for it
            self.exchange.publish(key, f"away {error!s:.500}")
            raise
        self.exchange.publish(key, f"{chosen[0]} {chosen[1]}")
        return chosen

    def _requested(self) -> tuple[str, int]:
        step, folder = self.skip.all_but, self.setting.folder
        if self.memory == step:
            return "memory", step
        whole = sorted(self._query_storage(folder.committed))
        if step in whole:
            return "storage", step
        there = ", ".join(map(str, whole[-MOST_NAMED:])) or "none"
        raise StepNotAvailable(
            f"--restore-step={step}: step {step} is not complete in memory, and {folder.url} has "
            "no "
            f"valid checkpoint of it (it has: {there})"
        )

    def _newest_in_memory_or_storage(self) -> tuple[str, int]:
        """The newest step; in memory if storage has the same. Suspect steps come last."""
        memory = -1 if self.skip.memory else self.memory
        below = [step for step in (self.skip.storage_from, self._corrupt) if step >= 0]
        stored = self._newest_in_storage(memory, min(below, default=-1))
        if max(memory, stored) < 0 and (self.skip.memory or self.skip.storage_from >= 0):
            memory, stored = self.memory, self._newest_in_storage(self.memory, self._corrupt)
            if max(memory, stored) >= 0:
                again = f"step {max(memory, stored)} is tried again"
                self.remark(f"{again}, although ranks failed soon after it: no other step is left")
        if memory >= 0 and memory >= stored:
            return "memory", memory
        return ("storage", stored) if stored >= 0 else ("nothing", 0)

    def _newest_in_storage(self, memory: int, below: int) -> int:
        """The newest step in storage. With a step in memory, an unreachable storage is ignored."""
        folder = self.setting.folder
        if memory < 0:
            return self._query_storage(partial(folder.newest, below))
        try:
            return within_limit(QUERY_LIMIT, partial(folder.newest, below, memory), folder.url)
        except Exception as error:  # of the library for this storage
            self.remark(f"step {memory} is restored from memory; storage was not queried: {error}")
            return -1

    def _query_storage(self, work: Callable[[], T]) -> T:
        """The result of `work`, a query of the storage that the choice depends on. Raises
        StorageError."""
        url = self.setting.folder.url

        def slow() -> None:
            self.remark(f"{url} has not answered for {QUERY_LIMIT:.0f} s; the ranks wait for it")

        return within_limit(STORAGE_LIMIT, work, url, slow)

    def _examine(self, step: int) -> tuple[StoredCheckpoint, CheckpointFault | None]:
        """The checkpoint, and the first fault that a rank found, the same on all ranks; None if it
        may be loaded."""
        setting, key = self.setting, f"whole/{self._round}"
        try:
            stored = StoredCheckpoint(setting, step)
            wrong = within_limit(AGREE_LIMIT, stored.fault, setting.folder.url)
        except Exception as error:  # release the other ranks, which wait for this one
            self.exchange.abort_agreement(key, f"away rank {setting.rank}: {error!s:.500}")
            raise
        if wrong is not None:
            kind = "spoiled" if wrong.corrupt else "unfit"
            reply = self.exchange.abort_agreement(key, f"{kind} {wrong.what}")
        else:
            reply = self.exchange.wait_for_agreement(key)
        kind, _, what = reply.partition(" ")
        if kind == "away":
            raise NotAgreed(f"step {step} in storage cannot be restored by all ranks: {what}")
        return stored, CheckpointFault(what, kind == "spoiled") if what else None
