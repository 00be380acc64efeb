"""The saver's storage work. All of it runs in one thread.

torch and the modules that write checkpoints (`saver.parts`) are imported by the first work item, so
that the saver can answer its agent earlier.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticrun.host.system.reasons import reason_of
from elasticrun.snapshots.saver.hashing import OpenSegment, Overwritten
from elasticrun.snapshots.saver.part_written import PartWritten
from elasticrun.snapshots.storage import retention
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.wire.snapshots import PersistParts

MAX_FOLDERS: Final = 8
"""Maximum number of cached Folder objects, which remember the features of their file systems."""

_folders: dict[str, Folder] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a work item: why it failed, or ""; sentences for the operator; written
    parts."""

    reason: str = ""
    remarks: tuple[str, ...] = ()
    parts: tuple[PartWritten, ...] = ()

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        remarks = [text for folder in list(_folders.values()) for text in folder.take_remarks()]
        return cls(reason_of(error), tuple(remarks))


def import_modules() -> Outcome:
    """Import torch, set to one thread, and the modules that write checkpoints."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    importlib.import_module("elasticrun.snapshots.saver.parts")
    return Outcome()


def write_parts(
    opened: Mapping[int, OpenSegment | None], order: PersistParts, stop: Callable[[], bool]
) -> Outcome:
    """Write all parts of this node, one after the other. Does not check the snapshots, because the
    agent has had them checked."""
    from elasticrun.snapshots.saver.parts import PersistError, write_part

    folder = _folder(order)
    ranks = {part.rank for part in order.parts}
    retention.clear_earlier(folder, order.step, ranks, order.attempt)
    parts = []
    for part in order.parts:
        if stop():
            raise PersistError("it was given up")
        held = opened[part.key]
        if held is None:
            raise Overwritten(f"the saver does not have the segment of rank {part.rank}")
        held.clear_stale_hashes(held.snapshot(part.slot, part.sequence))
        parts.append(write_part(held.segment, part, order, folder, stop=stop))
    return Outcome("", tuple(folder.take_remarks()), tuple(parts))


def commit(order: PersistParts, parts: Sequence[PartWritten], stop: Callable[[], bool]) -> Outcome:
    """Write the manifest and the marker."""
    from elasticrun.snapshots.saver import parts as saver_parts

    folder = _folder(order)
    saver_parts.commit(folder, order, parts, stop)
    return Outcome("", tuple(folder.take_remarks()))


def sweep(order: PersistParts) -> Outcome:
    """Remove checkpoints that need not be kept any more."""
    return _swept(order, order.keep_last, order.keep_every, order.in_use)


def remove_unfinished(order: PersistParts) -> Outcome:
    """Remove old uncommitted checkpoints. Needed when attempts fail, because only a commit is
    followed by a sweep."""
    return _swept(order, 0, 0, ())


def _swept(order: PersistParts, last: int, every: int, in_use: Sequence[int]) -> Outcome:
    folder = _folder(order)
    used = (order.step, *in_use)
    _, remarks = retention.sweep(folder, keep_last=last, keep_every=every, in_use=used)
    return Outcome("", (*remarks, *folder.take_remarks()))


def remove_attempt(order: PersistParts) -> Outcome:
    """Remove the files of a failed attempt."""
    folder = _folder(order)
    retention.discard_attempt(folder, order.step, order.attempt)
    return Outcome("", tuple(folder.take_remarks()))


def _folder(order: PersistParts) -> Folder:
    if order.folder not in _folders:
        while len(_folders) >= MAX_FOLDERS:
            del _folders[next(iter(_folders))]
        _folders[order.folder] = Folder(order.folder)
    return _folders[order.folder]
