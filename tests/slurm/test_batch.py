"""Batch jobs that Slurm ends: they save first, and go on where they were."""

from __future__ import annotations

import re

import pytest

from tests.harness import until_file
from tests.slurm.conftest import Batch, Slurm, meeting
from tests.snapshots.conftest import TRAIN, starts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKED = re.compile(r"every rank is asked to save step (\d+)")

ENDLESS = 10**9
"""Steps of a first life, which somebody must end."""


def trains(slurm: Slurm, *options: str, flags: str = "") -> Batch:
    """A training on two nodes that ends in its second life; returns when it has begun."""
    out, ckpt = slurm.folder / "out", slurm.folder / "ckpt"
    out.mkdir()
    steps = f"$([ ${{SLURM_RESTART_COUNT:-0}} = 0 ] && echo {ENDLESS} || echo 1)"
    job = slurm.sbatch(
        f"echo attempt ${{SLURM_RESTART_COUNT:-0}}\n"
        f"srun --ntasks-per-node=1 {meeting('2', '$(hostname)')} {flags} "
        f"{TRAIN} --steps {steps} --every 5 --out {out} --ckpt {ckpt}\n"
        'code=$?; echo "over $code"\n'
        '[ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"',
        *("-N2", "--requeue", *options),
        env={"OMP_NUM_THREADS": "1"},
    )
    until_file(job.console, lambda shown: shown.count("snapshots take") == 2)
    return job


def saved(slurm: Slurm, shown: str) -> int:
    """The step that all ranks were asked for; it is the only one in storage."""
    step = int(ASKED.findall(shown)[-1])
    markers = [path.parent.name for path in (slurm.folder / "ckpt").glob("step-*/.metadata")]
    assert markers == [f"step-{step:09d}"]
    return step


def goes_on(slurm: Slurm, job: Batch) -> None:
    """The next attempt takes up the step that was saved, on whatever nodes it is given."""
    step = saved(slurm, until_file(job.console, lambda shown: "attempt 1\n" in shown, 200))
    job.until_text("over 0\n")
    for rank in (0, 1):
        assert starts(slurm.folder / "out", rank) == [0, step]


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm) -> None:
    """Slurm signals every process of the step, and they save one step."""
    job = trains(slurm)
    slurm.cluster.run("scontrol", "requeue", str(job.number))
    goes_on(slurm, job)


@pytest.mark.parametrize(
    "limit", [(), pytest.param(("--time=1", "--signal=USR1@30"), marks=pytest.mark.soak)]
)
def test_a_signal_before_the_end(slurm: Slurm, limit: tuple[str, ...]) -> None:
    """`--signal=USR1@...`: the step gets it, so many seconds before the time limit. Where agents
    are told that it ends them, everything is saved when srun returns, and the script puts its job
    back into the queue."""
    job = trains(slurm, *limit, flags="--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    if not limit:
        slurm.cluster.run("scancel", "--signal=USR1", str(job.number))
    goes_on(slurm, job)
    assert "\nover 1\n" in job.console.read_text()
