"""A folder of checkpoints by path and by URL: what counts, what is spoiled, what is removed."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash

from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.folder import REMOVED, Folder
from elasticrun.snapshots.storage.manifest import FileEntry, Manifest
from elasticrun.snapshots.storage.retention import clear_earlier, sweep
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.wire.types import RoundName
from tests.snapshots.storage import stand_ins

BLOCK = 4096
DATA = os.urandom(3 * BLOCK + 100)
TENSORS = 2 * BLOCK + 50


@pytest.fixture(params=["path", "file", "memory"])
def folder(request, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "memory":
        url = "memory://" + str(tmp_path)
        yield Folder(url)
        fsspec.filesystem("memory").store.clear()
        return
    yield Folder(("file://" if request.param == "file" else "") + str(tmp_path / "run"))


def entry(rank: int) -> FileEntry:
    made = FileEntry(f"__{rank}_1.1.a.distcp", rank, True, 1, len(DATA), TENSORS, BLOCK, ())
    hashes = tuple(xxhash.xxh3_64_intdigest(DATA[a:b]) for a, b in made.spans())
    return FileEntry(made.name, rank, True, 1, len(DATA), TENSORS, BLOCK, hashes)


def save(folder: Folder, step: int, *, ranks: int = 1, marker: bytes = b"marker") -> None:
    folder.make_folder(step)
    for rank in range(ranks):
        sink = folder.create(step, entry(rank).name, len(DATA))
        sink.write(memoryview(DATA))
        sink.close()
    made = Manifest(
        *(step, RoundName(1, 1, "aa"), ranks, "a", "periodic", "2.13.0"),
        *(len(marker), xxhash.xxh3_64_intdigest(marker), tuple(map(entry, range(ranks)))),
    )
    folder.put(step, manifests.NAME, manifests.encode(made))
    if marker:
        folder.put(step, manifests.MARKER, marker)


def flip(folder: Folder, step: int, name: str, at: int) -> None:
    """One byte of a file."""
    with fsspec.open(f"{folder.path(step)}/{name}", "rb") as file:
        data = bytearray(file.read())
    data[at] ^= 0x40
    with fsspec.open(f"{folder.path(step)}/{name}", "wb") as file:
        file.write(bytes(data))


def test_what_has_a_marker_counts(folder: Folder) -> None:
    assert folder.committed() == []
    assert folder.manifest(5) is None
    for step in (1_000_000_000_000, 30, 5):
        save(folder, step)
    save(folder, 40, marker=b"")
    assert folder.committed() == [5, 30, 1_000_000_000_000]
    assert "was never committed" in folder.verify(40)
    found = folder.manifest(30)
    assert found.files == (entry(0),)


def test_what_was_condemned_no_longer_counts(folder: Folder) -> None:
    save(folder, 5)
    save(folder, 6)
    folder.condemn(6, "a byte of it was changed")
    folder.condemn(6, "another reason")
    assert (folder.committed(), folder.condemned()) == ([5], [6])
    assert "found to be spoiled before" in folder.verify(6)
    folder.clear_condemned(6)
    assert folder.committed() == [5, 6]


def test_the_newest_above_and_below(folder: Folder) -> None:
    for step in (5, 6, 7):
        save(folder, step)
    folder.condemn(7, "a byte of it was changed")
    found = [folder.newest(below, above) for below, above in ((-1, 5), (-1, 6), (-1, 7), (6, -1))]
    assert found == [6, -1, -1, 5]


def test_it_is_removed_as_a_whole(folder: Folder) -> None:
    save(folder, 5)
    save(folder, 6)
    folder.remove(5)
    folder.remove(5)
    assert folder.committed() == [6]
    assert folder.files(5) == {}


@pytest.mark.parametrize("most", range(6))
def test_a_removal_that_was_cut_off_is_known_and_finished(tmp_path: Path, most: int) -> None:
    folder = Folder(str(tmp_path))
    save(folder, 5, ranks=2)
    save(folder, 6)
    count = len(folder.files(5))
    with suppress(StorageError):
        Folder(folder.url, calls=stand_ins.CutOff(most)).remove(5)
    (one,) = [one for one in folder.survey() if one.step == 5] or [None]
    if most == 0:
        assert one is not None
        assert one.committed, "its marker goes first"
    elif most > count:
        assert one is None
    else:
        assert one is not None
        assert one.removed
        assert folder.verify(5).endswith("is being removed, or its removal was cut off")
        assert sweep(folder, keep_last=9, keep_every=0).removed == (5,)
        assert folder.files(5) == {}


def test_the_same_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    folder = Folder("memory://" + str(tmp_path))
    save(folder, 3)
    remove = type(store).rm

    def cut_off(self: Any, path: Any, recursive: bool = False, **how: Any) -> None:
        if recursive:
            raise OSError("the process was killed")
        remove(self, path, **how)

    monkeypatch.setattr(type(store), "rm", cut_off)
    with pytest.raises(StorageError):
        folder.remove(3)
    assert list(folder.files(3)) == [REMOVED]
    assert [one.removed for one in folder.survey()] == [True]
    monkeypatch.undo()
    folder.remove(3)
    assert folder.survey() == []
    store.store.clear()


def test_what_is_written_anew_is_not_being_removed(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    save(folder, 5)
    with pytest.raises(StorageError):
        Folder(folder.url, calls=stand_ins.CutOff(1)).remove(5)
    clear_earlier(folder, 5, [0], "later")
    assert not [one for one in folder.survey() if one.removed]
    save(folder, 5)
    assert folder.committed() == [5]


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("__1_1.1.a.distcp", 0, "__1_1.1.a.distcp was changed between bytes 0 and 4096"),
        ("__1_1.1.a.distcp", TENSORS - 1, f"between bytes {2 * BLOCK} and {TENSORS}"),
        ("__0_1.1.a.distcp", len(DATA) - 1, f"between bytes {TENSORS} and {len(DATA)}"),
        (manifests.NAME, 200, "the manifest is not what was written"),
        (manifests.MARKER, 0, ".metadata is not what was written"),
    ],
)
def test_a_changed_byte_is_found(folder: Folder, name: str, at: int, said: str) -> None:
    save(folder, 5, ranks=2)
    assert folder.verify(5) == ""
    flip(folder, 5, name, at)
    assert said in folder.verify(5)
    flip(folder, 5, name, at)
    assert folder.verify(5) == ""


def test_checking_is_shared_among_ranks(folder: Folder) -> None:
    save(folder, 5, ranks=3)
    flip(folder, 5, "__1_1.1.a.distcp", 9)
    spoiled = ["spoiled" in folder.verify(5, part, 3) for part in range(4)]
    assert spoiled == [False, True, False, False]


def test_a_missing_or_a_cut_file_is_found_by_everyone(folder: Folder) -> None:
    save(folder, 5, ranks=3)
    folder.unlink(5, ["__2_1.1.a.distcp"])
    assert "__2_1.1.a.distcp is missing" in folder.verify(5, 0, 3)
    folder.put(5, "__2_1.1.a.distcp", DATA[:-1])
    assert f"has {len(DATA) - 1} bytes, not {len(DATA)}" in folder.verify(5, 0, 3)


def test_sizes_alone_can_be_compared(folder: Folder) -> None:
    save(folder, 5, ranks=2)
    flip(folder, 5, "__1_1.1.a.distcp", 9)
    assert folder.verify(5, 0, 0) == ""
    folder.put(5, "__1_1.1.a.distcp", DATA[:-1])
    assert "not 12388" in folder.verify(5, 0, 0)
    least = {"__0_1.1.a.distcp": len(DATA), "__1_1.1.a.distcp": len(DATA) - 1}
    assert folder.short(5, least) == ""
    assert "and 12388 were written" in folder.short(5, {**least, "__1_1.1.a.distcp": len(DATA)})
    assert folder.short(5, {"__2_0.distcp": 0}) == "__2_0.distcp is missing"


def test_a_cut_marker_is_found(folder: Folder) -> None:
    save(folder, 5)
    for wrong in (b"", b"marke", b"marker and more"):
        folder.put(5, ".metadata", wrong)
        assert ".metadata is not what was written" in folder.verify(5)


def test_what_torch_has_written_is_not_judged(folder: Folder) -> None:
    folder.make_folder(5)
    folder.put(5, ".metadata", b"torch's own")
    assert (folder.committed(), folder.verify(5), folder.manifest(5)) == ([5], "", None)


def test_a_manifest_of_another_step_is_none(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    save(folder, 5)
    os.rename(folder.path(5), folder.path(6))
    assert "the manifest belongs to step 5" in folder.verify(6)


def test_only_what_we_began_long_ago_is_a_leftover(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for step in (1, 2, 3, 4):
        save(folder, step, marker=b"")
    assert folder.uncommitted(3600) == []
    save(folder, 9)
    now = max(f.stat().st_mtime for f in Path(folder.path(9)).iterdir())
    for step, age in ((1, 7200), (2, 7200), (3, 7200), (4, 60)):
        for file in Path(folder.path(step)).iterdir():
            os.utime(file, (now - age, now - age))
    (Path(folder.path(2)) / "notes.txt").write_text("the user's")
    os.utime(Path(folder.path(3)) / entry(0).name, (now, now))  # one rank still writes
    assert folder.uncommitted(3600) == [1]
    folder.remove(9)  # what is being written tells the storage's time as well
    assert folder.uncommitted(3600) == [1]


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    save(folder, 5)
    for name in ("step-5", "step-0000000005", "step-x", "latest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_text("")
    os.symlink(folder.path(5), folder.path(7))
    assert folder.committed() == [5]


@pytest.mark.parametrize("url", ["runs/a", "", "nowhere-such://bucket/run"])
def test_where_nothing_can_lie_is_said(url: str) -> None:
    with pytest.raises(StorageError, match=r"neither an absolute path nor a URL|cannot be reached"):
        Folder(url)


@pytest.mark.parametrize(("number", "verdict"), [(errno.EIO, True), (errno.ESTALE, False)])
def test_storage_that_is_away_is_no_verdict(
    tmp_path: Path, monkeypatch, number: int, verdict: bool
) -> None:
    class Sick(io.FileIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(number, os.strerror(number))

    folder = Folder(str(tmp_path))
    save(folder, 5)
    monkeypatch.setattr("elasticrun.snapshots.storage.places.io.FileIO", Sick)
    if verdict:
        assert f"is spoiled: {entry(0).name} cannot be read whole" in folder.verify(5)
    else:
        with pytest.raises(StorageError, match="cannot be read: Stale file handle"):
            folder.verify(5)

    def late(*_: object) -> int:
        raise TimeoutError

    monkeypatch.setattr(Sick, "readinto", late)
    with pytest.raises(StorageError, match="cannot be read: TimeoutError"):
        folder.verify(5)
