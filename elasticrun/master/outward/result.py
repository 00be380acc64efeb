"""What has become of a job, as one file for programs: `result.json`, among its incidents."""

from __future__ import annotations

import time

from msgspec import Struct

from elasticrun.config import EXIT_OK, EXIT_SAVED
from elasticrun.core.events import JobOver
from elasticrun.core.sight.picture import Goodput, Picture
from elasticrun.master.outward.report import lasted

STATES = {EXIT_OK: "done", EXIT_SAVED: "saved"}
"""Exit codes of jobs that have not failed."""


class ShortRow(Struct, frozen=True):
    """An incident; as in `IncidentRow`, and how long nothing was trained."""

    number: int
    cause: str
    sentence: str
    seconds: float
    steps_lost: int
    slot_seconds: float
    cost: float


class JobResult(Struct, frozen=True):
    """Times are seconds since 1970."""

    job: str
    state: str  # done, failed, saved (it is to be started again)
    exit_code: int
    reason: str
    failure: str  # which rank failed first in the last round that failed, and how; "": none did
    started: float
    ended: float
    nodes: int  # that had a place in the last round
    world_size: int
    restarts: int  # that were charged
    step: int  # the newest that was told; -1: none
    goodput: Goodput | None
    incidents: tuple[ShortRow, ...]  # the newest last


def result_of(end: JobOver, found: Picture) -> JobResult:
    """At the job's end."""
    status, now = found.status, time.time()
    rows = (
        ShortRow(
            *(row.number, row.cause, row.sentence, lasted(row)),
            *(row.steps_lost, row.slot_seconds, row.cost),
        )
        for row in found.incidents
    )
    return JobResult(
        job=status.job_id,
        state=STATES.get(end.exit_code, "failed"),
        exit_code=end.exit_code,
        reason=end.reason,
        failure=status.last_failure,
        started=now - status.age,
        ended=now,
        nodes=sum(node.group_rank >= 0 for node in status.nodes),
        world_size=status.world_size,
        restarts=status.restart_count,
        step=status.step,
        goodput=found.goodput,
        incidents=tuple(rows),
    )
