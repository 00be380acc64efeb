"""What a saver writes: whole or not at all, whatever happens in between."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticrun.snapshots.saver import parts
from elasticrun.snapshots.saver.part_written import PartError, PartWritten
from elasticrun.snapshots.shm.segment import Segment
from elasticrun.snapshots.storage import retention
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.writing import Calls, StorageError
from elasticrun.wire.snapshots import PartOf
from elasticrun.wire.types import RoundName
from tests.harness import program
from tests.snapshots.dcp.checkpoints import commit, load, ordered, save
from tests.snapshots.dcp.slots import HandMade
from tests.snapshots.storage.stand_ins import Bucket, Poor

SCRIPT = Path(__file__).parent.parent / "dcp" / "scripts" / "dying_saver.py"


def rank(number: int = 0, *, fill: float = 1.0, size: int = 5000) -> HandMade:
    one = HandMade(number).tensor("w", is_=torch.full((size,), fill)).value("lr", is_=fill)
    return one.tensor("rng", is_=torch.arange(9) + number, own=True).value("seen", is_=3, own=True)


def write(
    folder: Folder,
    segment: Segment,
    *,
    step: int = 7,
    sequence: int = 1,
    attempt: str = "a",
    shared: bool = True,
    stop: object = bool,
) -> PartWritten:
    part = PartOf(key=0, slot=0, sequence=sequence, rank=0, shared=shared)
    order = ordered(step=step, attempt=attempt)
    return parts.write_part(segment, part, order, folder, stop=stop, image_problem="")


def loaded(folder: Folder, step: int = 7) -> tuple[float, float]:
    found = load(folder.path(step), {"w": torch.zeros(5000), "lr": 0.0})
    assert bool((found["w"] == found["w"][0]).all())
    return float(found["w"][0]), found["lr"]


def test_hashes_that_the_saver_had_made_are_used(folder: Folder) -> None:
    fresh = write(folder, rank().segment())
    known = write(folder, rank().segment(hashed=True), attempt="b")
    assert known.file.hashes == fresh.file.hashes
    assert known.file == replace(fresh.file, name=known.file.name)
    commit(folder, [known], attempt="b")
    assert folder.verify(7) == ""


def test_a_snapshot_that_was_changed_after_it_was_hashed_is_found(tmp_path: Path) -> None:
    folder, segment = Folder(str(tmp_path)), rank().segment(hashed=True)
    item = segment.layout().tensors[-1]
    segment.payload(0)[item.payload + 5] ^= 1
    commit(folder, [write(folder, segment)])
    assert "was changed between bytes" in folder.verify(7)


def test_a_part_goes_over_the_wire_and_back(folder: Folder) -> None:
    part = write(folder, rank().segment())
    assert PartWritten.decode(part.encode()) == part
    own = write(folder, rank().segment(), attempt="own", shared=False)
    assert PartWritten.decode(own.encode()) == own
    (slow,) = save(folder, [rank()], attempt="slow", image_problem="for this test")
    assert slow.places
    assert PartWritten.decode(slow.encode()) == slow


def test_bytes_that_are_no_part_are_refused(tmp_path: Path) -> None:
    part = write(Folder(str(tmp_path)), rank().segment())
    data = part.encode()
    bad = [b"", b"\0" * 10, data[:-1], data[:50], struct.pack("<I", 2**31) + data[4:]]
    bad.append(replace(part, lengths=(1, 2)).encode())
    bad.append(replace(part, lengths=(part.lengths[0],)).encode())
    bad.append(replace(part, file=replace(part.file, layout=5)).encode())
    bad.append(replace(part, file=replace(part.file, name="../../etc/passwd")).encode())
    bad.append(replace(part, places=((0, part.file.size + 1),)).encode())
    bad.append(replace(part, step=-1).encode())
    bad.append(replace(part, round=RoundName(1, 2, "x" * 100)).encode())
    for wrong in bad:
        with pytest.raises(PartError):
            PartWritten.decode(wrong)


def test_what_the_slot_does_not_hold_is_not_written(tmp_path: Path) -> None:
    folder, segment = Folder(str(tmp_path)), rank().segment()
    for wrong in ({"step": 8}, {"sequence": 2}, {"attempt": "../x"}, {"attempt": ""}):
        with pytest.raises(parts.PersistError):
            write(folder, segment, **wrong)
    segment.withdraw(0)
    with pytest.raises(parts.PersistError, match="does not hold its snapshot of step 7"):
        write(folder, segment)
    assert folder.files(7) == {}


def test_a_snapshot_that_is_taken_back_meanwhile_leaves_no_file(tmp_path: Path) -> None:
    folder, segment = Folder(str(tmp_path)), rank().segment()
    with pytest.raises(parts.PersistError, match="was overwritten during the write"):
        write(folder, segment, stop=lambda: segment.withdraw(0))
    assert folder.files(7) == {}


def test_an_attempt_that_is_given_up_meanwhile_leaves_no_file(folder: Folder) -> None:
    with pytest.raises(parts.PersistError, match="given up"):
        write(folder, rank().segment(), stop=lambda: True)
    assert folder.files(7) == {}


def test_a_table_of_values_that_is_none_is_refused(tmp_path: Path) -> None:
    segment = rank().segment()
    layout = segment.layout()
    table = segment.payload(0)[layout.own_bytes + layout.shared_bytes :]
    table[:8] = struct.pack("=Q", 2**40)
    with pytest.raises(parts.PersistError, match="an invalid table of values"):
        write(Folder(str(tmp_path)), segment)


def test_no_marker_without_all_parts(folder: Folder) -> None:
    part = write(folder, rank().segment())
    with pytest.raises(parts.PersistError, match="does not belong to attempt b"):
        commit(folder, [part], attempt="b")
    with pytest.raises(parts.PersistError, match="two parts"):
        commit(folder, [part, part])
    os.truncate(Path(folder.path(7)) / part.file.name, part.file.size - 1)
    with pytest.raises(parts.PersistError, match="do all nodes see the same storage"):
        commit(folder, [part])
    assert folder.committed() == []


def test_a_part_that_is_removed_during_the_commit_undoes_it(tmp_path: Path) -> None:
    """Another node may give up in the moment in which the marker is written."""

    class GivesUp(Calls):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if target.endswith(".metadata"):
                retention.discard_attempt(folder, 7, "a")
                for name in Path(target).parent.glob("*.distcp"):
                    name.unlink()

    folder = Folder(str(tmp_path), calls=GivesUp())
    part = write(folder, rank().segment())
    with pytest.raises(parts.PersistError, match="was not committed"):
        commit(folder, [part])
    assert folder.committed() == []


def test_giving_up_removes_one_attempt(folder: Folder) -> None:
    write(folder, rank().segment(), attempt="a")
    part = write(folder, rank().segment(), attempt="b.a")
    retention.discard_attempt(folder, 7, "a")
    assert list(folder.files(7)) == [part.file.name]
    commit(folder, [part], attempt="b.a")
    retention.discard_attempt(folder, 7, "b.a")
    assert folder.verify(7) == ""
    retention.discard_attempt(folder, 8, "b.a")
    write(folder, rank().segment(step=9), step=9)
    retention.discard_attempt(folder, 9, "a")
    assert not os.path.exists(folder.path(9))


def test_giving_up_removes_a_manifest_without_a_marker(tmp_path: Path) -> None:
    class Dies(Calls):
        def rename(self, source: str, target: str) -> None:
            if target.endswith(".metadata"):
                raise OSError(errno.EIO, "died")
            super().rename(source, target)

    folder = Folder(str(tmp_path), calls=Dies())
    with pytest.raises(StorageError, match="metadata was not written"):
        save(folder, [rank()])
    assert "elasticrun.json" in folder.files(7)
    retention.discard_attempt(folder, 7, "b")
    assert "elasticrun.json" in folder.files(7)
    retention.discard_attempt(folder, 7, "a")
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_saved_again_replaces_the_older(folder: Folder) -> None:
    save(folder, [rank(fill=1.0)])
    folder.condemn(7, "for this test")
    (Path(folder.path(7)) / ".metadata.0123abcd.tmp").write_text("of one that died")
    (part,) = save(folder, [rank(fill=2.0)], attempt="b")
    assert folder.committed() == [7]
    assert folder.verify(7) == ""
    assert not list(Path(folder.path(7)).glob("*.tmp"))
    assert sorted(folder.files(7)) == sorted([".metadata", part.file.name, "elasticrun.json"])
    assert loaded(folder) == (2.0, 2.0)


def test_what_is_not_kept_is_swept(folder: Folder) -> None:
    for step, reason in ((1, "periodic"), (2, "periodic"), (3, "periodic")):
        save(folder, [rank()], step=step, reason=reason)
    save(folder, [rank()], step=4, reason="breakpoint")
    save(folder, [rank()], step=5, reason="breakpoint")
    folder.condemn(1, "for this test")
    write(folder, rank().segment(step=6), step=6)
    swept = retention.sweep(folder, keep_last=2, keep_every=0, in_use=(2,))
    assert (swept.removed, swept.remarks) == ((1,), ())
    assert folder.committed() == [2, 3, 4, 5]
    assert retention.sweep(folder, keep_last=2, keep_every=0).removed == (2,)
    assert retention.sweep(folder, keep_last=1, keep_every=4).removed == ()
    assert retention.sweep(folder, keep_last=1, keep_every=0).removed == (4,)
    assert folder.committed() == [3, 5]
    assert list(folder.files(6))  # young: somebody may be writing it


def test_what_was_begun_long_ago_is_swept(folder: Folder) -> None:
    part = write(folder, rank().segment())
    os.utime(Path(folder.path(7)) / part.file.name, (1000, 1000))
    save(folder, [rank()], step=8)
    assert retention.sweep(folder, keep_last=0, keep_every=0).removed == (7,)


def test_by_url(tmp_path: Path) -> None:
    import fsspec

    folder = Folder(f"memory://{tmp_path}")
    try:
        for step in (7, 8):
            save(folder, [rank(fill=step)], step=step)
        assert folder.verify(8) == ""
        assert loaded(folder, 8) == (8.0, 8.0)
        save(folder, [rank(fill=3)], step=8, attempt="b", image_problem="for this test")
        assert loaded(folder, 8) == (3.0, 3.0)
        assert retention.sweep(folder, keep_last=1, keep_every=0).removed == (7,)
        assert (folder.committed(), folder.files(7)) == ([8], {})
        with pytest.raises(parts.PersistError):
            write(folder, rank().segment(step=9), step=9, stop=lambda: True)
        assert folder.files(9) == {}
    finally:
        fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("image_problem", ["", "for this test"], ids=["image", "write_data"])
@pytest.mark.parametrize("storage", ["poor", "bucket"])
def test_on_storage_that_refuses(tmp_path: Path, storage: str, image_problem: str) -> None:
    root, hidden = tmp_path / "run", tmp_path / "hidden"
    hidden.mkdir()
    folder = Folder(str(root), calls=Poor() if storage == "poor" else Bucket(root, hidden))
    for step in (7, 8):
        save(folder, [rank(fill=step)], step=step, image_problem=image_problem)
    save(folder, [rank(fill=9)], step=8, attempt="b", image_problem=image_problem)
    assert folder.verify(8) == ""
    assert loaded(folder, 8) == (9.0, 9.0)
    assert retention.sweep(folder, keep_last=1, keep_every=0).removed == (7,)
    assert os.listdir(root) == ["step-000000008"]
    assert os.listdir(hidden) == []


@pytest.mark.parametrize("image_problem", ["", "for this test"], ids=["image", "write_data"])
@pytest.mark.parametrize("block", [4096, 8192, 2**20])
def test_every_block_is_hashed(folder: Folder, monkeypatch, block: int, image_problem: str) -> None:
    monkeypatch.setattr(parts, "block_of", lambda _bytes: block)
    (part,) = save(folder, [rank(size=9000)], image_problem=image_problem)
    assert folder.verify(7) == ""
    path = Path(folder.path(7)) / part.file.name
    for begin, end in part.file.spans():
        if begin < end:
            data = bytearray(path.read_bytes())
            data[end - 1] ^= 1
            path.write_bytes(data)
            assert f"between bytes {begin} and {end}" in folder.verify(7)
            data[end - 1] ^= 1
            path.write_bytes(data)


@pytest.mark.slow
def test_a_saver_killed_at_any_call_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """A forked saver dies at its first call to the system, the next at its second, and so on."""
    done = program(str(SCRIPT), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    deaths, old, new = map(int, done.stdout.split())
    assert deaths == old + new > 20
    assert old > 10
    assert new > 1
