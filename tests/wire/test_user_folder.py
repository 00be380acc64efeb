"""The user's folder: what a master that was killed leaves there, and one that ended does not; and
folders of records, private, held by those who live, on a disk of this host."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elasticrun.host import user_folder
from elasticrun.host.system.processes import ProcessId
from elasticrun.host.user_folder import (
    DEAD_FILE_LIFE,
    PREFIX,
    Published,
    Unusable,
    began_before,
    lock_folder,
    make_launch_folder,
    prepare_folder,
    publish,
    published,
    sweep_launch_folders,
    was_killed,
)


@pytest.fixture
def dead() -> Published:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made = Published("job", "127.0.0.1", 29400, "", ProcessId.of(process.pid))
        process.kill()
    return made


def test_one_that_lives_or_ended_well_was_not_killed(tmp_path: Path) -> None:
    assert not was_killed(tmp_path, "job", 29400)
    me = Published("job", "127.0.0.1", 29400, "", ProcessId.own())
    path = publish(tmp_path, me)
    assert not was_killed(tmp_path, "job", 29400)
    path.unlink()
    assert not was_killed(tmp_path, "job", 29400)


def test_one_that_left_its_file_was_killed(tmp_path: Path, dead: Published) -> None:
    publish(tmp_path, dead)
    assert was_killed(tmp_path, "job", 29400)
    assert was_killed(tmp_path, "job", 29400)  # to look removes nothing
    assert not was_killed(tmp_path, "another", 29400)
    assert not was_killed(tmp_path, "job", 29401)
    (tmp_path / "master-1-2.json").write_text("half a fi")
    assert was_killed(tmp_path, "job", 29400)


def test_who_lists_the_masters_hides_no_kill_from_a_slow_agent(
    tmp_path: Path, dead: Published
) -> None:
    """`elasticrun status` in the second after the kill would keep every agent from following."""
    publish(tmp_path, dataclasses.replace(dead, began=5.0))
    (tmp_path / "master-1-2.json").write_text("half a fi")
    assert published(tmp_path) == []
    assert published(tmp_path) == []
    assert was_killed(tmp_path, "job", 29400)
    assert began_before(tmp_path, "job", 29400) == 5.0
    for path in tmp_path.iterdir():
        long_ago = path.stat().st_mtime - 2 * DEAD_FILE_LIFE
        os.utime(path, (long_ago, long_ago))
    assert published(tmp_path) == []
    assert not was_killed(tmp_path, "job", 29400)
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_followed_is_forgotten(tmp_path: Path, dead: Published) -> None:
    for pid in (2**22 - 1, 2**22 - 2, dead.pid):  # two of them were listed as dead
        other = dataclasses.replace(dead.process, pid=pid)
        publish(tmp_path, dataclasses.replace(dead, process=other))
        published(tmp_path)
    other = dataclasses.replace(dead.process, pid=2**22 - 3)
    publish(tmp_path, dataclasses.replace(dead, job_id="another", process=other))
    me = dataclasses.replace(dead, process=ProcessId.own())
    publish(tmp_path, me)
    assert published(tmp_path) == [me]
    assert not was_killed(tmp_path, "job", 29400)
    assert was_killed(tmp_path, "another", 29400)
    assert len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------- where a record may lie


NFS = 0x6969


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A user's places, all below this test's folder."""
    for name in ("run", "scratch", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(user_folder, "SHARED_MEMORY", str(tmp_path / "shm"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


def _remote(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """Have these folders (and what is below) be on NFS."""
    monkeypatch.setattr(
        user_folder,
        "_file_system_type",
        lambda path: NFS if any(part in folders for part in path.parts) else 0xEF53,
    )


def test_a_launch_has_a_private_folder_until_it_is_removed(environ: dict[str, str]) -> None:
    first, second = make_launch_folder(environ), make_launch_folder(environ)
    assert first.path != second.path
    assert first.path.parent == Path(environ["XDG_RUNTIME_DIR"]) / "elasticrun"
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "trace").write_text("x")
    first.remove()
    assert not first.path.exists()
    assert second.path.exists()
    second.remove()


def test_a_sweep_removes_what_nobody_holds(environ: dict[str, str]) -> None:
    held, left, shared = (
        make_launch_folder(environ),
        make_launch_folder(environ),
        make_launch_folder(environ),
    )
    other = lock_folder(shared.path)
    left.release()
    shared.release()
    assert sweep_launch_folders(environ) == 1
    assert (held.path.exists(), left.path.exists(), shared.path.exists()) == (True, False, True)
    os.close(other)
    assert sweep_launch_folders(environ) == 1
    held.remove()


HOLDER = """
import os, sys
from elasticrun.host.user_folder import make_launch_folder
print(make_launch_folder(dict(os.environ)).path, flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_holds_nothing(environ: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        path = Path(owner.stdout.readline().strip())
        assert sweep_launch_folders(environ) == 0
        assert path.exists()
        owner.kill()
    assert sweep_launch_folders(environ) == 1
    assert not path.exists()


def test_a_sweep_touches_nothing_else(environ: dict[str, str], tmp_path: Path) -> None:
    shared = tmp_path / "scratch"
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("x")
    (shared / f"{PREFIX}link").symlink_to(target)
    (shared / f"{PREFIX}file").write_text("x")
    (shared / "another").mkdir()
    assert sweep_launch_folders(environ) == 0
    assert (target / "precious").exists()
    assert len(list(shared.iterdir())) == 3


def test_a_network_file_system_is_passed_over(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _remote(monkeypatch, "run")
    fallback = make_launch_folder(environ)
    assert fallback.path.parent == tmp_path / "scratch"
    assert fallback.path.stat().st_mode & 0o777 == 0o700
    fallback.remove()
    _remote(monkeypatch, "run", "scratch")
    last = make_launch_folder(environ)
    assert last.path.parent == tmp_path / "shm"
    last.remove()
    _remote(monkeypatch, "run", "scratch", "shm")
    with pytest.raises(Unusable, match=r"network file system \(NFS\)"):
        make_launch_folder(environ)


def test_a_user_without_a_home_has_a_record_too(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    made = make_launch_folder({})
    assert made.path.parent == tmp_path / "scratch"
    made.remove()


def test_a_named_folder_is_made_or_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match="cannot be used: "):
        prepare_folder(tmp_path / "file")
    with pytest.raises(Unusable, match="cannot be used: "):
        prepare_folder(tmp_path / "file" / "below")
    with pytest.raises(Unusable, match="/proc cannot be written to: "):  # not even by root
        prepare_folder(Path("/proc"))
    assert list((tmp_path / "a" / "b").iterdir()) == [], "what was tried is gone"
    _remote(monkeypatch, "a")
    with pytest.raises(Unusable, match=r"network file system .* name a folder on a disk of this"):
        prepare_folder(tmp_path / "a" / "b")


def test_file_systems_are_told_apart(tmp_path: Path) -> None:
    """What this kernel says of its own ones: no network."""
    assert user_folder.network_file_system(tmp_path) == ""
    assert user_folder._file_system_type(Path("/proc")) == 0x9FA0  # PROC_SUPER_MAGIC
    with pytest.raises(FileNotFoundError):
        user_folder.network_file_system(tmp_path / "missing")


def test_one_holder_alone(tmp_path: Path) -> None:
    alone = lock_folder(tmp_path, alone=True)
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path, alone=True)
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    os.close(alone)
    os.close(lock_folder(tmp_path))
    shutil.rmtree(tmp_path)
