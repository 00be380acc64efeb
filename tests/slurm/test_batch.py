"""Batch jobs that Slurm ends, whose time is over for instance: they save first, and go on where
they were. `scontrol` moves the end of jobs that run, and the controller, which looks at them every
30 s, does the rest."""

from __future__ import annotations

import re
import shlex

import pytest

from elasticrun.config import EXIT_SAVED
from tests.further import further
from tests.harness import until_file
from tests.jobs.render.rendered import render
from tests.slurm.conftest import Batch, Slurm, meeting, script_of_page
from tests.snapshots.conftest import TRAIN, ends, starts, until_printed

pytestmark = pytest.mark.slow

ASKED = re.compile(r"all ranks must save step (\d+)")

RANKS = (0, 1)

UNHURRIED = "--departure-grace=100"
"""Less than KillWait and GraceTime; that a save is quick is nothing that this machine promises."""

LIVES = """
import os, runpy, sys
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
sys.argv += ["--steps", str(10**9 if first else 1)]
runpy.run_path({train!r}, run_name="__main__")
"""
"""The first life is without an end, which somebody must make; the second has nothing left to do."""


def two_lives(slurm: Slurm, persist_every: int = 0) -> list[str]:
    """A training that ends in its second life: a script and its arguments."""
    script = slurm.folder / "train.py"
    script.write_text(LIVES.format(train=str(TRAIN)))
    out, ckpt = slurm.folder / "out", slurm.folder / "ckpt"
    out.mkdir()
    persist = ("--persist-every", str(persist_every)) if persist_every else ()
    words = ("--mode", "counter", "--every", "5", "--print-at", "5")
    return [str(script), *words, *persist, "--out", str(out), "--ckpt", str(ckpt)]


def trains(slurm: Slurm, *options: str, flags: str = "", persist_every: int = 0) -> Batch:
    """Such a training on two nodes, whose script requeues it; returns when it has begun."""
    job = slurm.sbatch(
        f"srun --ntasks-per-node=1 --no-kill {meeting('2', '$(hostname)')} {UNHURRIED} {flags} "
        f"{' '.join(two_lives(slurm, persist_every))}\n"
        'code=$?; echo "over $code"\n'
        '[ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"',
        *("-N2", "--requeue", *options),
    )
    begun(slurm)
    return job


def begun(slurm: Slurm) -> None:
    """Wait until every rank has taken a snapshot: before its first step it has nothing to save."""
    for rank in RANKS:
        until_printed(slurm.folder / "out", rank)


def markers(slurm: Slurm) -> list[int]:
    """The steps that are in storage."""
    found = (slurm.folder / "ckpt").glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def saved(slurm: Slurm, job: Batch) -> int:
    """The step that all ranks were asked for; it is the only one in storage."""
    step = int(ASKED.findall(job.console.read_text())[-1])
    assert markers(slurm) == [step]
    return step


def second_life(slurm: Slurm) -> None:
    """Wait until every rank has begun it."""
    for rank in RANKS:
        told = slurm.folder / "out" / f"rank-{rank}.jsonl"
        until_file(told, lambda text: text.count('"start"') == 2)


def goes_on(slurm: Slurm, job: Batch) -> None:
    """The second life begins, and takes up what the first one has saved."""
    second_life(slurm)
    goes_on_from(slurm, job, saved(slurm, job))


def goes_on_from(slurm: Slurm, job: Batch, step: int) -> None:
    """The second life takes up this step, on whatever nodes it is given, and ends well."""
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert slurm.told(job, "Restarts") == "1"
    for rank in RANKS:
        assert starts(slurm.folder / "out", rank) == [0, step]
        assert len(ends(slurm.folder / "out", rank)) == 1


WRITTEN = re.compile(r"the checkpoint of step \d+ is written")
TOLD = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm) -> None:
    """Slurm signals every process of the step, and they save one step."""
    job = trains(slurm)
    slurm.cluster.run("scontrol", "requeue", str(job.number))
    goes_on(slurm, job)


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_a_job_makes_room_for_an_urgent_one(slurm: Slurm) -> None:
    """Preempted by a partition of a higher tier: SIGTERM, and `GraceTime` to save."""
    job = trains(slurm)
    urgent = slurm.srun("--partition=urgent", "-N4", "--exclusive", "true")
    second_life(slurm)
    assert urgent.wait() == 0
    goes_on(slurm, job)


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_the_script_of_the_page(slurm: Slurm) -> None:
    """A signal to the step, as `--signal=TERM@...` sends it before the time limit: everything is
    saved when srun returns, and the script puts its job back into the queue."""
    here = {
        "--nproc-per-node=8": f"--nproc-per-node=1 {UNHURRIED}",
        "train.py": shlex.join(two_lives(slurm)),
    }
    job = slurm.sbatch(script_of_page("#!/bin/bash", here))
    begun(slurm)
    slurm.cluster.run("scancel", "--signal=TERM", str(job.number))
    goes_on(slurm, job)


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
@pytest.mark.parametrize(("name", "flags"), [("USR1", TOLD), ("TERM", "")])
def test_a_signal_before_the_end(slurm: Slurm, name: str, flags: str) -> None:
    """`--signal=USR1@...`: the step gets it, so many seconds before the time limit. Agents are told
    that it ends them (SIGTERM does anyway)."""
    job = trains(slurm, "--time=2", f"--signal={name}@60", flags=flags)
    until_file(job.console, lambda shown: f"\nover {EXIT_SAVED}\n" in shown)
    # a second life on a busy machine may take longer than the minute until its own signal
    slurm.cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=10")
    goes_on(slurm, job)


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


LEAD = 150


def ends_in(slurm: Slurm, job: Batch, seconds: int) -> None:
    """Its time is over then."""
    slurm.cluster.run("scontrol", "update", f"jobid={job.number}", f"EndTime=now+{seconds}seconds")


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_two_jobs_whose_time_is_over(slurm: Slurm) -> None:
    """Without `--signal`: SIGTERM to every process at the end, twice within milliseconds, SIGKILL
    when KillWait is over. By then a step that all ranks have is in storage; but the batch script is
    ended too, and nothing requeues the job.

    As `render slurm --signal` has it: the signal comes before the end. The nodes save a step and
    leave, the script puts its job back into the queue, and it goes on where it was."""
    (slurm.folder / "rendered").mkdir()
    other = Slurm(slurm.cluster, slurm.world, slurm.folder / "rendered")
    script = render(
        "slurm", "--name", "tr", "--nnodes", "2", "--time", "30", "--signal", f"USR1@{LEAD}",
        "--requeue", "1", *UNHURRIED.split("="), "--", *two_lives(other),
    ).out  # fmt: skip
    rendered, plain = other.sbatch(script), trains(slurm)
    begun(other)
    ends_in(other, rendered, LEAD + 20)
    ends_in(slurm, plain, 1)

    slurm.await_end(plain)
    assert slurm.told(plain, "JobState") == "TIMEOUT"
    assert "DUE TO TIME LIMIT" in plain.console.read_text()
    saved(slurm, plain)

    goes_on(other, rendered)
    assert "DUE TO TIME LIMIT" not in rendered.console.read_text()
