"""Time limits that Slurm itself sees to: `scontrol` moves the end of jobs that run, and the
controller, which looks at them every 30 s, does the rest."""

from __future__ import annotations

import pytest

from tests.further import further
from tests.render.rendered import render
from tests.slurm.conftest import Batch, Slurm
from tests.slurm.training import (
    UNHURRIED,
    begun,
    goes_on_from,
    saved,
    second_life,
    trains,
    two_lives,
)

pytestmark = pytest.mark.slow

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

    second_life(other)
    goes_on_from(other, rendered, saved(other, rendered))
    assert "DUE TO TIME LIMIT" not in rendered.console.read_text()
