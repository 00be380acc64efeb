"""Whole jobs and their run folders: what they hold, the same folder again, two jobs, a lost one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticrun.host.runs.index import all_runs, runs_root
from elasticrun.host.runs.layout import RunFolder
from elasticrun.testing import processes
from tests.counting import let_pass
from tests.further import further
from tests.harness import await_true, free_port, warm_server

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from elasticrun import training
for step in range(int(os.environ.get("STEPS", "4"))):
    extra = {"lr": 1e-4} if step > 1 else {}
    training.progress(step, loss=1 / (step + 1), **extra)
    time.sleep(float(os.environ.get("PAUSE", "0")))
if os.environ.get("HOLD"):
    open("held", "x").close()
    signal.pause()
if os.environ.get("BAD") and os.environ["RANK"] == "0":
    raise ValueError("bad luck")
"""

ELASTICRUN = (sys.executable, "-m", "elasticrun")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    for name, value in warm_server().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ELASTICRUN, *words], env={**os.environ, **variables}, timeout=120, capture_output=True,
        text=True,
    )  # fmt: skip


def _begin(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ELASTICRUN, *words], env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True
    )


def _progress(folder: RunFolder) -> list[dict[str, Any]]:
    with (folder.path / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_failed_job_leaves_all_of_it(place: Path) -> None:
    done = _run("--nproc-per-node=2", "--run-dir=r", "train.py", BAD="1")
    assert done.returncode == 1
    (folder,) = all_runs(runs_root(os.environ))
    job, result = folder.job(), folder.result()
    assert job is not None
    assert result is not None
    name = f"train-{job.launch[:4]}"  # since nobody has named it
    assert (job.name, job.nproc, job.where, job.attempt) == (name, "2", "local", 1)
    assert folder.path.name == f"train-{job.launch}"
    assert job.command[0] == "elasticrun"
    assert job.versions["torch"]
    assert (result.state, result.step, result.world_size) == ("failed", 3, 2)
    assert [(row["step"], row["lr"]) for row in _progress(folder)] == [
        ("0", ""), ("1", ""), ("2", "0.0001"), ("3", "0.0001"),
    ]  # fmt: skip
    text = (place / "r" / "error.txt").read_text()
    assert text.startswith("rank 0 failed (ValueError: bad luck)\n")
    facts = ("ended with: exit code 1", "last step:  3", "verdict:    script")
    for line in (*facts, "    ValueError: bad luck"):
        assert f"\n{line}\n" in text, text
    assert [row["step"] for row in json.loads(_run("list", "-o", "json").stdout)] == [3]
    events = [json.loads(line) for line in (place / "r" / "events.jsonl").open()]
    assert events[-1]["text"].startswith("the job is over: ")
    assert events[-1]["level"] == "error"
    assert (place / "r" / "incidents" / "0001.md").is_file()
    shown = _run("events", "train")
    assert (shown.returncode, len(shown.stdout.splitlines())) == (0, len(events))
    assert shown.stdout.splitlines()[-1].endswith(events[-1]["text"])
    assert "bad luck" in next((place / "r" / "logs").rglob("0/stderr.log")).read_text()


def test_ctrl_c_before_anything_is_saved(place: Path) -> None:
    begun = _begin("train.py", HOLD="1")
    await_true((place / "held").exists, "the last step")
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=120)
    assert (begun.returncode, "ended by SIGINT (2)" in said) == (1, True), said
    (row,) = json.loads(_run("list", "-o", "json").stdout)
    assert (row["state"], row["step"], row["saved"]) == ("interrupted", 3, -1)


def test_ctrl_c_while_the_master_gets_no_cpu_time(place: Path) -> None:
    """The result is written all the same, before the command returns."""
    begun = _begin("train.py", HOLD="1")
    await_true((place / "held").exists, "the last step")
    (master,) = filter(processes.is_master, processes.children(begun.pid))
    os.kill(master, signal.SIGSTOP)
    begun.send_signal(signal.SIGINT)
    let_pass(2.5)
    os.kill(master, signal.SIGCONT)
    _, said = begun.communicate(timeout=120)
    assert begun.returncode == 1, said
    (row,) = json.loads(_run("list", "-o", "json").stdout)
    assert row["state"] == "interrupted", said


