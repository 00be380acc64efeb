"""What the saver does with storage, each piece in its one thread for that.

torch and all that writes checkpoints are imported here when the first piece is done, so that the
saver answers its agent before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticrun.saver import hashing
from elasticrun.saver.hashing import OpenSegment
from elasticrun.saver.written import PartWritten
from elasticrun.system.reasons import reason_of
from elasticrun.wire.snapshots import PersistParts

if TYPE_CHECKING:
    from elasticrun.storage.folder import Folder


MAX_FOLDERS: Final = 8
"""That are kept, with what was found out about their file systems."""

_folders: dict[str, Folder] = {}


class GivenUp(Exception):
    """The agent wants this attempt no more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a piece of work: "" or why it failed, and sentences for the operator."""

    reason: str = ""
    remarks: tuple[str, ...] = ()
    parts: tuple[PartWritten, ...] = ()

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        remarks: list[str] = []
        for folder in list(_folders.values()):
            remarks += folder.take_remarks()
        return cls(reason_of(error), tuple(remarks))


def get_ready() -> Outcome:
    """Import torch, with one thread to work with, and what writes checkpoints."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    importlib.import_module("elasticrun.saver.parts")
    return Outcome()


def write_parts(
    opened: Mapping[int, OpenSegment | None], order: PersistParts, stop: Callable[[], bool]
) -> Outcome:
    """Every part of this node, one after the other. The agent has had them compared before."""
    from elasticrun.saver import parts as saver_parts

    folder = _folder(order.folder)
    ranks = {part.rank for part in order.parts}
    saver_parts.clear_earlier(folder, order.step, ranks, order.attempt)
    parts = []
    for part in order.parts:
        if stop():
            raise GivenUp("it was given up")
        held = opened[part.key]
        if held is None:
            raise hashing.Gone(f"the saver does not have the segment of rank {part.rank}")
        held.drop_others(held.snapshot(part.slot, part.sequence))
        parts.append(saver_parts.write_part(held.segment, part, order, folder, stop=stop))
    return Outcome("", tuple(folder.take_remarks()), tuple(parts))


def commit(order: PersistParts, parts: Sequence[PartWritten], stop: Callable[[], bool]) -> Outcome:
    """Write manifest and marker."""
    from elasticrun.saver import parts as saver_parts

    folder = _folder(order.folder)
    saver_parts.commit(folder, order, parts, stop)
    return Outcome("", tuple(folder.take_remarks()))


def sweep(order: PersistParts) -> Outcome:
    """Remove what is not to be kept any more."""
    from elasticrun.saver import parts as saver_parts

    folder = _folder(order.folder)
    swept = saver_parts.sweep(
        folder,
        keep_last=order.keep_last,
        keep_every=order.keep_every,
        in_use=(order.step, *order.in_use),
    )
    return Outcome("", (*swept.remarks, *folder.take_remarks()))


def clean(order: PersistParts) -> Outcome:
    """Remove the files of an attempt that came to nothing."""
    from elasticrun.saver import parts as saver_parts

    folder = _folder(order.folder)
    saver_parts.give_up(folder, order.step, order.attempt)
    return Outcome("", tuple(folder.take_remarks()))


def tidy(order: PersistParts) -> Outcome:
    """Remove what was begun long ago, and no checkpoint: where no attempt comes through there is no
    sweep."""
    from elasticrun.saver import parts as saver_parts

    folder = _folder(order.folder)
    swept = saver_parts.sweep(folder, keep_last=0, keep_every=0, in_use=(order.step,))
    return Outcome("", (*swept.remarks, *folder.take_remarks()))


def _folder(url: str) -> Folder:
    from elasticrun.storage.folder import Folder

    if url not in _folders:
        while len(_folders) >= MAX_FOLDERS:
            del _folders[next(iter(_folders))]
        _folders[url] = Folder(url)
    return _folders[url]
