"""What every test of the Python API must leave behind: nothing."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import LIMIT, clean_environment

HELPERS = ("resource_tracker", "forkserver")
"""Processes that multiprocessing itself keeps until its user ends."""


def ours() -> set[psutil.Process]:
    """Descendants of this process that are not multiprocessing's own helpers."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if not any(helper in " ".join(process.cmdline()) for helper in HELPERS):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings from outside, logs under the test's own folder, no process left."""
    import os

    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = ours()
    yield
    multiprocessing.active_children()  # reaps
    _, alive = psutil.wait_procs(ours() - before, timeout=LIMIT)
    assert not alive, [process.cmdline() for process in alive]
