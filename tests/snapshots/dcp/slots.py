"""Segments with a snapshot in them, made by hand: what a rank would have left."""

from __future__ import annotations

import io
import mmap
import struct
from typing import Any

import torch

from elasticrun.snapshots.dcp.image import envelope, write_envelopes
from elasticrun.snapshots.saver.hashing import digest
from elasticrun.snapshots.shm.layout import PAGE, Item, ItemKind, Layout, lay_out
from elasticrun.snapshots.shm.segment import (
    HASHES_AT,
    Segment,
    block_of,
    hashes_page,
    initialize,
    segment_bytes,
)
from elasticrun.wire.types import RoundName

ROUND = RoundName(1, 3, "aabbccdd")
NAMED = RoundName(1, 3, "aabbccdd")


class HandMade:
    """The state of one rank, and a segment that holds it."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._tensors: list[tuple[Item, torch.Tensor]] = []
        self._values: list[tuple[Item, bytes]] = []

    def tensor(self, *path: str | int, is_: torch.Tensor, own: bool = False) -> HandMade:
        """A whole tensor."""
        zeros = (0,) * is_.dim()
        return self._add(path, is_, own, ItemKind.TENSOR, tuple(is_.shape), zeros)

    def chunk(
        self, *path: str | int, is_: torch.Tensor, shape: tuple[int, ...], at: tuple[int, ...]
    ) -> HandMade:
        """A chunk of a sharded one."""
        return self._add(path, is_, False, ItemKind.SHARD, shape, at)

    def value(self, *path: str | int, is_: Any, own: bool = False) -> HandMade:
        """An opaque value."""
        path, buffer = self._path(path, own), io.BytesIO()
        torch.save(is_, buffer)
        item = Item(".".join(map(str, path)), path, ItemKind.BYTES, own)
        self._values.append((item, buffer.getvalue()))
        return self

    def _path(self, path: tuple[str | int, ...], own: bool) -> tuple[str | int, ...]:
        return (f"__rank{self.rank}", *path) if own else path

    def _add(
        self,
        path: tuple[str | int, ...],
        tensor: torch.Tensor,
        own: bool,
        kind: ItemKind,
        shape: tuple[int, ...],
        at: tuple[int, ...],
    ) -> HandMade:
        path, sizes = self._path(path, own), tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        head, tail = envelope(dtype, sizes)
        item = Item(
            *(".".join(map(str, path)), path, kind, own, dtype, shape, at, sizes),
            *(False, 0, len(head), tensor.numel() * tensor.element_size(), len(tail)),
        )
        self._tensors.append((item, tensor.detach().clone()))
        return self

    def layout(self, room: int = PAGE) -> Layout:
        items = [i for i, _ in self._tensors] + [i for i, _ in self._values]
        return lay_out(items, room, str(torch.__version__))

    def segment(self, step: int = 7, *, hashed: bool = False, sequence: int = 1) -> Segment:
        """With one committed snapshot in slot 0."""
        values = {i.fqn: data for i, data in self._values}
        room = 8 * len(values) + sum(map(len, values.values()))
        layout = self.layout(room)
        encoded = layout.encode()
        size = segment_bytes(len(encoded), layout.slot_bytes, 2)
        memory = memoryview(mmap.mmap(-1, size))
        initialize(memory, layout_length=len(encoded), slot_bytes=layout.slot_bytes, slots=2)
        memory[PAGE : PAGE + len(encoded)] = encoded
        segment = Segment(memory)
        payload = segment.payload(0)
        write_envelopes(payload, layout)
        tensors = {i.fqn: tensor for i, tensor in self._tensors}
        for item in layout.tensors:
            if item.nbytes:
                data = tensors[item.fqn].contiguous().flatten().view(torch.uint8).numpy()
                payload[item.payload : item.payload + item.nbytes] = memoryview(data)
        at = layout.own_bytes + layout.shared_bytes
        ordered = [values[item.fqn] for item in layout.values]
        region = struct.pack(f"={len(ordered)}Q", *map(len, ordered)) + b"".join(ordered)
        payload[at : at + len(region)] = region
        segment.commit(
            0, round=ROUND, sequence=sequence, step=step, layout=layout.key, values=len(region)
        )
        if hashed:
            block = block_of(at)
            found = [digest(payload[b : min(b + block, at)]) for b in range(0, at, block)]
            found.append(digest(payload[at : at + len(region)]))
            page = hashes_page(sequence, tuple(found))
            start = segment.slot_at(0) + HASHES_AT
            memory[start : start + len(page)] = page
        return segment


def renamed(layout: Layout, old: str, **changes: Any) -> Layout:
    """With one item changed."""
    items = tuple(i._replace(**changes) if i.fqn == old else i for i in layout.items)
    return Layout(
        items, layout.own_bytes, layout.shared_bytes, layout.values_capacity, layout.torch
    )
