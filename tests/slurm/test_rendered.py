"""What `elasticrun render slurm` prints is taken by a real sbatch, and trains."""

from __future__ import annotations

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.render.rendered import render
from tests.slurm.conftest import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_rendered_script_runs_with_a_spare(slurm: Slurm) -> None:
    """Three nodes are allocated, two train, and the one that waits ends well with the job."""
    script = render(
        "slurm", "--name", "tr", "--nnodes", "2", "--spares", "1", "--cpus-per-task", "2",
        "--time", "30", "--requeue", "1", "--env", "NOTE=it's", "--max-restarts", "1",
        "--save-at-breakpoint", "--", PUPPET,
    ).out  # fmt: skip
    job = slurm.sbatch(script)
    peers = slurm.world.hub.ranks(2, world_size=2)
    assert {peer.run_id for peer in peers} == {str(job.number)}
    assert allreduce(slurm.world, peers) == [2, 2]
    finish(peers)
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert slurm.told(job, "ExitCode") == "0:0"
