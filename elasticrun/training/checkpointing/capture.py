"""Takes a snapshot: copies this rank's tensors into a slot of its mapped segment.

Training stalls from the beginning to the end of `take`. As much as possible is done in advance: the
plan is cached, envelopes are already in the slots, pages are mapped.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from elasticrun.snapshots.dcp.image import arrange, views, write_envelopes
from elasticrun.snapshots.dcp.restoring import copy_all
from elasticrun.snapshots.shm.layout import PAGE, Layout
from elasticrun.snapshots.shm.memory import map_pages, map_shared
from elasticrun.snapshots.shm.segment import NONE, Segment, SegmentError, values_region
from elasticrun.training.checkpointing.agent_connection import AgentConnection
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.state import SnapshotPlan, TrainingState
from elasticrun.wire.snapshots import Committed, NeedSegment, SegmentHere
from elasticrun.wire.types import RoundName

LEAST_ROOM: Final = 64 * 1024
"""Minimum bytes reserved for opaque values."""


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
        at = self._address + self.segment.slot_at(slot)
        map_pages(at, at + self.segment.slot_bytes + PAGE)

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
        self._sequence = 0
        self.spare: MappedSegment | None = None  # the segment from which the state was restored
        self.capacity_hint = 0  # bytes for opaque values in the restored snapshot

    def prepare(self) -> None:
        """Get a segment for the current state and map the slot that is written next. Mapping takes
        about 80 ms per GiB, and would make the first snapshot five times as slow as the others.
        Raises StateError or AgentConnectionError."""
        _, _, mapped, _ = self._planned()
        slot = mapped.segment.free_slot()
        if slot is not None:
            mapped.prefault(slot)

    def _planned(self) -> tuple[SnapshotPlan, bytes, MappedSegment, Layout]:
        """The current state, its serialized opaque values, and a segment and layout that fit
        both."""
        plan = self._state.take()
        serialised = self._state.serialised(plan.values)
        values = values_region(serialised)
        return plan, values, *self._segment_for(plan, len(values))

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

    def take(self, step: int, *, persist: bool, wait: float) -> bool:
        """Take a snapshot; False if no slot became free within `wait` seconds. `persist`: also pin
        it, because it will be written to storage. Raises StateError, AgentConnectionError, or what
        a
        Stateful raises; then no snapshot exists."""
        plan, values, mapped, layout = self._planned()
        segment = mapped.segment
        deadline = time.monotonic() + wait
        while (slot := segment.free_slot()) is None:
            if not self._connection.wait_for_slot(NONE, deadline - time.monotonic()):
                return False
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
        return True

    def _segment_for(self, plan: SnapshotPlan, values_bytes: int) -> tuple[MappedSegment, Layout]:
        """The segment for this plan: the current one, or a new one if the state has changed."""
        layout = self._layout
        if (
            self._mapped is not None
            and layout is not None
            and values_bytes <= layout.values_capacity
        ):
            room = layout.values_capacity
            if plan is self._plan or (plan.layout or arrange(plan.pieces, room)).key == layout.key:
                self._plan = plan
                return self._mapped, layout
        layout = plan.layout
        if layout is None or values_bytes > layout.values_capacity:
            # At least twice the needed size, rounded up to a power of two, so that the same segment
            # fits after a restart with values of similar length.
            room = max(LEAST_ROOM, 1 << (2 * values_bytes - 1).bit_length())
            if values_bytes <= self.capacity_hint:
                room = self.capacity_hint
            layout = arrange(plan.pieces, room)
        if layout.key in self._refused:
            raise StateError(self._refused[layout.key])
        self._mapped, self._layout, self._plan = self._request_segment(layout), layout, plan
        return self._mapped, layout

    def _request_segment(self, layout: Layout) -> MappedSegment:
        encoded = layout.encode()
        request = NeedSegment(
            *(layout.key, layout.content, len(encoded), layout.slot_bytes, self._slots),
            own=any(item.own for item in layout.items),
            least=self._least,
        )
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        here, fd = self._connection.request(request, SegmentHere)
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
            mapped.memory[PAGE : PAGE + len(encoded)] = encoded
            for slot in range(segment.slots):
                write_envelopes(segment.payload(slot), layout)
        return mapped

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
