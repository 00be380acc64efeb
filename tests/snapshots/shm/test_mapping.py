"""Mappings of shared memory: where they lie, and how long."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from elasticrun.snapshots.shm.memory import LARGE, map_shared


def mapped_here(name: str) -> int:
    """How many mappings of this memory the process has."""
    return Path("/proc/self/maps").read_text().count(name)


@pytest.fixture
def fd() -> object:
    found = os.memfd_create("elasticrun-mapping")
    os.ftruncate(found, 3 * 4096)
    yield found
    os.close(found)


def test_it_lies_where_large_pages_can_and_is_shared(fd: int) -> None:
    one, other = map_shared(fd, 3 * 4096), map_shared(fd, 3 * 4096, writable=False)
    assert ctypes.addressof(one) % LARGE == ctypes.addressof(other) % LARGE == 0
    one[5000] = 7
    assert other[5000] == os.pread(fd, 1, 5000)[0] == 7


@pytest.mark.slow
def test_it_goes_with_the_last_view_and_not_before(fd: int) -> None:
    array = map_shared(fd, 3 * 4096)
    view = memoryview(array).cast("B")[4096:]
    del array
    gc.collect()
    assert mapped_here("elasticrun-mapping") == 1
    view[0] = 1
    view.release()
    del view
    gc.collect()
    assert mapped_here("elasticrun-mapping") == 0


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="empty"):
        map_shared(0, 0)
    (tmp_path / "file").write_bytes(b"x" * 4096)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="denied"):
        map_shared(file.fileno(), 4096)  # opened for reading
    assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - before) <= 1
