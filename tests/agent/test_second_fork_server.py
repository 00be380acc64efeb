"""The fork server that is made ready beside training, with what the ranks have imported."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.config import Learning
from elasticrun.forkserver import prepare
from elasticrun.wire.spawning import Learned
from tests import planted
from tests.agent.configs import agent_config, reaping, spawners
from tests.harness import LIMIT

NEVER = 100 * LIMIT


@pytest.fixture
def blocking(tmp_path: Path) -> Iterator[Path]:
    """A pipe that is opened by the import of the planted module, which then never ends."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with planted.written() as place:
        place.write_text(f"open({str(pipe)!r}, 'w').close()\nopen({str(pipe)!r}).read()\n")
        yield pipe


@pytest.mark.slow
async def test_the_end_of_a_job_does_not_wait_for_its_imports(blocking: Path) -> None:
    async with reaping() as reaper:
        started = spawners(agent_config(preload_learn=Learning.AT_ONCE), reaper)
        started.heard(started._current, Learned((planted.NAME,)))
        async with asyncio.timeout(LIMIT):
            await asyncio.to_thread(blocking.read_bytes)
            await started.close(NEVER)


@pytest.mark.parametrize(
    ("elapsed", "used", "idle", "rest"),
    [
        (0.10, 0.01, 0.00, 0.0),  # too early to look
        (0.05, 0.05, 0.05, 0.0),  # the other of two cores is idle
        (3.00, 0.05, 2.80, 0.0),  # one core was idle through a rest
        (0.50, 0.05, 0.15, 3.0),  # training leaves gaps
        (0.10, 0.05, 0.00, 3.0),
        (9.00, 0.90, 4.00, 30.0),  # a large library: the longest rest
    ],
)
def test_imports_rest_where_no_core_is_to_spare(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, used: float, idle: float, rest: float
) -> None:
    clock = {"monotonic": 50.0, "process_time": 5.0, "idle": 500.0}
    slept = [0.0]
    monkeypatch.setattr(prepare.time, "monotonic", lambda: clock["monotonic"])
    monkeypatch.setattr(prepare.time, "process_time", lambda: clock["process_time"])
    monkeypatch.setattr(prepare.time, "sleep", slept.append)
    monkeypatch.setattr(prepare.processes, "idle_seconds", lambda cores: clock["idle"])
    pace = prepare.ImportPace()
    clock["monotonic"] += elapsed
    clock["process_time"] += used
    clock["idle"] += idle
    assert pace.find_spec("torch") is None
    assert slept[-1] == pytest.approx(rest)
