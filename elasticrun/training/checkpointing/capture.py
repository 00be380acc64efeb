"""Takes a snapshot: copies this rank's tensors into a slot of its mapped segment.

Training stalls from the beginning to the end of `take`. As much as possible is done in advance: the
plan is cached, envelopes are already in the slots, pages are mapped. A large segment is allocated
and mapped while training continues; until then `take` answers PREPARING.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto, unique
from typing import Any, Final

import torch

from elasticrun.snapshots.dcp.image import arrange, views, write_envelopes
from elasticrun.snapshots.dcp.restoring import copy_all
from elasticrun.snapshots.shm.layout import PAGE, Layout
from elasticrun.snapshots.shm.memory import CHUNK, map_pages, map_shared
from elasticrun.snapshots.shm.segment import (
    NONE,
    Segment,
    SegmentError,
    segment_bytes,
    values_region,
)
from elasticrun.training.checkpointing.agent_connection import ANSWER_LIMIT, AgentConnection
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.state import SnapshotPlan, TrainingState
from elasticrun.wire.snapshots import Committed, NeedSegment, SegmentHere
from elasticrun.wire.types import RoundName

LEAST_ROOM: Final = 64 * 1024
"""Minimum bytes reserved for opaque values."""


@unique
class Outcome(Enum):
    """What came of an attempt to save."""

    TAKEN = auto()
    BUSY = auto()  # no slot became free in time
    PREPARING = auto()  # the memory is not ready yet


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a segment that has no answer yet."""

    layout: Layout
    need: NeedSegment
    deadline: float  # by time.monotonic()

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return segment_bytes(self.need.layout_length, self.need.slot_bytes, self.need.slots)


