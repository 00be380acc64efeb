"""Finds the job that the user means, and connects to its master.

The user names a job as `jobs.connection.find_job` describes, or by its master's host:port. If only
one job runs here, the name is optional. The job's token authenticates the user; without it, the
credentials that the master left in this user's folder do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser, add_group
from elasticrun.cli.settings import FlagValues
from elasticrun.cli.table import TRUST
from elasticrun.cli.verbs.masters import NoStatus, parse_endpoint
from elasticrun.config import Tls
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import ENDED, RunFolder
from elasticrun.host.user_folder import Published, published, user_folder
from elasticrun.jobs.connection import (
    JobConnection,
    JobMaster,
    NotAnswered,
    UserJob,
    find_job,
    master_of,
)
from elasticrun.jobs.rows import SUSPENDED, row_of
from elasticrun.jobs.running.status import name_of, no_job
from elasticrun.wire import auth
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    import argparse

JOB: Final = "its name or run folder, or a unique prefix of one"
"""The help text for the JOB argument."""


def find_master(job: str, token: str = "", files: Tls | None = None) -> JobMaster:
    """The master of the job that the user means. Raises NotAnswered."""
    try:
        here = published(user_folder(os.environ))
    except OSError as wrong:
        here = []
        if not _is_endpoint(job):
            raise NotAnswered(f"the user's folder cannot be read: {wrong}") from None
    if _is_endpoint(job):
        try:
            endpoint = parse_endpoint(job)
        except NoStatus as wrong:
            raise NotAnswered(str(wrong)) from None
        ours = [one for one in here if one.port == endpoint.port]
        return _with_credentials(endpoint, ours[0] if ours and not token else None, token, files)
    found = find_job(job) if job else UserJob(_only_master(here))
    if one := found.master:
        return _with_credentials(
            one.endpoint, one, "" if one.operator else token, files if one.tls else None
        )
    if found.run is None:
        raise NotAnswered(no_job(job))
    if end := end_sentence(found.run):
        raise NotAnswered(end)
    return master_of(found.run)


def _is_endpoint(job: str) -> bool:
    return job.rpartition(":")[2].isdecimal() and ":" in job


def _with_credentials(
    endpoint: Endpoint, own: Published | None, token: str, files: Tls | None
) -> JobMaster:
    if own is not None and not token:
        return JobMaster(endpoint, own.reader, own.operator, files, own.run)
    run = own.run if own is not None else ""
    if not token:
        return JobMaster(endpoint, files=files, run=run)
    return JobMaster(endpoint, auth.reader_token(token), auth.operator_token(token), files, run)


def _only_master(here: Sequence[Published]) -> Published:
    """The master of the only job that runs here, if the user named none. Raises NotAnswered."""
    if len(here) == 1:
        return here[0]
    if not here:
        raise NotAnswered("no job of yours runs on this host: give the master's host:port")
    shown = index.first_names(name_of(one.job_id, str(one.endpoint), one.name) for one in here)
    raise NotAnswered(f"several jobs match: {shown}; name one, or give its host:port")


def ended_run(job: str) -> RunFolder | None:
    """The run folder of a job that has ended ("": the newest one) or whose master runs elsewhere;
    None if it runs here or is unknown. Raises NotAnswered if the name is ambiguous."""
    with contextlib.suppress(OSError):
        if not job and published(user_folder(os.environ)):
            return None
        runs = index.all_runs(index.runs_root(os.environ)) if not job else ()
        found = find_job(job, newest=True) if job else UserJob(run=next(iter(runs), None))
        if found.master or found.run is None:
            return None
        record = found.run.job()
        is_ours = record is not None and record.where == "local"
        return None if is_ours and found.run.state() not in ENDED else found.run
    return None


def end_sentence(folder: RunFolder) -> str:
    """A sentence about a job that does not run, from its run folder; "" for a job that may run."""
    record = folder.job()
    if record is None or (row := row_of(folder, record)).state not in (*ENDED, SUSPENDED):
        return ""
    why = f": {row.reason}" if row.reason else ""
    return f"job {record.name} has ended ({row.state}){why}; see {row.run}"


# ---------------------------------------------------------------- a verb


def parser(verb: str, does: str) -> Parser:
    """A parser for a verb's own arguments; `parse_flags` adds those of all verbs, JOB last."""
    return Parser(prog=f"{PROG} {verb}", description=does)


def add_job(made: Parser, environ: Mapping[str, str]) -> None:
    """Add the arguments for the job, the output format and the credentials."""
    text = f"{JOB}, or its master's host:port; optional if there is only one"
    made.add_argument("job", nargs="?", default="", metavar="JOB", help=text)
    add_connection(made, environ)


def add_connection(made: Parser, environ: Mapping[str, str]) -> None:
    """Add the arguments for the output format and the credentials."""
    text = "json: for programs (docs/sight.md)"
    made.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)
    add_group(made, "for a job with a token or TLS", TRUST, environ)


def run(
    made: Parser, argv: Sequence[str], does: Callable[[JobConnection, argparse.Namespace], int]
) -> int:
    """Parse the arguments, find the job and call `does`. Prints a sentence and returns 1 if no
    master answers. Raises UsageError for unreadable TLS or token files."""
    flags = parse_flags(made, argv)
    try:
        return with_master(flags, does)
    except NotAnswered as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 1


def parse_flags(made: Parser, argv: Sequence[str]) -> FlagValues:
    """Add the arguments that all verbs share, and parse."""
    variables = trust.withdraw()
    add_job(made, variables)
    return FlagValues(made.parse_args(argv), variables)


def with_master(flags: FlagValues, does: Callable[[JobConnection, argparse.Namespace], int]) -> int:
    """Find the job's master and call `does` with it. Raises NotAnswered, UsageError."""
    master = find_master(flags.ns.job, trust.token(flags), trust.tls(flags))
    with asyncio.Runner() as runner:
        return does(JobConnection(master, runner), flags.ns)
