"""`elasticrun list`, which shows this user's jobs, running, ended or lost, and `elasticrun prune`,
which removes the run folders of ended jobs.

Rows of jobs that run come from their masters, other rows from run folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser, add_group
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.table import TRUST
from elasticrun.cli.verbs.columns import duration, lines, table_width
from elasticrun.cli.verbs.masters import (
    NO_JOBS,
    MasterQuery,
    NoStatus,
    published_here,
    query_all,
    query_to,
)
from elasticrun.config import EXIT_USAGE, Tls
from elasticrun.core.words import plain, plural
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import ENDED, JobRecord, RunFolder
from elasticrun.jobs.backend import RequestFailed, command_line, submission, was_submitted
from elasticrun.jobs.backends import updated_by_backends
from elasticrun.jobs.connection import NotAnswered, master_of
from elasticrun.jobs.kubernetes import record_end
from elasticrun.jobs.rows import SAVED, SUSPENDED, JobRow, as_json, live_row, row_of

TITLES: Final = ("NAME", "ID", "STATE", "NODES", "STEP", "RESTARTS", "AGE", "WHERE")

MAX_ENDED: Final = 20
"""Number of newest ended jobs that are listed without --all."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: Sequence[str]) -> int:
    """Run `elasticrun list`. Returns 1 if a master on this host does not answer. Raises UsageError
    for unreadable TLS or token files."""
    made = Parser(prog=f"{PROG} list", description="List your jobs: running, ended, or lost.")
    text = f"also list ended jobs beyond the newest {MAX_ENDED}"
    made.add_argument("-A", "--all", action="store_true", help=text)
    add_output(made)
    variables = trust.withdraw()
    add_group(made, "for jobs with a token or TLS", TRUST, variables)
    ns = made.parse_args(argv)
    flags = FlagValues(ns, variables)
    rows, silent = local_rows(trust.token(flags), trust.tls(flags))
    rows = updated_by_backends(rows, variables)
    if not ns.all:
        over = [row for row in rows if row.state in ENDED][MAX_ENDED:]
        rows = [row for row in rows if row not in over]
    for sentence in silent:
        print(f"{made.prog}: {sentence}", file=sys.stderr)
    if ns.output == "json":
        print(as_json(rows))
    elif rows:
        print(*lines(TITLES, [list_cells(row) for row in rows], table_width()), sep="\n")
        for row in rows:
            if (row.where, row.state) == ("k8s", "submitted") and row.reason:
                print(f"{row.name}: {plain(row.reason)}")
    elif not silent:
        print(NO_JOBS)
    return 1 if silent else 0


def add_output(made: Parser) -> None:
    """Add the flag for the output format."""
    text = "json: for programs (docs/jobs.md)"
    made.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)


def local_rows(token: str = "", files: Tls | None = None) -> tuple[list[JobRow], list[str]]:
    """The jobs of this user that this host knows, those that have ended last, and the newest first;
    and a sentence for each master on this host that does not answer."""
    silent = []
    try:
        folders = index.all_runs(index.runs_root(os.environ))
    except OSError as wrong:
        silent.append(f"the run folders cannot be read: {wrong}")
        folders = []
    with asyncio.Runner() as runner:
        rows, no_reply = _rows_from_masters(token, files, [*_masters_elsewhere(folders)], runner)
    live = {os.path.realpath(row.run) for row in rows if row.run}
    left = [folder for folder in folders if os.path.realpath(folder.path) not in live]
    rows += [row_of(folder, job) for folder in left if (job := folder.job())]
    rows.sort(key=lambda row: (row.state in ENDED, row.age))
    return rows, [*silent, *no_reply]


def _masters_elsewhere(folders: Iterable[RunFolder]) -> Iterator[MasterQuery]:
    """The queries to the masters of jobs that may run elsewhere: those not started as local."""
    for folder in folders:
        job = folder.job()
        if job is None or job.where == "local" or folder.state() in ENDED:
            continue
        with contextlib.suppress(NotAnswered):
            master = master_of(folder)
            yield MasterQuery(master.endpoint, master.reader, run=str(folder.path))


def _rows_from_masters(
    token: str, files: Tls | None, away: Sequence[MasterQuery], runner: asyncio.Runner
) -> tuple[list[JobRow], list[str]]:
    """Rows from the masters' replies, and a sentence for each master on this host that does not
    answer, unless its job has ended meanwhile. A silent master elsewhere may have exited with its
    nodes or be unreachable, so its backend or run folder provides the row."""
    try:
        masters = published_here()
        queries = [query_to(one, token, files) for one in masters if one.process.is_local]
        pages, no_reply = query_all(queries, runner) if queries else ([], [])
    except NoStatus as wrong:
        return [], [str(wrong)]
    taken = {one.endpoint for one in queries}  # another host may use the same loopback address
    far = {one.endpoint: one for one in masters if one.endpoint not in taken}
    others = [query_to(one, token, files) for one in far.values()]
    here = {os.path.realpath(one.run) for one in (*queries, *others) if one.run}
    away = [*others, *(one for one in away if os.path.realpath(one.run) not in here)]
    answers = query_all(away, runner)[0] if away else []
    pages += [(at, page) for at, page in answers if at not in far or page.job_id == far[at].job_id]
    folders = {one.endpoint: one.run for one in (*away, *queries)}
    silent = [one.sentence for one in no_reply if not has_ended(folders[one.where])]
    return [live_row(page, endpoint, folders[endpoint]) for endpoint, page in pages], silent


