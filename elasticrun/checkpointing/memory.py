"""A segment in this process: one mapping, seen as bytes, as words and as tensors.

The mapping goes when the last tensor over it has gone and never before (`wire.mapping`). Where the
agent got no large pages, a new mapping of warm pages still costs a fault for each: `warm` has the
kernel make all entries at once. That takes some 80 ms a GiB then, in the caller's thread.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

import torch

from elasticrun.dcp.image import views
from elasticrun.wire.layout import PAGE, Layout
from elasticrun.wire.mapping import map_shared, system
from elasticrun.wire.segment import Segment, SegmentError

MADV_POPULATE_READ: Final = 22
"""Linux 5.14. Of shared memory, pages that are mapped by it are writable as well."""


class Mapped:
    """One mapped segment."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over. SegmentError, OSError or RuntimeError if it cannot be
        mapped."""
        try:
            about = os.fstat(fd)
            size, self._identity = about.st_size, (about.st_dev, about.st_ino)
            array = map_shared(fd, size)
        finally:
            os.close(fd)
        self._address = ctypes.addressof(array)
        self.storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        self.memory = memoryview(array).cast("B")
        self.segment = Segment(self.memory)
        self._tensors: dict[int, list[torch.Tensor]] = {}

    def is_of(self, fd: int) -> bool:
        """Whether this descriptor is of the same memory."""
        about = os.fstat(fd)
        return (about.st_dev, about.st_ino) == self._identity

    def tensors(self, slot: int, layout: Layout) -> list[torch.Tensor]:
        """The tensors of a slot in layout order; made once."""
        if slot not in self._tensors:
            at = self.segment.payload_at(slot)
            self._tensors[slot] = views(self.storage, at, layout)
        return self._tensors[slot]

    def warm(self, slot: int) -> None:
        """Map all pages of a slot. An older kernel does not know how; then the first copy does."""
        at = self._address + self.segment.slot_at(slot)
        system().madvise(at - at % PAGE, self.segment.slot_bytes + PAGE, MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmapped once nobody has a tensor of it any more."""
        self.segment.close()
        self.memory.release()
        self._tensors.clear()


def values_at(mapped: Mapped, slot: int, layout: Layout, values_bytes: int) -> list[memoryview]:
    """The opaque values of a slot. SegmentError for a table that cannot be true."""
    at = layout.own_bytes + layout.shared_bytes
    region = mapped.segment.payload(slot)[at : at + values_bytes]
    count = len(layout.values)
    if values_bytes < 8 * count or len(region) != values_bytes:
        raise SegmentError("a snapshot's opaque values have no table")
    lengths = struct.unpack(f"={count}Q", region[: 8 * count])
    found, begin = [], 8 * count
    for length in lengths:
        found.append(region[begin : begin + length])
        begin += length
    if begin != values_bytes:
        raise SegmentError("a snapshot's opaque values are longer or shorter than its record says")
    return found


def with_table(values: list[bytes]) -> bytes:
    """Opaque values as they lie in a slot."""
    return struct.pack(f"={len(values)}Q", *map(len, values)) + b"".join(values)
