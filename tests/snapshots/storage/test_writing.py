"""Files get there whole, whatever the file system refuses; or there is a sentence and no file."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.writing import PIECE, Calls, Sink, StorageError, is_gcsfuse
from tests import needs
from tests.snapshots.storage.stand_ins import Bucket, LateDirect, Poor, refusal

FULL_DISK = Path(__file__).parent / "scripts" / "full_disk.py"
SIZES = (0, 1, 4096, 4097, 3 * 4096 + 7, PIECE + 4096 + 1)


def plural(size: int) -> memoryview:
    """Bytes in memory that begins at a page."""
    memory = mmap.mmap(-1, max(size, 1))
    memory[:size] = (os.urandom(4096) * (size // 4096 + 1))[:size]
    return memoryview(memory)[:size]


def begun(folder: Folder, size: int) -> Sink:
    folder.make_folder(7)
    return folder.create(7, "data", size)


def bucket(tmp_path: Path) -> tuple[Folder, Bucket]:
    root, hidden = tmp_path / "bucket", tmp_path / "hidden"
    hidden.mkdir()
    calls = Bucket(root, hidden)
    return Folder(str(root), calls=calls), calls


def written(folder: Folder, data: memoryview, name: str = "data") -> Path:
    folder.make_folder(7)
    sink = folder.create(7, name, len(data))
    sink.write(data)
    sink.close()
    folder.put(7, ".metadata", b"first")
    folder.put(7, ".metadata", b"marker")
    return Path(folder.path(7))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("calls", [Calls, Poor, LateDirect])
def test_a_file_is_what_was_written(tmp_path: Path, calls: type[Calls], size: int) -> None:
    data = plural(size)
    path = written(Folder(str(tmp_path / "a" / "b"), calls=calls()), data)
    assert (path / "data").read_bytes() == bytes(data)
    assert (path / ".metadata").read_bytes() == b"marker"
    assert sorted(os.listdir(path)) == [".metadata", "data"]


def test_in_pieces_that_are_no_pages(tmp_path: Path) -> None:
    folder, data = Folder(str(tmp_path)), plural(5 * 4096)
    sink = begun(folder, len(data))
    for at, end in ((0, 4096), (4096, 5000), (5000, 5001), (5001, len(data))):
        sink.write(data[at:end])
    sink.close()
    assert (Path(folder.path(7)) / "data").read_bytes() == bytes(data)


def test_a_folder_that_another_node_found_empty_is_made_again(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.make_folder(7)
    Folder(str(tmp_path)).unlink(7, ["nothing"])
    assert os.listdir(tmp_path) == []
    folder.create(7, "data", 5).close()
    assert list(folder.files(7)) == ["data"]


def test_one_sentence_for_each_refusal(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), calls=Poor())
    written(folder, plural(4096))
    written(folder, plural(4096), "again")
    said = folder.take_remarks()
    assert [word for line in said for word in ("O_DIRECT", "fallocate", "rename") if word in line]
    assert len(said) == 3
    assert folder.take_remarks() == []


def test_a_bucket_is_written_as_a_bucket(tmp_path: Path) -> None:
    (folder, _), data = bucket(tmp_path), plural(10_000)
    sink = begun(folder, len(data))
    sink.write(data[:9000])
    assert os.listdir(folder.path(7)) == []
    sink.write(data[9000:])
    sink.close()
    assert (Path(folder.path(7)) / "data").read_bytes() == bytes(data)
    folder.put(7, ".metadata", b"marker")
    assert folder.committed() == [7]
    folder.condemn(7, "once")
    folder.condemn(7, "twice")
    assert (Path(folder.path(7)) / "elasticrun.bad").read_text() == "once\n"


def test_where_close_fails_there_is_no_file(tmp_path: Path) -> None:
    folder, calls = bucket(tmp_path)
    sink = begun(folder, 5)
    sink.write(memoryview(b"12345"))
    calls.closes_fail = True
    with pytest.raises(StorageError, match=r"data was not written"):
        sink.close()
    with pytest.raises(StorageError, match=r"metadata was not written"):
        folder.put(7, ".metadata", b"marker")
    assert folder.files(7) == {}


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Calls):
        def fsync(self, fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/data"):
                raise refusal(errno.EDQUOT)

    folder = Folder(str(tmp_path), calls=Failing())
    sink = begun(folder, 5)
    sink.write(memoryview(b"12345"))
    with pytest.raises(StorageError, match="the quota is used up"):
        sink.close()
    assert folder.files(7) == {}


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="was not made"):
        Folder(str(tmp_path / "file" / "runs")).make_folder(7)


@pytest.mark.parametrize(
    ("path", "bucket"),
    [("/mnt/a b/run", True), ("/mnt/a b", True), ("/mnt/a bc", False), ("/mnt/a b/disk", False)],
)
def test_gcsfuse_is_known_by_the_deepest_mount(path: str, bucket: bool) -> None:
    lines = [
        "/dev/x / ext4 rw 0 0",
        "b /mnt/a\\040b fuse.gcsfuse rw 0 0",
        "/dev/y /mnt/a\\040b/disk xfs rw 0 0",
    ]
    table = "\n".join(lines)
    assert is_gcsfuse(path, table) is bucket


def test_a_full_disk_is_said_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    """A real one: a small tmpfs in a namespace of its own."""
    command = [*needs.tmpfs(tmp_path, "8m"), sys.executable, str(FULL_DISK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    first, early, late, left = done.stdout.splitlines()
    assert first == "written"
    for line in (early, late):
        assert "data was not written: the disk is full (0.0" in line
        assert line.endswith("free some space, or choose another folder")
    assert left == "{} {} [1]"
