"""Segments in the saver: mapped once; their snapshots are hashed block by block, and compared with
those hashes."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import xxhash

from elasticrun.snapshots.shm.layout import Item
from elasticrun.snapshots.shm.memory import map_pages, map_shared
from elasticrun.snapshots.shm.segment import (
    HASHES_AT,
    Segment,
    SegmentError,
    Snapshot,
    block_of,
    hashes_page,
)
from elasticrun.wire.types import key_of_name, tensor_name

SEAL_AT: Final = HASHES_AT - 8
"""Offset in a slot's header page of the `seal` of its hashes."""


LARGE: Final = 1 << 20
"""Bytes; the pages of a larger tensor are mapped before it is hashed."""


class Overwritten(Exception):
    """The slot no longer contains the requested snapshot."""


class OpenSegment:
    """A segment that the agent has passed, mapped for reading until the last reference is gone.

    The descriptor stays open too, because hashes are written through it."""

    def __init__(self, descriptor: int, local_rank: int) -> None:
        """Takes ownership of the descriptor; also closes it when it raises OSError or
        SegmentError."""
        self.descriptor = descriptor
        self.local_rank = local_rank
        weakref.finalize(self, os.close, descriptor)
        array = map_shared(descriptor, os.fstat(descriptor).st_size, writable=False)
        self._address = ctypes.addressof(array)
        self._mapping = memoryview(array).cast("B").toreadonly()
        self.segment = Segment(self._mapping)
        self._sizes: dict[int, int] = {}
        self._compared: tuple[int, tuple[Item, ...]] = (0, ())
        self.digests: TensorDigests | None = None
        """Of the snapshot that was compared last with its replicas."""

    @property
    def owner(self) -> str:
        """Whose segment this is, for messages."""
        return f"local rank {self.local_rank}" if self.local_rank >= 0 else "another node's rank"

    def snapshot(self, slot: int, sequence: int) -> Snapshot:
        """The snapshot in a slot. Raises Overwritten if it has another sequence number."""
        found = self.segment.read(slot) if 0 <= slot < self.segment.slots else None
        if found is None or found.sequence != sequence:
            raise Overwritten(f"slot {slot} of {self.owner} now holds another snapshot")
        return found

    def check_not_overwritten(self, snapshot: Snapshot) -> None:
        """Raise Overwritten if the rank has started to overwrite the snapshot since it was read."""
        if self.segment.committed(snapshot.slot) != snapshot.sequence:
            raise Overwritten(
                f"the snapshot of step {snapshot.step} of {self.owner} was "
                "overwritten while it was read"
            )

    def tensor_bytes(self, snapshot: Snapshot) -> int:
        """Bytes of the snapshot's tensors, own and shared. Raises SegmentError."""
        if snapshot.layout not in self._sizes:
            layout = self.segment.layout()
            if layout.key != snapshot.layout:
                raise SegmentError("a snapshot is of another layout than its segment")
            self._sizes[snapshot.layout] = layout.tensor_bytes
        return self._sizes[snapshot.layout]

    def compared(self, snapshot: Snapshot) -> tuple[Item, ...]:
        """The tensors that the snapshot's replicas have in common. Raises SegmentError."""
        if self._compared[0] != snapshot.layout:
            layout = self.segment.layout()
            if layout.key != snapshot.layout:
                raise SegmentError("a snapshot is of another layout than its segment")
            self._compared = (snapshot.layout, layout.compared)
        return self._compared[1]

    def address_of(self, slot: int) -> int:
        """The address of a slot's first tensor."""
        return self._address + self.segment.payload_at(slot)

    def stretches(self, snapshot: Snapshot) -> Iterator[memoryview]:
        """Yield the stretches that one hash each covers: the blocks of tensors, then the opaque
        values with their table. The pages of a block are mapped right before it is yielded. Raises
        SegmentError for invalid sizes."""
        tensors = self.tensor_bytes(snapshot)
        payload = self.segment.payload(snapshot.slot)
        if tensors + snapshot.values_bytes > len(payload):
            raise SegmentError("a snapshot is longer than its slot")
        first = self._address + self.segment.payload_at(snapshot.slot)
        block = block_of(tensors)
        for at in range(0, tensors, block):
            end = min(at + block, tensors)
            map_pages(first + at, first + end)
            yield payload[at:end]
        yield payload[tensors : tensors + snapshot.values_bytes]

    def stored_hashes(self, snapshot: Snapshot) -> tuple[int, ...]:
        """The hashes of a snapshot, () if they have not been computed. Hashes of an earlier
        snapshot with the same sequence number, from before a restart of the rank, do not count."""
        at = self.segment.slot_at(snapshot.slot) + SEAL_AT
        found = self.segment.hashes(snapshot)
        return found if bytes(self._mapping[at : at + 8]) == seal(snapshot) else ()

    def clear_stale_hashes(self, snapshot: Snapshot) -> None:
        """Clear the slot's hashes if they belong to an earlier snapshot, so that no reader uses
        them. Raises OSError."""
        if self.segment.hashes(snapshot) and not self.stored_hashes(snapshot):
            at = self.segment.slot_at(snapshot.slot) + HASHES_AT
            os.pwrite(self.descriptor, struct.pack("=Q", 0), at)


