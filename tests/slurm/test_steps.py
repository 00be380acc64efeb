"""Steps: srun with one agent a node, several jobs at a time, what `elasticrun render slurm` prints,
and machines that lose power: with `--no-kill` Slurm lets the others be, and they go on long before
Slurm knows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import Peer, until_file
from tests.jobs.render.rendered import render
from tests.slurm.conftest import Slurm, agent, typed_on_page

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


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


@further("test_srun_of_several_nodes", "cli/detection/test_sources")
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


@further("test_a_step_whose_ranks_fail")
def test_a_node_is_excluded_and_the_job_is_done(slurm: Slurm) -> None:
    """srun ends with the highest code of its tasks, and the job with srun's: what Slurm shows of a
    job that is done is the 75 of the excluded node."""
    times = "--rdzv-conf=heartbeat_timeout=60,probe_timeout=240"  # the good ones may be slow
    check = f"--node-id=$SLURMD_NODENAME --network-check {times}"
    step = f"elasticrun --nnodes=2:3 {check} {PUPPET}"
    job = slurm.sbatch(
        f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 sh -c 'exec {step}'",
        *("-N3", "-wn1,n2,n3"),
        env={"ELASTICRUN_FAULT": "probe-fail@n2", "OMP_NUM_THREADS": "1"},
    )
    peers = slurm.world.hub.ranks(2, world_size=2)
    assert "n2" not in map(slurm.host_of, peers)
    job.until_text("exit code 75")
    finish(peers)
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "FAILED"
    assert slurm.told(job, "ExitCode") == "75:0"


@further("jobs/render/test_slurm", "jobs/render/test_goldens")
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


@further("e2e/test_examples::test_files_are_what_render_prints")
def test_the_example_trains(slurm: Slurm) -> None:
    """examples/cluster/slurm.sh, with one rank on a node and a small model."""
    script = (EXAMPLES / "cluster/slurm.sh").read_text()
    small = "--steps 30 --batch 8 --micro-batch 2 --length 16 --width 32 --layers 1"
    for found, here in (
        ("per-node=8", "per-node=1"),
        ("#SBATCH --gpus-per-node=1\n", ""),
        ("cpus-per-task=32", "cpus-per-task=1"),
        ("--nodes=2-5", "--nodes=2-3"),
        ("/shared/runs/pretrain", f"{slurm.folder}/pretrain {small}"),
        ("examples/", f"{EXAMPLES}/"),
    ):
        assert found in script
        script = script.replace(found, here)
    job = slurm.sbatch(script)
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert "step=30 ranks=" in job.console.read_text()


@further("jobs/render/test_slurm", "slurm/test_steps::test_a_step_whose_ranks_fail")
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


QUICK = "--rdzv-conf=heartbeat_timeout=10,last_call_timeout=1"
"""A node that stands still for a shorter while has not lost its power."""


def next_world(slurm: Slurm, size: int, old: set[int]) -> list[Peer]:
    """The ranks of the world that comes after these processes, which sums."""
    peers = slurm.world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)
    assert allreduce(slurm.world, peers) == [size] * size
    return peers


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill",
)
def test_nodes_lose_power_one_after_the_other(slurm: Slurm) -> None:
    """2:3 on four nodes. The spare takes the place of the first that is lost; without another, the
    two that are left go on. No restart is charged, and Slurm has noticed nothing. When it does,
    that disturbs nobody."""
    here = {"train.py": f"{QUICK} {PUPPET}"}
    step = slurm.types(*typed_on_page("srun -N4 --no-kill", here))
    peers = next_world(slurm, 3, set())
    busy = [slurm.host_of(peer) for peer in peers]
    (spare,) = set(slurm.cluster.nodes) - set(busy)
    lost = []
    for size in (3, 2):
        lost.append(next(name for name in reversed(busy) if name != "n1"))
        # a late node's first world may have been one of two: those have gone
        known = {peer.pid for peer in slurm.world.hub.peers}
        slurm.cluster.power_off(lost[-1])
        peers = next_world(slurm, size, known)
        busy = [slurm.host_of(peer) for peer in peers]
        assert lost[-1] not in busy
        assert (spare in busy) is (size == 3) or spare not in lost
    assert all("down" not in slurm.cluster.state(name) for name in lost)
    for name in lost:
        slurm.cluster.run("scontrol", "update", f"nodename={name}", "state=down", "reason=power")
    assert allreduce(slurm.world, peers) == [2, 2]
    finish(peers, step)
    assert "(no restart used)" in step.stderr
