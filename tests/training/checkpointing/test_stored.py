"""Restores from storage in one process: what is spoiled, what is only out of reach, and URLs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem

from elasticrun.snapshots.storage import manifest as manifests
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.manifest import FileEntry, Manifest
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing import restore_choice
from elasticrun.training.checkpointing.restore_choice import CorruptError, UnreadableError
from elasticrun.wire.snapshots import Remark
from elasticrun.wire.types import RoundName
from tests import hanging
from tests.training.checkpointing.played import PlayedAgent

pytestmark = pytest.mark.filterwarnings("ignore")


def save(folder: Path, *steps: int, ours: bool = False, **more: Any) -> None:
    """Checkpoints by torch alone; with `ours` they have a manifest, as a saver's have."""
    state = {"x": torch.zeros(40_000)}
    ckpt = Checkpointer(folder, state=state, persist_every_steps=1, **more)
    for step in steps:
        state["x"].fill_(float(step))
        ckpt.step(step)
        if ours:
            add_manifest(Folder(str(folder)), step)
    ckpt.close()


def file_of(folder: Path, step: int) -> Path:
    """The one file of this step's tensors."""
    (file,) = Path(Folder(str(folder)).path(step)).glob("*.distcp")
    return file


def add_manifest(folder: Folder, step: int) -> None:
    entries = []
    for number, path in enumerate(sorted(Path(folder.path(step)).glob("*.distcp"))):
        data = path.read_bytes()
        hashes = (xxhash.xxh3_64_intdigest(data), xxhash.xxh3_64_intdigest(b""))
        size = len(data)
        entries.append(FileEntry(path.name, number, True, 1, size, size, size, hashes))
    marker = (Path(folder.path(step)) / manifests.MARKER).read_bytes()
    made = Manifest(
        *(step, RoundName(1, 1, "aa"), 1, "a", "periodic", "2.13.0"),
        *(len(marker), xxhash.xxh3_64_intdigest(marker), tuple(entries)),
    )
    folder.put(step, manifests.NAME, manifests.encode(made))


def restored(folder: Path | str, **more: Any) -> int:
    """The step; its bits are compared."""
    state = {"x": torch.zeros(40_000)}
    ckpt = Checkpointer(folder, state=state, persist_every_steps=1, **more)
    step = ckpt.restore()
    assert torch.all(state["x"] == step)
    ckpt.close()
    return step


@pytest.fixture
def place() -> Iterator[Any]:
    """A class of the script."""
    module = types.ModuleType("script_of_a_test")
    sys.modules[module.__name__] = module
    exec("class Place:\n    pass\n", module.__dict__)
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_lost_class_condemns_none(tmp_path: Path, place: Any, ours: bool, verify: bool) -> None:
    save(tmp_path, 1, 2, ours=ours, place={"it": place.Place()}, weights_only=False)
    kept, place.Place = place.Place, None
    del place.Place
    said = "is intact" if ours and verify else "verify=True does that" if ours else "its full size"
    for _ in range(2):
        with pytest.raises(UnreadableError, match=f"step 2 in .*{said}.*Can't get attribute"):
            restored(tmp_path, place={"it": None}, verify=verify, weights_only=False)
    assert Folder(str(tmp_path)).condemned() == []
    place.Place = kept
    assert restored(tmp_path, place={"it": None}, verify=verify, weights_only=False) == 2


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_a_short_file_is_spoiled_and_the_one_before_is_taken(
    tmp_path: Path, ours: bool, verify: bool
) -> None:
    save(tmp_path, 1, 2, 3, ours=ours)
    os.truncate(file_of(tmp_path, 3), 1000)
    file_of(tmp_path, 2).unlink()
    assert restored(tmp_path, verify=verify) == 1
    assert Folder(str(tmp_path)).condemned() == [2, 3]


