"""`elasticrun incidents [JOB] [N]`: the interruptions of a job's training, and their cost.

For a job that has ended, they come from the files that its master left.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Final

from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import FlagValues
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.host.runs.layout import INCIDENTS
from elasticrun.jobs.backends import updated_by_backends
from elasticrun.jobs.connection import JobConnection, NotAnswered
from elasticrun.jobs.rows import as_json, row_of
from elasticrun.jobs.running.master_lookup import add_connection, ended_run, find_master
from elasticrun.master.outward.report import page, table
from elasticrun.master.outward.run_files import read

MAX_DIGITS: Final = 4
"""Digits up to which a single number means an incident and not a job."""


def main(argv: Sequence[str]) -> int:
    """The `incidents` verb. Prints a sentence and returns 1 if neither a master nor a run folder
    has the incidents. Raises UsageError for unreadable TLS or token files."""
    made = Parser(
        prog=f"{PROG} incidents",
        description="Show what has interrupted the training of a job that runs, or has ended here.",
    )
    text = "the job, as `elasticrun status` names it; the number of one incident to show in full"
    made.add_argument("words", nargs="*", metavar="JOB N", help=text)
    variables = trust.withdraw()
    add_connection(made, variables)
    ns = made.parse_args(argv)
    if len(ns.words) > 2 or (len(ns.words) == 2 and not ns.words[1].isdecimal()):
        made.error("expected a job, and the number of one of its incidents")
    job, number = job_and_number(ns.words)
    try:
        rows, now = _rows(job, FlagValues(ns, variables))
        print(_output_text(rows, number, now, as_text=ns.output == "text"), end="")
    except NotAnswered as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 1
    return 0


def job_and_number(words: Sequence[str]) -> tuple[str, int]:
    """The meaning of `[JOB] [N]`: the job ("": the only one) and the incident (0: all)."""
    if len(words) == 2:
        return words[0], int(words[1])
    if words and words[0].isdecimal() and len(words[0]) <= MAX_DIGITS:
        return "", int(words[0])
    return (words[0] if words else ""), 0


def _rows(job: str, flags: FlagValues) -> tuple[Sequence[IncidentRow], str]:
    """The incidents, and a sentence about what holds up a running job now, or why a job is lost;
    else "". The incidents of the current start come from the master, all others from files. Raises
    NotAnswered."""
    folder = ended_run(job)
    if folder is not None:
        now, record = time.time(), folder.job()
        rows = updated_by_backends([row_of(folder, record)], os.environ) if record else []
        lost = [f"the job is lost: {row.reason}" for row in rows if row.state == "lost"]
        return read(folder.path / INCIDENTS, now), "".join(lost)
    master = find_master(job, trust.token(flags), trust.tls(flags))
    with asyncio.Runner() as runner:
        line = JobConnection(master, runner)
        picture = line.picture()
    left = read(line.run.path / INCIDENTS, time.time()) if line.run is not None else []
    earlier = [row for row in left if row.age > picture.status.age]  # from starts before this one
    verdict = picture.verdict
    held = f"held up now: {verdict.sentence}; {verdict.then}" if verdict is not None else ""
    return [*earlier, *picture.incidents], held


def _output_text(rows: Sequence[IncidentRow], number: int, now: str, *, as_text: bool) -> str:
    if not number:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        return table(rows, columns, now) if as_text else as_json(list(rows)) + "\n"
    for row in reversed(rows):  # each start numbers its incidents from 1
        if row.number == number:
            return page(row) if as_text else as_json(row) + "\n"
    raise NotAnswered(f"there is no incident {number}: the job has {len(rows)}")
