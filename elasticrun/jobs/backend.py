"""What every place can do with a job: this host, Slurm, and others by a module of their own.

A job that was submitted has two files of ours in its run folder: `submitted.json` (`Submission`),
from which it is started again, and `token`, by which its nodes and its owner prove themselves.
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


class NotDone(Exception):
    """What was asked for was not done; the text is a sentence."""


class Forbidden(NotDone):
    """The place gives this user no right to it."""


class Missing(NotDone):
    """The place has no such job."""


class Submission(Struct, frozen=True, kw_only=True):
    """A job as it was submitted, and what carries it now."""

    name: str
    on: str  # local, ssh, slurm, k8s
    host: str = ""  # where it was submitted
    flags: tuple[str, ...] = ()  # of the launcher, the same on each node
    program: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = {}  # beside that of who starts it
    min_nodes: int = 1
    max_nodes: int = 1
    scaled: int = 0  # nodes at most by `scale` since; 0: it was not scaled
    gpus: tuple[
        str, ...
    ] = ()  # that the nodes of this host share out, as CUDA_VISIBLE_DEVICES has it
    port: int = 0  # where the nodes of this host meet; 0: there is one node
    agents: tuple[LocalAgent, ...] = ()  # as in `runs.layout.Starting`
    hosts: tuple[str, ...] = ()  # that ssh reaches, with users
    ssh: tuple[str, ...] = ()  # what reaches them
    script: str = ""  # for sbatch; objects of a cluster, as JSON
    number: str = ""  # of the job, by its scheduler; in a cluster its kind
    context: str = ""  # of the kubeconfig
    namespace: str = ""
    uid: str = ""  # of the object in the cluster


class Place(Protocol):
    """Where jobs run. `run` is a job's run folder; each method returns a sentence on what was done,
    or raises NotDone."""

    def submit(self, run: RunFolder, wanted: Submission) -> str:
        """Start it; returns when that is on its way. The folder has the job's record already."""

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """These rows of its jobs, by what the place itself knows of them, which may be better."""


class Backend(Place, Protocol):
    """One whose jobs this program itself looks after. In a cluster the API server is told instead,
    by which a job without a run folder is known as well (`jobs/kube/`)."""

    def scale(self, run: RunFolder, wanted: Request, ask: Callable[[Request], Reply]) -> str:
        """Set how many nodes it has at most; `ask` puts a request to its master."""

    def suspend(self, run: RunFolder) -> str:
        """Save a step, and let go of what it runs on; returns when that is done."""

    def resume(self, run: RunFolder) -> str:
        """Go on in the same folder."""

    def stop(self, run: RunFolder) -> str:
        """End it for good, where its master cannot be asked to; it saves first what it can."""

    def end(self, run: RunFolder) -> None:
        """End it at once, for its folder is to go; returns when nothing of it runs."""

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """Run a command on a node of it, on this terminal; the command's exit code."""


def submission(run: RunFolder) -> Submission:
    """How it was submitted. NotDone where it was not."""
    try:
        with open(run.path / SUBMITTED, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Submission)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        job = run.job()
        name = job.name if job else run.path.name
        again = ""
        if job is not None and job.command and run.state() in ENDED:
            again = f"; to run it again, type its command again: {typed(job)}"
        raise NotDone(
            f"job {name} was started by hand and not by `elasticrun submit`, so only its launcher "
            f"can do that{again}"
        ) from None


def typed(job: JobRecord) -> str:
    """What a person typed to start it, for a shell."""
    return f"cd {shlex.quote(job.workdir)} && {shlex.join(job.command)}"


def write_submission(run: RunFolder, known: Submission) -> None:
    """OSError."""
    replace_file(run.path / SUBMITTED, msgspec.json.format(msgspec.json.encode(known)) + b"\n")


def make_token(run: RunFolder) -> Path:
    """A fresh secret in the folder, for its owner alone, unless there is one. OSError, also where
    that one is another's or may be read by others."""
    path = run.path / TOKEN
    if not os.path.lexists(path):
        replace_file(path, secrets.token_hex(32).encode() + b"\n")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{path} is not yours alone: remove it, and the job gets a fresh one")
    return path


def token(run: RunFolder) -> str:
    """The job's secret; "" where it has none here."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (run.path / TOKEN).read_text(encoding="ascii").strip()
    return ""


def is_ours(run: RunFolder) -> bool:
    """Whether it was submitted from here."""
    return os.path.exists(run.path / SUBMITTED)
