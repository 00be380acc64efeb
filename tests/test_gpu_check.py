"""The check for a GPU (benchmarks/gpu), rehearsed with a CPU in the place of the device."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import check
from tests.further import further
from tests.harness import LIMIT, await_true

ROOT = Path(__file__).parent.parent


def checked(*words: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    """On a machine with a GPU too, the check finds none."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.check", "--device", device, *words],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip


def test_its_parts_are_those_of_the_plan() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "from benchmarks.gpu import parts; print(*parts.PARTS)"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True,
    )  # fmt: skip
    assert listed.stdout.split() == [part.name for part in check.PLAN]


def test_an_unknown_part_is_refused() -> None:
    refused = checked("--parts", "soak,nonsense")
    assert refused.returncode == 2
    assert refused.stderr.endswith("error: no such part: nonsense\n")


def test_make_hands_its_variables_on() -> None:
    words = ("DEVICE=cpu", "OUT=o", "BUDGET=7", "PARTS=soak", "WHEELS=w", "GPU_PYTHON=python3")
    shown = subprocess.run(
        ["make", "-n", "gpu", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
        check=True,
    )  # fmt: skip
    command = shlex.split(shown.stdout.replace("\\\n", ""))
    assert command[:3] == ["python3", "-m", "benchmarks.gpu.check"]
    options, chosen = check.parsed(command[3:])
    assert (options.device, options.out, options.wheels) == ("cpu", "o", "w")
    assert (options.budget, [part.name for part in chosen]) == (7.0, ["soak"])


@pytest.mark.slow
def test_parts_run_to_the_end(tmp_path: Path) -> None:
    done = checked("--parts", "untouched,recorder", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"untouched", "recorder"}
    assert not [row for row in rows if row["ok"] is False]
    assert "done: positions" in {row["name"] for row in rows if row["ok"]}
    report = (tmp_path / "report.md").read_text()
    assert "### untouched" in report
    assert "### recorder" in report


@pytest.mark.slow
@further("test_parts_run_to_the_end", "snapshots/test_corruption::test_a_majority_names_the_rank")
def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    done = checked("--parts", "corruption", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row["ok"] is False]
    names = {row["name"] for row in rows if row["ok"]}
    assert {"a flipped bit is found after", "rank 1 has restored what its replicas have"} <= names


@pytest.mark.slow
def test_a_part_is_killed_at_its_limit_and_the_report_names_what_was_not_run(
    tmp_path: Path,
) -> None:
    options, chosen = check.parsed(
        ["--device", "cpu", "--out", str(tmp_path), "--parts", "soak,hang", "--budget", "100"]
    )
    run = check.Check(options)
    hang = run.start(chosen[1], 0.0)
    folders = [hang.scratch, hang.shm]
    await_true(lambda: len(check.marked(hang.mark)) > 4, "processes of the jobs")
    run.finish(hang)
    assert not check.marked(hang.mark)
    assert not [folder for folder in folders if folder.exists()]
    run.budget = 0.0
    run.run(chosen)
    verdicts = [(name, said) for name, said, _ in run.verdicts]
    nothing = "not run: 0 s were left"
    assert verdicts == [("hang", "killed after 0 s"), ("soak", nothing), ("hang", nothing)]
    assert nothing in (tmp_path / "report.md").read_text()
    assert not run.is_good()
    run.close()


@further("test_a_folder_without_wheels_is_refused")
@pytest.mark.slow
def test_wheels_that_python_lacks_are_unpacked(tmp_path: Path) -> None:
    for name in ("absent_from_here", "msgspec"):
        with zipfile.ZipFile(tmp_path / f"{name}-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}_of_a_wheel.py", "")
    options, _ = check.parsed(["--device", "cpu", "--out", str(tmp_path / "out")])
    run = check.Check(options)
    assert run.prepare(str(tmp_path)) == ""
    assert [path.name for path in run.site.iterdir()] == ["absent_from_here_of_a_wheel.py"]
    run.close()
    assert not run.site.exists()


def test_a_folder_without_wheels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    refused = checked("--wheels", str(tmp_path), "--out", str(tmp_path / "out"))
    assert refused.returncode == check.CANNOT_RUN
    assert f"there are no wheels in {tmp_path}" in refused.stdout
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_without_a_device_nothing_is_tried(tmp_path: Path) -> None:
    refused = checked("--out", str(tmp_path), device="cuda")
    assert refused.returncode == check.CANNOT_RUN
    assert "torch finds no CUDA device here" in refused.stdout
    assert not (tmp_path / "results.jsonl").read_text()
