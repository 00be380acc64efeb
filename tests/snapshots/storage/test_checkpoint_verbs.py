"""`elasticrun ckpt ls|verify|prune` on folders of whole, spoiled and torn checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.cli.main import main
from elasticrun.host.runs.index import make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder
from elasticrun.jobs.running import checkpoints
from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.timeline import Timeline
from elasticrun.snapshots.storage.writing import StorageError
from tests.snapshots.storage.stand_ins import CutOff
from tests.snapshots.storage.test_folder import DATA, entry, flip, save

FIRST, SECOND = entry(0).name, entry(1).name
NO_TORCH = """
import sys
from elasticrun.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "grpc"} & set(sys.modules), "imported"
raise SystemExit(code)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Steps 10 to 50 of two ranks: 10 is whole, 20 too, 30 was changed in two files, 40 has a short
    one, 50 was cut off before its marker."""
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TZ", "UTC")
    made = Folder(str(tmp_path / "a"))
    for step in (10, 20, 30, 40):
        save(made, step, ranks=2)
    save(made, 50, ranks=2, marker=b"")
    made.unlink(50, ["elasticrun.json"])
    for name in (FIRST, SECOND):
        flip(made, 30, name, 9)
    made.put(40, SECOND, DATA[:-1])
    return made


def test_ls(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", folder.url]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["STEP", "WHEN", "SIZE", "RANKS", "REASON", "STATE"]
    states = [(line.split()[0], line.split()[-1]) for line in out[1:6]]
    assert states == [
        *(("10", "whole"), ("20", "whole"), ("30", "whole")),  # of its sizes
        *(("40", "spoiled"), ("50", "torn")),
    ]
    assert out[1].split()[-4:] == ["KiB", "2", "periodic", "whole"]
    assert out[6] == f"step 40 is spoiled: {SECOND} has 12387 bytes, not 12388"
    assert out[7].startswith("step 50 was never committed: it is being written, or")
    assert out[-1] == "a restart resumes from step 30"
    assert max(map(len, out)) <= 80
    assert main(["ckpt", "ls", folder.url, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows if row["restart"]] == [30]
    assert list(rows[0]) == list(checkpoints.CheckpointRow.__struct_fields__)


def test_what_was_condemned_or_left_says_so(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.condemn(30, next(folder.faults(30)).what)
    line = Timeline(1, 15)
    folder.put(10, line.file, line.sentence.encode())
    assert main(["ckpt", "ls", folder.url]) == 0
    out = capsys.readouterr().out
    assert "step 20 is abandoned: training was rewound" in out
    reason = f"step 30 was found to be spoiled before: {FIRST} was changed between"
    assert reason in " ".join(out.split())
    assert out.endswith("a restart resumes from step 10\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["10"], 0, ["step 10 is whole"]),
        (
            ["30"],
            1,
            [f"30 is spoiled: {FIRST} was changed", f"30 is spoiled: {SECOND} was changed"],
        ),
        (["50"], 1, ["step 50 was never committed"]),
        ([], 1, ["10 is", "20 is", f"{FIRST} was", f"{SECOND} was", f"{SECOND} has", "50 was"]),
    ],
)
def test_verify(
    folder: Folder, words: list[str], code: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", folder.url, *words]) == code
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(said)
    assert all(words in line for words, line in zip(said, out, strict=True))


def test_what_the_saver_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from tests.snapshots.dcp import checkpoints as saver
    from tests.snapshots.dcp.slots import HandMade

    folder = Folder(str(tmp_path))
    ranks = [HandMade(number).tensor("w", is_=torch.ones(5000)) for number in (0, 1)]
    parts = [saver.save(folder, ranks, step=step, reason="breakpoint") for step in (7, 8)]
    assert main(["ckpt", "verify", folder.url]) == 0
    flip(folder, 8, parts[1][1].file.name, 100)
    assert main(["ckpt", "verify", folder.url]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(f"step 8 is spoiled: {parts[1][1].file.name} was changed between")
    assert main(["ckpt", "ls", folder.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["2", "breakpoint", "whole"]


def test_one_that_is_being_written_is_not_bad_and_one_that_lost_its_marker_is(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (30, 40):
        folder.remove(step)
    assert main(["ckpt", "verify", folder.url]) == 0
    folder.unlink(20, [".metadata", SECOND])
    assert main(["ckpt", "verify", folder.url]) == 1
    assert capsys.readouterr().out.splitlines()[-2] == "step 20 was never committed"


def test_what_is_half_removed_is_named_and_removed_by_the_next_prune(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StorageError):
        Folder(folder.url, calls=CutOff(1)).remove(20)
    assert main(["ckpt", "ls", folder.url]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split()[-1] == "removing"
    said = "step 20 is being removed, or its removal was cut off: the next checkpoint"
    assert said in " ".join(out.split())
    assert main(["ckpt", "prune", folder.url, "--keep", "5"]) == 0
    assert "removed step 20" in capsys.readouterr().out
    assert folder.files(20) == {}


def test_prune_never_takes_the_newest_verified_one(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "prune", folder.url, "--keep", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("removed step 10: 25 KiB")
    assert out[-1] == f"2 checkpoints removed from {folder.url}; kept: 20, 40"
    save(folder, 60)
    save(folder, 70)
    words = ["ckpt", "prune", folder.url, "--keep", "1", "--every", "20", "-o", "json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [], "kept": [20, 40, 60, 70]}
    for step in (20, 60, 70):
        flip(folder, step, FIRST, 9)
    assert main(["ckpt", "prune", folder.url, "--keep", "1"]) == 1
    assert "is intact, so nothing is removed" in capsys.readouterr().err
    assert folder.committed() == [20, 40, 60, 70]


def test_a_folder_of_torch_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(str(tmp_path / "b"))
    folder.make_folder(5)
    folder.put(5, ".metadata", b"torch's own")
    assert main(["ckpt", "verify", folder.url]) == 0
    assert "step 5 was written by torch alone" in capsys.readouterr().out
    assert main(["ckpt", "prune", folder.url, "--keep", "1"]) == 2
    assert "has no checkpoint with an elasticrun.json" in capsys.readouterr().err


def test_by_the_name_of_a_job_and_without_torch(folder: Folder, tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "runs", "tr", "95d292de"))
    run.write_job(JobRecord(name="tr"))
    command = [sys.executable, "-c", NO_TORCH, "ckpt", "ls", "tr"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no checkpoints in its run folder" in done.stderr
    os.rename(folder.url, run.path / "checkpoints")
    for word in ("tr", str(run.path)):
        command[-1] = word
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert "a restart resumes from step 30" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "nowhere"], "there is no folder"),
        (["ls", "./nowhere"], "there is no folder"),
        (["verify", "."], "is not a folder of checkpoints"),
        (["prune", ".", "--keep", "1"], "is not a folder of checkpoints"),
        (["prune", "a"], "--keep"),
        (["prune", "a", "--keep", "0"], "'0' is not a whole number of at least 1"),
        (["verify", "a", "11"], "there is no step 11 in"),
        (["verify", "a", "x"], "'x' is not a whole number of at least 0"),
        (["lst", "a"], "'lst'"),
        ([], "name one of ls, verify, prune"),
    ],
)
def test_bad_words(
    folder: Folder,
    tmp_path: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(["ckpt", *words])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert folder.committed() == [10, 20, 30, 40]
