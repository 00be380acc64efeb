"""The step log of a job under test: what its ranks write, and what a test reads from it.

A rank says that it has completed a step by one line of JSON, written by one `write` to the file
that $ELASTICRUN_STEP_LOG names (opened for appending, so that lines of several ranks never mix):

    {"rank": 0, "step": 17, "world_size": 4, "world": "10.0.0.1:43117/0", "pid": 471, "time": 81.2}

`step(17)` does that and needs nothing but the standard library; a script that must run where
elasticrun is not installed writes the line itself. Without the variable it does nothing, so the
call may stay in the script. `time` is CLOCK_MONOTONIC in seconds, which is one clock for all
processes of a machine; `world` tells the worlds of a job apart: where their store is, and how often
ranks had been restarted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

STEP_LOG: Final = "ELASTICRUN_STEP_LOG"
"""Variable with the path of the step log; unset outside a test."""

MAX_LINE: Final = 4096
"""Bytes of one line; a longer one is none of ours."""


def step(number: int) -> None:
    """Say that this rank has just completed step `number`. Does nothing outside a test."""
    path = os.environ.get(STEP_LOG)
    if not path:
        return
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "step": number,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "world": f"{where}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        "pid": os.getpid(),
        "time": time.clock_gettime(time.CLOCK_MONOTONIC),
    }
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, json.dumps(record).encode() + b"\n")
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Step:
    """One step that one rank completed.

    `world` is the name under which the rank wrote it; `round` numbers the worlds of the job from 1
    in the order of their first steps (a round that completed no step has no number here). `time`:
    CLOCK_MONOTONIC, seconds."""

    rank: int
    step: int
    world_size: int
    round: int
    world: str
    pid: int
    time: float


class StepLog:
    """Reads the file of a job as it grows."""

    def __init__(self, path: str) -> None:
        """Makes the file, which must not be there yet."""
        self.path = path
        self.steps: list[Step] = []
        self._worlds: dict[str, int] = {}
        self._rest = b""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def read(self) -> list[Step]:
        """Take up what was written since the last call; these steps alone, in order of arrival.
        ValueError where somebody has written what is no step."""
        if self._file.closed:
            return []
        data = self._rest + (self._file.read() or b"")
        *lines, self._rest = data.split(b"\n")
        fresh = [self._parse(line) for line in lines if line.strip()]
        self.steps += fresh
        return fresh

    def _parse(self, line: bytes) -> Step:
        try:
            if len(line) > MAX_LINE:
                raise ValueError("a long line")
            fields = json.loads(line)
            world = str(fields["world"])
            number = self._worlds.setdefault(world, len(self._worlds) + 1)
            return Step(
                rank=int(fields["rank"]),
                step=int(fields["step"]),
                world_size=int(fields["world_size"]),
                round=number,
                world=world,
                pid=int(fields["pid"]),
                time=float(fields["time"]),
            )
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"the step log {self.path} has a line that is no step: {line[:200]!r}"
            ) from None

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()


def overlap(steps: Iterable[Step]) -> str:
    """Where two worlds of one job ran at a time: the first such pair in a sentence, or "".

    After the first step of one round no step of an earlier round may be completed. The times that
    the ranks wrote themselves are compared, not the order in which lines arrived. A step is
    completed when the first of its ranks says so: the others have taken part in its collective by
    then, and one that is stopped at that very moment says so when it goes on, however late."""
    done: dict[tuple[str, int], Step] = {}
    for record in steps:
        before = done.setdefault((record.world, record.step), record)
        if record.time < before.time:
            done[record.world, record.step] = record
    seen: set[str] = set()
    newest: Step | None = None
    for record in sorted(done.values(), key=lambda s: s.time):
        if newest is None or record.world not in seen:
            seen.add(record.world)
            newest = record
        elif record.world != newest.world:
            late = record.time - newest.time
            return (
                f"rank {record.rank} of {record.world_size} completed step {record.step} of the "
                f"world at {record.world} {late:.3f} s after rank {newest.rank} of "
                f"{newest.world_size} had begun the world at {newest.world}"
            )
    return ""
