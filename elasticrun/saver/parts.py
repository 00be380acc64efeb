"""What a saver does to write snapshots out: parts, the commit of a checkpoint, what is not kept.

Plain functions that take as long as the storage takes; the saver calls them in its worker. A part
is one file of one rank. The stretch of tensors in a slot is written as it lies there, in one run,
and hashed on the way where the saver had not hashed it before. Then come the opaque values. What
the coordinator's saver has to know of a part is a `PartWritten`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import xxhash

from elasticrun.dcp import image
from elasticrun.dcp.metadata import MetadataError, PartFile, build, items_of, stretch_of
from elasticrun.dcp.writing import write_data
from elasticrun.saver.written import MAX_LAYOUTS, PartWritten
from elasticrun.shm.layout import (
    Item,
    Layout,
)
from elasticrun.shm.segment import Segment, Snapshot, block_of
from elasticrun.storage import manifest as manifests
from elasticrun.storage.folder import MARKER, Folder
from elasticrun.storage.manifest import FileEntry, Manifest, ManifestError
from elasticrun.storage.timeline import (
    PERIODIC,
    Listed,
    Timeline,
    chain,
    join,
    not_kept,
    timeline_of,
)
from elasticrun.storage.writing import PIECE, Sink, StorageError
from elasticrun.wire.snapshots import PartOf, PersistParts
from elasticrun.wire.types import MAX_ATTEMPT

OLD: Final = 3600.0
"""Seconds after which a checkpoint that was never committed is removed."""

_ATTEMPT: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_ATTEMPT}}}\Z")
_NAME: Final = re.compile(r"__(?P<rank>\d+)_\d+\.\d+\.(?P<attempt>.+)\.distcp\Z")
_DRAFT: Final = re.compile(r"(elasticrun\.json|\.metadata)\.[0-9a-f]{8}\.tmp\Z")
_layouts: dict[int, Layout] = {}


class PersistError(Exception):
    """A part or a checkpoint was not written, and nothing is left of it; a sentence."""


def file_name(rank: int, number: int, sequence: int, attempt: str) -> str:
    """Of a part. No other attempt, round or life writes a file of this name."""
    return f"__{rank}_{number}.{sequence}.{attempt}.distcp"


# ---------------------------------------------------------------- a part


def write_part(
    segment: Segment,
    part: PartOf,
    order: PersistParts,
    folder: Folder,
    *,
    stop: Callable[[], bool] = bool,
    distrusted: str | None = None,
) -> PartWritten:
    """Write one rank's share of the checkpoint that is ordered, from its segment. On stable storage
    when it returns. PersistError, StorageError.

    `stop` is asked now and then whether the attempt was given up. `distrusted`: why the slot cannot
    be written as it is, "" for no reason; None: dcp.image is asked once."""
    step, rank, attempt = order.step, part.rank, order.attempt
    if not _ATTEMPT.match(attempt):
        raise PersistError(f"{attempt[:80]!r} is no name of an attempt")
    snapshot = segment.read(part.slot) if 0 <= part.slot < segment.slots else None
    if snapshot is None or (snapshot.sequence, snapshot.step) != (part.sequence, step):
        about = f"rank {rank}'s slot {part.slot}"
        raise PersistError(f"{about} does not hold its snapshot of step {step}")
    name = file_name(rank, order.round.number, part.sequence, attempt)
    slot = _Slot(segment, snapshot, part.shared, rank)
    why = _untrusted() if distrusted is None else distrusted
    if not why and any(not item.head for item in slot.layout.tensors):
        why = "this torch has no envelope for some tensors"
    if why:
        folder.remark(f"checkpoints are written item by item, which is slower: {why}")
    folder.begin(step)
    sink = folder.create(step, name, 0 if why else slot.size)
    try:
        way = _item_by_item if why else _as_it_lies
        entry, places = way(slot, name, sink, stop)
        if segment.committed(part.slot) != part.sequence:
            raise PersistError(f"rank {rank}'s snapshot of step {step} was taken back meanwhile")
        sink.close()
        folder.settle(step)
    except BaseException:
        sink.abort()
        raise
    lengths = tuple(len(value) for value in slot.values)
    layout = slot.layout
    return PartWritten(entry, step, order.round, attempt, layout.torch, lengths, places, layout)


class _Slot:
    """What is to be written of a slot."""

    def __init__(self, segment: Segment, snapshot: Snapshot, shared: bool, rank: int) -> None:
        self.rank, self.shared = rank, shared
        self.layout = _layout_of(segment, snapshot)
        self.payload = segment.payload(snapshot.slot)
        self.items: Sequence[Item] = items_of(self.layout, shared)
        self.stretch = stretch_of(self.layout, shared)
        tensors = stretch_of(self.layout, True)
        self.block = block_of(tensors)
        self.values = self._values(tensors, snapshot)
        self.size = self.stretch + sum(len(value) for value in self.values)
        known = segment.hashes(snapshot)
        whole = shared and len(known) == -(-tensors // self.block) + 1
        self.known: tuple[int, ...] = known[:-1] if whole else ()

    def _values(self, tensors: int, snapshot: Snapshot) -> list[memoryview]:
        items = self.layout.values
        region = self.payload[tensors : tensors + snapshot.values_bytes]
        table = struct.calcsize(f"={len(items)}Q")
        whole = len(region) == snapshot.values_bytes >= table
        lengths = struct.unpack_from(f"={len(items)}Q", region) if whole else ()
        if not whole or table + sum(lengths) != snapshot.values_bytes:
            raise PersistError(f"rank {self.rank}'s snapshot has a table of values that is none")
        found, at = [], table
        for item, length in zip(items, lengths, strict=True):
            if item.own or self.shared:
                found.append(region[at : at + length])
            at += length
        return found

    def entry(self, name: str, size: int, stretch: int, hashes: Sequence[int]) -> FileEntry:
        return FileEntry(
            *(name, self.rank, self.shared, self.layout.key),
            *(size, stretch, self.block, tuple(hashes)),
        )


Written = tuple[FileEntry, tuple[tuple[int, int], ...]]


def _as_it_lies(slot: _Slot, name: str, sink: Sink, stop: Callable[[], bool]) -> Written:
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


def _item_by_item(slot: _Slot, name: str, sink: Sink, stop: Callable[[], bool]) -> Written:
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
def _untrusted() -> str:
    return image.trusted()


def _layout_of(segment: Segment, snapshot: Snapshot) -> Layout:
    """Decoding one of thousands of items costs more than writing out a hundred megabytes."""
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
    """Make the parts a checkpoint: the manifest, then the marker. What the checkpoint replaces, an
    earlier one of the same step, is gone then. PersistError, StorageError; the checkpoint is not
    committed then."""
    step, attempt = order.step, order.attempt
    for part in parts:
        if (part.step, part.round, part.attempt) != (step, order.round, attempt):
            raise PersistError(f"{part.file.name} is no part of attempt {attempt}")
    try:
        marker = build([_told(part) for part in parts], folder.path(step), attempt)
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
    )
    _all_there(folder, made)
    found = folder.survey()
    line = join(found, step, order.rewound_from)
    _tell_later(folder, found, line, step)
    if stop():
        raise PersistError("the attempt was given up before its marker was written")
    folder.put(step, manifests.NAME, manifests.encode(made))
    if line.file:
        folder.put(step, line.file, line.sentence.encode())
    folder.clear_condemned(step)
    folder.put(step, MARKER, marker)
    try:
        _all_there(folder, made)  # another node may have given up and removed its part meanwhile
    except PersistError:
        folder.unlink(step, [MARKER])
        raise
    _tidy(folder, made, line)
    return made


def _tell_later(folder: Folder, found: Sequence[Listed], line: Timeline, step: int) -> None:
    """One sentence where a start would rather go on from something else than what is written."""
    lost = {one.step for one in found if one.timeline < line and one.step >= line.start}
    later = sorted({one for one in chain(found) if one > step} - lost)
    if later:
        folder.remark(
            f"checkpoints of later steps than {step} stand in {folder.url}, up to step "
            f"{later[-1]}: a start that restores goes on from those"
        )


def _tidy(folder: Folder, made: Manifest, line: Timeline) -> None:
    """Remove what earlier attempts at this step have left. The checkpoint counts already."""
    ours = {entry.name for entry in made.files} | {line.file}
    try:
        names = [n for n in folder.files(made.step) if _is_of_attempt(n) and n not in ours]
        folder.unlink(made.step, names)
    except StorageError as error:
        folder.remark(f"files of earlier attempts at step {made.step} stay: {error}")


def _is_of_attempt(name: str) -> bool:
    return bool(_NAME.match(name) or _DRAFT.match(name) or timeline_of(name))


def _told(part: PartWritten) -> PartFile:
    entry = part.file
    return PartFile(entry.rank, part.layout, entry.name, entry.shared, part.lengths, part.places)


def _all_there(folder: Folder, made: Manifest) -> None:
    wrong = folder.lacks(made.step, made.files) if folder.shows_others else ""
    if wrong:
        raise PersistError(
            f"step {made.step} was not committed: {wrong} in {folder.path(made.step)} "
            "(do all nodes see the same storage there?)"
        )


def clear_earlier(folder: Folder, step: int, ranks: Collection[int], attempt: str) -> None:
    """Remove what earlier attempts of savers that were killed have left of these ranks: on a disk
    that is nearly full no new one would come through. StorageError."""
    files = folder.files(step)
    if MARKER in files:
        return
    parts = [(name, found) for name in files if (found := _NAME.match(name))]
    old = [n for n, f in parts if int(f["rank"]) in ranks and f["attempt"] != attempt]
    if old:
        folder.unlink(step, old)


def give_up(folder: Folder, step: int, attempt: str) -> None:
    """Remove what an attempt has written, unless it was committed. StorageError."""
    files = folder.files(step)
    names = [n for n in files if (found := _NAME.match(n)) and found["attempt"] == attempt]
    try:
        manifest = folder.manifest(step)
    except ManifestError:
        manifest = None
    ours = manifest is not None and manifest.attempt == attempt
    if MARKER in files and (ours or manifest is None):
        return
    if MARKER not in files:
        names += [name for name in files if timeline_of(name)]
    folder.unlink(step, [*names, manifests.NAME] if ours else names)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Steps whose checkpoints were removed, and sentences about those that could not be."""

    removed: tuple[int, ...]
    remarks: tuple[str, ...]


