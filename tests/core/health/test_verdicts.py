"""What the exit codes, time limits and first lines of a health command mean."""

from __future__ import annotations

import pytest

from elasticrun.core.health.verdicts import CommandJudge, CommandRun

LATE = CommandRun(None, "", late=True)


@pytest.mark.parametrize(
    ("run", "state", "why"),
    [
        (CommandRun(0, "all is well"), "healthy", ""),
        (CommandRun(1, "GPU 3 is lost"), "unhealthy", "reports: GPU 3 is lost (exit code 1)"),
        (CommandRun(1, ""), "unhealthy", "reports: no output (exit code 1)"),
        (CommandRun(125, "x"), "unhealthy", "reports: x (exit code 125)"),
        (CommandRun(2, "no nvidia-smi"), "unknown", "has no result: no nvidia-smi (exit code 2)"),
        (CommandRun(126, "denied"), "unknown", "has no result: denied (exit code 126)"),
        (CommandRun(127, "not found"), "unknown", "has no result: not found (exit code 127)"),
        (CommandRun(137, ""), "unknown", "has no result: no output (exit code 137)"),
        (CommandRun(-9, ""), "unknown", "has no result: no output (exit code -9)"),
        (CommandRun(None, "no thread"), "unknown", "did not run: no thread"),
    ],
)
def test_how_it_ends_is_the_verdict(run: CommandRun, state: str, why: str) -> None:
    verdict = CommandJudge(30.0).judge(run)
    assert verdict.state == state
    assert verdict.why == (f"its health command {why}" if why else "")


def test_three_timeouts_in_a_row_are_a_fault() -> None:
    judge = CommandJudge(30.0)
    states = [judge.judge(run).state for run in (LATE, LATE, CommandRun(0, ""), LATE, LATE)]
    assert states == ["unknown", "unknown", "healthy", "unknown", "unknown"]
    verdict = judge.judge(LATE)
    assert verdict.state == "unhealthy"
    assert verdict.why == "its health command did not finish within 30 s, 3 times in a row"


def test_a_run_without_a_result_ends_the_row() -> None:
    judge = CommandJudge(30.0)
    runs = (LATE, LATE, CommandRun(2, ""), LATE)
    assert [judge.judge(run).state for run in runs] == ["unknown"] * 4
