"""Removes files left by attempts, and checkpoints that retention does not keep."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.folder import MARKER, REMOVED, Folder
from elasticrun.snapshots.storage.manifest import ManifestError
from elasticrun.snapshots.storage.timeline import PERIODIC, not_kept, restorable_steps, timeline_of
from elasticrun.snapshots.storage.writing import StorageError

OLD: Final = 3600.0
"""Seconds after its last change when an uncommitted checkpoint is removed."""

_NAME: Final = re.compile(r"__(?P<rank>\d+)_\d+\.\d+\.(?P<attempt>.+)\.distcp\Z")
_DRAFT: Final = re.compile(r"(elasticrun\.json|\.metadata)\.[0-9a-f]{8}\.tmp\Z")


def file_name(rank: int, number: int, sequence: int, attempt: str) -> str:
    """The file name of a part, unique to the rank, the round, the snapshot and the attempt."""
    return f"__{rank}_{number}.{sequence}.{attempt}.distcp"


def is_of_attempt(name: str) -> bool:
    """Whether attempts write files with names like this: parts, drafts, timelines."""
    return bool(_NAME.match(name) or _DRAFT.match(name) or timeline_of(name))


def clear_earlier(folder: Folder, step: int, ranks: Collection[int], attempt: str) -> None:
    """Before an attempt, remove these ranks' files of earlier attempts, which killed savers have
    left: on a nearly full disk no attempt could succeed otherwise. Also cancels a removal that has
    begun. A no-op if the step is committed. Raises StorageError."""
    files = folder.files(step)
    if MARKER in files:
        return
    parts = [(name, found) for name in files if (found := _NAME.match(name))]
    old = [n for n, f in parts if int(f["rank"]) in ranks and f["attempt"] != attempt]
    old += [REMOVED] if REMOVED in files else []
    if old:
        folder.unlink(step, old)


def discard_attempt(folder: Folder, step: int, attempt: str) -> None:
    """Remove what an attempt has written, unless it was committed, as far as known. Raises
    StorageError."""
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
    """Steps whose checkpoints were removed, and sentences about those that could not be."""

    removed: tuple[int, ...]
    remarks: tuple[str, ...]


def sweep(
    folder: Folder, *, keep_last: int, keep_every: int, in_use: Collection[int] = ()
) -> SweepResult:
    """Remove checkpoints that are not kept (`timeline.not_kept`), and uncommitted ones that have
    not changed for OLD seconds. Call after a commit. Never raises StorageError: failures are
    remarks."""
    removed, remarks = [], []
    try:
        found = folder.survey()
        reasons = _reasons(folder, restorable_steps(found), keep_last)
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
    """The steps, newest first, with the reasons of their checkpoints. Reads only the manifests that
    matter, back to the newest periodic checkpoint; the other reasons are ""."""
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
