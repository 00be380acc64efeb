"""Steps: srun with one agent a node, and several jobs at a time."""

from __future__ import annotations

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.slurm.conftest import Slurm, agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_srun_of_several_nodes(slurm: Slurm) -> None:
    """One agent a node, two ranks each, in one world; the step ends with 0."""
    hosts = ["n1", "n2", "n3"]
    step = slurm.srun(
        *("-N3", f"-w{','.join(hosts)}", "--ntasks-per-node=1"),
        *agent("3", "n1", "--nproc-per-node=2"),
    )
    peers = slurm.world.hub.ranks(6)
    assert [peer.world_size for peer in peers] == [6] * 6
    assert sorted(slurm.host_of(peer) for peer in peers) == sorted(hosts * 2)
    assert allreduce(slurm.world, peers) == [6] * 6
    finish(peers)
    assert step.wait() == 0, step.stderr


def test_a_step_whose_ranks_fail(slurm: Slurm) -> None:
    """The agents' code is the step's; srun names no other."""
    step = slurm.srun("-N2", "-wn1,n2", "--ntasks-per-node=1", *agent("2", "n1"))
    finish(slurm.world.hub.ranks(2), code=5)
    assert step.wait() == 1
    assert "exitcode" in step.stderr


def test_two_steps_of_one_job_at_once(slurm: Slurm) -> None:
    """On the same two machines, with bare commands: each is a job of its own."""
    step = f"srun --overlap --ntasks-per-node=1 elasticrun {PUPPET}"
    job = slurm.sbatch(f"{step} & {step} & wait -n; wait -n; echo over $?", "-N2")
    peers = slurm.world.hub.ranks(4, world_size=2)
    ids = sorted({peer.run_id for peer in peers})
    assert ids == [str(job.number), f"{job.number}.1"]
    for run_id in ids:
        ours = [peer for peer in peers if peer.run_id == run_id]
        assert [slurm.host_of(peer) for peer in ours] == slurm.nodes_of(job)
        assert allreduce(slurm.world, ours) == [2, 2]
    finish(peers)
    job.until_text("over 0\n")
