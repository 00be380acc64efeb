"""One segment in the agent's hands: what it was made for, what is in it, why it is needed."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field

from elasticrun.wire.layout import MAX_LAYOUT_BYTES, MAX_SIZE, PAGE
from elasticrun.wire.segment import MAX_SLOTS, MIN_SLOTS, Segment, Snapshot, segment_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a segment is made for."""

    layout: int  # Layout.key
    layout_length: int
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        return segment_bytes(self.layout_length, self.slot_bytes, self.slots)

    def wrong(self) -> str:
        """Why no segment has such sizes; "" if one may."""
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            return f"a segment has {MIN_SLOTS} to {MAX_SLOTS} slots, not {self.slots}"
        if not 0 < self.layout_length <= MAX_LAYOUT_BYTES:
            return f"a layout of {self.layout_length} bytes is none"
        if self.slot_bytes % PAGE or not 0 <= self.slot_bytes <= MAX_SIZE // MAX_SLOTS:
            return f"a slot of {self.slot_bytes} bytes is none"
        return ""


@dataclass(eq=False)
class Held:
    """One segment in our hands."""

    key: int  # what a saver knows it by; never used twice
    local_rank: int  # -1: what another node's rank has, copied from there
    sizes: Sizes
    content: int  # Layout.content
    path: str  # "" for memory without a name
    fd: int
    map: mmap.mmap
    segment: Segment
    written: bool = False  # a snapshot was seen in it, so its layout stands
    pins: dict[int, set[str]] = field(default_factory=dict)  # slot -> what it is needed for
    gone: bool = False  # given back: nothing of it may be looked at
    own: bool = False  # its rank has state that no other rank has
    replica: int = -1  # the rank of another node whose snapshots are kept here; -1: it is none

    @property
    def passing(self) -> bool:
        """Whether it is a copy that one restore needs, and nobody else."""
        return self.local_rank < 0 and self.replica < 0

    def snapshots(self) -> list[Snapshot]:
        """What stands in it, the newest last."""
        return [] if self.gone else self.segment.snapshots()

    def find(self, round: bytes, step: int) -> Snapshot | None:
        """The snapshot of (round, step) in it."""
        for snapshot in self.snapshots():
            if snapshot.round == round and snapshot.step == step:
                return snapshot
        return None

    def find_any(self) -> Snapshot | None:
        """The newest snapshot in it."""
        return next(reversed(self.snapshots()), None)

    def pin(self, slot: int, reason: str) -> None:
        if not self.gone:
            self.pins.setdefault(slot, set()).add(reason)
            self.segment.pin(slot)

    def unpin(self, reason: str) -> None:
        """Not needed for this any more; a slot that nobody needs is free."""
        for slot, reasons in self.pins.items():
            if reason in reasons and not self.gone:
                reasons.discard(reason)
                self.segment.pin(slot, bool(reasons))

    def pinned(self) -> bool:
        return any(self.pins.values())


def let_go(held: Held) -> None:
    """Unmap it; blocks for as long as the kernel takes for gigabytes."""
    held.segment.close()
    os.close(held.fd)
    with contextlib.suppress(BufferError):  # it is unmapped with its last view
        held.map.close()
