"""Finds the job that the user means and the endpoint and credentials of its master, and queries
that master.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from elasticrun.cli.verbs.masters import unanswered
from elasticrun.config import Tls
from elasticrun.core.sight.picture import Picture
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import RunFolder
from elasticrun.host.system.processes import user_name
from elasticrun.host.user_folder import Published, published, user_folder
from elasticrun.jobs.backend import token
from elasticrun.wire import auth
from elasticrun.wire.messages import Reply, Request, Role
from elasticrun.wire.types import Endpoint, WireError

ANSWER_LIMIT: Final = 20.0
"""Seconds to wait for a reply: longer than the master itself waits for the ranks."""


class NotAnswered(Exception):
    """No single job matches, or its master is unknown, does not answer or refuses; the message is a
    sentence."""


@dataclass(frozen=True, slots=True)
class JobMaster:
    """The endpoint of a master, and our credentials for it: the tokens of the roles reader and
    operator ("" if unknown), and TLS files."""

    endpoint: Endpoint
    reader: str = field(default="", repr=False)
    operator: str = field(default="", repr=False)
    files: Tls | None = None
    run: str = ""  # the job's run folder; "": unknown


class JobConnection:
    """The connection to one master. It belongs to one `asyncio.Runner`, because grpc does not
    support a second event loop."""

    def __init__(self, master: JobMaster, runner: asyncio.Runner) -> None:
        self._master = master
        self._runner = runner

    def reply(self, request: Request) -> Reply:
        """The master's reply. Raises NotAnswered, also if the master refuses."""
        # Late import: grpc takes longer to import than everything else here together.
        from elasticrun.wire.rpc import protobuf
        from elasticrun.wire.rpc.channel import LinkError, ask_for

        master, reading = self._master, request.verb in ("picture", "stacks")
        # A job without a token has no reader token: its own user reads as operator.
        reads = reading and bool(master.reader or not master.operator)
        role = Role.READER if reads else Role.OPERATOR
        token = master.reader if role is Role.READER else master.operator
        try:
            protobuf.report_to_wire(request)
        except WireError as wrong:  # the user typed an invalid node name
            raise NotAnswered(str(wrong)) from None
        try:
            pem = None if master.files is None else auth.read_pem(master.files)
            asking = ask_for(
                master.endpoint, ANSWER_LIMIT, request, token=token, role=role, tls=pem
            )
            reply = self._runner.run(asking)
        except LinkError as error:
            if not error.rejected:
                raise NotAnswered(unanswered(master.endpoint, str(error), master.run)) from None
            raise NotAnswered(f"the master at {master.endpoint} refuses: {error}") from None
        except auth.TlsError as wrong:
            raise NotAnswered(str(wrong)) from None
        if not reply.ok:
            raise NotAnswered(reply.reason)
        return reply

    def picture(self, verb: str = "picture", *, live: bool = False) -> Picture:
        """The master's picture of the job. With `live`, or with the verb "stacks", it includes the
        ranks' current activity. Raises NotAnswered."""
        reply = self.reply(Request(verb, live=live, who=user_at_host()))
        try:
            return msgspec.json.decode(reply.body, type=Picture)
        except msgspec.DecodeError as wrong:
            where = self._master.endpoint
            raise NotAnswered(f"the master at {where} has another version: {wrong}") from None

    @property
    def run(self) -> RunFolder | None:
        """The job's run folder, if known."""
        return RunFolder(Path(self._master.run)) if self._master.run else None

    @property
    def endpoint(self) -> Endpoint:
        """The master's endpoint."""
        return self._master.endpoint

    def sleep(self, seconds: float) -> None:
        """Sleep; ^C interrupts it."""
        self._runner.run(asyncio.sleep(seconds))


def user_at_host() -> str:
    """`user@host`, for the events of a job."""
    return f"{user_name()}@{socket.gethostname()}"[:200]


@dataclass(frozen=True, slots=True)
class UserJob:
    """One of this user's jobs; no job was found if both fields are None."""

    master: Published | None = None  # if it runs on this host
    run: RunFolder | None = None


def find_job(job: str, *, newest: bool = False) -> UserJob:
    """The job that `job` names, for verbs that query a master: a run folder's path, or as in
    `index.pick`. Without a match, an empty UserJob. Raises NotAnswered if several match, or if a
    path is no run folder."""
    here: list[Published] = []
    runs: list[RunFolder] = []
    with contextlib.suppress(OSError):
        here = published(user_folder(os.environ))
    with contextlib.suppress(OSError):  # this user has no run folders
        runs = index.all_runs(index.runs_root(os.environ))
    masters = {os.path.realpath(one.run): one for one in here if one.run}
    listed = {os.path.realpath(run.path) for run in runs}
    known = [_named_job(masters.get(os.path.realpath(run.path)), run) for run in runs]
    known += [
        _named_job(one) for one in here if os.path.realpath(one.run or os.devnull) not in listed
    ]
    try:
        if index.is_folder(job, [one.names for one in known]):
            run = index.find(index.runs_root(os.environ), job)
            return UserJob(masters.get(os.path.realpath(run.path)), run)
        found = index.pick(job, known, newest=newest)
        if found is None and os.sep in job:
            found = UserJob(run=index.find(index.runs_root(os.environ), job))
    except index.NoRun as wrong:
        raise NotAnswered(str(wrong)) from None
    except OSError:
        found = None
    return found or UserJob()


def _named_job(master: Published | None, run: RunFolder | None = None) -> index.NamedJob[UserJob]:
    """The names of a job: those of its run folder, else those that its master published here."""
    if run is None and master is not None and master.run:
        run = RunFolder(Path(master.run))
    job = UserJob(master, run)
    if run is not None and run.job() is not None:
        one = index.to_named_job(run, job)
        return one._replace(is_live=True) if master else one
    assert master is not None
    name = master.name or master.job_id
    return index.NamedJob(job, (master.job_id, name), name, True, f"{master.job_id} (running)")


def master_of(run: RunFolder) -> JobMaster:
    """The master of the job of a run folder: the endpoint and credentials that it published for
    this user on this host, else those in the folder. Raises NotAnswered."""
    job = run.job()
    if job is None:
        raise NotAnswered(f"{run.path} has no job.json yet")
    with contextlib.suppress(OSError):
        for one in published(user_folder(os.environ)):
            if one.run and os.path.realpath(one.run) == os.path.realpath(run.path):
                return JobMaster(one.endpoint, one.reader, one.operator, run=one.run)
    host, _, port = job.endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise NotAnswered(f"job {job.name} has no master yet: its nodes have not joined")
    secret = token(run)
    endpoint = Endpoint(host.removeprefix("[").removesuffix("]"), int(port))
    if not secret:
        return JobMaster(endpoint, run=str(run.path))
    proofs = auth.reader_token(secret), auth.operator_token(secret)
    return JobMaster(endpoint, *proofs, run=str(run.path))
