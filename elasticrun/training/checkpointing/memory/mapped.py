"""A segment as a rank has mapped it: bytes, words, tensors, and their pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref

import torch

from elasticrun.snapshots.dcp.image import views
from elasticrun.snapshots.shm.layout import PAGE, Layout
from elasticrun.snapshots.shm.memory import CHUNK, map_pages, map_shared
from elasticrun.snapshots.shm.segment import Segment
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.training.checkpointing.memory.devices import PageLocks, pieces


class MappedSegment:
    """A segment that this process has mapped once, accessible as bytes, words and tensors.

    It is unmapped when the last tensor on it is freed, never earlier (`shm.memory`)."""

    def __init__(self, fd: int) -> None:
        """Map the segment; takes ownership of the descriptor. Raises SegmentError, OSError or
        RuntimeError if it cannot be mapped."""
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
        self._is_mapped = threading.Event()
        self._is_mapped.set()
        self._throttle = Throttle()  # of the thread that maps the slots
        self._locks = PageLocks()
        weakref.finalize(array, self._locks.release).atexit = False  # before it is unmapped

    def is_of(self, fd: int) -> bool:
        """Whether this descriptor refers to the same memory."""
        about = os.fstat(fd)
        return (about.st_dev, about.st_ino) == self._identity

    def tensors(self, slot: int, layout: Layout) -> list[torch.Tensor]:
        """The tensors of a slot in layout order; created once."""
        if slot not in self._tensors:
            at = self.segment.payload_at(slot)
            self._tensors[slot] = views(self.storage, at, layout)
        return self._tensors[slot]

    def prefault(self, slot: int, device: torch.device | None = None) -> None:
        """Map all pages of a slot, if the agent did not get huge pages, and page-lock them for a
        device."""
        pages = self._pages_of(slot)
        self._map(pages, None, Throttle(0))
        if device is not None:
            args = (pages, device, Throttle(0))
            thread = threading.Thread(target=self._map, args=args)
            with contextlib.suppress(RuntimeError):  # no thread to be had
                thread.start()
                thread.join()

    def prefault_in_background(self, device: torch.device | None = None) -> None:
        """Do that for all slots in a thread, the next one first."""
        first = self.segment.free_slot() or 0
        order = [first, *(slot for slot in range(self.segment.slots) if slot != first)]
        pages = [self._pages_of(slot) for slot in order]
        self._is_mapped.clear()
        thread = threading.Thread(
            target=self._prefault, args=(pages, device), name="elasticrun-prefault", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the first access to each page is a fault
            self._is_mapped.set()

    def _prefault(self, slots: list[tuple[int, int]], device: torch.device | None) -> None:
        """The thread. Its reference to this object keeps the memory mapped until it ends."""
        for pages in slots:
            self._map(pages, device, self._throttle)
            self._is_mapped.set()

    def _pages_of(self, slot: int) -> tuple[int, int]:
        at = self._address + self.segment.slot_at(slot)
        return at, at + self.segment.slot_bytes + PAGE

    def _map(self, pages: tuple[int, int], device: torch.device | None, throttle: Throttle) -> None:
        at, end = pages
        # page faults of other threads wait for one piece only
        for begin in throttle.spread(range(at, end, CHUNK)):
            map_pages(begin, min(end, begin + CHUNK))
        for piece in throttle.spread(pieces(at, end) if device is not None else ()):
            if device is None or not self._locks.add(*piece, device):
                break

    def is_mapped(self, *, wait: bool) -> bool:
        """Whether the pages of the next slot are mapped. `wait`: until they are."""
        if wait:
            self._throttle.hurry()
        return self._is_mapped.wait(None if wait else 0)

    def close(self) -> None:
        """Drop our references; the memory is unmapped when no tensor on it is left."""
        self.segment.close()
        self.memory.release()
        self._tensors.clear()
