"""Writes snapshots as files: one rank's part, and the commit that makes parts a checkpoint.

These functions block on storage; the saver calls them in its worker thread. A part is one file of
one rank: the tensors of a slot, which are written unchanged and sequentially, and hashed on the way
unless the saver has hashed them before; then the opaque values. A `PartWritten` describes a part
for the coordinator's saver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final

import torch
import xxhash

from elasticrun.snapshots.dcp import image
from elasticrun.snapshots.dcp.metadata import MetadataError, PartFile, build
from elasticrun.snapshots.dcp.writing import write_data
from elasticrun.snapshots.saver.part_written import MAX_LAYOUTS, PartWritten
from elasticrun.snapshots.shm.layout import Layout, items_of, stretch_of
from elasticrun.snapshots.shm.segment import Segment, SegmentError, Snapshot, block_of
from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.folder import MARKER, Folder
from elasticrun.snapshots.storage.manifest import FileEntry, Manifest, ManifestError
from elasticrun.snapshots.storage.retention import file_name, is_of_attempt
from elasticrun.snapshots.storage.timeline import (
    ListedCheckpoint,
    Timeline,
    restorable_steps,
    timeline_for,
)
from elasticrun.snapshots.storage.writing import PIECE, Sink, StorageError
from elasticrun.wire.snapshots import PartOf, PersistParts
from elasticrun.wire.types import MAX_ATTEMPT

_ATTEMPT: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_ATTEMPT}}}\Z")
_layouts: dict[int, Layout] = {}


class PersistError(Exception):
    """A part or a checkpoint was not written. The part's file, or the marker, has been removed."""


# ---------------------------------------------------------------- a part


def write_part(
    segment: Segment,
    part: PartOf,
    order: PersistParts,
    folder: Folder,
    *,
    stop: Callable[[], bool] = bool,
    image_problem: str | None = None,
) -> PartWritten:
    """Write one rank's part of the ordered checkpoint from its segment. It is on stable storage
    when this returns. Raises PersistError, SegmentError or StorageError.

    `stop` is called repeatedly; it returns whether the attempt was given up. `image_problem`: why
    the slot cannot be written unchanged, "" if it can; None: test it once (dcp.image)."""
    step, rank, attempt = order.step, part.rank, order.attempt
    if not _ATTEMPT.match(attempt):
        raise PersistError(f"{attempt[:80]!r} is not a valid name of an attempt")
    snapshot = segment.read(part.slot) if 0 <= part.slot < segment.slots else None
    if snapshot is None or (snapshot.sequence, snapshot.step) != (part.sequence, step):
        about = f"rank {rank}'s slot {part.slot}"
        raise PersistError(f"{about} does not hold its snapshot of step {step}")
    name = file_name(rank, order.round.number, part.sequence, attempt)
    slot = _Slot(segment, snapshot, part.shared, rank)
    why = _image_problem() if image_problem is None else image_problem
    if not why and any(not item.head for item in slot.layout.tensors):
        why = "this torch has no envelope for some tensors"
    if why:
        folder.remark(f"checkpoints are written item by item, which is slower: {why}")
    folder.make_folder(step)
    sink = folder.create(step, name, 0 if why else slot.size)
    try:
        way = _write_by_item if why else _write_contiguous
        entry, places = way(slot, name, sink, stop)
        if segment.committed(part.slot) != part.sequence:
            about = f"rank {rank}'s snapshot of step {step}"
            raise PersistError(f"{about} was overwritten during the write")
        sink.close()
        folder.settle(step)
    except BaseException:
        sink.abort()
        raise
    return PartWritten(
        *(entry, step, order.round, attempt, slot.layout.torch),
        *(tuple(map(len, slot.values)), places, slot.layout),
    )


