"""Which job is meant, and the asking of its master.

A job is named by its id, by the beginning of it as far as no other job of this user here begins so,
or by its master's host:port; where one job alone is there, it need not be named. Who has the job's
token proves it; else what the master has left in this user's folder does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser, add_group
from elasticrun.cli.settings import Asked
from elasticrun.cli.table import TRUST
from elasticrun.cli.verbs.status import NoStatus, name_of, parse_endpoint
from elasticrun.config import Tls
from elasticrun.core.words import nearest
from elasticrun.jobs.line import JobLine, JobMaster, NotAnswered, master_of, meant_here
from elasticrun.jobs.rows import row_of
from elasticrun.runs import index
from elasticrun.runs.layout import ENDED, RunFolder
from elasticrun.wire import auth
from elasticrun.wire.types import Endpoint
from elasticrun.wire.user_folder import Published, published, user_folder

if TYPE_CHECKING:
    import argparse

MOST_NAMED: Final = 8
"""Jobs that a sentence lists."""


def find(job: str, token: str = "", files: Tls | None = None) -> JobMaster:
    """The master of the job that is meant. NotAnswered."""
    try:
        folder = user_folder(os.environ)
        here = published(folder)
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
        return _master(endpoint, ours[0] if ours and not token else None, token, files)
    if job and not meant_here(job, here):
        with contextlib.suppress(OSError, index.NoRun):
            run = index.find(index.runs_root(os.environ), job)
            if run.state(time.time()) not in ENDED:
                return master_of(run)
    one = _pick(job, here)
    return _master(one.endpoint, one, "" if one.operator else token, files if one.tls else None)


def _is_endpoint(job: str) -> bool:
    return job.rpartition(":")[2].isdecimal() and ":" in job


def _master(endpoint: Endpoint, own: Published | None, token: str, files: Tls | None) -> JobMaster:
    if own is not None and not token:
        return JobMaster(endpoint, own.reader, own.operator, files, own.run)
    run = own.run if own is not None else ""
    if not token:
        return JobMaster(endpoint, files=files, run=run)
    return JobMaster(endpoint, auth.reader_token(token), auth.operator_token(token), files, run)


def _pick(job: str, here: Sequence[Published]) -> Published:
    """The one that is meant, of those that run here."""
    found = meant_here(job, here)
    if len(found) == 1:
        return found[0]
    listed = sorted(name_of(one.job_id, str(one.endpoint)) for one in found or here)
    shown = ", ".join(listed[:MOST_NAMED]) + (", ..." if len(listed) > MOST_NAMED else "")
    if found:
        raise NotAnswered(f"several jobs are meant: {shown}; name one, or its host:port")
    if job and (end := ended(job)):
        raise NotAnswered(end)
    if not job:
        raise NotAnswered("no job of yours runs on this host: name its master's host:port")
    hint = nearest(job, [one.job_id for one in here])
    raise NotAnswered(f"no job {job} of yours runs on this host{hint or _running(shown)}")


def left_by(job: str) -> RunFolder | None:
    """The run folder of a job that has ended, "" for the last; None if it runs here, or is not
    known."""
    try:
        if meant_here(job, published(user_folder(os.environ))):
            return None
        root = index.runs_root(os.environ)
        folder = index.find(root, job) if job else next(iter(index.all_runs(root)), None)
        record = folder.job() if folder is not None else None
        if record is None or folder is None or record.where != "local":
            return folder
        return folder if folder.state(time.time()) in ENDED else None
    except (OSError, index.NoRun):
        return None


def ended(job: str) -> str:
    """What its run folder says of a job that does not run here; "" where there is none."""
    try:
        folder = index.find(index.runs_root(os.environ), job)
    except (OSError, index.NoRun):
        return ""
    record, now = folder.job(), time.time()
    if record is None or (row := row_of(folder, record, now)).state not in ENDED:
        return ""
    why = f": {row.reason}" if row.reason else ""
    return f"job {record.name} has ended ({row.state}){why}; see {row.run}"


def _running(shown: str) -> str:
    return f"; there is {shown}" if shown else ": name its master's host:port"


# ---------------------------------------------------------------- a verb


def parser(verb: str, does: str) -> Parser:
    """The arguments that all have, but for the job, which comes last."""
    return Parser(prog=f"{PROG} {verb}", description=does)


def add_job(made: Parser, environ: Mapping[str, str]) -> None:
    """Which job, how it is printed, and what proves that we may ask."""
    text = (
        "the job's id, the beginning of it, or its master's host:port; not needed for the only one"
    )
    made.add_argument("job", nargs="?", default="", metavar="JOB", help=text)
    add_way(made, environ)


def add_way(made: Parser, environ: Mapping[str, str]) -> None:
    """How it is printed, and what proves that we may ask."""
    text = "json: for programs, as docs/sight.md has it"
    made.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)
    add_group(made, "of a job that has a token or TLS", TRUST, environ)


def run(
    made: Parser, argv: Sequence[str], does: Callable[[JobLine, argparse.Namespace], int]
) -> int:
    """Parse, find the job and do it; 1 with a sentence where nobody answers. UsageError for files
    that cannot be read."""
    asked = parsed(made, argv)
    try:
        return reach(asked, does)
    except NotAnswered as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 1


def parsed(made: Parser, argv: Sequence[str]) -> Asked:
    """The arguments, with those that all have."""
    variables = trust.withdraw()
    add_job(made, variables)
    return Asked(made.parse_args(argv), variables)


def reach(asked: Asked, does: Callable[[JobLine, argparse.Namespace], int]) -> int:
    """Find the job's master and do it there. NotAnswered, UsageError."""
    master = find(asked.ns.job, trust.token(asked), trust.tls(asked))
    with asyncio.Runner() as runner:
        return does(JobLine(master, runner), asked.ns)


def as_json(value: Any) -> str:
    """Records as a person or a program reads them."""
    return json.dumps(msgspec.to_builtins(value), indent=1)
