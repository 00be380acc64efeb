"""Restores from memory: from the snapshots of the previous ranks into the current tensors.

With the same number of ranks, a rank needs only its own snapshot. With another number, or if its
own is lost, it requests others until they cover all chunks that it needs, and only then overwrites
its state.

The ranks of a node may use all its cores for this, because nothing else runs. Tensors that were
never touched get their pages during the copy, which takes the kernel several times as long as the
copy itself, so that is spread over the cores too. The threads exist only during the copy.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from elasticrun.snapshots.dcp.items import PLAIN, own_key, pieces
from elasticrun.snapshots.dcp.loading import NotAllowed, deserialise
from elasticrun.snapshots.dcp.restoring import Cover, RestoreError, copy, copy_all
from elasticrun.snapshots.shm.layout import Item, Layout
from elasticrun.snapshots.shm.segment import SegmentError, Snapshot
from elasticrun.training.checkpointing.agent_connection import AgentConnection
from elasticrun.training.checkpointing.memory import devices
from elasticrun.training.checkpointing.memory.mapped import MappedSegment
from elasticrun.training.checkpointing.parts import Path, StateError
from elasticrun.training.checkpointing.state import KnownLayout, TrainingState
from elasticrun.wire import env
from elasticrun.wire.snapshots import IsWhole, Resume, ShardHere, WantShard, Whole

MOST_THREADS: Final = 8
"""Maximum number of threads; a few saturate the memory bus."""

LEAST_BYTES: Final = 32 * 1024 * 1024
"""Minimum bytes per thread. One thread copies less before a second one has started."""

SHARES: Final = 8
"""Number of shares per thread; a thread that is done takes another share, so that all finish
together.
"""

LEAST_SHARE: Final = 4 * 1024 * 1024
"""Minimum bytes of a share; below that, the distribution takes longer than the copy."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def threads_for(nbytes: int) -> int:
    """Number of threads with which this rank copies so many bytes: its share of the node's
    cores."""
    try:
        local = max(1, int(os.environ.get(env.LOCAL_WORLD_SIZE, "1")))
    except ValueError:
        local = 1
    cores = len(os.sched_getaffinity(0)) // local
    return max(1, min(MOST_THREADS, cores, nbytes // LEAST_BYTES))


def copy_in(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor; with several threads if all targets are in CPU memory. Raises what
    torch raises."""
    if devices.device_of(targets) is not None:
        devices.copy_in(targets, sources)
        return
    here = all(target.is_cpu for target in targets)
    sizes = [target.nbytes for target in targets] if here else []
    count = threads_for(sum(sizes))
    if count < 2:
        copy_all(targets, sources)
        return
    each = max(LEAST_SHARE, sum(sizes) // (count * SHARES) + 1)
    todo = iter(_shares(zip(targets, sources, sizes, strict=True), each))  # shared by the threads
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for share in todo:
                copy_all([target for target, _ in share], [source for _, source in share])
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _shares(sized: Iterable[tuple[torch.Tensor, torch.Tensor, int]], each: int) -> list[Pairs]:
    """Pairs of about `each` bytes in total; a large contiguous tensor is split."""
    shares: list[Pairs] = [[]]
    left = each
    for target, source, nbytes in sized:
        while (
            nbytes > left
            and target.is_contiguous()
            and source.is_contiguous()
            and target.shape == source.shape
        ):
            cut = max(1, left // target.element_size())
            if cut >= target.numel():
                break
            target, source = target.detach().view(-1), source.view(-1)
            shares[-1].append((target[:cut], source[:cut]))
            target, source = target[cut:], source[cut:]
            nbytes = target.nbytes
            shares.append([])
            left = each
        shares[-1].append((target, source))
        left -= nbytes
        if left <= 0:
            shares.append([])
            left = each
    return [share for share in shares if share]


class BadShard(Exception):
    """A shard is unusable: its `rank`, and the reason."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason


@dataclass(slots=True)
class Shard:
    """One rank's snapshot, mapped."""

    rank: int  # whose shard it is
    mapped: MappedSegment
    layout: Layout
    snapshot: Snapshot

    def tensors(self) -> list[torch.Tensor]:
        return self.mapped.tensors(self.snapshot.slot, self.layout)

    def value(self, place: int, weights_only: bool) -> Any:
        """Unpickle the opaque value at this place. Raises NotAllowed, or what a user's class
        raises."""
        found = self.mapped.segment.values(self.snapshot, self.layout)
        name = self.layout.values[place].fqn
        return deserialise(bytes(found[place]), weights_only, name)


def fetch_order(rank: int, world_size: int, old: int, *, here: bool) -> list[int]:
    """The old ranks, in the order in which this new rank requests their shards. First the one with
    its own number, if it is on this node (`here`): it costs nothing and has all unsharded state.
    Then the ranks that had what this rank needs, assuming equal shards."""
    begin = rank * old // world_size
    order = [one % old for one in range(begin, begin + old)]
    return sorted(order, key=lambda one: one != rank) if here else order


class MemoryRestore:
    """One restore from memory."""

    def __init__(self, connection: AgentConnection, state: TrainingState, resume: Resume) -> None:
        self._connection = connection
        self._state = state
        self._resume = resume
        self._shards: dict[int, Shard] = {}
        self._checked: set[int] = set()
        self._filled: dict[str, torch.Tensor] = {}
        self.values_capacity = 0
        self.kept: MappedSegment | None = None  # this rank's own mapped segment; the caller owns it

    def run(self, world_size: int) -> None:
        """Restore the state. Raises BadShard or AgentConnectionError, RuntimeError if this process
        cannot map the memory, and NotAllowed for a value that `weights_only` excludes."""
        same = self._resume.world_size == world_size
        ranks = self._resume.world_size
        order = fetch_order(self._state.rank, world_size, ranks, here=self._resume.same)
        try:
            self._restore(order, same)
            if not same:
                self._state.resize(
                    ranks, f"the job had {ranks} rank{'s' * (ranks != 1)} before", self._own_of
                )
            own = self._shards.get(self._state.rank)
            if same and own is not None and own.rank == self._state.rank:
                self.kept = own.mapped
                self._state.known = KnownLayout(own.layout, self._filled)
        finally:
            for shard in self._shards.values():
                if shard.mapped is not self.kept:
                    shard.mapped.close()
            self._shards.clear()

    def _fetch(self, rank: int) -> Shard | str:
        """A shard, or why it is missing."""
        if rank in self._shards:
            return self._shards[rank]
        here, fd = self._connection.request(WantShard(rank), ShardHere)
        if not here.ok or fd is None:
            return here.reason or f"the shard of rank {rank} no longer exists"
        mapped = self._mapped(rank, fd)
        try:
            snapshot = mapped.segment.read(here.slot)
            fits = snapshot is not None and snapshot.sequence == here.sequence
            if snapshot is None or not fits or not snapshot.is_of(self._resume.round):
                raise BadShard(rank, f"the snapshot of rank {here.rank} is not the announced one")
            layout = mapped.segment.layout(snapshot.layout)
            if snapshot.step != self._resume.step:
                raise BadShard(rank, f"the snapshot of rank {here.rank} belongs to another state")
        except (SegmentError, RuntimeError, ValueError) as error:
            raise BadShard(rank, f"the snapshot of rank {rank} cannot be read: {error}") from error
        self._shards[rank] = Shard(here.rank, mapped, layout, snapshot)
        return self._shards[rank]

    def _mapped(self, rank: int, fd: int) -> MappedSegment:
        """Map a shard's segment. Raises BadShard, or RuntimeError if the cause is this process and
        not the shard."""
        try:
            return MappedSegment(fd)
        except (OSError, RuntimeError, ValueError) as error:
            if not isinstance(error, OSError) or error.errno == errno.EINVAL:  # empty segment
                raise BadShard(
                    rank, f"the snapshot of rank {rank} cannot be mapped: {error}"
                ) from error
            raise RuntimeError(
                f"step {self._resume.step} is complete in memory, but this process cannot map the "
                f"snapshot of rank {rank} ({error.strerror}): raise its limits (ulimit -v, "
                "vm.max_map_count)"
            ) from error

    def _restore(self, order: list[int], same: bool) -> None:
        saved: dict[str, Item] = {}
        mine = own_key(self._state.rank)
        why = "none of its shards is in memory any more"
        found: tuple[Cover, list[torch.Tensor], dict[str, torch.Tensor]] | None = None
        for rank in order:
            shard = self._fetch(rank)
            if isinstance(shard, str):
                why = shard
                continue
            # Ignore other ranks' own state. Each rank has its own, and each shard would otherwise
            # require a new lookup of what is needed.
            items = shard.layout.items
            names = {i.fqn: i for i in items if not i.own or i.path[0] == mine}
            self.values_capacity = self.values_capacity or shard.layout.values_capacity
            try:
                if found is None or not names.keys() <= saved.keys():
                    saved = {**names, **saved}
                    found = self._cover(saved, same)
                else:
                    found[0].offer(rank, shard.layout)
            except (StateError, RestoreError) as error:
                why = str(error)
                continue
            if found[0].whole:
                self._finish(saved, *found, same)
                return
            why = f"{found[0].missing[0]} is in no shard that was found"
        raise BadShard(order[0], why)

    def _cover(
        self, saved: dict[str, Item], own: bool
    ) -> tuple[Cover, list[torch.Tensor], dict[str, torch.Tensor]]:
        targets = self._state.targets(saved, own)
        items: list[Item] = []
        self._filled = {}
        rest: dict[str, torch.Tensor] = {}
        for fqn, target in targets.items():
            item = saved[fqn]
            if type(target) in PLAIN and item.sizes == item.shape == target.shape:
                items.append(item)  # equals the item of `pieces`, but is faster
                self._filled[fqn] = target
            else:
                rest[fqn] = target
        try:
            more = pieces(rest)
        except ValueError as error:
            raise StateError(str(error)) from error
        items += [one.item for one in more]
        tensors = [*self._filled.values(), *(one.value for one in more)]
        cover = Cover(items, self._state.wanted_values(saved, own))
        for rank, shard in self._shards.items():
            cover.offer(rank, shard.layout)
        return cover, tensors, targets

    def _finish(
        self,
        saved: dict[str, Item],
        cover: Cover,
        tensors: list[torch.Tensor],
        targets: dict[str, torch.Tensor],
        own: bool,
    ) -> None:
        sources = {move.source: self._shards[move.source] for move in cover.moves}
        for shard in sources.values():
            # this rank's own segment is used again, so page-locking it is no loss
            device = devices.device_of(tensors) if shard.rank == self._state.rank else None
            shard.mapped.prefault(shard.snapshot.slot, device)
        shards = {rank: shard.tensors() for rank, shard in sources.items()}
        copy(cover.moves, shards, tensors, copy_in)
        for rank in sources.keys() | {rank for rank, _ in cover.values.values()}:
            self._check(rank)
        values: dict[str, Any] = dict(targets)
        for fqn, (rank, place) in cover.values.items():
            try:
                values[fqn] = self._shards[rank].value(place, self._state.weights_only)
            except NotAllowed:  # the snapshot itself is intact
                raise
            except Exception as error:  # raised by a user's class
                raise BadShard(rank, f"{fqn} cannot be read: {error!r:.200}") from error
        self._state.adopt(saved, values, own)

    def _check(self, rank: int) -> None:
        """Check that what was copied is what was written; ask the agent once for each shard."""
        if rank in self._checked:
            return
        self._checked.add(rank)
        whole, fd = self._connection.request(IsWhole(rank), Whole)
        assert fd is None
        shard = self._shards[rank]
        if not whole.ok:
            raise BadShard(rank, whole.reason)
        if shard.mapped.segment.committed(shard.snapshot.slot) != shard.snapshot.sequence:
            raise BadShard(rank, f"the snapshot of rank {rank} was overwritten during the restore")

    def _own_of(self, rank: int, name: str) -> dict[Path, Any]:
        """The per-rank state of one old rank, {} if it is lost."""
        shard = self._fetch(rank)
        if isinstance(shard, str) or shard.rank != rank:
            return {}
        self._check(rank)
        prefix = (own_key(rank), name)
        found: dict[Path, Any] = {}
        for tensor, item in zip(shard.tensors(), shard.layout.tensors, strict=True):
            if item.path[:2] == prefix:
                found[item.path[2:]] = tensor.clone()
        for place, item in enumerate(shard.layout.values):
            if item.path[:2] == prefix:
                found[item.path[2:]] = shard.value(place, self._state.weights_only)
        return found