def sweep(
    folder: Folder, *, keep_last: int, keep_every: int, in_use: Collection[int] = ()
) -> SweepResult:
    """Remove what is not to be kept (storage.timeline), what was condemned and is older than all
    that is kept, and what was begun and never committed. To be called after a commit."""
    removed, remarks = [], []
    try:
        found = folder.survey()
        told = _reasons(folder, chain(found), keep_last)
        gone = not_kept(found, told, last=keep_last, every=keep_every, in_use=in_use)
        gone += [step for step in folder.uncommitted(OLD, found) if step not in in_use]
    except StorageError as error:
        return SweepResult((), (f"old checkpoints are not removed: {error}",))
    for step in gone:
        try:
            folder.remove(step)
            removed.append(step)
        except StorageError as error:
            remarks.append(str(error))
    return SweepResult(tuple(removed), tuple(remarks))


def _reasons(folder: Folder, committed: Sequence[int], last: int) -> list[tuple[int, str]]:
    """Only manifests that matter are read: back to the newest periodic checkpoint."""
    found: list[tuple[int, str]] = []
    for step in reversed(committed):
        reason = ""
        if last > 0 and all(known != PERIODIC for _, known in found):
            try:
                manifest = folder.manifest(step)
                reason = manifest.reason if manifest is not None else PERIODIC
            except ManifestError:
                reason = ""
        found.append((step, reason))
    return found
