"""Many real sessions on one real master process: counts in `make test`, the bars in `make soak`.

The sessions are those of agents (their own Link), held by load processes of the benchmark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.further import further

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "idle_sessions.py"


def measure(
    tmp_path: Path, sessions: int, seconds: int, limit: float, *more: str
) -> dict[str, float]:
    """What the benchmark finds. Its exit code speaks of bars, which are the soak's affair."""
    target = tmp_path / "found.json"
    words = (f"--sessions={sessions}", f"--seconds={seconds}", f"--json={target}", *more)
    done = subprocess.run(
        (sys.executable, str(BENCHMARK), *words), capture_output=True, text=True, timeout=limit
    )
    assert target.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, float] = {
        name: value
        for name, value in json.loads(target.read_text()).items()
        if isinstance(value, float)
    }
    return found


def nobody_was_lost(found: dict[str, float]) -> None:
    """Idle sessions stay what they are."""
    wrong = {name: found[name] for name in ("dead", "suspect", "broken", "stopped") if found[name]}
    assert not wrong


@pytest.mark.slow
@further(why="benchmarks/idle_sessions.py measures it")
def test_five_hundred_idle_sessions(tmp_path: Path) -> None:
    """They attach, start, idle, are started again after a failure; nobody is taken for dead. (With
    the usual 5 s of silence: below. A third of them is one process, which may stand still.)"""
    found = measure(tmp_path, 500, 5, 600, "--heartbeat=60")
    assert found["sessions"] == 500
    assert not found["dead"]
    assert not found["stopped"]


@further(why="benchmarks/idle_sessions.py measures it")
@pytest.mark.timeout(1800)
def test_five_thousand_idle_sessions_for_ten_minutes(tmp_path: Path) -> None:
    """Steady CPU, a broadcast of Start, nobody suspected, no false death."""
    found = measure(tmp_path, 5000, 600, 1500)
    assert found["sessions"] == 5000
    nobody_was_lost(found)
    assert found["cpu"] <= 40.0
    assert found["broadcast"] <= 1.0