def has_ended(run: str) -> bool:
    """Whether the job of this run folder has ended; False for "", an unknown folder."""
    return bool(run) and RunFolder(Path(run)).state() in ENDED


def list_cells(row: JobRow) -> tuple[str, ...]:
    """The cells of a table row. For a job that was saved, the step is the one in storage."""
    has_saved = row.state in (SAVED, SUSPENDED, "stopped") and row.saved >= 0
    step = row.saved if has_saved or row.continued_by else row.step
    at = f" at step {row.saved}" if has_saved else ""
    return (
        row.name,
        row.run_id or "-",
        row.state + (f" by {row.continued_by}" if row.continued_by else at),
        f"{row.nodes}/{row.max_nodes}" if row.max_nodes else "-",
        str(step) if step >= 0 else "-",
        str(row.restarts),
        duration(row.age),
        row.where,
    )


def ended_job_lines(folder: RunFolder, job: JobRecord, row: JobRow) -> list[str]:
    """Lines about a job without an answering master, from its run folder and its `row`."""
    again = row.state in (*ENDED, SUSPENDED) and row.state not in ("succeeded", "continued")
    resume = (
        f"{PROG} resume {job.name}"
        if was_submitted(folder)
        else f"run it again: {command_line(job)}"
    )
    fields = {
        "outcome": row.reason,
        "progress": folder.newest_metrics(),
        "command": " ".join(job.command),
        "commit": job.git_commit,
        "run folder": row.run,
        "to resume": resume if again else "",
        "continued by": f"run {row.continued_by}; see {PROG} status {row.continued_by}"
        if row.continued_by
        else "",
    }
    found = [*lines(TITLES, [list_cells(row)], table_width()), ""]
    found += [f"{name}: {text}" for name, text in fields.items() if text]
    if row.state in ("failed", "saved", "lost") and (error := folder.error(since=job.began)):
        found += ["", *error.rstrip("\n").split("\n")]
    return found


# ---------------------------------------------------------------- prune


def prune(argv: Sequence[str]) -> int:
    """Run `elasticrun prune`. Returns 1 if nothing is removed because a job is unknown or has not
    ended, or a folder cannot be removed. Raises UsageError."""
    made = Parser(
        prog=f"{PROG} prune",
        description="Remove the run folders of jobs that have ended. A folder that you "
        "chose yourself (--run-dir) stays, but is no longer listed.",
    )
    text = "jobs that ended at least this long ago: 90s, 30m, 12h, 7d, 2w"
    made.add_argument("--since", metavar="AGE", default="", help=text)
    made.add_argument("jobs", nargs="*", metavar="JOB", help="these jobs, by full name")
    add_output(made)
    ns = made.parse_args(argv)
    if not (ns.since or ns.jobs):
        raise UsageError("prune: give --since 7d, or the names of jobs", EXIT_USAGE)
    since = parse_age(ns.since, "--since") if ns.since else 0.0
    try:
        root = index.runs_root(os.environ)
        named = [index.find(root, job, whole="prune") for job in ns.jobs]
        stay = _in_clusters(named or index.all_runs(root), since)
        only = _selected(named, ns.jobs)
        removed = index.prune(root, since, only)
    except (OSError, index.NoRun, RequestFailed) as wrong:
        print(f"{made.prog}: {wrong}", file=sys.stderr)
        return 1
    placed = [str(stays) for stays in removed.values() if stays]
    if ns.output == "json":
        names = [name for name, stays in removed.items() if not stays]
        print(as_json({"removed": names, "placed": placed}))
        return 0
    for name, stays in removed.items():
        print(f"{stays} is no longer listed, but stays" if stays else f"removed {name}")
        if name in stay:
            print(f"  its objects in the cluster stay until `{stay[name]}`")
    print(f"{plural(len(removed) - len(placed), 'run folder')} removed from {root}")
    return 0


def _in_clusters(runs: Sequence[RunFolder], since: float) -> dict[str, str]:
    """The command that deletes the cluster objects of each ended job in Kubernetes, by the name of
    its run folder. First queries the clusters about jobs that are old enough and whose end is not
    recorded here. A job that its cluster no longer has becomes lost. Raises OSError."""
    known = [
        (run, job)
        for run in runs
        if (job := run.job()) and job.where == "k8s" and was_submitted(run)
    ]
    old = time.time() - since
    rows = [row_of(run, job) for run, job in known if run.state() not in ENDED and job.began < old]
    for row in updated_by_backends(rows, trust.withdraw()) if rows else ():
        if row.state == "lost":
            record_end(RunFolder(Path(row.run)), "lost", row.reason, ended=time.time() - row.age)
    stay = {}
    for run, job in known:
        if run.state() in ("succeeded", "failed"):
            at = submission(run)
            words = [PROG, "delete", job.name, "-n", at.namespace]
            words += ["--context", at.context] if at.context else []
            stay[run.path.name] = shlex.join(words)
    return stay


def _selected(found: Sequence[RunFolder], jobs: Sequence[str]) -> list[Path] | None:
    """The folders of these jobs; None: all. Raises NoRun if a job has not ended."""
    for folder, job in zip(found, jobs, strict=True):
        if (state := folder.state()) not in ENDED:
            raise index.NoRun(f"job {job} is {state}: `{PROG} stop {job}` ends it")
    return [folder.path for folder in found] if jobs else None


def parse_age(text: str, flag: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d`, `2w`. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise UsageError(f"{flag}={text}: write 90s, 30m, 12h, 7d or 2w", EXIT_USAGE)
    return float(found[1]) * _UNITS[found[2]]