def test_the_same_folder_again(place: Path) -> None:
    assert _run("--run-dir=r", "train.py", BAD="1").returncode == 1
    other = _begin("--run-dir=r", "train.py", STEPS="1000", PAUSE="0.1")
    folder = RunFolder(place / "r")
    await_true(lambda: folder.state() == "running", "the second attempt")
    done = _run("--run-dir=r", "train.py")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    before = folder.job()
    assert before is not None
    assert f"job {before.name} (process {other.pid} of " in done.stderr
    await_true(lambda: folder.last_step() > 3, "its steps")
    other.kill()
    other.communicate(timeout=60)
    shown = json.loads(_run("list", "-o", "json").stdout)
    assert [(row["state"], row["step"] > 3) for row in shown] == [("lost", True)]
    await_true(lambda: _run("--run-dir=r", "train.py").returncode == 0, "its master's end")
    job = folder.job()
    assert job is not None
    assert job.attempt >= 3
    assert len(_progress(folder)) >= 4 + 4 + 4, "rows of every attempt"
    done = _run("--run-dir=r", "train.py")
    said = f"job {job.name} has already succeeded at step 3 (in {place}/r); --fresh runs it again"
    assert (done.returncode, done.stderr) == (0, f"elasticrun: {said}\n")
    (place / "other.py").write_text("")
    for verb in (("submit",), ()):
        before_script = (*verb, "--run-dir=r", *(["--"] if verb else []))
        done = _run(*before_script, "other.py")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "it ran the script train.py, this is other.py; start over there" in done.stderr
    assert _run("--run-dir=r", "--dry-run", "other.py").stderr == done.stderr
    again = _run("--run-dir=r", "--nproc-per-node=2", "--dry-run", "train.py")
    assert (again.returncode, again.stderr) == (0, f"elasticrun: {said}\n")
    assert _run("--run-dir=r", "--fresh", "train.py").returncode == 0
    assert len(_progress(folder)) == 4
    assert RunFolder(place / "r/previous/1").job() == job


@further("test_the_same_folder_again")
def test_all_nodes_hear_that_the_job_has_succeeded(place: Path) -> None:
    """By the master of the one that has the folder: the other's is not there."""
    assert _run("--run-dir=r", "train.py").returncode == 0
    flags = ("--nnodes=2", "--rdzv-id=x", "--rdzv-backend=c10d")
    where = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    first = _begin(*flags, where, "--rdzv-conf=is_host=1", "--run-dir=r", "train.py", BAD="1")
    second = _begin(*flags, where, "--rdzv-conf=is_host=0", "--run-dir=r2", "train.py", BAD="1")
    told = [job.communicate(timeout=120)[1] for job in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), told
    other = _run(*flags, where, "--rdzv-conf=is_host=1", "--run-dir=r", "train.py", "--lr=2")
    assert other.returncode == 1, other.stderr
    assert "its argument 1 was none, here it is '--lr=2'" in other.stderr
    job = RunFolder(place / "r").job()
    assert job is not None
    assert f"job {job.name} has already succeeded at step 3" in told[0]


def test_a_job_that_is_told_to_leave_has_all_its_rows(place: Path) -> None:
    job = _begin("--run-dir=r", "train.py", HOLD="1")
    await_true((place / "held").exists, "its steps")
    job.terminate()
    job.communicate(timeout=60)
    assert [row["step"] for row in _progress(RunFolder(place / "r"))] == ["0", "1", "2", "3"]


def test_rank_0_elsewhere_than_the_master(place: Path) -> None:
    """Its rows come by way of its agent; nothing else of the folder is there."""
    port = free_port()
    words = ("master", f"--port={port}", "--host=127.0.0.1", "--rdzv-id=x", "--run-dir=mine")
    master = _begin(*words)
    flags = ("--rdzv-id=x", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    done = _run("--nnodes=1:1", *flags, "--rdzv-conf=is_host=0", "train.py")
    assert done.returncode == 0, done.stderr
    master.communicate(timeout=60)
    folder = RunFolder(place / "mine")
    result = folder.result()
    assert result is not None
    assert (result.state, result.step) == ("succeeded", 3)
    assert [row["loss"][:4] for row in _progress(folder)] == ["1.0", "0.5", "0.33", "0.25"]


def test_a_home_that_cannot_be_written_to(place: Path) -> None:
    (place / "file").write_text("")
    done = _run("train.py", ELASTICRUN_RUNS=str(place / "file" / "runs"))
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if "run folder" in line)
    assert "cannot write to the run folder of this job: " in line
