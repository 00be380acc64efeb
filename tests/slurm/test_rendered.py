"""What `elasticrun render slurm` prints is taken by a real sbatch, and trains."""

from __future__ import annotations

from itertools import pairwise

import psutil
import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import until_file
from tests.render.rendered import render
from tests.slurm.conftest import Slurm

pytestmark = pytest.mark.slow


@further("render/test_slurm", "render/test_goldens")
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
    until_file(job.console, lambda shown: "spare: the round is full" in shown)
    finish(peers)
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert slurm.told(job, "ExitCode") == "0:0"


@further("render/test_slurm", "slurm/test_steps::test_a_step_whose_ranks_fail")
def test_the_script_ends_with_the_code_of_the_job(slurm: Slurm) -> None:
    """An agent is killed, a spare takes its place, and the training is done: srun ends with 137,
    the job with 0."""
    script = render(
        "slurm", "--name", "tr", "--nnodes", "2", "--spares", "1", "--max-restarts", "0",
        "--rdzv-conf", "last_call_timeout=1,heartbeat_timeout=10", "--", PUPPET,
    ).out  # fmt: skip
    job = slurm.sbatch(
        script.replace("\ncode=$?\nown_code", '\ncode=$?; echo "srun $code"\nown_code')
    )
    peers = slurm.world.hub.ranks(2, world_size=2)
    first = slurm.nodes_of(job)[0]
    lost = next(peer for peer in peers if slurm.host_of(peer) != first)
    above = [psutil.Process(lost.pid), *psutil.Process(lost.pid).parents()]
    agent = next(one for one, parent in pairwise(above) if parent.name() == "bash")
    agent.kill()
    old = {peer.pid for peer in peers}
    peers = slurm.world.hub.ranks(2, world_size=2, pid=lambda pid: pid not in old)
    finish(peers)
    slurm.await_end(job)
    assert "srun 137\n" in job.console.read_text()
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert slurm.told(job, "ExitCode") == "0:0"
