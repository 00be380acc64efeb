"""The list of jobs that `elasticrun status` begins with, a line each: those that run, then those
that have ended.

A name is never broken or cut, for then it can neither be read nor copied: one that leaves the rest
no room in the width of the terminal has a line of its own, as in `df`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from elasticrun.wire.ended import Ended
from elasticrun.wire.page import JobStatus

TITLES: Final = ("JOB", "STATE", "NODES", "STEP", "STEP AGE", "RESTARTS", "AGE")

Row = tuple[str, ...]


def name_of(job_id: str, where: str) -> str:
    """A static job has no id of its own: all of them are called "none", as under torchrun."""
    return f"of {where}" if job_id in ("", "none") and where else job_id


def running(page: JobStatus, where: str) -> Row:
    """A job whose master at `where` has answered."""
    placed = sum(node.group_rank >= 0 for node in page.nodes)
    return (
        name_of(page.job_id, where),
        page.phase,
        f"{placed}/{page.max_nodes}",
        *_step(page.step, page.step_age),
        f"{page.restart_count}/{page.max_restarts}",
        duration(page.age),
    )


def over(job: Ended, now: float) -> Row:
    """A job that has ended; its ages are since then. `now`: seconds since 1970."""
    since = max(0.0, now - job.ended)
    return (
        name_of(job.job_id, job.endpoint),
        job.state,
        f"{job.nodes}/{job.max_nodes}",
        *_step(job.step, since),
        f"{job.restart_count}/{job.max_restarts}",
        duration(job.age + since),
    )


def _step(step: int, age: float) -> tuple[str, str]:
    return (str(step), duration(age)) if step >= 0 else ("-", "-")


def duration(seconds: float) -> str:
    """`45s`, `12m`, `3h05m`, `2d04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}h"


def lines(rows: Sequence[Row], columns: int) -> list[str]:
    """The table, no wider than `columns` but for a name that is wider by itself."""
    table = [TITLES, *rows]
    most = [max(len(row[at]) for row in table) for at in range(1, len(TITLES))]
    room = columns - sum(width + 2 for width in most)
    wide = max((len(row[0]) for row in table if len(row[0]) <= room), default=0)
    drawn = []
    for row in table:
        if len(row[0]) > wide:
            drawn.append(row[0])
        name = row[0] if len(row[0]) <= wide else ""
        rest = (word.ljust(width) for word, width in zip(row[1:], most, strict=True))
        drawn.append("  ".join((name.ljust(wide), *rest)).rstrip())
    return drawn