def test_a_cut_marker_of_torch_alone_is_spoiled(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for step, size in ((2, 0), (3, 200)):
        os.truncate(Path(Folder(str(tmp_path)).path(step)) / manifests.MARKER, size)
    assert restored(tmp_path) == 1


def test_storage_full_of_spoiled_checkpoints_is_not_read_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(restore_choice, "MAX_CORRUPT", 2)
    save(tmp_path, 1, 2, 3, ours=True)
    for file in tmp_path.glob("*/*.distcp"):
        os.truncate(file, 10)
    with pytest.raises(CorruptError, match=r"2 checkpoints in .* in a row are corrupt"):
        restored(tmp_path)
    assert Folder(str(tmp_path)).condemned() == [2, 3]


def test_what_cannot_be_condemned_is_passed_over_all_the_same(tmp_path: Path, monkeypatch) -> None:
    """Storage that can only be read."""

    def refuse(*_: Any) -> None:
        raise StorageError("it is read-only")

    save(tmp_path, 1, 2, ours=True)
    os.truncate(file_of(tmp_path, 2), 10)
    monkeypatch.setattr(Folder, "condemn", refuse)
    with pytest.warns(UserWarning, match=r"could not be marked as corrupt \(it is read-only\)"):
        assert restored(tmp_path) == 1


class Elsewhere(LocalFileSystem):
    """A storage behind a library of fsspec, and what that raises."""

    protocol = "elsewhere"
    raises: BaseException | None = None

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if Elsewhere.raises and mode == "rb" and path.endswith(".distcp"):
            raise Elsewhere.raises
        return super()._open(path, mode, **more)


@pytest.fixture
def elsewhere() -> Iterator[type[Elsewhere]]:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    yield Elsewhere
    Elsewhere.raises = None


@pytest.mark.parametrize("ours", [True, False])
def test_a_restore_by_url(tmp_path: Path, elsewhere: type[Elsewhere], ours: bool) -> None:
    save(tmp_path, 1, 2, ours=ours)
    assert restored(f"elsewhere://{tmp_path}") == 2
    os.truncate(file_of(tmp_path, 2), 10)
    assert restored(f"elsewhere://{tmp_path}") == 1
    assert Folder(str(tmp_path)).condemned() == [2]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "raised",
    [
        TimeoutError(),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        RuntimeError("503 Service Unavailable"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_library_that_does_not_do_its_work_condemns_nothing(
    tmp_path: Path, elsewhere: type[Elsewhere], ours: bool, raised: BaseException
) -> None:
    save(tmp_path, 1, 2, ours=ours)
    elsewhere.raises = raised
    said = "(step-000000002|step 2 in).*(Timeout|reset|503)"
    with pytest.raises((StorageError, UnreadableError), match=said):
        restored(f"elsewhere://{tmp_path}")
    elsewhere.raises = None
    assert Folder(str(tmp_path)).condemned() == []
    assert restored(f"elsewhere://{tmp_path}") == 2


def in_memory(agent: PlayedAgent, folder: Path, step: int) -> None:
    ckpt = Checkpointer(
        folder, state={"x": torch.full((40_000,), float(step))}, persist_every_seconds=None
    )
    ckpt.save_now(step)
    agent.next_life(step, 1)
    ckpt.close()


@pytest.mark.parametrize("how", ["it raises", "it hangs"])
def test_memory_does_not_wait_for_a_storage_that_is_away(
    agent: PlayedAgent, tmp_path: Path, monkeypatch, how: str
) -> None:
    (tmp_path / "step-000000009").mkdir()
    in_memory(agent, tmp_path, 3)
    back, scan = threading.Event(), os.scandir

    def away(path: Any = ".") -> Any:
        if str(path).startswith(str(tmp_path)):
            if how == "it raises":
                raise OSError(errno.ESTALE, "Stale file handle")
            assert back.wait(240)
        return scan(path)

    if how == "it hangs":
        monkeypatch.setattr(restore_choice, "QUERY_LIMIT", 0.5)
    monkeypatch.setattr(os, "scandir", away)
    assert restored(tmp_path) == 3
    back.set()
    said = [one.text for one in agent.until(Remark)]
    why = "Stale file handle" if how == "it raises" else "has not answered"
    assert len(said) == 1
    assert said[0].startswith("step 3 is restored from memory; storage was not queried: ")
    assert why in said[0]


@pytest.mark.slow
def test_a_folder_that_hangs_holds_nobody_up_without_limit(tmp_path: Path) -> None:
    """Every system call that names the folder hangs. To make a Checkpointer needs none; a restore
    that has nothing in memory says that it waits, and ends in a sentence."""
    hanging.require()
    code = f"from {__name__} import *; restored_while_it_hangs({str(tmp_path)!r})"
    done = subprocess.run(
        [*hanging.APART, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path} has not answered for 0 s; the ranks wait for it" in done.stderr
    assert done.stdout == f"made\n{tmp_path} has not answered for 1 s\n"


def restored_while_it_hangs(folder: str) -> None:
    """In a process with mounts of its own, which ends here."""
    restore_choice.QUERY_LIMIT, restore_choice.STORAGE_LIMIT = 0.1, 0.6
    os.environ["ELASTICRUN_SNAPSHOTS"] = ""
    hanging.mount(folder)
    ckpt = Checkpointer(folder, state={"x": torch.zeros(1)})
    print("made", flush=True)
    try:
        ckpt.restore()
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)


def test_memory_is_taken_where_what_is_later_in_storage_is_spoiled(
    agent: PlayedAgent, tmp_path: Path, monkeypatch
) -> None:
    save_alone(tmp_path, monkeypatch, 5, 6)
    in_memory(agent, tmp_path, 3)
    for file in tmp_path.glob("*/*.distcp"):
        os.truncate(file, 10)
    assert restored(tmp_path) == 3
    assert Folder(str(tmp_path)).condemned() == [5, 6]
    said = [one.text for one in agent.until(Remark)]
    assert [text.split(" in ")[0] for text in said] == ["step 6", "step 5"]
    assert all(text.endswith("it will not be used again") for text in said)


def test_storage_is_listed_once(agent: PlayedAgent, tmp_path: Path, monkeypatch) -> None:
    save_alone(tmp_path, monkeypatch, 1, 2, 3)
    in_memory(agent, tmp_path, 3)
    listed, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": (listed.append(str(path)), scan(path))[1])
    assert restored(tmp_path) == 3
    assert [path for path in listed if path.startswith(str(tmp_path))] == [str(tmp_path)]


def save_alone(folder: Path, monkeypatch, *steps: int) -> None:
    with monkeypatch.context() as alone, warnings.catch_warnings():
        alone.delenv("ELASTICRUN_SNAPSHOTS")
        save(folder, *steps)
