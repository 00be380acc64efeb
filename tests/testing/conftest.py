"""Runs pytest on files that a test writes, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.testing import WARM_FOLDER
from tests.harness import clean_environment

LIMIT = 240.0


class Inner:
    """A folder of tests, and what pytest says of them."""

    warm_of_its_own = False
    """Else its jobs come from the warm process of the run around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """pytest in a process of its own."""
        own = ("-p", "no:randomly", "-p", "no:cacheprovider", f"--basetemp={self.folder}/tmp")
        env = {n: v for n, v in clean_environment().items() if not n.startswith("PYTEST")}
        if "PYTHONPATH" in os.environ:
            env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        if not self.warm_of_its_own:
            env[WARM_FOLDER] = os.environ.get(WARM_FOLDER, "")
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *own, *words],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        """Its exit code and all it has said."""
        process = self.start(*words)
        try:
            text, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
        return process.returncode, text


@pytest.fixture
def inner(tmp_path: Path) -> Inner:
    """An empty folder in which a user keeps tests."""
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "pytest.ini").write_text(f"[pytest]\nelasticrun_timeout = {LIMIT}\n")
    return Inner(folder)
