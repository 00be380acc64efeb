"""A launcher whose `elasticrun/jobs` is deleted: it runs scripts, passes the quick tests of its
command line, and says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.further import further

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("elasticrun", "tests", "pyproject.toml", "examples", "docs", "README.md")
LIMIT = 600.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the project without that folder."""
    copy = tmp_path_factory.mktemp("without")
    away = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        of = ROOT / name
        if of.is_dir():
            shutil.copytree(of, copy / name, ignore=away)
        else:
            shutil.copy(of, copy / name)
    shutil.rmtree(copy / "elasticrun/jobs")
    yield copy
    shutil.rmtree(copy)


def python(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=place, env=environ, capture_output=True, text=True, timeout=LIMIT
    )


def test_it_runs_a_script(place: Path) -> None:
    (place / "train.py").write_text("import os; print('rank', os.environ['RANK'], flush=True)\n")
    done = python(place, "-m", "elasticrun", "--nproc-per-node=2", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1"]


@pytest.mark.parametrize("words", [("list",), ("submit", "--", "x.py"), ("--hosts", "a", "x.py")])
def test_it_says_what_is_missing(place: Path, words: tuple[str, ...]) -> None:
    done = python(place, "-m", "elasticrun", *words)
    assert done.returncode == 1
    assert done.stderr == (
        "elasticrun: error: this installation has no elasticrun.jobs: reinstall elasticrun\n"
    )


@further("test_it_runs_a_script", "test_it_says_what_is_missing")
def test_it_passes_its_quick_tests(place: Path) -> None:
    quick = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not soak")
    done = python(place, *quick, "tests/cli", "tests/cli/detection")
    assert done.returncode == 0, done.stdout[-4000:]
