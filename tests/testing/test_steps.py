"""The step log: what ranks write, what a test reads, and where two worlds overlap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.testing.steps import STEP_LOG, Step, StepLog, overlap

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "7",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_a_script_says_its_steps_and_nothing_outside_a_test(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path / "steps"))
    call = "from elasticrun.testing import step; step(4); step(5)"
    for env in (RANK, {**RANK, STEP_LOG: log.path}):
        subprocess.run([sys.executable, "-c", call], env=env, check=True, timeout=60)
    first, second = log.read()
    log.close()
    assert (first.rank, first.step, first.world_size, first.round) == (1, 4, 2, 1)
    assert first.world == "10.0.0.1:7/3"
    assert (second.step, second.pid) == (5, first.pid)
    assert 0 < first.time <= second.time


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path / "steps"))
    line = '{"rank": 0, "step": 1, "world_size": 1, "world": "w", "pid": 9, "time": 1.5}\n'
    with open(log.path, "a") as file:
        file.write(line + line[:30])
        file.flush()
        assert [s.step for s in log.read()] == [1]
        assert log.read() == []
        file.write(line[30:])
    assert len(log.read()) == 1
    assert len(log.steps) == 2
    log.close()


@pytest.mark.parametrize("line", ["step 3", "{}", '{"rank": 0}', "[]", '{"rank": "x"}'])
def test_a_line_that_is_no_step_is_told(tmp_path: Path, line: str) -> None:
    log = StepLog(str(tmp_path / "steps"))
    Path(log.path).write_text(line + "\n")
    with pytest.raises(ValueError, match="a line that is no step"):
        log.read()
    log.close()


def test_a_rank_that_says_late_what_its_world_has_done_is_none() -> None:
    """It was stopped between the collective and its word."""
    assert overlap([said("a", 1), said("b", 2), said("a", 3, rank=1)]) == ""
    assert overlap([said("a", 1), said("b", 2), said("a", 3, rank=1, step=1)])


def said(world: str, time: float, rank: int = 0, step: int = 0) -> Step:
    """One record."""
    return Step(rank, step, 2, 0, world, 1, time)


def test_worlds_one_after_another_do_not_overlap() -> None:
    assert overlap([]) == ""
    assert overlap([said("a", 1), said("a", 2, rank=1), said("b", 3), said("c", 4)]) == ""
    assert overlap([said("b", 3), said("a", 1), said("a", 2)]) == "", "the times count"


def test_a_step_of_an_older_world_after_the_first_of_a_newer_is_an_overlap() -> None:
    wrong = overlap([said("a", 1), said("b", 2, rank=1), said("a", 2.5, step=7), said("b", 3)])
    assert wrong == (
        "rank 0 of 2 completed step 7 of the world at a 0.500 s after rank 1 of 2 had begun the "
        "world at b"
    )
