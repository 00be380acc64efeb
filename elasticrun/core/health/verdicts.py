"""What a run of the user's health command (--health-cmd) means for its node.

Exit codes are those of node-problem-detector's custom plugins, with one difference: any other code
below 126 also means unhealthy, because scripts for Slurm's HealthCheckProgram end with whatever
failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MAX_TIMEOUTS: Final = 3
"""Consecutive runs over the time limit that make a node unhealthy. A single one may be a busy file
server; a driver that hangs is found by all."""

UNKNOWN: Final = 2
"""The exit code of a command that could not examine the node."""

NOT_RUN: Final = 126
"""From this exit code on, the shell reports that the command could not run, or was killed."""


@dataclass(frozen=True, slots=True)
class CommandRun:
    """The end of one run. `code`: None if it ran over its time limit or could not be started.
    `line`: the first line of its output; without a code, why there is none."""

    code: int | None
    line: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class CommandVerdict:
    """What the runs up to now mean; `why` is a clause, "" if healthy."""

    state: Literal["healthy", "unknown", "unhealthy"]
    why: str = ""


class CommandJudge:
    """Judges the runs of one node's health command, in order."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds that one run may take."""
        self._limit = limit
        self._timeouts = 0

    def judge(self, run: CommandRun) -> CommandVerdict:
        """The verdict after this run."""
        if run.late:
            return self._judge_timeout()
        self._timeouts = 0
        if run.code is None:
            return CommandVerdict("unknown", f"its health command did not run: {run.line}")
        said = f"{run.line or 'no output'} (exit code {run.code})"
        if run.code == 0:
            return CommandVerdict("healthy")
        if run.code == UNKNOWN or run.code < 0 or run.code >= NOT_RUN:
            return CommandVerdict("unknown", f"its health command has no result: {said}")
        return CommandVerdict("unhealthy", f"its health command reports: {said}")

    def _judge_timeout(self) -> CommandVerdict:
        self._timeouts += 1
        late = f"its health command did not finish within {self._limit:g} s"
        if self._timeouts < MAX_TIMEOUTS:
            return CommandVerdict("unknown", f"{late} ({self._timeouts} of {MAX_TIMEOUTS} times)")
        return CommandVerdict("unhealthy", f"{late}, {MAX_TIMEOUTS} times in a row")
