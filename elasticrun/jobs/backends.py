"""Selects the backend: for a new job --on, else ssh if hosts are named, else $ELASTICRUN_ON, else
this host; for an existing job, the backend that its run folder records.

The presence of sbatch does not select Slurm: a job in a cluster's queue and a job on this host
differ too much to guess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from elasticrun.core.words import did_you_mean
from elasticrun.host.runs.index import NoRun, all_runs, find, runs_root
from elasticrun.host.runs.layout import ENDED, RunFolder
from elasticrun.jobs.backend import Backend, RequestFailed, submission
from elasticrun.jobs.kubernetes import KubernetesJobs
from elasticrun.jobs.local import LocalJobs
from elasticrun.jobs.rows import JobRow, row_of
from elasticrun.jobs.slurm import SlurmJobs
from elasticrun.jobs.ssh import SshJobs
from elasticrun.wire.env import ON

PLACES: Final = ("local", "ssh", "slurm", "k8s")

CLUSTER_FLAGS: Final = ("--namespace", "--context", "-n")
"""Flags that verbs accept only for jobs in Kubernetes."""

FLAGS_WITH_VALUES: Final = (
    "--tail", "-t", "--rank", "--node", "--instance", "-i", "--since", "--grep", "--reason",
    "--output", "-o",
)  # fmt: skip
"""Flags whose next word is a value and not a job's name."""


def choose_backend(on: str, environ: Mapping[str, str], *, hosts: bool = False) -> str:
    """The name of the backend for a new job. `hosts`: whether the user names hosts. Raises
    RequestFailed for an unknown name, and if only one of --hosts and --on ssh is given."""
    word, source = (on, "--on") if on else (environ.get(ON, "") or "local", ON)
    word = backend_name(word, source)
    if hosts and not on:
        return "ssh"
    if hosts != (word == "ssh"):
        raise RequestFailed(
            f"{source}={word}: --hosts (or --hostfile) and --on ssh belong together"
        )
    return word


def backend_name(word: str, source: str = "--on") -> str:
    """The canonical name of a backend; `source`: where the user wrote it. Raises RequestFailed if
    it is unknown."""
    word = "k8s" if word == "kubernetes" else word
    if word not in PLACES:
        hint = did_you_mean(word, PLACES)
        raise RequestFailed(f"{source}={word}: jobs are on one of {', '.join(PLACES)}{hint}")
    return word


def backend(place: str, environ: Mapping[str, str]) -> Backend:
    """The backend of that name. Raises RequestFailed for others, including k8s."""
    if place == "local":
        return LocalJobs(environ)
    if place == "ssh":
        return SshJobs(environ)
    if place == "slurm":
        return SlurmJobs(environ)
    raise RequestFailed(f"unknown backend {place}")


def backend_name_of(run: RunFolder) -> str:
    """The name of the backend to which the job of a run folder was submitted; for any other job,
    of the place where it was started."""
    with contextlib.suppress(RequestFailed):
        return submission(run).on
    job = run.job()
    return job.where if job is not None else "local"


def backend_of(run: RunFolder, environ: Mapping[str, str]) -> Backend:
    """The backend of an existing job. Raises RequestFailed."""
    return backend(backend_name_of(run), environ)


def refuse_taken_name(
    root: Path, name: str, environ: Mapping[str, str], own: RunFolder | None = None
) -> None:
    """Raise RequestFailed if a job with this name, other than that of `own`, has not ended. Raises
    OSError if the run folders cannot be read."""
    known = [(run, job) for run in all_runs(root) if (job := run.job()) and job.name == name]
    mine = own.place if own else None
    rows = [row_of(run, job) for run, job in known if run.place != mine]
    for row in updated_by_backends(rows, environ):
        if row.state not in ENDED:
            raise RequestFailed(
                f"a job {name} exists already ({row.state}): choose another --name, or end that "
                f"one with `elasticrun stop {name}`"
            )


def updated_by_backends(rows: Sequence[JobRow], environ: Mapping[str, str]) -> list[JobRow]:
    """These rows, updated by each backend that knows more about its jobs."""
    known: dict[str, JobRow] = {}
    own: dict[str, list[JobRow]] = {place: [] for place in PLACES}
    for row in rows:
        if (place := backend_name_of(RunFolder(Path(row.run))) if row.run else row.where) in own:
            own[place].append(row)
    for place, theirs in own.items():
        if theirs:
            by = KubernetesJobs() if place == "k8s" else backend(place, environ)
            known |= {row.run: row for row in by.jobs(theirs)}
    return [known.get(row.run, row) for row in rows]


def is_in_cluster(words: Sequence[str], environ: Mapping[str, str], *, others: int = 0) -> bool:
    """Whether a verb applies to jobs in Kubernetes: according to --on and the cluster flags, else
    the run folder of the named job, else $ELASTICRUN_ON. `others`: number of positional arguments
    before the job's name. Raises RequestFailed for a backend that is unknown or not allowed
    here."""
    ours = list(words[: words.index("--")] if "--" in words else words)
    for at, word in enumerate(ours):
        flag, _, value = word.partition("=")
        if flag == "--on":
            if (place := backend_name(value or "".join(ours[at + 1 : at + 2]))) != "k8s":
                raise RequestFailed(
                    f"--on={place}: leave it out; it is only for jobs in Kubernetes"
                )
            return True
        if flag in CLUSTER_FLAGS:
            return True
    with contextlib.suppress(OSError):
        root = runs_root(environ)
        values = {at + 1 for at, word in enumerate(ours) if word in FLAGS_WITH_VALUES}
        named = (word for at, word in enumerate(ours) if at not in values and word[:1] != "-")
        for word in list(named)[others:]:
            with contextlib.suppress(NoRun):
                return backend_name_of(find(root, word, newest=True)) == "k8s"
    return backend_name(environ.get(ON, "") or "local", ON) == "k8s"
