"""A folder of checkpoints: lists, verifies, condemns, removes and creates them.

A checkpoint `step-000000123` is committed once its marker `.metadata` exists, which is written
last. Checkpoints are found by listing; there is no pointer file to the latest one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import eq, ge
from typing import Final, NamedTuple

import xxhash

from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.manifest import FileEntry, Manifest, ManifestError
from elasticrun.snapshots.storage.places import Entry, LocalPlace, StoragePlace, UrlPlace
from elasticrun.snapshots.storage.timeline import (
    ListedCheckpoint,
    Timeline,
    restorable_steps,
    timeline_of,
)
from elasticrun.snapshots.storage.writing import PIECE, Calls, Sink, StorageError

MARKER: Final = manifests.MARKER
CONDEMNED: Final = "elasticrun.bad"
REMOVED: Final = "elasticrun.removed"
"""A file in a checkpoint without a marker: its removal has begun."""
MAX_STEP: Final = 2**53
MAX_REMARKS: Final = 32
MAX_VERDICT: Final = 4096
"""Maximum bytes of the reason why a checkpoint was condemned."""

_STEP: Final = re.compile(r"step-(\d{9,16})\Z")
_OURS: Final = re.compile(r"(__\d+_\d+\.\d+\..+\.distcp|elasticrun\..+|\.metadata\..+\.tmp)\Z")


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:09d}"


class CheckpointFault(NamedTuple):
    """What is wrong with a checkpoint. `corrupt`: its bytes are not those that were written."""

    what: str
    corrupt: bool = True

    @property
    def clause(self) -> str:
        """What is wrong, as the rest of a sentence that starts with the checkpoint."""
        return f"is spoiled: {self.what}" if self.corrupt else self.what


class Folder:
    """One folder of checkpoints. `url`: an absolute path, a `file://` URL, or any other URL that
    fsspec supports.

    All methods raise StorageError if the storage fails. A fault of a checkpoint is not raised but
    returned, except that `manifest` raises ManifestError."""

    def __init__(self, url: str, *, calls: Calls | None = None) -> None:
        """Raises StorageError if the URL is invalid. Does not access the storage yet."""
        self.url = url
        path = url.removeprefix("file://")
        self.is_local = path != url or url.startswith("/") or "://" not in url
        self._reported: set[str] = set()
        if self.is_local and not os.path.isabs(path):
            raise StorageError(f"{url!r} is neither an absolute path nor a URL")
        self._place: StoragePlace = (
            LocalPlace(path, calls or Calls()) if self.is_local else UrlPlace(url)
        )
        self.unfit = self._place.unfit
        """Why a job must not keep its checkpoints in this folder, as a sentence; "" if it may."""

    @property
    def shows_others(self) -> bool:
        """Whether files written by other nodes are visible here at once; on mounted buckets they
        are not."""
        return self._place.is_consistent

    def path(self, step: int) -> str:
        """The path or URL of a checkpoint, for torch's readers (`checkpoint_id`)."""
        return self._place.full(step_name(step))

    def remark(self, text: str) -> None:
        """Keep a sentence for `take_remarks`; beyond MAX_REMARKS it is dropped."""
        if len(self._place.remarks) < MAX_REMARKS:
            self._place.remarks.append(text)

    def take_remarks(self) -> list[str]:
        """Take the sentences for the operator that were added since the last call, without those
        taken before."""
        fresh = [r for r in dict.fromkeys(self._place.remarks) if r not in self._reported]
        self._place.remarks.clear()
        if len(self._reported) < MAX_REMARKS:
            self._reported.update(fresh)
        return fresh

    def _steps(self) -> list[int]:
        named = ((_STEP.match(one.name), one) for one in self._place.entries("") if one.folder)
        steps = [(int(match[1]), one.name) for match, one in named if match]
        return sorted(n for n, name in steps if n < MAX_STEP and name == step_name(n))

    def _entries(self, step: int) -> dict[str, Entry]:
        return {entry.name: entry for entry in self._place.entries(step_name(step))}

    def survey(self) -> list[ListedCheckpoint]:
        """Every finished or unfinished checkpoint, ordered by step; lists each folder once."""
        return [_listed(step, self._entries(step)) for step in self._steps()]

    def committed(self) -> list[int]:
        """Steps with a marker that were not condemned, ascending; also those on abandoned
        timelines."""
        return [one.step for one in self.survey() if one.committed]

    def newest(self, below: int = -1, above: int = -1) -> int:
        """The step that a start restores: the newest one that is committed, not condemned and not
        on an abandoned timeline; -1: none. `below`: consider only steps below this one; -1: all.
        `above`: consider only steps above this one; takes a single listing if there are none."""
        names = self._steps()
        if not names or names[-1] <= above:
            return -1
        steps = restorable_steps(_listed(step, self._entries(step)) for step in names)
        return max((s for s in steps if s > above and (below < 0 or s < below)), default=-1)

    def condemned(self) -> list[int]:
        """Steps that were marked as corrupt, ascending."""
        return [one.step for one in self.survey() if one.condemned]

    def uncommitted(
        self, older_than: float, found: Iterable[ListedCheckpoint] | None = None
    ) -> list[int]:
        """Steps without a marker that contain only our files and have not changed for `older_than`
        seconds; also steps whose removal has begun. Compares times of the storage's clock only: the
        newest change in any checkpoint counts as the current time. `found`: a recent survey."""
        found = self.survey() if found is None else list(found)
        now = max((one.changed for one in found), default=0.0)
        begun = [one for one in found if not one.marker and one.only_ours and one.changed]
        old = [one.step for one in begun if now - one.changed > older_than]
        return sorted({*old, *(one.step for one in found if one.removed)})

    def files(self, step: int) -> dict[str, int]:
        """Names and sizes of the files in a checkpoint."""
        return {e.name: e.size for e in self._entries(step).values() if not e.folder}

    def size(self, step: int, name: str) -> int | None:
        """Size of a file, None if it does not exist. Opens the file, because on NFS and on mounted
        buckets a listing may be several seconds old."""
        try:
            with self._place.opened(f"{step_name(step)}/{name}") as file:
                return int(file.seek(0, os.SEEK_END))
        except FileNotFoundError:
            return None

    def lacks(self, step: int, wanted: Iterable[FileEntry]) -> str:
        """ "" if these files exist with these sizes, else what is wrong with one of them."""
        return self._first_size_fault(step, {one.name: one.size for one in wanted}, eq, "not {}")

    def short(self, step: int, least: Mapping[str, int]) -> str:
        """ "" if these files exist with at least this many bytes each, else what is wrong with one
        of them. For checkpoints written by torch alone, which have no manifest."""
        return self._first_size_fault(step, least, ge, "and {} were written")

    def _first_size_fault(
        self, step: int, wanted: Mapping[str, int], fits: Callable[[int, int], bool], why: str
    ) -> str:
        sizes = self.files(step)
        sized = (self._size_fault(step, one, sizes, fits, why) for one in wanted.items())
        return next(filter(None, sized), "")

    def _size_fault(
        self,
        step: int,
        wanted: tuple[str, int],
        sizes: Mapping[str, int],
        fits: Callable[[int, int], bool] = eq,
        why: str = "not {}",
    ) -> str:
        name, bytes_ = wanted
        if fits(sizes.get(name, -1), bytes_):  # from a listing, which may be old
            return ""
        size = self.size(step, name)
        if size is None:
            return f"{name} is missing"
        return "" if fits(size, bytes_) else f"{name} has {size} bytes, {why.format(bytes_)}"

    def has_manifest(self, step: int) -> bool:
        """Whether the checkpoint has a manifest to compare it with (torch alone writes none)."""
        return self.size(step, manifests.NAME) is not None

    def manifest(self, step: int) -> Manifest | None:
        """Read the manifest; None if there is none, because the step was not committed or torch
        alone has written it. Raises ManifestError."""
        try:
            data = self._read(step, manifests.NAME, manifests.MAX_BYTES)
        except FileNotFoundError:
            return None
        found = manifests.decode(data)
        if found.step != step:
            raise ManifestError(f"the manifest belongs to step {found.step}")
        return found

    def _read(self, step: int, name: str, most: int) -> bytes:
        with self._place.opened(f"{step_name(step)}/{name}") as file:
            pieces, have = [], 0
            while piece := file.read(min(PIECE, most + 1 - have)):
                pieces.append(piece)
                have += len(piece)
                if have > most:
                    raise StorageError(f"{self.path(step)}/{name} is longer than it can be")
        return b"".join(pieces)

    def verify(self, step: int, part: int = 0, of: int = 1) -> str:
        """Compare a checkpoint with its manifest: all sizes, its marker, and the hashes of every
        `of`-th file, starting with number `part` (`of`=0: of no file). Returns "" or a sentence
        about the first fault. A checkpoint without a manifest, which torch alone has written, has
        no fault if its marker exists and it was not condemned."""
        wrong = next(self.faults(step, part, of), None)
        return f"{self._where(step)} {wrong.clause}" if wrong is not None else ""

    def faults(self, step: int, part: int = 0, of: int = 1) -> Iterator[CheckpointFault]:
        """Yield every fault that `verify` would find. Sizes are checked before hashes."""
        sizes = self.files(step)
        if MARKER not in sizes and self.size(step, MARKER) is None:
            cut_off = "is being removed, or its removal was cut off"
            what = cut_off if REMOVED in sizes else "was never committed"
            yield CheckpointFault(what, corrupt=False)
            return
        if CONDEMNED in sizes:
            yield CheckpointFault("was found to be spoiled before", corrupt=False)
            return
        try:
            manifest = self.manifest(step)
        except ManifestError as error:
            yield CheckpointFault(str(error))
            return
        except OSError as error:
            yield self._unread(step, manifests.NAME, error)
            return
        if manifest is not None:
            yield from self._compare(manifest, sizes, manifest.files[part::of] if of else ())

    def _where(self, step: int) -> str:
        return f"step {step} in {self.url}"

    def _unread(self, step: int, name: str, error: OSError) -> CheckpointFault:
        """The fault of a file that cannot be read. Raises StorageError if the storage is
        unreachable, which proves nothing about the file."""
        why = error.strerror or repr(error)
        if error.errno != errno.EIO and not isinstance(error, FileNotFoundError):
            raise StorageError(f"{self._where(step)} cannot be read: {why}") from error
        return CheckpointFault(f"{name} cannot be read whole ({why})")

    def _compare(
        self, manifest: Manifest, sizes: Mapping[str, int], hashed: Iterable[FileEntry]
    ) -> Iterator[CheckpointFault]:
        step, missing = manifest.step, set()
        for entry in manifest.files:
            if wrong := self._size_fault(step, (entry.name, entry.size), sizes):
                missing.add(entry.name)
                yield CheckpointFault(wrong)
        for name, check in (
            (MARKER, partial(self._marker_fault, manifest)),
            *((one.name, partial(self._content_fault, step, one)) for one in hashed),
        ):
            if name in missing:
                continue
            try:
                wrong = check()
            except OSError as error:
                yield self._unread(step, name, error)
                continue
            if wrong:
                yield CheckpointFault(wrong)

    def _marker_fault(self, manifest: Manifest) -> str:
        if self.size(manifest.step, MARKER) == manifest.marker_size:
            marker = self._read(manifest.step, MARKER, manifest.marker_size)
            if xxhash.xxh3_64_intdigest(marker) == manifest.marker_hash:
                return ""
        return f"{MARKER} is not what was written"

    def _content_fault(self, step: int, entry: FileEntry) -> str:
        with self._place.opened(f"{step_name(step)}/{entry.name}") as file:
            room = memoryview(bytearray(min(PIECE, max(entry.size, 1))))
            for (begin, end), wanted in zip(entry.spans(), entry.hashes, strict=True):
                found, at = xxhash.xxh3_64(), begin
                while at < end:
                    took = file.readinto(room[: end - at])
                    if not took:
                        return f"{entry.name} ends at byte {at}"
                    found.update(room[:took])
                    at += took
                if found.intdigest() != wanted:
                    return f"{entry.name} was changed between bytes {begin} and {end}"
        return ""

    def verdict(self, step: int) -> str:
        """Why a checkpoint was condemned; "" if it was not. Raises StorageError."""
        try:
            return self._read(step, CONDEMNED, MAX_VERDICT).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def condemn(self, step: int, what: str) -> None:
        """Mark this checkpoint as corrupt, so that it no longer counts as committed. `what`: the
        reason; if it is already marked, the first reason stays."""
        data = what.encode()[: MAX_VERDICT - 1] + b"\n"
        self._place.put_first(f"{step_name(step)}/{CONDEMNED}", data)

    def clear_condemned(self, step: int) -> None:
        """Remove the mark of `condemn`, because the checkpoint is about to be written again."""
        self._place.unlink(f"{step_name(step)}/{CONDEMNED}")

    def remove(self, step: int) -> None:
        """Remove a checkpoint: its marker first, so that a half-removed folder is not a checkpoint,
        and the file REMOVED last."""
        if MARKER in self._entries(step):
            self._place.put_first(f"{step_name(step)}/{REMOVED}", b"")
            self._place.unlink(f"{step_name(step)}/{MARKER}")
            self._place.settle(step_name(step))
        self._place.remove(step_name(step), last=REMOVED)

    def make_folder(self, step: int) -> None:
        """Create the folder of a checkpoint that is about to be written."""
        self._place.make(step_name(step))

    def create(self, step: int, name: str, size: int) -> Sink:
        """Create a large file of a checkpoint."""
        return self._place.create(f"{step_name(step)}/{name}", size)

    def settle(self, step: int) -> None:
        """Make the names of a checkpoint's files durable."""
        self._place.settle(step_name(step))

    def put(self, step: int, name: str, data: bytes) -> None:
        """Write a small file of a checkpoint atomically, replacing an older one."""
        self._place.put(f"{step_name(step)}/{name}", data)

    def unlink(self, step: int, names: Iterable[str]) -> None:
        """Remove files of a checkpoint, and its folder if it becomes empty."""
        for name in names:
            self._place.unlink(f"{step_name(step)}/{name}")
        self._place.remove_empty(step_name(step))


def _listed(step: int, entries: dict[str, Entry]) -> ListedCheckpoint:
    marker = entries.get(MARKER)
    lines = [line for line in map(timeline_of, entries) if line is not None]
    return ListedCheckpoint(
        step,
        marker is not None,
        CONDEMNED in entries,
        marker is None and REMOVED in entries,
        manifests.NAME in entries,
        all(_OURS.match(name) for name in entries),
        max(lines, default=Timeline()),
        0.0 if marker is None else marker.changed,
        max((entry.changed for entry in entries.values()), default=0.0),
    )
