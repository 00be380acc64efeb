"""The step log: what ranks write, what a test reads, and where two worlds overlap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.testing.steps import STEP_LOG, STEP_NODE, Step, StepLog, gap, overlap, worlds

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
    own = {STEP_LOG: log.path, STEP_NODE: "2", "GROUP_RANK": "1"}
    for env in (RANK, {**RANK, **own}):
        subprocess.run([sys.executable, "-c", call], env=env, check=True, timeout=240)
    first, second = log.read()
    log.close()
    assert (first.rank, first.step, first.world_size, first.round) == (1, 4, 2, 1)
    assert first.world == "10.0.0.1:7/3"
    assert (second.step, second.pid) == (5, first.pid)
    assert (second.node, second.group_rank, second.restarts) == (2, 1, 3)
    assert 0 < first.time <= second.time


def test_two_worlds_of_one_name(tmp_path: Path) -> None:
    """A store may get the port of one that is long gone. A process lives in one world only, so its
    pid tells; who says something late still belongs to the world it began in."""
    log = StepLog(str(tmp_path / "steps"))
    says = [(0, 70, 2), (1, 71, 2), (0, 80, 2), (1, 71, 2), (1, 81, 2), (0, 90, 1)]
    with open(log.path, "a") as file:
        for rank, pid, size in says:
            line = {"rank": rank, "step": 1, "world_size": size, "world": "w/0", "pid": pid}
            file.write(json.dumps({**line, "time": 1.0}) + "\n")
    assert [s.round for s in log.read()] == [1, 1, 2, 1, 2, 3]
    assert {(s.node, s.group_rank, s.restarts) for s in log.steps} == {(-1, -1, -1)}
    log.close()


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
    with pytest.raises(ValueError, match="a line that is not a step"):
        log.read()
    log.close()


def test_a_rank_that_says_late_what_its_world_has_done_is_none() -> None:
    """It was stopped between the collective and its word."""
    assert overlap([said("a", 1), said("b", 2), said("a", 3, rank=1)]) == ""
    assert overlap([said("a", 1), said("b", 2), said("a", 3, rank=1, step=1)])
    late = [said("a", 1), said("b", 2), said("a", 3, rank=1)]
    assert (overlap(late, held=[1]), bool(overlap(late, held=[2]))) == ("", True), "who was held"


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


def life(
    number: int, *steps: tuple[int, int, float], size: int = 2, restarts: int = 0
) -> list[Step]:
    """What one world said: (rank, step, time) each, by a process for each rank on a node of its
    own."""
    return [
        Step(rank, step, size, number, "w", 10 * number + rank, time, 5 + rank, rank, restarts)
        for rank, step, time in steps
    ]


def test_a_world_is_what_its_ranks_have_said() -> None:
    first, second = worlds(
        [
            *life(2, (0, 7, 9.0), size=1, restarts=1),
            *life(1, (1, 6, 1.5), (0, 6, 1.0), (0, 7, 2.0)),
        ]
    )
    assert (first.round, first.world_size, first.restarts) == (1, 2, 0)
    assert (first.began, first.ended, first.first, first.last) == (1.0, 2.0, 6, 7)
    assert first.nodes == {0: 5, 1: 6}
    assert first.pids == {0: 10, 1: 11}
    assert first.whole == {6}, "rank 1 has not said that it has completed step 7"
    assert (second.round, second.restarts, second.whole) == (2, 1, {7})


def test_a_step_that_no_whole_world_completed_is_missing() -> None:
    steps = life(1, (0, 1, 1.0), (1, 1, 1.0), (0, 2, 2.0), (1, 2, 2.0), (0, 3, 3.0))
    assert gap(worlds([])) == gap(worlds(steps)) == ""
    assert gap(worlds([*steps, *life(2, (0, 3, 4.0), (0, 4, 5.0), size=1)])) == ""
    assert gap(worlds([*steps, *life(2, (0, 4, 4.0), (0, 5, 5.0), size=1)])) == (
        "no whole world completed step 3; a world of 2 from 0.00 s to 2.00 s, steps 1 to 3; "
        "a world of 1 from 3.00 s to 4.00 s, steps 4 to 5"
    )
