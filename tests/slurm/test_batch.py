"""Batch jobs that Slurm ends: they save first, and go on where they were."""

from __future__ import annotations

import re
import shlex

import pytest

from elasticrun.config import EXIT_SAVED
from tests.further import further
from tests.harness import until_file
from tests.slurm import page
from tests.slurm.conftest import Slurm
from tests.slurm.training import (
    UNHURRIED,
    begun,
    goes_on_from,
    markers,
    saved,
    second_life,
    trains,
    two_lives,
)

pytestmark = pytest.mark.slow

WRITTEN = re.compile(r"the checkpoint of step \d+ is written")
TOLD = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm) -> None:
    """Slurm signals every process of the step, and they save one step."""
    job = trains(slurm)
    slurm.cluster.run("scontrol", "requeue", str(job.number))
    second_life(slurm)
    goes_on_from(slurm, job, saved(slurm, job))


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_a_job_makes_room_for_an_urgent_one(slurm: Slurm) -> None:
    """Preempted by a partition of a higher tier: SIGTERM, and `GraceTime` to save."""
    job = trains(slurm)
    urgent = slurm.srun("--partition=urgent", "-N4", "--exclusive", "true")
    second_life(slurm)
    assert urgent.wait() == 0
    goes_on_from(slurm, job, saved(slurm, job))


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_the_script_of_the_page(slurm: Slurm) -> None:
    """A signal to the step, as `--signal=TERM@...` sends it before the time limit: everything is
    saved when srun returns, and the script puts its job back into the queue."""
    here = {
        "--nproc-per-node=8": f"--nproc-per-node=1 {UNHURRIED}",
        "train.py": shlex.join(two_lives(slurm)),
    }
    job = slurm.sbatch(page.script("#!/bin/bash", here))
    begun(slurm)
    slurm.cluster.run("scancel", "--signal=TERM", str(job.number))
    second_life(slurm)
    goes_on_from(slurm, job, saved(slurm, job))


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
@pytest.mark.parametrize(("name", "flags"), [("USR1", TOLD), ("TERM", "")])
def test_a_signal_before_the_end(slurm: Slurm, name: str, flags: str) -> None:
    """`--signal=USR1@...`: the step gets it, so many seconds before the time limit. Agents are told
    that it ends them (SIGTERM does anyway)."""
    job = trains(slurm, "--time=1", f"--signal={name}@30", flags=flags)
    second_life(slurm)
    goes_on_from(slurm, job, saved(slurm, job))
    assert f"\nover {EXIT_SAVED}\n" in job.console.read_text()


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_a_cancelled_job_saves_and_leaves_nothing(slurm: Slurm) -> None:
    """`scancel`: SIGTERM to the step, SIGKILL when KillWait is over. It needs less: a step that all
    ranks have is in storage, and nothing stays on the nodes."""
    job = trains(slurm)
    slurm.cluster.run("scancel", str(job.number))
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "CANCELLED"
    saved(slurm, job)
    slurm.world.nothing_left()


@further(
    "slurm/test_batch::test_a_requeued_job_goes_on_where_it_was",
    "pods/test_pods::test_pods_come_and_go_and_come_back",
)
@pytest.mark.parametrize("no_kill", [False, True])
def test_the_machine_of_the_batch_script_loses_power(slurm: Slurm, no_kill: bool) -> None:
    """It has the job's master too. When Slurm has noticed (after `SlurmdTimeout`; here an operator
    says so), the job is requeued: begins again on machines that live, from its last checkpoint. But
    with `--no-kill` the rest is left as it is, without a script: the operator has to requeue it."""
    job = trains(slurm, *(["--no-kill"] if no_kill else []), persist_every=100)
    first, other = slurm.nodes_of(job)
    until_file(job.console, lambda shown: WRITTEN.search(shown) is not None)
    slurm.cluster.power_off(first)
    slurm.cluster.run("scontrol", "update", f"nodename={first}", "state=down", "reason=power")
    if no_kill:
        assert slurm.told(job, "JobState") == "RUNNING"
        assert slurm.nodes_of(job) == [other]
        slurm.cluster.run("scontrol", "requeue", str(job.number))
    second_life(slurm)
    step = markers(slurm)[-1]
    assert first not in slurm.nodes_of(job)
    goes_on_from(slurm, job, step)
