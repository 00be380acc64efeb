"""The shared memory of one local rank: a control page, a layout, and two to four slots.

A rank writes snapshots into its segment, its agent and its saver read them, and the segment
outlives a rank that is killed. There are no locks. A slot is written in four steps: the commit word
is cleared; the payload is copied; the record is written, which identifies the snapshot; the commit
word is set to the record's sequence number. A reader accepts a slot only if record and commit word
agree and the record's checksum is correct; while the rank runs, it checks the commit word again
after reading the payload. SIGKILL cannot undo stores, and on x86 stores become visible in program
order; on other machines the message over the socket, which follows them, is the fence.

    control page | layout (PAGE-aligned) | slot 0: header page, own tensors, shared tensors,
    opaque values | slot 1 ...

Apart from the pins, each word of the control page has one writer: the agent writes `watermark`,
`given_up` and `save_at`, the rank writes `current`. A slot's pin is set by
the rank for a persist that it requests (before it sends the message to the agent), or by the agent
while the rank is not running. Only the agent clears it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from elasticrun.snapshots.shm.layout import MAX_SIZE, PAGE, Layout, LayoutError, decode, has_key
from elasticrun.wire.types import RoundName

MAGIC: Final = 0x3130_5047_5352_4C45  # b"ELRSGP01", little-endian
VERSION: Final = 3
NONE: Final = -1
"""In `watermark`, `given_up`, `save_at` and `current`: no step."""

MIN_SLOTS: Final = 2
MAX_SLOTS: Final = 4

_MAGIC, _VERSION, _SLOTS, _LAYOUT_BYTES, _LAYOUT_LENGTH, _SLOT_BYTES = range(6)
_WATERMARK, _SAVE_AT, _CURRENT, _GIVEN_UP = 16, 17, 18, 19
_PINS = 24
"""Indices of 8-byte words in the control page; pins take MAX_SLOTS of them."""

COMMIT_AT: Final = 1024
"""Offset of the commit word in a slot's header page."""

HASHES_AT: Final = 2048
"""Offset of the saver's hashes in a slot's header page: the snapshot's sequence number, the number
of hashes, then each hash."""

BLOCK: Final = 64 * 1024 * 1024
"""Bytes of tensors that one hash covers; one more hash covers the opaque values."""

MAX_HASHES: Final = (PAGE - HASHES_AT) // 8 - 2
"""Maximum number of hashes of a snapshot; tensors of more than 16 GiB are hashed in larger blocks
(`block_of`)."""

_RECORD: Final = struct.Struct("<QIqq16sQqQQI")
"""magic, version, term, number, key of the round, sequence, step, layout, bytes of opaque values,
checksum of all fields before it.
"""


class SegmentError(ValueError):
    """The bytes are not a valid segment."""