INLINE_BYTES: Final = 8 * 1024 * 1024
"""Segments up to this size are allocated within a step; that takes a few milliseconds."""


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

    def prefault(self, slot: int) -> None:
        """Map all pages of a slot, if the agent did not get huge pages."""
        self._map(*self._pages_of(slot))

    def prefault_in_background(self) -> None:
        """Map the pages of all slots in a thread, those of the next one first."""
        first = self.segment.free_slot() or 0
        order = [first, *(slot for slot in range(self.segment.slots) if slot != first)]
        pages = [self._pages_of(slot) for slot in order]
        self._is_mapped.clear()
        thread = threading.Thread(
            target=self._prefault, args=(pages,), name="elasticrun-prefault", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the first access to each page is a fault
            self._is_mapped.set()

    def _prefault(self, slots: list[tuple[int, int]]) -> None:
        """The thread. Its reference to this object keeps the memory mapped until it ends."""
        for span in slots:
            self._map(*span)
            self._is_mapped.set()

    def _pages_of(self, slot: int) -> tuple[int, int]:
        at = self._address + self.segment.slot_at(slot)
        return at, at + self.segment.slot_bytes + PAGE

    @staticmethod
    def _map(at: int, end: int) -> None:
        for begin in range(at, end, CHUNK):  # page faults of other threads wait for one piece only
            map_pages(begin, min(end, begin + CHUNK))

    def is_mapped(self, *, wait: bool) -> bool:
        """Whether the pages of the next slot are mapped. `wait`: until they are."""
        return self._is_mapped.wait(None if wait else 0)

    def close(self) -> None:
        """Drop our references; the memory is unmapped when no tensor on it is left."""
        self.segment.close()
        self.memory.release()
        self._tensors.clear()


class SnapshotTaker:
    """Takes the snapshots of one rank."""

    def __init__(
        self,
        connection: AgentConnection,
        state: TrainingState,
        slots: int,
        present: RoundName,
        least: int = 0,
    ) -> None:
        """`least`: the minimum number of slots if there is no memory for more; 0: no fewer than
        `slots`."""
        self._connection = connection
        self._state = state
        self._slots, self._least = slots, least
        self._present = present
        self._mapped: MappedSegment | None = None
        self._layout: Layout | None = None
        self._plan: SnapshotPlan | None = None
        self._refused: dict[int, str] = {}
        self._request: _Request | None = None
        self._sequence = 0
        self.spare: MappedSegment | None = None  # the segment from which the state was restored
        self.capacity_hint = 0  # bytes for opaque values in the restored snapshot

    def prepare(self, *, wait: bool) -> None:
        """Get a segment for the current state and map the slot that is written next. Mapping takes
        about 80 ms per GiB, and would make the first snapshot five times as slow as the others.
        `wait`: until that is done; otherwise a large segment is prepared in the background. Raises
        StateError or AgentConnectionError."""
        planned = self._planned(wait=wait)
        if planned is None or not wait:
            return
        mapped = planned[2]
        slot = mapped.segment.free_slot()
        if slot is not None:
            mapped.prefault(slot)

    def collect(self) -> None:
        """Map the requested segment if the agent has sent it. Raises StateError or
        AgentConnectionError."""
        if self._request is not None and self._mapped is None and self._layout is not None:
            self._mapped = self._new_segment(self._layout, wait=False)

    def _planned(self, *, wait: bool) -> tuple[SnapshotPlan, bytes, MappedSegment, Layout] | None:
        """The current state, its serialized opaque values, and a segment and layout that fit both.
        None if the segment is still being prepared and must not be waited for."""
        plan = self._state.take()
        serialised = self._state.serialised(plan.values)
        values = values_region(serialised)
        found = self._segment_for(plan, len(values), wait=wait)
        return None if found is None else (plan, values, *found)

    def note_step(self, step: int) -> None:
        """Note that training has reached this step."""
        if self._mapped is not None:
            self._mapped.segment.current = step

    @property
    def requested_step(self) -> int:
        """The step that all ranks must save, or NONE."""
        return NONE if self._mapped is None else self._mapped.segment.save_at

    def wait_until_whole(self, step: int, requested: int, limit: float) -> None:
        """Wait until all ranks have saved this step, or a step other than `requested` is required,
        for at most `limit` seconds."""
        deadline = time.monotonic() + limit
        mapped = self._mapped
        while (
            mapped is not None
            and mapped.segment.watermark < step
            and mapped.segment.save_at in (NONE, requested)
        ):
            if not self._connection.wait_for_slot(step, deadline - time.monotonic()):
                return

    def take(self, step: int, *, persist: bool, wait: float) -> Outcome:
        """Take a snapshot. BUSY if no slot became free within `wait` seconds; PREPARING only if
        `wait` is 0. `persist`: also pin it, because it will be written to storage. Raises
        StateError, AgentConnectionError, or what a Stateful raises; then no snapshot exists."""
        planned = self._planned(wait=wait > 0)
        if planned is None:
            return Outcome.PREPARING
        plan, values, mapped, layout = planned
        segment = mapped.segment
        deadline = time.monotonic() + wait
        while (slot := segment.free_slot()) is None:
            if not self._connection.wait_for_slot(NONE, deadline - time.monotonic()):
                return Outcome.BUSY
        segment.withdraw(slot)
        copy_out(mapped.tensors(slot, layout), plan.tensors)
        at = layout.tensor_bytes
        segment.payload(slot)[at : at + len(values)] = values
        self._sequence += 1
        if persist:
            segment.pin(slot)
        segment.commit(
            slot,
            round=self._present,
            sequence=self._sequence,
            step=step,
            layout=layout.key,
            values=len(values),
        )
        segment.current = step
        self._connection.send(Committed(step, slot, self._sequence, persist))
        return Outcome.TAKEN

    def _segment_for(
        self, plan: SnapshotPlan, values_bytes: int, *, wait: bool
    ) -> tuple[MappedSegment, Layout] | None:
        """The segment for this plan: the current one, or a new one if the state has changed; None
        if it is not ready and must not be waited for."""
        layout = self._layout_for(plan, values_bytes)
        if layout.key in self._refused:
            raise StateError(self._refused[layout.key])
        if layout is not self._layout and self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._layout, self._plan = layout, plan
        if self._mapped is None:
            self._mapped = self._new_segment(layout, wait=wait)
        if self._mapped is None or not self._mapped.is_mapped(wait=wait):
            return None
        return self._mapped, layout

    def _layout_for(self, plan: SnapshotPlan, values_bytes: int) -> Layout:
        """The layout for this plan: the current one if it fits."""
        layout = self._layout
        if layout is not None and values_bytes <= layout.values_capacity:
            room = layout.values_capacity
            if plan is self._plan or (plan.layout or arrange(plan.pieces, room)).key == layout.key:
                return layout
        layout = plan.layout
        if layout is None or values_bytes > layout.values_capacity:
            # At least twice the needed size, rounded up to a power of two, so that the same segment
            # fits after a restart with values of similar length.
            room = max(LEAST_ROOM, 1 << (2 * values_bytes - 1).bit_length())
            if values_bytes <= self.capacity_hint:
                room = self.capacity_hint
            layout = arrange(plan.pieces, room)
        return layout

    def _new_segment(self, layout: Layout, *, wait: bool) -> MappedSegment | None:
        """Get a segment for this layout from the agent; None if it is not there yet and must not be
        waited for. Small ones are waited for in any case."""
        if self._request is not None and self._request.layout is not layout:  # the state changed
            answer = self._answer(self._request, wait=wait)
            if answer is None:
                return None
            if answer[1] is not None:
                os.close(answer[1])
        if self._request is None:
            need = NeedSegment(
                layout.key,
                layout.content,
                len(layout.encode()),
                layout.slot_bytes,
                self._slots,
                own=any(item.own for item in layout.items),
                least=self._least,
            )
            self._connection.send(need)
            self._request = _Request(layout, need, time.monotonic() + ANSWER_LIMIT)
        is_small = self._request.size <= INLINE_BYTES
        answer = self._answer(self._request, wait=wait or is_small)
        if answer is None:
            return None
        here, fd = answer
        if not here.ok or fd is None:
            self._refused = {layout.key: here.reason or "the agent gave no memory"}
            raise StateError(self._refused[layout.key])
        spare, self.spare = self.spare, None
        if spare is not None and spare.is_of(fd):  # its pages are already mapped
            os.close(fd)
            mapped = spare
        else:
            if spare is not None:
                spare.close()
            try:
                mapped = MappedSegment(fd)
            except SegmentError as error:  # the agent has checked it before sending it
                raise StateError(f"the memory for snapshots was damaged: {error}") from error
        segment = mapped.segment
        committed = [snapshot.sequence for snapshot in segment.snapshots()]
        self._sequence = max([self._sequence, *committed])
        if not committed:
            encoded = layout.encode()
            mapped.memory[PAGE : PAGE + len(encoded)] = encoded
            for slot in range(segment.slots):
                write_envelopes(segment.payload(slot), layout)
        if not (wait or is_small):
            mapped.prefault_in_background()
        return mapped

    def _answer(self, request: _Request, *, wait: bool) -> tuple[SegmentHere, int | None] | None:
        """The agent's answer, with the segment's descriptor; None if it is not there yet and must
        not be waited for."""
        answer = self._connection.answer_to(
            request.need, SegmentHere, deadline=request.deadline, wait=wait
        )
        if answer is not None:
            self._request = None
        return answer

    def close(self) -> None:
        for mapped in (self._mapped, self.spare):
            if mapped is not None:
                mapped.close()
        self._mapped = self.spare = None


def copy_out(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy to shared memory; returns when all data has arrived. Each CUDA device uses a separate
    stream, so that the devices copy in parallel."""
    devices = {source.device for source in sources if source.is_cuda}
    if not devices:
        copy_all(targets, sources)
        return
    cuda: Any = torch.cuda  # untyped
    events = []
    for device in devices:
        stream = cuda.Stream(device)
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):
            at = [i for i, source in enumerate(sources) if source.device == device]
            copy_all([targets[i] for i in at], [sources[i] for i in at], non_blocking=True)
            event = cuda.Event()
            event.record(stream)
            events.append(event)
    rest = [i for i, source in enumerate(sources) if source.device not in devices]
    copy_all([targets[i] for i in rest], [sources[i] for i in rest])
    for event in events:
        event.synchronize()
