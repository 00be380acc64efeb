"""Removes files left by attempts, and checkpoints that retention does not keep."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.folder import MARKER, REMOVED, Folder
from elasticrun.snapshots.storage.manifest import ManifestError
from elasticrun.snapshots.storage.timeline import PERIODIC, chain, not_kept, timeline_of
from elasticrun.snapshots.storage.writing import StorageError

OLD: Final = 3600.0
"""Seconds after which an uncommitted checkpoint is removed."""

_NAME: Final = re.compile(r"__(?P<rank>\d+)_\d+\.\d+\.(?P<attempt>.+)\.distcp\Z")
_DRAFT: Final = re.compile(r"(elasticrun\.json|\.metadata)\.[0-9a-f]{8}\.tmp\Z")


def file_name(rank: int, number: int, sequence: int, attempt: str) -> str:
    """The file name of a part. It is unique to the attempt, the round and the snapshot."""
    return f"__{rank}_{number}.{sequence}.{attempt}.distcp"


def is_of_attempt(name: str) -> bool:
    """Whether an attempt writes files with such names."""
    return bool(_NAME.match(name) or _DRAFT.match(name) or timeline_of(name))


def clear_earlier(folder: Folder, step: int, ranks: Collection[int], attempt: str) -> None:
    """Remove files that killed savers left of earlier attempts by these ranks. On a nearly full
    disk no new attempt could succeed otherwise. Also cancels a removal that has begun. Raises
    StorageError."""
    files = folder.files(step)
    if MARKER in files:
        return
    parts = [(name, found) for name in files if (found := _NAME.match(name))]
    old = [n for n, f in parts if int(f["rank"]) in ranks and f["attempt"] != attempt]
    old += [REMOVED] if REMOVED in files else []
    if old:
        folder.unlink(step, old)


def discard_attempt(folder: Folder, step: int, attempt: str) -> None:
    """Remove what an attempt has written, unless it was committed. Raises StorageError."""
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


class SweepResult(NamedTuple):
    """Steps whose checkpoints were removed, and sentences about failures."""

    removed: tuple[int, ...]
    remarks: tuple[str, ...]


def sweep(
    folder: Folder, *, keep_last: int, keep_every: int, in_use: Collection[int] = ()
) -> SweepResult:
    """Remove what is not kept (storage.timeline): also condemned checkpoints older than all that
    are kept, and uncommitted ones. Call after a commit."""
    removed, remarks = [], []
    try:
        found = folder.survey()
        reasons = _reasons(folder, chain(found), keep_last)
        to_remove = not_kept(found, reasons, last=keep_last, every=keep_every, in_use=in_use)
        to_remove += [step for step in folder.uncommitted(OLD, found) if step not in in_use]
    except StorageError as error:
        return SweepResult((), (f"old checkpoints are not removed: {error}",))
    for step in to_remove:
        try:
            folder.remove(step)
            removed.append(step)
        except StorageError as error:
            remarks.append(str(error))
    return SweepResult(tuple(removed), tuple(remarks))


def _reasons(folder: Folder, committed: Sequence[int], last: int) -> list[tuple[int, str]]:
    """Read only the manifests that matter: back to the newest periodic checkpoint."""
    found: list[tuple[int, str]] = []
    for step in reversed(committed):
        reason = ""
        if last > 0 and all(known != PERIODIC for _, known in found):
            try:
                manifest = folder.manifest(step)
                reason = manifest.reason if manifest is not None else PERIODIC
            except ManifestError:
                pass
        found.append((step, reason))
    return found
