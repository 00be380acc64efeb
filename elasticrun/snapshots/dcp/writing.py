"""Writes a part slowly: item by item from a slot, with torch's `write_data`.

Used if this torch cannot read the image of a slot (`dcp.image`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from elasticrun.snapshots.dcp.metadata import dtype_of, write_item
from elasticrun.snapshots.shm.layout import Item

Write = Callable[[memoryview], None]
"""Accepts the next bytes of the file."""


def write_data(
    items: Sequence[Item], payload: memoryview, values: Sequence[memoryview], write: Write
) -> tuple[tuple[int, int], ...]:
    """Pass the bytes of one file to `write`; returns (offset, length) of each item, in order.

    `payload`: the slot from its first tensor on; `values`: the opaque values, in order. Exceptions
    from `write` propagate."""
    planned = [write_item(item) for item in items]
    planner = _FromSlot(zip(planned, items, strict=True), payload, values)
    # copying ahead would initialize the accelerator in this process, which must not use it
    writer = FileSystemWriter("unused", sync_files=False, per_thread_copy_ahead=0)
    writer.fs = _OneFile(write)  # type: ignore[assignment]
    (plan,) = writer.prepare_global_plan([SavePlan(planned)])
    with _no_checksums():
        results = writer.write_data(plan, planner).wait()
    found = {r.index: (r.storage_data.offset, r.storage_data.length) for r in results}
    return tuple(found[item.index] for item in planned)


class _FromSlot(DefaultSavePlanner):
    """Finds the data of an item in a slot."""

    def __init__(self, items: Any, payload: memoryview, values: Sequence[memoryview]) -> None:
        super().__init__()
        self._payload = payload
        self._tensors: dict[Any, Item] = {}
        self._values: dict[Any, memoryview] = {}
        rest = iter(values)
        for planned, item in items:
            if planned.type == WriteItemType.BYTE_IO:
                self._values[planned.index] = next(rest)
            else:
                self._tensors[planned.index] = item

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index])
        item = self._tensors[write_item.index]
        dtype = dtype_of(item.dtype)
        if not item.nbytes:
            return torch.empty(item.sizes, dtype=dtype)
        count = item.nbytes // dtype.itemsize
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only
            flat = torch.frombuffer(self._payload, dtype=dtype, count=count, offset=item.payload)
        return flat.view(item.sizes)


class _OneFile:
    """A file system for torch's writer, with one write-only file."""

    def __init__(self, write: Write) -> None:
        self._write = write

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[_Stream]:
        yield _Stream(self._write)

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix


class _Stream(io.RawIOBase):
    """A file that supports only write and tell."""

    def __init__(self, write: Write) -> None:
        self._write_on = write
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._write_on(view)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        return self._at


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Turn checksums off in this block: torch.save spends half of its time on the zip's CRC, which
    torch.load does not check."""
    serialization: Any = torch.serialization
    if not hasattr(serialization, "set_crc32_options"):
        yield
        return
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)
