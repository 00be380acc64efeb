"""Folders on file systems that are small, full, without inodes, or read-only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticrun.host.doctor import disk
from elasticrun.host.doctor.disk import JobFolder
from elasticrun.host.doctor.verdict import GIB, MIB
from elasticrun.wire.types import Level
from tests.host.doctor.child import found

LOOK = """
from elasticrun.host.doctor.disk import JobFolder, examine
found = examine(JobFolder("log", {place!r}, {little}, {none}, needed={needed}))
"""

FILL = 'dd if=/dev/zero of="{place}/full" bs=4k 2>/dev/null || true'


@pytest.mark.parametrize(
    ("options", "more", "needed", "state", "said"),
    [
        ("size=200m", "", True, Level.OK, "of 200 MiB are free in"),
        ("size=90m", "", True, Level.WARNING, "90 MiB of 90 MiB are free"),
        ("size=40m", "", True, Level.FAILED, "40 MiB of 40 MiB are free"),
        ("size=200m,nr_inodes=500", "", True, Level.WARNING, "inodes for 49"),
        ("size=200m,nr_inodes=50", "", True, Level.FAILED, "inodes for 4"),
        ("size=2m", FILL, True, Level.FAILED, "it is full"),
        ("size=200m,ro", "", True, Level.FAILED, "read-only file system"),
        ("size=200m,ro", "", False, Level.WARNING, "read-only file system"),
    ],
    ids=["well", "little", "none", "few-inodes", "no-inodes", "full", "read-only", "not-needed"],
)
def test_a_file_system_of_its_own(
    tmp_path: Path, options: str, more: str, needed: bool, state: Level, said: str
) -> None:
    place = str(tmp_path)
    setup = f"mount -t tmpfs -o {options} tmpfs '{place}'\n" + more.format(place=place)
    code = LOOK.format(place=place, little=100 * MIB, none=50 * MIB, needed=needed)
    (only,) = found(code, setup=setup, apart=("--mount",))
    assert only.state is state, only
    assert said in only.seen
    assert place in only.seen
    assert bool(only.todo) is (state is not Level.OK)
    assert "--log-dir" in only.todo or state is Level.OK


@pytest.mark.parametrize(
    ("setup", "state", "said"),
    [
        ("touch '{place}/a'", Level.OK, "read-write"),
        ("touch '{place}/a'; mount -o remount,ro '{place}'", Level.OK, "read-only"),
        ("", Level.WARNING, "is empty"),
        ("umount '{place}'; rmdir '{place}'", Level.FAILED, "there is no folder"),
    ],
)
def test_a_folder_of_data(tmp_path: Path, setup: str, state: Level, said: str) -> None:
    place = tmp_path / "data"
    place.mkdir()
    code = f"""
from elasticrun.host.doctor.disk import examine_data
found = examine_data("corpus", {str(place)!r})
"""
    first = f"mount -t tmpfs -o size=1m tmpfs '{place}'\n" + setup.format(place=place)
    (only,) = found(code, setup=first, apart=("--mount",))
    assert (only.check, only.state) == ("data, corpus", state), only
    assert said in only.seen
    assert ("on a local disk" in only.seen) == (state is Level.OK)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    (only,) = disk.examine(JobFolder("log", str(tmp_path), warn_below=0, fail_below=0))
    assert only.state is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_made_later(tmp_path: Path) -> None:
    later = tmp_path / "a" / "b"
    (only,) = disk.examine(JobFolder("log", str(later), warn_below=0, fail_below=0))
    assert only.state is Level.OK
    assert f"{later} (to be created in {tmp_path})" in only.seen
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_nobody_makes(tmp_path: Path) -> None:
    """Python goes elsewhere without a word."""
    gone = str(tmp_path / "gone")
    temporary = disk.folders({"TMPDIR": gone})[0]
    (only,) = disk.examine(temporary)
    assert only.state is Level.WARNING
    assert only.seen == f"there is no folder {gone}"
    assert "TMPDIR" in only.todo


def test_a_folder_below_one_that_cannot_be_looked_into(tmp_path: Path) -> None:
    """Here a name that no file system takes; for a user who is not root, a folder of root's."""
    (only,) = disk.examine(
        JobFolder("log", str(tmp_path / ("x" * 300)), warn_below=0, fail_below=0)
    )
    assert "(to be created in " in only.seen


def test_a_user_without_a_home() -> None:
    """The user's folder is only wanted; a log folder is needed."""
    place = "~no-such-user-here/x"
    (only,) = disk.examine(JobFolder("user's", place, needed=False))
    assert only.state is Level.WARNING
    assert only.seen == f"{place} cannot be found: this user has no home folder"
    (only,) = disk.examine(JobFolder("log", place))
    assert only.state is Level.FAILED


def test_the_folders_of_a_job(tmp_path: Path) -> None:
    place = str(tmp_path)
    environ = {"TMPDIR": place, "XDG_RUNTIME_DIR": place}
    by_role = {f.role: f for f in disk.folders(environ, log_dir="/logs", checkpoints="/ckpt")}
    assert [by_role[r].path for r in ("temporary", "log", "checkpoint", "user's")] == [
        place,
        "/logs",
        "/ckpt",
        os.path.join(place, "elasticrun"),
    ]
    assert by_role["checkpoint"].fail_below == GIB
    assert not by_role["user's"].needed
    without = disk.folders({"TMPDIR": place, "XDG_RUNTIME_DIR": "/gone"}, log_dir=os.devnull)
    assert [f.role for f in without] == ["temporary", "user's"]
    assert without[1].path == os.path.join("~", ".cache", "elasticrun")
