"""Jobs that have ended on this host, as small files in the user's own run folder.

A master that ends writes one, `elasticrun status` lists them until `--prune` removes them. The
newest are kept. Nothing here is needed for a job to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from elasticrun.wire.messages import JobStatus
from elasticrun.wire.run_folder import MAX_FILE_BYTES
from elasticrun.wire.types import Endpoint

MOST: Final = 50
"""Ended jobs that are kept; a new one takes the place of the oldest."""

MAX_REASON: Final = 2000
"""Characters kept of why a job ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a job."""

    job_id: str
    endpoint: str  # of its master, which is the name of a static job
    state: str  # done, failed, saved (to be started again), lost (its agents have gone)
    reason: str
    nodes: int  # in its last round
    max_nodes: int
    step: int  # -1: none was told of
    restart_count: int
    max_restarts: int
    age: float  # seconds that it took
    ended: float  # seconds since 1970


def of(page: JobStatus, endpoint: Endpoint, state: str, reason: str, nodes: int = 0) -> Ended:
    """What is to be kept of a job, at its end. `nodes`: in its last round, if that is known; on the
    page those that have left are missing."""
    return Ended(
        job_id=page.job_id,
        endpoint=str(endpoint),
        state=state,
        reason=(page.outcome or reason)[:MAX_REASON],
        nodes=nodes or sum(node.group_rank >= 0 for node in page.nodes),
        max_nodes=page.max_nodes,
        step=page.step,
        restart_count=page.restart_count,
        max_restarts=page.max_restarts,
        age=page.age,
        ended=time.time(),
    )


def _folder(run_folder: Path) -> Path:
    return run_folder / "ended"


def _files(run_folder: Path) -> list[Path]:
    """Oldest first, by the moment in their names."""
    return sorted(_folder(run_folder).glob("*.json"))


def write(run_folder: Path, job: Ended) -> None:
    """Keep it, and let go of the oldest where there are too many. OSError."""
    folder = _folder(run_folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{int(job.ended * 1e6):020d}-{os.getpid()}.json"
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(job), file)
    draft.rename(path)
    for old in _files(run_folder)[:-MOST]:
        with contextlib.suppress(OSError):
            old.unlink()


def read(run_folder: Path) -> list[Ended]:
    """The jobs that have ended, the newest first."""
    found = (_read(path) for path in reversed(_files(run_folder)))
    return [job for job in found if job is not None]


def prune(run_folder: Path) -> int:
    """Remove all of them; how many there were. OSError."""
    files = _files(run_folder)
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _read(path: Path) -> Ended | None:
    try:
        with path.open() as file:
            told: Any = json.loads(file.read(MAX_FILE_BYTES))
        job = Ended(**told)
    except (OSError, ValueError, TypeError):
        return None
    kinds = {"str": (str,), "int": (int,), "float": (int, float)}
    right = all(type(getattr(job, one.name)) in kinds[str(one.type)] for one in fields(job))
    return job if right else None
