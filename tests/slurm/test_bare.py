"""A bare command finds out by itself where it is, and means one node where nobody has asked for
more, as under torchrun."""

from __future__ import annotations

import os

import pytest

from tests.compat.live import PUPPET, allreduce, finish, summing
from tests.further import further
from tests.slurm.conftest import Slurm, typed_on_page

pytestmark = pytest.mark.slow


@further("slurm/test_steps::test_srun_of_several_nodes", "cli/test_bare")
def test_a_step_of_two_nodes(slurm: Slurm) -> None:
    here = {"-N4": "-N2 -wn2,n3", "node=8": "node=2", "train.py": str(PUPPET)}
    step = slurm.types(*typed_on_page("srun -N4 elasticrun", here))
    peers = slurm.world.hub.ranks(4, world_size=4)
    assert sorted(slurm.host_of(peer) for peer in peers) == ["n2", "n2", "n3", "n3"]
    assert [slurm.host_of(peer) for peer in peers[::2]] == ["n2", "n3"], "as srun numbers nodes"
    assert slurm.cluster.jobs() == [peers[0].run_id]
    assert allreduce(slurm.world, peers) == [4] * 4
    finish(peers, step)
    assert "so this equals --nnodes=2" in step.stderr


@further("cli/test_bare")
def test_several_tasks_a_node_are_one_agent(slurm: Slurm) -> None:
    """The others end at once, with 0 and a sentence."""
    step = slurm.srun("-N2", "--ntasks-per-node=2", "elasticrun", "--nnodes=2", PUPPET)
    peers = summing(slurm.world, 2, world_size=2)
    step.until_text("another task on this node is the agent")
    finish(peers, step)
    assert step.stderr.count("another task on this node is the agent") == 2


@further("cli/test_bare")
def test_an_array_of_wrapped_commands_that_ask_for_srun(slurm: Slurm) -> None:
    """`sbatch --wrap "elasticrun --srun ..."`: one agent on each node. Two tasks of an array share
    both machines, and are jobs of their own."""
    here = {"-N4": "-N2 -wn1,n2 --array=0-1", "node=8": "node=1", "train.py": str(PUPPET)}
    array = slurm.submits(*typed_on_page("sbatch -N4 --wrap", here)[1:])
    peers = slurm.world.hub.ranks(4, world_size=2)
    for task in (0, 1):
        ours = [peer for peer in peers if peer.run_id == f"{array.number}_{task}"]
        assert {slurm.host_of(peer) for peer in ours} == {"n1", "n2"}
        assert allreduce(slurm.world, ours) == [2, 2]
    finish(peers)
    slurm.await_end(array)
    ended = slurm.cluster.run("scontrol", "show", "job", str(array.number))
    assert ended.count("JobState=COMPLETED") == 2
    assert array.console.read_text().count("--srun: srun --nodes=2") == 2


@further("cli/test_bare")
def test_where_nobody_asked_for_more_than_one_node(slurm: Slurm) -> None:
    """A shell from `srun --pty`, salloc, and a batch script that goes from node to node: the same
    command is a job of one node in all of them, and says which flag makes it one of two."""
    hub = slurm.world.hub
    typed = f"srun -N2 -wn1,n2 --pty elasticrun {PUPPET}"
    shell = slurm.types("script", "-qfec", typed, str(slurm.folder / "terminal.txt"))
    salloc = slurm.types("salloc", "-N2", "-wn3,n4", "elasticrun", PUPPET)
    seen = slurm.folder / "environment"
    end = slurm.folder / "end"
    os.mkfifo(end)
    batch = slurm.sbatch(f"env -0 >{seen}; echo seen; read <{end}", "-N2", "-wn3,n4")
    batch.until_text("seen\n")
    env = dict(item.split("=", 1) for item in seen.read_text().split("\0") if "=" in item)
    visits = [
        slurm.world.command([*slurm.cluster.lab.prefix(host), "elasticrun", PUPPET], env=env)
        for host in ("n3", "n4")
    ]
    alone = hub.ranks(5)
    assert [peer.world_size for peer in alone] == [1] * 5
    finish(alone, shell, salloc, *visits)
    assert "use --nnodes=2 for one job on all nodes" in (slurm.folder / "terminal.txt").read_text()
    for one in (salloc, *visits):
        assert "use --srun for one job on all nodes" in one.stderr
    end.write_text("\n")