def round_key(name: RoundName) -> bytes:
    """A 16-byte hash of the whole name of a round."""
    text = f"{name.term}/{name.number}/{name.nonce}".encode()
    return blake2b(text, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed snapshot, as the record in its slot describes it."""

    slot: int
    term: int
    number: int
    round: bytes  # round_key
    sequence: int
    step: int
    layout: int  # Layout.key
    values_bytes: int  # opaque values with their table

    def is_of(self, name: RoundName) -> bool:
        return self.round == round_key(name)


def segment_bytes(layout_length: int, slot_bytes: int, slots: int) -> int:
    """Size in bytes of a segment with these slots and an encoded layout of this length."""
    return PAGE + _up(layout_length) + slots * (PAGE + slot_bytes)


def block_of(tensor_bytes: int) -> int:
    """Bytes that one hash covers in a snapshot with this many bytes of tensors (own and shared)."""
    block = BLOCK
    while -(-tensor_bytes // block) >= MAX_HASHES:
        block *= 2
    return block


class _Word:
    """A word of eight bytes in the control page."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, segment: Segment, _: object = None) -> int:
        return segment._words[self._index]

    def __set__(self, segment: Segment, step: int) -> None:
        segment._words[self._index] = step


class Segment:
    """A view of one segment. `memory` is the whole segment, mapped shared; writers need it
    writable.

    Words of eight bytes are read and written atomically (`memoryview.cast`). `close` releases the
    views; the caller owns the mapping."""

    def __init__(self, memory: memoryview) -> None:
        """Raises SegmentError if this is not a segment, or is shorter than its header states."""
        if len(memory) < PAGE:
            raise SegmentError(f"a segment of {len(memory)} bytes is too small")
        self._memory = memory.cast("B")
        self._words = self._memory[:PAGE].cast("q")
        if self._words[_MAGIC] != MAGIC or self._words[_VERSION] != VERSION:
            raise SegmentError("this is not a segment of this version")
        self.slots = self._words[_SLOTS]
        self._layout_bytes = self._words[_LAYOUT_BYTES]
        self.slot_bytes = self._words[_SLOT_BYTES]  # without its header page
        sizes = (self._layout_bytes, self.slot_bytes, self._words[_LAYOUT_LENGTH])
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS or not all(0 <= n <= MAX_SIZE for n in sizes):
            raise SegmentError("a segment has impossible sizes")
        if len(memory) < self.slot_at(self.slots) or sizes[2] > self._layout_bytes:
            raise SegmentError("a segment is shorter than its header states")

    def is_made_for(self, layout_length: int, slot_bytes: int, slots: int) -> bool:
        """Whether the control page still has the values that `initialize` wrote for these sizes."""
        made = (MAGIC, VERSION, slots, _up(layout_length), layout_length, slot_bytes)
        return tuple(self._words[: len(made)]) == made

    def has_layout(self, key: int) -> bool:
        """Whether the segment's layout has this key; does not decode it."""
        length = self._words[_LAYOUT_LENGTH]
        return has_key(bytes(self._memory[PAGE : PAGE + length]), key)

    # ------------------------------------------------------------ places

    def slot_at(self, slot: int) -> int:
        """Offset of a slot's header page in the segment."""
        return PAGE + self._layout_bytes + slot * (PAGE + self.slot_bytes)

    def payload_at(self, slot: int) -> int:
        """Offset of a slot's first tensor."""
        return self.slot_at(slot) + PAGE

    def payload(self, slot: int) -> memoryview:
        """The bytes of a slot after its header page."""
        at = self.payload_at(slot)
        return self._memory[at : at + self.slot_bytes]

    def layout(self, key: int | None = None) -> Layout:
        """Decode the layout of the slots; with the `key` from a snapshot's record that takes a
        third of the time (`layout.decode`). Raises SegmentError."""
        at = PAGE
        length = self._words[_LAYOUT_LENGTH]
        try:
            layout = decode(bytes(self._memory[at : at + length]), key)
        except LayoutError as error:
            raise SegmentError(f"a segment's layout cannot be read: {error}") from None
        if layout.slot_bytes > self.slot_bytes:
            raise SegmentError("a segment's slots are smaller than its layout")
        return layout

    # ------------------------------------------------------------ the control page

    watermark = _Word(_WATERMARK)
    """The newest step of the current round that is complete in the whole job, or NONE."""

    given_up = _Word(_GIVEN_UP)
    """Steps above the watermark up to this one can never be complete, because some ranks have saved
    them and others continued without; NONE: no step."""

    save_at = _Word(_SAVE_AT)
    """The step that all ranks must save, or NONE."""

    current = _Word(_CURRENT)
    """The current step of the rank, or NONE."""

    def pinned(self, slot: int) -> bool:
        """Whether the slot is pinned: it must not be overwritten."""
        return self._words[_PINS + slot] != 0

    def pin(self, slot: int, on: bool = True) -> None:
        self._words[_PINS + slot] = int(on)

    # ------------------------------------------------------------ slots

    def _commit(self, slot: int) -> memoryview:
        at = self.slot_at(slot) + COMMIT_AT
        return self._memory[at : at + 8].cast("q")

    def committed(self, slot: int) -> int:
        """The commit word: the snapshot's sequence number, 0 if there is none. While the rank runs,
        a reader compares it again after reading."""
        return self._commit(slot)[0]

    def withdraw(self, slot: int) -> None:
        """Mark the slot as empty: the first step of a write, or the end of a snapshot."""
        self._commit(slot)[0] = 0

    def commit(
        self, slot: int, *, round: RoundName, sequence: int, step: int, layout: int, values: int
    ) -> None:
        """Write the record and set the commit word, after the payload was copied. `values`: bytes
        of opaque values with their table; `sequence`: must be higher than that of every other
        slot."""
        key = round_key(round)
        fields = (MAGIC, VERSION, round.term, round.number, key, sequence, step, layout, values)
        record = _RECORD.pack(*fields, 0)[:-4]
        at = self.slot_at(slot)
        self._memory[at : at + _RECORD.size] = record + struct.pack("<I", zlib.crc32(record))
        self._commit(slot)[0] = sequence

    def read(self, slot: int) -> Snapshot | None:
        """The committed snapshot in a slot; None if there is none or its record is invalid."""
        at = self.slot_at(slot)
        record = bytes(self._memory[at : at + _RECORD.size])
        magic, version, term, number, key, sequence, step, layout, values, crc = _RECORD.unpack(
            record
        )
        if magic != MAGIC or version != VERSION or zlib.crc32(record[:-4]) != crc:
            return None
        if not sequence or self.committed(slot) != sequence or values > self.slot_bytes:
            return None
        if step < 0:  # invalid in every report
            return None
        return Snapshot(slot, term, number, key, sequence, step, layout, values)

    def snapshots(self) -> list[Snapshot]:
        """All committed snapshots, newest last."""
        found = (self.read(slot) for slot in range(self.slots))
        return sorted((s for s in found if s is not None), key=lambda s: s.sequence)

    def free_slot(self) -> int | None:
        """A slot for the rank's next snapshot: an empty one, else one that is not pinned and not
        needed, because a newer step is complete or its own step was given up; None if every slot is
        needed."""
        held = {s.slot: s for s in self.snapshots()}
        free = [j for j in range(self.slots) if not self.pinned(j)]
        for slot in free:
            if slot not in held:
                return slot
        watermark, given_up = self.watermark, self.given_up
        whole = [s.sequence for s in held.values() if s.step <= watermark]
        newest = max(whole, default=0)
        needless = [
            held[j]
            for j in free
            if held[j].sequence < newest or watermark < held[j].step <= given_up
        ]
        return min(needless, key=lambda s: s.sequence).slot if needless else None

    def values(self, snapshot: Snapshot, layout: Layout) -> list[memoryview]:
        """The opaque values of a snapshot, as views. Raises SegmentError if their table is
        invalid."""
        at, count = layout.tensor_bytes, len(layout.values)
        region = self.payload(snapshot.slot)[at : at + snapshot.values_bytes]
        if not 8 * count <= len(region) == snapshot.values_bytes:
            raise SegmentError("a snapshot's opaque values have no table")
        found, begin = [], 8 * count
        for length in struct.unpack(f"={count}Q", region[:begin]):
            found.append(region[begin : begin + length])
            begin += length
        if begin != snapshot.values_bytes:
            raise SegmentError(
                "a snapshot's opaque values are longer or shorter than its record says"
            )
        return found

    # ------------------------------------------------------------ hashes, kept by the saver

    def hashes(self, snapshot: Snapshot) -> tuple[int, ...]:
        """The xxh3 (64 bits) of each block of this snapshot's tensors, then that of its opaque
        values; () if they have not been computed."""
        at = self.slot_at(snapshot.slot) + HASHES_AT
        words = self._memory[at : at + PAGE - HASHES_AT].cast("Q")
        sequence, count = words[0], words[1]
        if sequence != snapshot.sequence or not 1 <= count <= MAX_HASHES:
            return ()
        return tuple(words[2 : 2 + count])

    def close(self) -> None:
        """Release the views."""
        self._words.release()
        self._memory.release()


def initialize(memory: memoryview, *, layout_length: int, slot_bytes: int, slots: int) -> None:
    """Initialize fresh, zeroed memory as a segment without snapshots; called by the agent. Before
    its first snapshot, the rank writes its encoded layout of `layout_length` bytes at `PAGE`.
    Raises ValueError for invalid sizes, or if the memory is too small."""
    room = _up(layout_length)
    if not MIN_SLOTS <= slots <= MAX_SLOTS or slot_bytes % PAGE or min(room, slot_bytes) < 0:
        raise ValueError(f"{slots} slots of {slot_bytes} bytes are not a valid segment")
    if len(memory) < PAGE + room + slots * (PAGE + slot_bytes):
        raise ValueError("the memory is smaller than the segment")
    words = memory[:PAGE].cast("q")
    words[_VERSION] = VERSION
    words[_SLOTS] = slots
    words[_LAYOUT_BYTES] = room
    words[_LAYOUT_LENGTH] = layout_length
    words[_SLOT_BYTES] = slot_bytes
    words[_WATERMARK] = words[_SAVE_AT] = words[_CURRENT] = words[_GIVEN_UP] = NONE
    words[_MAGIC] = MAGIC
    words.release()


def values_region(values: Sequence[bytes]) -> bytes:
    """Opaque values as they are in a slot: a table of their lengths, then each value."""
    return struct.pack(f"={len(values)}Q", *map(len, values)) + b"".join(values)


def hashes_page(sequence: int, hashes: tuple[int, ...]) -> bytes:
    """What the saver writes at `slot_at(slot) + HASHES_AT` once it has hashed a snapshot."""
    return struct.pack(f"={2 + len(hashes)}Q", sequence, len(hashes), *hashes)


def _up(number: int) -> int:
    return -(-number // PAGE) * PAGE
