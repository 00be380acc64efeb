"""Which place is meant: what `--on` says, else $ELASTICRUN_ON, else this host; of a job that is
there, the place that its run folder names.

A host with sbatch is not taken for a place to hand jobs to: what stands in a cluster's queue and
what runs here differ too much for a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from elasticrun.jobs.backend import Backend, NotDone
from elasticrun.jobs.local import LocalJobs
from elasticrun.jobs.slurm import SlurmJobs
from elasticrun.runs.layout import JobRow, RunFolder
from elasticrun.wire.env import ON

PLACES: Final = ("local", "ssh", "slurm", "k8s")

_NOT_YET: Final = {
    "ssh": "jobs on other hosts are started by `elasticrun --hosts a,b train.py`",
    "k8s": "for Kubernetes, `elasticrun render k8s ... | kubectl apply -f -` makes the job",
}


def chosen(on: str, environ: Mapping[str, str]) -> str:
    """The place's name. NotDone for none that a job can be submitted to."""
    word, source = (on, "--on") if on else (environ.get(ON, "") or "local", ON)
    if word not in PLACES:
        raise NotDone(f"{source}={word}: a job is submitted on one of {', '.join(PLACES)}")
    if word in _NOT_YET:
        raise NotDone(f"{source}={word}: nothing is submitted there yet; {_NOT_YET[word]}")
    return word


def backend(place: str, environ: Mapping[str, str], gpus: Sequence[str] = ()) -> Backend:
    """The place of that name. NotDone."""
    if place == "local":
        return LocalJobs(environ, gpus)
    if place == "slurm":
        return SlurmJobs(environ)
    raise NotDone(_NOT_YET.get(place, f"nothing is known of a place {place}"))


def backend_of(run: RunFolder, environ: Mapping[str, str]) -> Backend:
    """The place of a job that is there. NotDone."""
    job = run.job()
    return backend(job.where if job is not None else "local", environ)


def by_their_places(rows: Sequence[JobRow], environ: Mapping[str, str]) -> list[JobRow]:
    """These rows, those of a place that keeps a list of its jobs by what that says."""
    known: dict[str, JobRow] = {}
    for place in sorted({row.where for row in rows} & {"slurm"}):
        own = [row for row in rows if row.where == place and row.run]
        known |= {row.run: row for row in backend(place, environ).jobs(own)}
    return [known.get(row.run, row) for row in rows]