class _Slot:
    """What is written from a slot: its layout, items and opaque values, and known hashes."""

    def __init__(self, segment: Segment, snapshot: Snapshot, shared: bool, rank: int) -> None:
        self.rank, self.shared = rank, shared
        self.layout = _layout_of(segment, snapshot)
        self.payload = segment.payload(snapshot.slot)
        self.items = items_of(self.layout, shared)
        self.stretch = stretch_of(self.layout, shared)
        try:
            values = segment.values(snapshot, self.layout)
        except SegmentError:
            raise PersistError(f"rank {rank}'s snapshot has an invalid table of values") from None
        named = zip(self.layout.values, values, strict=True)
        self.values = [value for item, value in named if item.own or shared]
        self.size = self.stretch + sum(map(len, self.values))
        self.block = block_of(self.layout.tensor_bytes)
        known = segment.hashes(snapshot)
        whole = shared and len(known) == -(-self.stretch // self.block) + 1
        self.known = known[:-1] if whole else ()

    def entry(self, name: str, size: int, stretch: int, hashes: Sequence[int]) -> FileEntry:
        return FileEntry(
            *(name, self.rank, self.shared, self.layout.key),
            *(size, stretch, self.block, tuple(hashes)),
        )


Written = tuple[FileEntry, tuple[tuple[int, int], ...]]


def _write_contiguous(slot: _Slot, name: str, sink: Sink, stop: Callable[[], bool]) -> Written:
    hashes: list[int] = list(slot.known)
    for begin in range(0, slot.stretch, slot.block):
        end = min(begin + slot.block, slot.stretch)
        digest = None if slot.known else xxhash.xxh3_64()
        for piece in _pieces(slot.payload[begin:end], stop):
            if digest is not None:
                digest.update(piece)
            sink.write(piece)
        if digest is not None:
            hashes.append(digest.intdigest())
    rest = xxhash.xxh3_64()
    for value in slot.values:
        for piece in _pieces(value, stop):
            rest.update(piece)
            sink.write(piece)
    hashes.append(rest.intdigest())
    return slot.entry(name, slot.size, slot.stretch, hashes), ()


def _pieces(data: memoryview, stop: Callable[[], bool]) -> Iterator[memoryview]:
    for at in range(0, len(data), PIECE):
        if stop():
            raise PersistError("the attempt was given up while it was written")
        yield data[at : at + PIECE]


def _write_by_item(slot: _Slot, name: str, sink: Sink, stop: Callable[[], bool]) -> Written:
    hashes: list[int] = []
    digest, room, size = xxhash.xxh3_64(), slot.block, 0

    def write(data: memoryview) -> None:
        nonlocal digest, room, size
        size += len(data)
        for piece in _pieces(data, stop):
            sink.write(piece)
        while data:
            digest.update(data[:room])
            took = min(room, len(data))
            data, room = data[took:], room - took
            if not room:
                hashes.append(digest.intdigest())
                digest, room = xxhash.xxh3_64(), slot.block

    places = write_data(slot.items, slot.payload, slot.values, write)
    if size % slot.block:
        hashes.append(digest.intdigest())
    hashes.append(xxhash.xxh3_64_intdigest(b""))
    return slot.entry(name, size, size, hashes), places


@cache
def _image_problem() -> str:
    return image.image_problem()


def _layout_of(segment: Segment, snapshot: Snapshot) -> Layout:
    """The layout of a snapshot. Cached, because decoding a layout with thousands of items costs
    more than writing a hundred megabytes. Raises PersistError."""
    if snapshot.layout not in _layouts:
        found = segment.layout()
        if found.key != snapshot.layout:
            raise PersistError("a snapshot is of another layout than its segment")
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        _layouts[snapshot.layout] = found
    return _layouts[snapshot.layout]


# ---------------------------------------------------------------- a checkpoint


def commit(
    folder: Folder,
    order: PersistParts,
    parts: Sequence[PartWritten],
    stop: Callable[[], bool] = bool,
) -> Manifest:
    """Make the parts a checkpoint: write the manifest, then the marker. An earlier checkpoint of
    the same step is replaced. Raises PersistError or StorageError; then the checkpoint is not
    committed."""
    step, attempt = order.step, order.attempt
    for part in parts:
        if (part.step, part.round, part.attempt) != (step, order.round, attempt):
            raise PersistError(f"{part.file.name} does not belong to attempt {attempt}")
    try:
        marker = build([_description(part) for part in parts], folder.path(step), attempt)
    except MetadataError as error:
        raise PersistError(f"step {step} was not committed: {error}") from None
    made = Manifest(
        step=step,
        round=order.round,
        world_size=order.world_size,
        attempt=attempt,
        reason=order.reason,
        torch=torch.__version__,
        marker_size=len(marker),
        marker_hash=xxhash.xxh3_64_intdigest(marker),
        files=tuple(sorted((part.file for part in parts), key=lambda entry: entry.rank)),
        used=order.used,
    )
    _all_exist(folder, made)
    found = folder.survey()
    line = timeline_for(found, step, order.rewound_from)
    newer = _newer(found, line, step)
    if wrong := _conflict_with_other_job(folder, newer, order):
        raise PersistError(f"step {step} was not committed: {wrong}")
    if newer and newer[-1] > step:
        folder.remark(  # does not name our `step`, so that it is reported only once
            f"{folder.url} has checkpoints of later steps, up to step {newer[-1]}: "
            "a job that restores continues from those"
        )
    if stop():
        raise PersistError("the attempt was given up before its marker was written")
    folder.put(step, manifests.NAME, manifests.encode(made))
    if line.file:
        folder.put(step, line.file, line.sentence.encode())
    folder.clear_condemned(step)
    folder.put(step, MARKER, marker)
    try:
        _all_exist(folder, made)  # another node may have given up and removed its part
    except PersistError:
        folder.unlink(step, [MARKER])
        raise
    _tidy(folder, made, line)
    return made


def _newer(found: Sequence[ListedCheckpoint], line: Timeline, step: int) -> list[int]:
    """The steps from `step` on, ascending, that a start could still restore once there is a
    checkpoint of `step` on timeline `line`."""
    lost = {one.step for one in found if one.timeline < line and one.step >= line.start}
    return sorted({one for one in restorable_steps(found) if one >= step} - lost)


def _conflict_with_other_job(folder: Folder, steps: Sequence[int], order: PersistParts) -> str:
    """An error message if one of these steps is later than the step that this job's ranks restored
    and was written by another job; else "". The ranks restored the newest checkpoint, so that job
    has written it since, and it must not be replaced."""
    for step in reversed(steps) if order.base >= 0 else ():
        if step <= order.base:
            continue
        try:
            made = folder.manifest(step)
        except ManifestError:
            continue
        if made is None or made.round.term != order.round.term:
            return (
                f"another job has written step {step} in {folder.url} since this job "
                f"restored step {order.base}: stop one of the two jobs, or use another folder; "
                "a restart of this job continues from the newest checkpoint there"
            )
    return ""


def _tidy(folder: Folder, made: Manifest, line: Timeline) -> None:
    """Remove files of earlier attempts at this step, once the checkpoint is committed; a failure is
    only remarked."""
    ours = {entry.name for entry in made.files} | {line.file}
    try:
        names = [n for n in folder.files(made.step) if is_of_attempt(n) and n not in ours]
        folder.unlink(made.step, names)
    except StorageError as error:
        folder.remark(f"files of earlier attempts at step {made.step} stay: {error}")


def _description(part: PartWritten) -> PartFile:
    entry = part.file
    return PartFile(entry.rank, part.layout, entry.name, entry.shared, part.lengths, part.places)


def _all_exist(folder: Folder, made: Manifest) -> None:
    wrong = folder.lacks(made.step, made.files) if folder.shows_others else ""
    if wrong:
        raise PersistError(
            f"step {made.step} was not committed: {wrong} in {folder.path(made.step)} "
            "(do all nodes see the same storage there?)"
        )
