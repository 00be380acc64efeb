"""Steps: srun with one agent a node, and several jobs at a time."""

from __future__ import annotations

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.slurm.conftest import Slurm, agent

pytestmark = pytest.mark.slow


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
    finish(peers, step)


def test_a_step_whose_ranks_fail(slurm: Slurm) -> None:
    """The agents' code is the step's; srun names no other."""
    step = slurm.srun("-N2", "-wn1,n2", "--ntasks-per-node=1", *agent("2", "n1"))
    finish(slurm.world.hub.ranks(2), code=5)
    assert step.wait() == 1
    assert "exitcode" in step.stderr


@further("e2e/test_surroundings::test_two_jobs_on_one_host")
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


@further(
    "test_a_step_whose_ranks_fail",
    "health/test_exclusion::test_an_excluded_node_stays_until_the_job_ends",
)
@pytest.mark.parametrize(
    ("park", "state", "code"), [("", "FAILED", "75:0"), ("--quarantine=1", "COMPLETED", "0:0")]
)
def test_a_node_is_excluded_and_the_job_is_done(
    slurm: Slurm, park: str, state: str, code: str
) -> None:
    """srun ends with the highest code of its tasks, and the job with srun's: what Slurm shows of a
    job that is done is the 75 of the node that was sent away, unless that one has stayed."""
    times = "--rdzv-conf=heartbeat_timeout=60,probe_timeout=240"  # the good ones may be slow
    check = f"--node-id=$SLURMD_NODENAME --network-check {times} {park}"
    step = f"elasticrun --nnodes=2:3 {check} {PUPPET}"
    job = slurm.sbatch(
        f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 sh -c 'exec {step}'",
        *("-N3", "-wn1,n2,n3"),
        env={"ELASTICRUN_FAULT": "probe-fail@n2", "OMP_NUM_THREADS": "1"},
    )
    peers = slurm.world.hub.ranks(2, world_size=2)
    assert "n2" not in map(slurm.host_of, peers)
    job.until_text("it stays parked until the job ends" if park else "exit code 75")
    finish(peers)
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == state
    assert slurm.told(job, "ExitCode") == code
