"""Stacks of a process that does not answer, and what is written of ranks that hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.agent.sight import dump, outside
from elasticrun.wire import messages as m

CHILD = """
import ctypes, os
if os.fork():
    print("ready", flush=True)
ctypes.PyDLL(None).usleep(600_000_000)
"""


@pytest.fixture
def held(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process whose interpreter nobody gets, with a child of the same kind."""
    (tmp_path / "held.py").write_text(CHILD)
    return subprocess.Popen([sys.executable, tmp_path / "held.py"], stdout=subprocess.PIPE)


def test_a_process_that_holds_its_interpreter(
    held: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        assert held.stdout is not None
        held.stdout.readline()
        lines = list(outside.facts(held.pid))
        assert "python" in lines[0]
        if shutil.which("py-spy") is not None:
            threads, why = outside.stacks_of(held.pid, 10)
            assert (threads[""][0][1:], why) == ((5, "<module>"), "")
            assert outside.stacks_below(held.pid, 10)["loader 1"][0][1] == 5
        monkeypatch.setenv("PATH", str(tmp_path))
        assert outside.stacks_of(held.pid, 10)[1].startswith("py-spy, which could read it")
        assert outside.stacks_below(held.pid, 10) == {}
        spy = tmp_path / "py-spy"
        spy.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
        spy.chmod(0o700)
        assert outside.stacks_of(held.pid, 10) == ({}, "py-spy: Error: Permission denied")
        assert held.poll() is None
    finally:
        for child in outside.processes.descendants(held.pid):
            os.kill(child.pid, 9)
        held.kill()
        held.communicate()
    assert list(outside.facts(held.pid)) == []


def test_the_file_of_a_rank(tmp_path: Path) -> None:
    at = m.Position(0, 31, 30, call="all_reduce [1000] float32", age=7.0)
    seen = m.RankSeen(
        2, 70, m.Being.SLEEPS, True, True, 0.0, 0.0, quiet=7.0, kernel="futex", at=(at,)
    )
    groups = [m.GroupSeen("0", "dp", "0-3")]
    text = dump.describe(seen, groups, {"": [("/u/train.py", 88, "load")]}, ["70 python: S futex"])
    folder = dump.write(str(tmp_path), 3, {2: text, 3: "x" * dump.MAX_DUMP * 2})
    assert folder == str(tmp_path / "hang-3")
    assert (tmp_path / "hang-3/rank-3.txt").stat().st_size == dump.MAX_DUMP
    assert (tmp_path / "hang-3/rank-2.txt").read_text().splitlines() == [
        "rank 2, process 70: sleeps, futex",
        "quiet for 7 s; 0.00 cores, 0.0 MB/s, 0 MiB of memory",
        "group 0 dp (0-3): 31 called, 30 done; the oldest open one, 7 s: all_reduce [1000] float32",
        "",
        "main thread, innermost first:",
        "  /u/train.py:88 load",
        "",
        "threads as the kernel sees them:",
        "70 python: S futex",
    ]
    assert dump.write("", 1, {2: text}) == ""
    assert dump.write(str(tmp_path / "hang-3/rank-2.txt"), 1, {2: text}) == ""
