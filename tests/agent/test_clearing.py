"""The end of an agent: every step is done, whatever becomes of the others, within one bound."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from elasticrun.agent.logs.output import RankOutput
from elasticrun.agent.workers import clearing
from elasticrun.agent.workers.clearing import Clearing
from elasticrun.config import LogPlan
from elasticrun.master.main import _anyway
from tests.aio import run


def test_a_step_that_fails_or_is_late_is_told_and_the_next_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []

    async def broken() -> None:
        raise OSError("the disk is gone")

    async def sound() -> None:
        done.append("sound")

    def defect() -> None:
        raise KeyError("defect")

    async def body() -> None:
        end = Clearing()
        end.begin()
        end.now("the first", defect)
        await end.step("the second", broken(), 5.0)
        await end.step("the third", asyncio.Event().wait(), 0.01)
        await end.step("the fourth", sound(), 5.0)

    run(body())
    assert done == ["sound"]
    for told in ("the first failed", "the second failed", "the third took longer than 0.01 s"):
        assert told in caplog.text


def test_the_steps_have_one_bound_and_each_its_least(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    end = Clearing()
    assert end.left(1e6) == 1e6
    end.begin()
    assert (end.left(3.0), end.left(1e6)) == (3.0, clearing.BOUND)
    now += clearing.BOUND
    assert (end.left(0.5), end.left(1e6)) == (0.5, clearing.LEAST)


@pytest.mark.parametrize(("took", "bound"), [(1.0, 20.0), (15.0, 14.0), (26.0, 4.0), (90.0, 4.0)])
def test_what_ranks_took_of_a_pods_grace_is_not_there_any_more(
    took: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    end = Clearing()
    end.signalled()
    now += took / 2
    end.signalled()  # a second one does not put the end off
    now += took / 2
    end.begin()
    assert end.left(1e6) == bound


def test_output_is_shown_until_a_death_signal_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A console that nobody reads, with an endless patience: the signal alone ends the wait."""
    monkeypatch.setattr(clearing, "SHOW_LIMIT", 0.1)
    monkeypatch.setattr(clearing, "SHOW_PATIENCE", 3600.0)
    out, into = os.pipe()
    plan = LogPlan(log_dir=str(tmp_path), tee_all=1)
    output = RankOutput(plan, "job", "default", 1, stdout_fd=into, patience=3600.0)
    logs = output.open_attempt(0, {0: {}})
    Path(logs[0].stdout).write_bytes(b"line\n" * 100_000)

    async def body() -> float:
        end = Clearing()
        end._until = 0.0
        showing = asyncio.create_task(end.output(output, hurried=False))
        done, _ = await asyncio.wait({showing}, timeout=0.5)
        assert not done  # the bound of the other steps is over, and does not count here
        hurried_at = time.monotonic()
        end.hurry.set()
        await showing
        return time.monotonic() - hurried_at

    assert run(body()) < clearing.SHOW_PATIENCE
    assert "because the time to end was up" in caplog.text
    os.close(out)
    os.close(into)


def test_the_master_takes_every_step_of_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def broken() -> None:
        raise OSError("the disk is gone")

    async def body() -> None:
        await _anyway("the first", broken)
        await _anyway("the second", lambda: done.append("sound"))

    run(body())
    assert done == ["sound"]
    assert "the first failed" in caplog.text
