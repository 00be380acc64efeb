"""What verbs print with `-o json`, the same for every backend.

Every verb uses the same words for a job's state.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from elasticrun.host.runs.layout import ENDED, JobRecord, RunFolder
from elasticrun.wire.messages import JobStatus
from elasticrun.wire.types import Endpoint

OVER: Final = "ended"
"""The state of a job that has ended, if its outcome is unknown here."""

SUSPENDED: Final = "suspended"
"""The state of a suspended job, whether or not it saved a step."""

SAVED: Final = "saved"
"""The state of a job that has ended and resumes from a step in storage when it starts again."""

_STATES: Final = {"gathering": "waiting", "stopping": "waiting", "running": "running"}
"""A job's state, by the phase of its round."""


class JobRow(Struct, frozen=True, kw_only=True):
    """What `elasticrun list -o json` prints of a job; its fields are a stable schema."""

    name: str
    state: str  # as in `RunFolder.state`, or from its master
    where: str  # local, ssh, slurm, k8s
    id: str = ""  # its rendezvous id; in a cluster NAMESPACE/NAME
    run_id: str = ""  # 8 hexadecimal digits that identify its run folder; verbs take it
    user: str = ""
    host: str = ""  # the host that launched it
    endpoint: str = ""  # of its master
    run: str = ""  # its run folder
    nodes: int = 0  # nodes in the current round
    max_nodes: int = 0
    step: int = -1  # the newest reported; -1: none
    saved: int = -1  # the newest in storage when it ended; -1: none, or unknown
    continued_by: str = ""  # `run_id` of the run in which the same command has continued it
    restarts: int = 0
    age: float = 0.0  # seconds since it began, including suspensions
    reason: str = ""  # why it waits, or how it ended


class JobPage(JobRow, frozen=True, kw_only=True):
    """What `elasticrun status -o json` prints of a job: a row of `list`, and more. In a cluster
    also `kind`, `namespace`, `conditions`, `pods` and `events`."""

    exit_code: int | None = None  # of its launcher, after the end
    page: str = ""  # URL for a browser, while it runs here; good once, for 15 minutes
    tensorboard: str = ""  # URL
    master: JobStatus | None = None  # its master's status; null if it does not run


class DoneRow(Struct, frozen=True, kw_only=True):
    """What a verb that changes a job prints with `-o json`."""

    name: str
    done: str  # a sentence
    run_dir: str = ""  # the job's run folder; "": not known here
    on: str = ""  # the place, of submit and in a cluster: local, ssh, slurm, k8s


def row_of(folder: RunFolder, job: JobRecord) -> JobRow:
    """The row from the job's run folder."""
    result = folder.result()
    state = result.state if result else folder.state()
    return JobRow(
        name=job.name,
        state=SUSPENDED if result and result.suspended else state,
        where=job.where,
        id=job.id,
        run_id=folder.id,
        user=job.user,
        host=job.host,
        endpoint=job.endpoint,
        run=str(folder.place),
        nodes=result.nodes if result else 0,
        max_nodes=int(job.nodes.rpartition(":")[2] or 0),
        step=folder.last_step(),
        saved=result.saved if result else -1,
        continued_by=result.continued_by if result else "",
        restarts=result.restarts if result else 0,
        age=job.age(),
        reason=result.reason if result else folder.end_reason(job) if state in ENDED else "",
    )


def state_of(status: JobStatus, run: str = "") -> str:
    """The state that a master's status means; `run`: the job's run folder, if known."""
    if is_hanging(status):
        return "hangs"
    if word := _STATES.get(status.phase):
        return word
    state = RunFolder(Path(run)).state() if run else ""
    return state if state in ENDED else OVER


def is_hanging(status: JobStatus) -> bool:
    """Whether a running job hangs. A weak verdict does not count: the rank may well be making
    progress."""
    return status.phase == "running" and status.hang not in ("", "weak")


def live_row(status: JobStatus, endpoint: Endpoint | str, run: str) -> JobRow:
    """The row from the status of the master at `endpoint`; `run`: the job's run folder, "" if
    unknown."""
    folder = RunFolder(Path(run or os.devnull))
    job = folder.job()
    return JobRow(
        name=job.name if job else status.name or status.job_id,
        state=state_of(status, run),
        where=job.where if job else "local",
        id=status.job_id,
        run_id=folder.id if job else "",
        user=job.user if job else "",
        host=job.host if job else os.uname().nodename,
        endpoint=str(endpoint),
        run=str(folder.place) if job else "",
        nodes=sum(node.group_rank >= 0 for node in status.nodes),
        max_nodes=status.max_nodes,
        step=status.step if status.step >= 0 else folder.last_step(),
        restarts=status.restart_count,
        age=job.age() if job else status.age,
        reason=status.outcome or status.reason or status.verdict,
    )


def page_of(row: JobRow, **more: object) -> JobPage:
    """The row with more fields of the same job."""
    return JobPage(**asdict(row) | more)


class NodeRow(Struct, frozen=True, kw_only=True):
    """What `elasticrun top nodes --on k8s -o json` prints of a node of a cluster. CPU in cores,
    memory in MiB; taken: requested by pods that are placed there; -1: unknown."""

    node: str
    state: str  # ready, not ready, cordoned
    gpus: int = 0
    gpus_taken: int = -1
    cpus: float = 0.0
    cpus_taken: float = -1.0
    cpus_used: float = -1.0
    memory: int = 0
    memory_taken: int = -1
    memory_used: int = -1


def as_json(value: Any) -> str:
    """Indented JSON, readable by people and programs."""
    return json.dumps(msgspec.to_builtins(value), indent=1)
