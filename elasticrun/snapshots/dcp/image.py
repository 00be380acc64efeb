"""Lays out a slot like a checkpoint file: each tensor in the envelope that torch.save writes.

The envelope's head and tail depend only on the tensor's dtype and sizes. torch.save itself produces
them with `skip_data`, which leaves a hole for the elements. Ranks copy the elements into the hole,
and DCP reads the result as the tensor (it does not check the zip's CRC). `skip_data` is a prototype
in torch, so `image_problem` tests the result.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from elasticrun.host.system.processes import memory_file
from elasticrun.snapshots.dcp.items import Piece, in_order
from elasticrun.snapshots.shm.layout import Layout, lay_out

SMALL: Final = 1 << 20
"""A blank tensor of fewer bytes is allocated as usual."""


class _FileWithHole:
    """A write-only file in memory: what is written before and after one skipped stretch, and the
    length of the stretch."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.hole = 0

    def write(self, data: bytes | memoryview) -> int:
        (self.after if self.hole else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 1 or self.hole:
            raise OSError("torch.save skips at an unexpected offset")
        self.hole = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.before) + self.hole + len(self.after)

    def flush(self) -> None:
        pass


def _blank(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these sizes that takes hardly any memory, because its elements are never
    touched."""
    empty = torch.empty(0, dtype=dtype)
    nbytes = math.prod(sizes) * empty.element_size()
    if nbytes < SMALL:
        return torch.empty(sizes, dtype=dtype)
    fd = memory_file("elasticrun-blank")
    try:
        os.ftruncate(fd, nbytes)
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
    finally:
        os.close(fd)
    return empty.set_(cast(Any, storage), 0, sizes, _strides(sizes))


def _strides(sizes: tuple[int, ...]) -> list[int]:
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


@lru_cache(maxsize=4096)
def envelope(dtype: str, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The bytes before and after the elements of a tensor with this dtype (torch's name without
    "torch.") and these sizes; an empty tensor has only bytes before. Both are empty if this torch
    cannot skip elements."""
    skip = getattr(torch.serialization, "skip_data", None)
    if skip is None:
        return b"", b""
    holed = _FileWithHole()
    try:
        tensor = _blank(getattr(torch, dtype), sizes)
        with skip():
            torch.save(tensor, cast(Any, holed))
    except (RuntimeError, OSError, TypeError):
        return b"", b""
    if holed.hole != tensor.numel() * tensor.element_size():
        return b"", b""
    return bytes(holed.before), bytes(holed.after)


def arrange(found: Sequence[Piece], values_capacity: int) -> Layout:
    """The layout of these pieces, in the order of `in_order`. `values_capacity`: space for the
    opaque values and their table."""

    def around(dtype: str, sizes: tuple[int, ...]) -> tuple[int, int]:
        head, tail = envelope(dtype, sizes)
        return len(head), len(tail)

    items = [one.item for one in in_order(found)]
    return lay_out(items, values_capacity, str(torch.__version__), around)


def write_envelopes(payload: memoryview, layout: Layout) -> None:
    """Write all envelopes into a slot's payload; needed only once, because snapshots do not touch
    them."""
    for item in layout.tensors:
        head, tail = envelope(item.dtype, item.sizes)
        end = item.payload + item.nbytes
        payload[item.extent : item.payload] = head
        payload[end : end + len(tail)] = tail


def views(storage: torch.UntypedStorage, at: int, layout: Layout) -> list[torch.Tensor]:
    """The tensors of a slot whose payload starts at byte `at` of the storage, in layout order. They
    keep the storage alive. Raises ValueError if a tensor is not aligned."""
    rows: dict[torch.dtype, torch.Tensor] = {}  # the whole storage as elements of a dtype
    found = []
    for item in layout.tensors:
        dtype, size, nbytes, strides = _form(item.dtype, item.sizes)
        begin, rest = divmod(at + item.payload, size)
        if nbytes != item.nbytes or (nbytes and rest):
            raise ValueError(f"{item.fqn} is not aligned in its slot")
        if not nbytes:
            found.append(torch.empty(item.sizes, dtype=dtype))
            continue
        if dtype not in rows:
            count = storage.nbytes() // size
            rows[dtype] = torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
        found.append(rows[dtype].as_strided(item.sizes, strides, begin))
    return found


@lru_cache(maxsize=4096)
def _form(dtype: str, sizes: tuple[int, ...]) -> tuple[torch.dtype, int, int, list[int]]:
    """torch's dtype, the bytes of an element and of the tensor, and the strides."""
    found: torch.dtype = getattr(torch, dtype)
    size = torch.empty(0, dtype=found).element_size()
    return found, size, math.prod(sizes) * size, _strides(sizes)


def image_problem(make: Callable[[str, tuple[int, ...]], tuple[bytes, bytes]] = envelope) -> str:
    """Test whether this torch reads such images; returns "" if it does, else why not. Writes three
    tensors to a temporary folder, which takes a few milliseconds."""
    tensors = {
        "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "half": torch.linspace(-1, 1, 5000).to(torch.bfloat16),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="elasticrun-") as folder:
            _write_image(Path(folder), tensors, make)
            found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that there is no process group
                load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    except Exception as error:  # whatever torch's reader raises
        return f"torch {torch.__version__} does not read a tensor's image ({error!r:.200})"
    if all(torch.equal(found[name], tensor) for name, tensor in tensors.items()):
        return ""
    return f"torch {torch.__version__} reads a tensor's image as another tensor"


def _write_image(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    make: Callable[[str, tuple[int, ...]], tuple[bytes, bytes]],
) -> None:
    """Write a checkpoint of one file, assembled from envelopes. Raises ValueError if there are
    none."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), None, True)
    plan: SavePlan = planner.create_local_plan()
    _, metadata = planner.create_global_plan([plan])
    results, at = [], 0
    with open(folder / "image.distcp", "wb") as file:
        for item in plan.items:
            tensor = tensors[item.index.fqn]
            head, tail = make(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if not head:
                raise ValueError("torch.save leaves no space for the elements")
            elements = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
            length = file.write(head + elements + tail)
            # part of the pickled format, so it cannot change; there is no public constructor
            where = _StorageInfo("image.distcp", at, length)
            results.append(WriteResult(item.index, length, where))
            at += length
    FileSystemWriter(folder).finish(metadata, [results])
