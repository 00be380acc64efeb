"""Takes a snapshot: copies this rank's tensors into a slot of its mapped segment.

Training stalls from the beginning to the end of `take`. As much as possible is done in advance: the
plan is cached, envelopes are already in the slots, pages are mapped. A large segment is allocated
and mapped while training continues; until then `take` answers PREPARING.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from typing import Final

import torch

from elasticrun.snapshots.dcp.image import arrange, write_envelopes
from elasticrun.snapshots.shm.layout import PAGE, Layout
from elasticrun.snapshots.shm.segment import (
    NONE,
    SegmentError,
    segment_bytes,
    values_region,
)
from elasticrun.training.checkpointing.agent_connection import ANSWER_LIMIT, AgentConnection
from elasticrun.training.checkpointing.memory.devices import (
    Copies,
    Optimizers,
    copy_out,
    device_of,
)
from elasticrun.training.checkpointing.memory.mapped import MappedSegment
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.state import SnapshotPlan, TrainingState
from elasticrun.wire.snapshots import AwaitSegment, Committed, NeedSegment, SegmentHere
from elasticrun.wire.types import RoundName

LEAST_ROOM: Final = 64 * 1024
"""Minimum bytes reserved for opaque values."""

INLINE_BYTES: Final = 8 * 1024 * 1024
"""Segments up to this size are allocated within a step; that takes a few milliseconds."""

COPY_LIMIT: Final = 60.0
"""Seconds to wait for copies in progress before their memory is given up."""


@unique
class SaveOutcome(Enum):
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


@dataclass(slots=True)
class _Pending:
    """A snapshot whose copies are in progress."""

    message: Committed
    commit: Callable[[], None]
    copies: Copies = field(default_factory=Copies)
    thread: threading.Thread | None = None
    error: str = ""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # that the copies took

    def finish(self) -> None:
        """Wait for the copies and commit the snapshot, unless it is not all of one step."""
        try:
            if self.copies.wait():
                self.commit()
            else:
                self.error = (
                    f"the state of step {self.message.step} was changed by something other than "
                    "the step() of its optimizers while it was copied: pass overlap=False"
                )
        except Exception as error:  # CUDA reports errors of any kernel here
            self.error = f"step {self.message.step} could not be copied: {error!r:.300}"
        self.seconds = time.monotonic() - self.began


class SnapshotTaker:
    """Takes the snapshots of one rank."""

    def __init__(
        self,
        connection: AgentConnection,
        state: TrainingState,
        slots: int,
        present: RoundName,
        least: int = 0,
        overlap: bool = False,
    ) -> None:
        """`least`: the minimum number of slots if there is no memory for more; 0: no fewer than
        `slots`. `overlap`: devices copy while training goes on."""
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
        self._overlap = overlap
        self.copy_seconds = 0.0  # of the newest snapshot that was copied beside training
        self._pending: _Pending | None = None
        self._optimizers: Optimizers | None = None
        self._owned: frozenset[int] = frozenset()  # storages that only the optimizers change
        self._owned_for: SnapshotPlan | None = None
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
        plan, _, mapped, _ = planned
        slot, device = mapped.segment.free_slot(), device_of(plan.tensors)
        if slot is not None:
            mapped.prefault(slot, device)
        if device is not None:
            mapped.prefault_in_background(device)

    def collect(self) -> None:
        """Map the requested segment if the agent has sent it, and report a snapshot whose copies
        are done. Raises StateError or AgentConnectionError."""
        if self._pending is not None and not self._pending.error:  # the next `take` reports errors
            self._settle(0)
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

    def take(self, step: int, *, persist: bool, wait: float) -> SaveOutcome:
        """Take a snapshot. BUSY if no slot became free within `wait` seconds; PREPARING only if
        `wait` is 0. `persist`: also pin it, because it will be written to storage. Raises
        StateError, AgentConnectionError, or what a Stateful raises; then no snapshot exists."""
        deadline = time.monotonic() + wait
        if not self._settle(wait):
            return SaveOutcome.BUSY
        planned = self._planned(wait=wait > 0)
        if planned is None:
            return SaveOutcome.PREPARING
        plan, values, mapped, layout = planned
        segment = mapped.segment
        while (slot := segment.free_slot()) is None:
            if not self._connection.wait_for_slot(NONE, deadline - time.monotonic()):
                return SaveOutcome.BUSY
        self._sequence += 1
        message = Committed(step, slot, self._sequence, persist)
        segment.withdraw(slot)
        at = layout.tensor_bytes
        segment.payload(slot)[at : at + len(values)] = values

        def commit() -> None:
            segment.commit(
                slot,
                round=self._present,
                sequence=message.sequence,
                step=step,
                layout=layout.key,
                values=len(values),
            )

        targets = mapped.tensors(slot, layout)
        if self._overlap and not persist and device_of(plan.tensors) is not None:
            self._copy_beside_training(targets, plan, _Pending(message, commit))
        else:
            copy_out(targets, plan.tensors)
            if persist:
                segment.pin(slot)
            commit()
            self._connection.send(message)
        segment.current = step
        return SaveOutcome.TAKEN

    def _copy_beside_training(
        self, targets: list[torch.Tensor], plan: SnapshotPlan, pending: _Pending
    ) -> None:
        """Issue the copies; a thread commits the snapshot once they are done."""
        if self._optimizers is None:
            self._optimizers = Optimizers(self._state.optimizers())
        if plan is not self._owned_for:
            self._owned_for, self._owned = plan, self._optimizers.storages()
        pending.copies.start_beside(targets, plan.tensors, self._owned)
        self._optimizers.copies = pending.copies
        self._pending = pending
        # Not a daemon: the interpreter must not end while it is in CUDA.
        pending.thread = threading.Thread(target=pending.finish, name="elasticrun-copies")
        try:
            pending.thread.start()
        except RuntimeError:  # no thread to be had
            pending.thread = None
            pending.finish()

    def _settle(self, wait: float) -> bool:
        """Report the snapshot whose copies were in progress; False if they still are after `wait`
        seconds. Raises StateError if there is no snapshot, AgentConnectionError."""
        pending = self._pending
        if pending is None:
            return True
        if pending.thread is not None:
            pending.thread.join(wait)
            if pending.thread.is_alive():
                return False
        self._pending, self.copy_seconds = None, pending.seconds
        if self._optimizers is not None:
            self._optimizers.copies = None
        if pending.error:
            raise StateError(pending.error)
        self._connection.send(pending.message)
        return True

    def _segment_for(
        self, plan: SnapshotPlan, values_bytes: int, *, wait: bool
    ) -> tuple[MappedSegment, Layout] | None:
        """The segment for this plan: the current one, or a new one if the state has changed; None
        if it is not ready and must not be waited for."""
        layout = self._layout_for(plan, values_bytes)
        if layout.key in self._refused:
            raise StateError(self._refused[layout.key])
        if layout is not self._layout and self._mapped is not None:
            if not self._settle(COPY_LIMIT):
                raise StateError("the copies of the previous snapshot do not end")
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
                device=_device(() if self._plan is None else self._plan.tensors),
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
            plan = self._plan
            mapped.prefault_in_background(None if plan is None else device_of(plan.tensors))
        return mapped

    def _answer(self, request: _Request, *, wait: bool) -> tuple[SegmentHere, int | None] | None:
        """The agent's answer, with the segment's descriptor; None if it is not there yet and must
        not be waited for."""
        if wait:
            self._connection.send(AwaitSegment())
        answer = self._connection.answer_to(
            request.need, SegmentHere, deadline=request.deadline, wait=wait
        )
        if answer is not None:
            self._request = None
        return answer

    def close(self) -> None:
        """Wait for copies in progress, and release the memory. Raises StateError or
        AgentConnectionError."""
        try:
            self._settle(COPY_LIMIT)
        finally:
            if self._optimizers is not None:
                self._optimizers.close()
            self._unmap()

    def _unmap(self) -> None:
        for mapped in (self._mapped, self.spare):
            if mapped is not None:
                mapped.close()
        self._mapped = self.spare = None


def _device(tensors: Sequence[torch.Tensor]) -> str:
    """The device of the first tensor that is not in the host's memory, with its name and UUID; ""
    if there is none."""
    device = next((one.device for one in tensors if one.device.type != "cpu"), None)
    if device is None:
        return ""
    module = getattr(torch, device.type, None)
    known = getattr(module, "get_device_properties", lambda _: None)(device)
    facts = (str(device), getattr(known, "name", ""), str(getattr(known, "uuid", "")))
    return " ".join(filter(None, facts))
