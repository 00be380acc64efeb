"""Detection in real commands: agents that find each other, and what their ranks see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticrun.cli.detection.found import port_of_number
from tests.cli.detection.environments import BATCH, CROWD, POD, SRUN
from tests.compat.live import PUPPET, finish
from tests.further import further
from tests.harness import ELASTICRUN, PATIENT, World

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, torch.distributed as dist
dist.init_process_group("gloo")
seen = [None] * dist.get_world_size()
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE")
dist.all_gather_object(seen, {name: os.environ[name] for name in names})
if dist.get_rank() == 0:
    print(json.dumps(seen), flush=True)
dist.destroy_process_group()
"""


def script(world: World) -> Path:
    """A program whose rank 0 prints what all ranks have in their environment."""
    path = world.scratch / "train.py"
    path.write_text(SCRIPT)
    return path


def step(node: int, job: int) -> dict[str, str]:
    """One of two tasks of a step whose nodes are both this host."""
    return SRUN | PATIENT | {
        "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node), "SLURM_STEP_NODELIST": "127.0.0.[2-3]",
    }  # fmt: skip


@further(
    "test_a_node_of_another_job_is_refused_at_the_port",
    "slurm/test_steps::test_srun_of_several_nodes",
    "cli/detection/test_schedulers",
)
def test_srun_with_a_bare_command(world: World) -> None:
    """Two tasks find each other by what Slurm says; the first node's is the first rank's."""
    train = str(script(world))
    job = 700_000_000 + (hash(world.marker) % 1_000_000)
    talkative = {"LOGLEVEL": "INFO"}
    second = world.launch(ELASTICRUN, train, env=step(1, job) | talkative)
    first = world.launch(ELASTICRUN, train, env=step(0, job) | talkative)
    for agent in (first, second):
        agent.until_text("ranks will be started by fork")
    assert [first.wait(), second.wait()] == [0, 0], first.stderr + second.stderr
    seen = json.loads(first.stdout)
    assert [one["RANK"] for one in seen] == ["0", "1"]
    assert [one["GROUP_RANK"] for one in seen] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in seen} == {"2"}
    assert {one["TORCHELASTIC_RUN_ID"] for one in seen} == {str(job)}
    assert f"--rdzv-endpoint=127.0.0.2:{port_of_number(job)}" in second.stderr
    assert f"task 1 of 2 in Slurm step {job}.0, so this equals" in second.stderr


@further(
    "test_a_node_of_another_job_is_refused_at_the_port",
    "cli/detection/test_schedulers::test_a_row_of_the_table",
    "jobs/render/test_trainer::test_a_train_job_with_a_command_of_its_own",
)
def test_what_an_operator_says_of_nodes_never_reaches_a_rank(world: World) -> None:
    """RANK=1 of WORLD_SIZE=2 nodes; each has two ranks."""
    train = str(script(world))
    port = str(20_000 + hash(world.marker) % 9_000)
    pods = [
        POD
        | PATIENT
        | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": port}
        for rank in range(2)
    ]
    jobs = [world.launch(ELASTICRUN, "--nproc-per-node=2", train, env=one) for one in pods]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    seen = json.loads(jobs[0].stdout)
    assert [one["RANK"] for one in seen] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in seen] == ["0", "1", "0", "1"]
    assert [one["GROUP_RANK"] for one in seen] == ["0", "0", "1", "1"]
    assert {one["WORLD_SIZE"] for one in seen} == {"4"}
    assert {one["GROUP_WORLD_SIZE"] for one in seen} == {"2"}
    assert all(one["MASTER_PORT"] != port for one in seen)


def test_a_node_of_another_job_is_refused_at_the_port(world: World) -> None:
    """Jobs whose ids give the same port never mix: the later one ends with a sentence."""
    job = 700_000_000 + (hash(world.marker) % 1_000_000)
    words = (ELASTICRUN, "--nnodes=1:2", "--grow=now", PUPPET)  # however late the second one is
    first = [world.launch(*words, env=step(0, job) | {"LOGLEVEL": "INFO"})]
    first[0].until_text("serving job")
    other = world.launch(ELASTICRUN, PUPPET, env=step(0, job + 9_000))
    first.append(world.launch(*words, env=step(1, job)))
    assert other.wait() == 1
    assert f"belongs to job '{job + 9_000}', the master here serves job '{job}'" in other.stderr
    finish(world.hub.ranks(2, world_size=2))
    assert [one.wait() for one in first] == [0, 0]


def test_another_task_of_a_node_ends_well(world: World) -> None:
    done = world.launch(ELASTICRUN, "--nnodes=2", "train.py", env=CROWD)
    assert done.wait() == 0
    assert done.stdout == ""
    assert "another task on this node is the agent, so this one exits" in done.stderr


def test_the_doctor_has_a_row(world: World) -> None:
    done = world.launch(ELASTICRUN, "doctor", "--json", env=SRUN | {"GLOO_SOCKET_IFNAME": "lo"})
    done.wait()
    page = json.loads(done.stdout)
    rows = [one for one in page["findings"] if one["check"] == "scheduler"]
    assert len(rows) == 1
    assert rows[0]["state"] == "ok"
    assert rows[0]["seen"].startswith("task 1 of 2 in Slurm step 1.0, so this equals")
    assert {"name": "nnodes", "value": "2", "source": "$SLURM_STEP_NUM_NODES"} in page["settings"]


@further(
    "test_a_node_of_another_job_is_refused_at_the_port",
    "cli/detection/test_schedulers::test_a_row_of_the_table",
)
def test_a_batch_script_is_one_node_and_one_line(world: World) -> None:
    train = str(script(world))
    done = world.launch(ELASTICRUN, "--nproc-per-node=2", train, env=BATCH)
    assert done.wait() == 0, done.stderr
    assert {one["WORLD_SIZE"] for one in json.loads(done.stdout)} == {"2"}
    lines = [line for line in done.stderr.splitlines() if "Slurm" in line]
    assert len(lines) == 1
    assert "use --srun for one job on all nodes" in lines[0]
