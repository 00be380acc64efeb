"""What every test of the Python API must leave behind: nothing."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir

import psutil
import pytest

from tests.harness import LIMIT, clean_environment, warm_server

HELPERS = ("resource_tracker", "forkserver")
"""Processes that multiprocessing itself keeps until its user ends."""


def ours(tmp: str) -> set[psutil.Process]:
    """Descendants of this process that are not multiprocessing's own helpers. `tmp`: the test's
    $TMPDIR. Others belong to jobs of concurrent tests: their fork servers become children of the
    process that started the run's warm process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            if any(helper in words for helper in HELPERS):
                continue
            if process.environ().get("TMPDIR", tmp) == tmp:
                found.add(process)
        except psutil.NoSuchProcess:  # or a zombie
            continue
    return found


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path_factory, request) -> Iterator[None]:
    """No settings from outside, logs in a folder of the test's own, no process left. (That folder's
    name is short: multiprocessing's fork server has a Unix socket in it.)"""
    import os

    warm = warm_server() if request.node.get_closest_marker("slow") else {}
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    for name, value in warm.items():
        monkeypatch.setenv(name, value)
    tmp_path_factory.getbasetemp()  # made here, it would lie in this test's own folder
    get_temp_dir()  # multiprocessing's own in this process, which outlives a test
    folder = tempfile.mkdtemp(prefix="er-api-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    before = ours(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
    multiprocessing.active_children()  # reaps
    _, alive = psutil.wait_procs(ours(folder) - before, timeout=LIMIT)
    assert not alive, [process.cmdline() for process in alive]
