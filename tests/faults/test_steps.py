"""The rules that every fault's test rests on do notice what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.steps import StepLog


def log_of(folder: Path, *lines: tuple[int, int, int, int, float]) -> StepLog:
    """A log of lines (world, rank, size, step, done); pids are told by world and rank."""
    log = StepLog(folder)
    with (folder / "all.jsonl").open("w") as file:
        for world, rank, size, step, done in lines:
            line = {"world": world, "rank": rank, "size": size, "step": step, "done": done}
            line |= {"began": done - 0.1, "pid": 10 * world + rank, "group_rank": rank}
            file.write(json.dumps({**line, "restart": 0, "store": "", "node": ""}) + "\n")
    return log


def test_one_world_after_the_other(tmp_path: Path) -> None:
    good = log_of(tmp_path, (1, 0, 2, 1, 1.0), (1, 1, 2, 1, 1.0), (2, 0, 1, 2, 3.0))
    assert [life.size for life in good.check()] == [2, 1]
    assert good.lives()[0].whole_steps() == {1}


def test_two_worlds_at_a_time(tmp_path: Path) -> None:
    bad = log_of(tmp_path, (1, 0, 1, 1, 1.0), (2, 0, 1, 2, 3.0), (1, 0, 1, 2, 3.1))
    with pytest.raises(AssertionError, match=r"0\.100 s after rank 0 of 1 had begun"):
        bad.one_world_at_a_time()
    with pytest.raises(AssertionError):
        bad.one_world_at_a_time(stopped=[10])  # nobody had done that step with it before


def test_the_late_line_of_a_rank_that_was_stopped(tmp_path: Path) -> None:
    """Allowed once it was stopped, and for a step that its peers had done; for nobody else."""
    late = log_of(
        tmp_path, (1, 0, 2, 1, 1.0), (2, 0, 1, 2, 3.0), (1, 1, 2, 1, 3.05), (2, 0, 1, 3, 4.0)
    )
    late.one_world_at_a_time(stopped=[11])
    with pytest.raises(AssertionError):
        late.one_world_at_a_time()


def test_a_step_that_no_whole_world_has_done(tmp_path: Path) -> None:
    bad = log_of(tmp_path, (1, 0, 2, 1, 1.0), (2, 0, 1, 2, 3.0))
    with pytest.raises(AssertionError, match=r"steps \[1\]"):
        bad.every_step_whole()
