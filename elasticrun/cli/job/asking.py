"""Which job is meant, and the asking of its master.

A job is named by its id, by the beginning of it as far as no other job of this user here begins so,
or by its master's host:port; where one job alone is there, it need not be named. Who has the job's
token proves it; else what the master has left in this user's folder does.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elasticrun.cli import trust
from elasticrun.cli.flags import PROG, Parser, add_group
from elasticrun.cli.settings import Asked
from elasticrun.cli.table import TRUST
from elasticrun.cli.verbs.status import NoStatus, name_of, parse_endpoint
from elasticrun.config import Tls
from elasticrun.core.sight.picture import Picture
from elasticrun.core.words import nearest
from elasticrun.runs import index
from elasticrun.runs.layout import ENDED
from elasticrun.wire import auth
from elasticrun.wire.messages import Reply, Request, Role
from elasticrun.wire.types import Endpoint, WireError
from elasticrun.wire.user_folder import Published, published, user_folder

if TYPE_CHECKING:
    import argparse

ANSWER_LIMIT: Final = 20.0
"""Seconds to wait for an answer: longer than the master itself waits for the ranks."""

MOST_NAMED: Final = 8
"""Jobs that a sentence lists."""


class NotAnswered(Exception):
    """Nobody is asked, or nobody answers; the text is a sentence."""


@dataclass(frozen=True, slots=True)
class JobMaster:
    """Whom to ask, and by what it knows us."""

    endpoint: Endpoint
    reader: str = field(default="", repr=False)
    operator: str = field(default="", repr=False)
    files: Tls | None = None


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
    one = _pick(job, here)
    return _master(one.endpoint, one, "" if one.operator else token, files if one.tls else None)


def _is_endpoint(job: str) -> bool:
    return job.rpartition(":")[2].isdecimal() and ":" in job


def _master(endpoint: Endpoint, own: Published | None, token: str, files: Tls | None) -> JobMaster:
    if own is not None and not token:
        return JobMaster(endpoint, own.reader, own.operator, files)
    if not token:
        return JobMaster(endpoint, files=files)
    return JobMaster(endpoint, auth.reader_token(token), auth.operator_token(token), files)


def _pick(job: str, here: Sequence[Published]) -> Published:
    """The one that is meant, of those that run here."""
    found = [one for one in here if job in (one.job_id, one.name)] if job else list(here)
    if job and not found:
        found = [one for one in here if one.job_id.startswith(job) or one.name.startswith(job)]
    if len(found) == 1:
        return found[0]
    listed = sorted(name_of(one.job_id, str(one.endpoint)) for one in found or here)
    shown = ", ".join(listed[:MOST_NAMED]) + (", ..." if len(listed) > MOST_NAMED else "")
    if found:
        raise NotAnswered(f"several jobs are meant: {shown}; name one, or its host:port")
    if job and (ended := _ended(job)):
        raise NotAnswered(ended)
    if not job:
        raise NotAnswered("no job of yours runs on this host: name its master's host:port")
    hint = nearest(job, [one.job_id for one in here])
    raise NotAnswered(f"no job {job} of yours runs on this host{hint or _running(shown)}")


def _ended(job: str) -> str:
    """What its run folder says of a job that does not run here; "" where there is none."""
    try:
        folder = index.find(index.runs_root(os.environ), job)
    except (OSError, index.NoRun):
        return ""
    state, result = folder.state(time.time()), folder.result()
    why = f": {result.reason}" if result and result.reason else ""
    return f"job {job} has ended ({state}){why}; see {folder.path}" if state in ENDED else ""


def _running(shown: str) -> str:
    return f"; there is {shown}" if shown else ": name its master's host:port"


# ---------------------------------------------------------------- the asking


class JobLine:
    """The way to one master; for one `asyncio.Runner`, since grpc takes no second event loop."""

    def __init__(self, master: JobMaster, runner: asyncio.Runner) -> None:
        self._master = master
        self._runner = runner

    def reply(self, request: Request) -> Reply:
        """What the master says to it. NotAnswered, also where it does not want to."""
        # Late: grpc takes longer to import than everything else here together.
        from elasticrun.wire.rpc import protobuf
        from elasticrun.wire.rpc.channel import LinkError, ask_for

        master, reading = self._master, request.verb in ("picture", "stacks")
        # without a token the job's own user is an operator or nobody
        reads = reading and bool(master.reader or not master.operator)
        role = Role.READER if reads else Role.OPERATOR
        token = master.reader if role is Role.READER else master.operator
        try:
            protobuf.report_to_wire(request)
        except WireError as wrong:  # what was typed is no name of a node
            raise NotAnswered(str(wrong)) from None
        try:
            pem = None if master.files is None else auth.read_pem(master.files)
            asking = ask_for(
                master.endpoint, ANSWER_LIMIT, request, token=token, role=role, tls=pem
            )
            reply = self._runner.run(asking)
        except LinkError as error:
            verb = "refuses" if error.rejected else "does not answer"
            raise NotAnswered(f"the master at {master.endpoint} {verb}: {error}") from None
        except auth.TlsError as wrong:
            raise NotAnswered(str(wrong)) from None
        if not reply.ok:
            raise NotAnswered(reply.reason)
        return reply

    def picture(self, verb: str = "picture", *, live: bool = False) -> Picture:
        """All that the master knows; `live`, and for stacks, what the ranks do at this moment."""
        reply = self.reply(Request(verb, live=live, who=who()))
        try:
            return msgspec.json.decode(reply.body, type=Picture)
        except msgspec.DecodeError as wrong:
            where = self._master.endpoint
            raise NotAnswered(f"the master at {where} is of another version: {wrong}") from None

    def pause(self, seconds: float) -> None:
        """Let time pass; ^C ends it."""
        self._runner.run(asyncio.sleep(seconds))


def who() -> str:
    """`user@host`, for the events of a job."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


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
    variables = trust.withdraw()
    add_job(made, variables)
    ns = made.parse_args(argv)
    asked = Asked(ns, variables)
    try:
        master = find(ns.job, trust.token(asked), trust.tls(asked))
        with asyncio.Runner() as runner:
            return does(JobLine(master, runner), ns)
    except NotAnswered as why:
        print(f"{made.prog}: {why}", file=sys.stderr)
        return 1


def as_json(value: Any) -> str:
    """Records as a person or a program reads them."""
    return json.dumps(msgspec.to_builtins(value), indent=1)
