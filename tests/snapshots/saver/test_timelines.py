"""Checkpoints after training was taken back: what stands on disk, and what a start finds."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elasticrun.snapshots.saver import parts
from elasticrun.snapshots.saver.part_written import PartWritten
from elasticrun.snapshots.storage import retention
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.writing import Calls, StorageError
from elasticrun.wire.snapshots import PartOf, PersistParts
from tests.snapshots.dcp.checkpoints import commit, ordered, save
from tests.snapshots.dcp.slots import NAMED, HandMade
from tests.snapshots.saver.test_parts import loaded, rank, write


def saved(folder: Folder, *steps: int, rewound_from: int = -1, attempt: str = "a") -> None:
    for step in steps:
        save(folder, [state(step)], step=step, rewound_from=rewound_from, attempt=attempt)


def state(step: int) -> HandMade:
    return rank(fill=step)


@pytest.fixture(params=["path", "url"])
def folder(request, tmp_path: Path) -> Iterator[Folder]:
    yield Folder(str(tmp_path) if request.param == "path" else f"memory://{tmp_path}")
    fsspec.filesystem("memory").store.clear()


def test_a_smaller_step_of_a_new_timeline_is_the_newest(folder: Folder) -> None:
    saved(folder, 4, 8, 12)
    assert (folder.newest(), folder.newest(below=12)) == (12, 8)
    saved(folder, 10, rewound_from=12)
    assert folder.committed() == [4, 8, 10, 12]
    assert folder.newest() == 10
    assert "elasticrun.timeline.1.from.12" in folder.files(10)
    assert folder.verify(10) == folder.verify(12) == ""
    assert loaded(folder, 12) == (12.0, 12.0), "plain torch reads what was left"
    removed = retention.sweep(folder, keep_last=2, keep_every=0, in_use=(10,)).removed
    assert (removed, folder.newest()) == ((4,), 10)
    saved(folder, 11)
    retention.sweep(folder, keep_last=2, keep_every=0)
    assert folder.committed() == [10, 11, 12], "what was left stays until training has passed it"
    saved(folder, 12, attempt="b")
    assert "elasticrun.timeline.1.from.12" in folder.files(12)
    assert (folder.newest(), folder.verify(12)) == (12, "")
    saved(folder, 16)
    retention.sweep(folder, keep_last=1, keep_every=0)
    assert folder.committed() == [16]
    assert "elasticrun.timeline.1.from.12" in folder.files(16)
    assert folder.take_remarks() == []


def test_a_spoiled_one_leads_back_past_the_poison(folder: Folder) -> None:
    saved(folder, 4, 8, 12)
    saved(folder, 10, rewound_from=12)
    folder.condemn(10, "for this test")
    assert folder.newest() == 8


def test_a_step_below_what_stands_there_is_kept_and_said(folder: Folder) -> None:
    """A script that restores nothing begins in the folder of another run."""
    saved(folder, 3000, 4000, 5000)
    saved(folder, 100)
    assert folder.take_remarks() == [
        f"{folder.url} has checkpoints of later steps, up to step 5000: "
        "a job that restores continues from those"
    ]
    saved(folder, 200)
    assert folder.take_remarks() == []  # once, and not at each checkpoint
    assert retention.sweep(folder, keep_last=3, keep_every=0, in_use=(100, 200)).removed == ()
    assert folder.committed() == [100, 200, 3000, 4000, 5000]


def test_without_its_marker_it_is_no_timeline(tmp_path: Path) -> None:
    """The saver dies, or the disk is full, before the marker: the older timeline still counts, and
    what the attempt has left is removed."""

    class NoMarker(Calls):
        def rename(self, source: str, target: str) -> None:
            if target.endswith("010/.metadata"):
                raise OSError(errno.ENOSPC, "full")
            super().rename(source, target)

    folder = Folder(str(tmp_path), calls=NoMarker())
    saved(folder, 4, 12)
    with pytest.raises(StorageError, match="the disk is full"):
        saved(folder, 10, rewound_from=12)
    assert "elasticrun.timeline.1.from.12" in folder.files(10)
    assert folder.newest() == 12
    retention.discard_attempt(folder, 10, "a")
    assert folder.files(10) == {}


def test_an_attempt_that_is_given_up_before_its_marker_is_no_checkpoint(folder: Folder) -> None:
    part = write(folder, rank().segment())
    with pytest.raises(parts.PersistError, match="given up before its marker"):
        parts.commit(folder, ordered(), [part], stop=lambda: True)
    assert folder.committed() == []


def test_a_checkpoint_counts_though_the_old_files_cannot_be_removed(tmp_path: Path) -> None:
    class Sticky(Calls):
        def unlink(self, path: str) -> None:
            if path.endswith(".distcp"):
                raise OSError(errno.EIO, "sticky")
            super().unlink(path)

    folder = Folder(str(tmp_path), calls=Sticky())
    write(folder, rank().segment(), attempt="old")
    part = write(folder, rank().segment())
    commit(folder, [part])
    assert (folder.committed(), folder.verify(7)) == ([7], "")
    assert "files of earlier attempts at step 7 stay" in folder.take_remarks()[0]


def test_what_killed_savers_have_left_does_not_fill_the_disk(folder: Folder) -> None:
    """Of the same ranks and step; never of a checkpoint, nor of what other ranks write now."""
    for attempt in ("killed", "killed-too"):
        write(folder, rank().segment(), attempt=attempt)
    part = write(folder, rank().segment(), attempt="now")
    retention.clear_earlier(folder, 7, {1}, "now")
    assert len(folder.files(7)) == 3
    retention.clear_earlier(folder, 7, {0, 1}, "now")
    assert list(folder.files(7)) == [part.file.name]
    commit(folder, [part], attempt="now")
    retention.clear_earlier(folder, 7, {0}, "next")
    assert folder.verify(7) == ""


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """Not an endless loop."""

    class Nothing(Calls):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(StorageError, match="a write accepted no bytes"):
        write(Folder(str(tmp_path), calls=Nothing()), rank().segment())


def part_of(folder: Folder, order: PersistParts) -> PartWritten:
    part = PartOf(key=0, slot=0, sequence=1, rank=0, shared=True)
    segment = state(order.step).segment(order.step)
    return parts.write_part(segment, part, order, folder, image_problem="")


def test_nothing_older_replaces_what_another_job_has_written_since(folder: Folder) -> None:
    """Two jobs with one folder, one after the other or both with the same name."""

    def write_one(step: int, term: int, **about: Any) -> None:
        name = dataclasses.replace(NAMED, term=term)
        order = ordered(step=step, attempt=f"t{term}", round=name, **about)
        parts.commit(folder, order, [part_of(folder, order)])

    write_one(2, term=1, base=0)
    write_one(4, term=2, base=2)
    write_one(6, term=2, base=2)
    for step in (4, 5, 6):
        with pytest.raises(
            parts.PersistError, match=r"another job has written step 6 in .* 2: stop"
        ):
            write_one(step, term=1, base=2)
    assert folder.committed() == [2, 4, 6]
    assert folder.manifest(4).round.term == 2  # type: ignore[union-attr]
    assert not folder.take_remarks()
    write_one(7, term=1, base=2)
    write_one(6, term=3, base=7)  # it has gone on from there and is saved again
    with pytest.raises(parts.PersistError, match="step 7"):
        write_one(6, term=3, base=5)
    write_one(5, term=3)  # a script that never restores is told, as before
    assert "has checkpoints of later steps, up to step 7" in folder.take_remarks()[-1]


def test_a_step_that_was_asked_for_leaves_what_another_job_has_written(folder: Folder) -> None:
    saved(folder, 4, 8, 12)
    order = ordered(step=8, round=dataclasses.replace(NAMED, term=9), base=4, rewound_from=5)
    parts.commit(folder, order, [part_of(folder, order)])
    assert folder.newest() == 8
