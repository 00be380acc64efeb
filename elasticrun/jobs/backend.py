"""The interface of backends, and the two files that `submit` adds to a job's run folder.

`submitted.json` (`Submission`) is what the job is started from again; `token` authenticates its
nodes and its owner.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from elasticrun.host.runs.layout import (
    ENDED,
    MAX_BYTES,
    SUBMITTED,
    JobRecord,
    LocalAgent,
    RunFolder,
    replace_file,
)
from elasticrun.jobs.rows import JobRow
from elasticrun.wire.messages import Reply, Request

TOKEN: Final = "token"


class RequestFailed(Exception):
    """The request was not carried out; the message is a sentence."""


class Forbidden(RequestFailed):
    """The backend denies this user the request."""


class JobMissing(RequestFailed):
    """The backend has no such job."""


class Submission(Struct, frozen=True, kw_only=True):
    """A job as it was submitted, and what runs it now."""

    name: str
    on: str  # local, ssh, slurm, k8s
    host: str = ""  # where it was submitted
    flags: tuple[str, ...] = ()  # the launcher's, the same on each node
    program: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = {}  # in addition to the environment of the user who starts it
    min_nodes: int = 1
    max_nodes: int = 1
    scaled: int = 0  # last maximum set by `scale`; 0: never scaled
    gpus: tuple[str, ...] = ()  # split among the nodes of this host; as in CUDA_VISIBLE_DEVICES
    port: int = 0  # of the rendezvous on this host; 0: one node, or nodes reached by ssh
    agents: tuple[LocalAgent, ...] = ()  # as in `layout.Starting`
    hosts: tuple[str, ...] = ()  # ssh destinations, with user names where given
    ssh: tuple[str, ...] = ()  # the command that reaches them
    script: str = ""  # for sbatch; in a cluster the objects, as JSON
    number: str = ""  # the scheduler's job number; in a cluster the object's kind
    context: str = ""  # from the kubeconfig
    namespace: str = ""
    uid: str = ""  # of the object in the cluster


class Target(Protocol):
    """Where jobs run. `run` is a job's run folder. A method that returns a str returns a sentence
    about what it did. All methods raise RequestFailed."""

    def submit(self, run: RunFolder, submission: Submission) -> str:
        """Start the job; returns once the start is under way. The folder already has the job's
        record."""

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """These rows, updated with what the backend itself knows, which may be more recent than
        the run folder."""


class Backend(Target, Protocol):
    """A place whose jobs this program itself manages. Kubernetes is only a `Target`: there the API
    server manages the jobs, including those without a run folder (`jobs/kube/`)."""

    def scale(self, run: RunFolder, request: Request, send: Callable[[Request], Reply]) -> str:
        """Set the job's maximum number of nodes; `send` sends a request to its master."""

    def suspend(self, run: RunFolder) -> str:
        """Save a step and release the job's resources; returns when that is done."""

    def resume(self, run: RunFolder) -> str:
        """Resume the job in the same folder."""

    def stop(self, run: RunFolder) -> str:
        """End the job permanently, if its master cannot. The job saves a step first if it can."""

    def terminate(self, run: RunFolder) -> None:
        """End the job at once, because its folder will be removed; returns when none of it runs."""

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """Run a command on one of the job's nodes, on this terminal. Returns the command's exit
        code."""


def submission(run: RunFolder) -> Submission:
    """How the job was submitted. Raises RequestFailed if it was not, or the file is unreadable."""
    try:
        with open(run.path / SUBMITTED, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Submission)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        job = run.job()
        name = job.name if job else run.path.name
        again = ""
        if job is not None and job.command and run.state() in ENDED:
            again = f"; to run it again, repeat its command: {command_line(job)}"
        raise RequestFailed(
            f"job {name} was not started by `elasticrun submit`, so only its launcher can do that"
            f"{again}"
        ) from None


def command_line(job: JobRecord) -> str:
    """A shell command that starts the job as its user did."""
    return f"cd {shlex.quote(job.workdir)} && {shlex.join(job.command)}"


def write_submission(run: RunFolder, known: Submission) -> None:
    """Write `submitted.json`. Raises OSError."""
    replace_file(run.path / SUBMITTED, msgspec.json.format(msgspec.json.encode(known)) + b"\n")


def make_token(run: RunFolder) -> Path:
    """Write a fresh token to the run folder, readable by its owner only, unless one exists.
    Returns its path. Raises OSError, also if the existing one belongs to another user or is
    accessible to others."""
    path = run.path / TOKEN
    if not os.path.lexists(path):
        replace_file(path, secrets.token_hex(32).encode() + b"\n")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{path} is accessible to others: remove it, and the job gets a new one")
    return path


def token(run: RunFolder) -> str:
    """The job's token; "" if its run folder has none that is readable."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (run.path / TOKEN).read_text(encoding="ascii").strip()
    return ""


def was_submitted(run: RunFolder) -> bool:
    """Whether the job was started with `elasticrun submit`."""
    return os.path.exists(run.path / SUBMITTED)