def seal(snapshot: Snapshot) -> bytes:
    """Eight bytes that identify a snapshot, to distinguish its hashes from those of any other."""
    which = (snapshot.sequence, snapshot.step, snapshot.layout, snapshot.values_bytes)
    return xxhash.xxh3_64_digest(snapshot.round + struct.pack("=4q", *which))


def store_hashes(
    descriptor: int, slot_at: int, snapshot: Snapshot, hashes: tuple[int, ...]
) -> None:
    """Write a snapshot's hashes into its slot; `slot_at`: the slot's offset in the file. The
    sequence number, which makes them valid, is cleared first and written last. Raises OSError."""
    at = slot_at + HASHES_AT
    page = hashes_page(snapshot.sequence, hashes)
    os.pwrite(descriptor, struct.pack("=Q", 0), at)
    os.pwrite(descriptor, page[8:], at + 8)
    os.pwrite(descriptor, seal(snapshot), slot_at + SEAL_AT)
    os.pwrite(descriptor, page[:8], at)


def digest(stretch: memoryview) -> int:
    """The hash of a stretch: xxh3, 64 bits."""
    return xxhash.xxh3_64_intdigest(stretch)


def hash_snapshot(opened: OpenSegment, slot: int, sequence: int) -> tuple[int, ...]:
    """Hash a committed snapshot and store the hashes in its slot, unless they are there already;
    returns them. Raises Overwritten, SegmentError or OSError."""
    snapshot = opened.snapshot(slot, sequence)
    if known := opened.stored_hashes(snapshot):
        return known
    hashes = _hashes(opened, snapshot)
    store_hashes(opened.descriptor, opened.segment.slot_at(slot), snapshot, hashes)
    return hashes


def _hashes(opened: OpenSegment, snapshot: Snapshot) -> tuple[int, ...]:
    found = []
    for stretch in opened.stretches(snapshot):
        found.append(digest(stretch))
        opened.check_not_overwritten(snapshot)
    return tuple(found)


class TensorDigests:
    """A hash of each tensor of a snapshot that replicas have in common, by name. Kept for the
    newest snapshot of a segment that was asked for, so that parts of it can be asked for later."""

    def __init__(self, opened: OpenSegment, slot: int, sequence: int) -> None:
        """Hash the tensors. Raises Overwritten or SegmentError."""
        snapshot = opened.snapshot(slot, sequence)
        items = opened.compared(snapshot)
        payload = opened.segment.payload(slot)
        self.which = (slot, sequence)
        self.names = [tensor_name(item.fqn) for item in items]
        self.digests = []
        for item in items:
            end = item.payload + item.nbytes
            if item.nbytes >= LARGE:
                first = opened.address_of(slot)
                map_pages(first + item.payload, first + end)
            self.digests.append(digest(payload[item.payload : end]))
            opened.check_not_overwritten(snapshot)

    def of_parts(
        self, parts: Sequence[tuple[int, int]], left_out: Collection[int]
    ) -> tuple[int, ...]:
        """One digest of each part of the tensors, without those whose names are `left_out`."""
        found = []
        for first, last in parts:
            chosen = zip(self.names[first:last], self.digests[first:last], strict=True)
            kept = [
                one for name, one in chosen if not left_out or key_of_name(name) not in left_out
            ]
            found.append(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(kept)}Q", *kept)) >> 1)
        return tuple(found)


def compared_digests(
    opened: OpenSegment, slot: int, sequence: int, *, again: bool
) -> TensorDigests:
    """The digests of a snapshot. `again`: it is asked for a second time, so they are known, even if
    the slot has been overwritten since. Raises Overwritten or SegmentError."""
    known = opened.digests
    if known is None or known.which != (slot, sequence) or not again:
        known = opened.digests = TensorDigests(opened, slot, sequence)
    return known


def check_snapshot(opened: OpenSegment, slot: int, sequence: int) -> str:
    """Compare a snapshot with its stored hashes. Returns "" if it is intact; a sentence if there
    are no hashes. Raises Corrupt if it differs; Overwritten or SegmentError."""
    snapshot = opened.snapshot(slot, sequence)
    known = opened.stored_hashes(snapshot)
    if not known:
        return f"step {snapshot.step} of {opened.owner} had not been hashed"
    _compare(opened, snapshot, known)
    return ""


class Corrupt(Exception):
    """The snapshot differs from what was hashed."""


def _compare(opened: OpenSegment, snapshot: Snapshot, known: tuple[int, ...]) -> None:
    found = _hashes(opened, snapshot)
    wrong = [n for n, pair in enumerate(zip(found, known, strict=False)) if pair[0] != pair[1]]
    if len(found) == len(known) and not wrong:
        return
    what = f"block {wrong[0] + 1} of {len(known)}" if wrong else "the number of blocks"
    raise Corrupt(
        f"the snapshot of step {snapshot.step} of {opened.owner} is not what was "
        f"written: {what} differs from its hash"
    )
