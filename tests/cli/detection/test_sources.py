"""What the user can see of detection: sources in --dry-run, the doctor's row, the attempt."""

from __future__ import annotations

import pytest

from elasticrun.cli.detection.found import PORTS, port_of_name, port_of_number
from elasticrun.cli.place import explain
from elasticrun.cli.settings import UsageError
from tests.cli.detection.commands import dry_run, pod, seen
from tests.cli.detection.environments import (
    ARRAY,
    BATCH,
    DLROVER,
    INDEXED,
    LWS,
    PYTORCH_JOB,
    REQUEUED,
    SKYPILOT,
    SRUN,
    TRAINER_2,
)


def test_every_value_has_its_source() -> None:
    rows = dry_run("", SRUN | {"SLURM_GPUS_ON_NODE": "8"})
    assert rows["nnodes"] == "2 $SLURM_STEP_NUM_NODES"
    assert rows["node-rank"] == "1 $SLURM_NODEID"
    assert rows["nproc-per-node"] == "8 $SLURM_GPUS_ON_NODE"
    assert rows["rdzv-id"] == "1 $SLURM_JOB_ID"
    assert rows["rdzv-backend"] == "c10d Slurm"
    assert rows["rdzv-endpoint"] == "node2:20001 $SLURM_STEP_NODELIST; port: $SLURM_JOB_ID"
    assert rows["max-restarts"] == "0 default"
    assert rows["nodes"] == "2"
    assert rows["job master"].startswith("node2:20001, started by the node that has this address")
    assert "attempt" not in rows  # Slurm counts from the second one on


def test_a_flag_counts_more_than_any_scheduler() -> None:
    rows = dry_run("--nnodes=1:2 --nproc-per-node=2 --rdzv-id=mine", SRUN)
    assert rows["nnodes"] == "1:2 --nnodes"
    assert rows["nproc-per-node"] == "2 --nproc-per-node"
    assert rows["rdzv-id"] == "mine --rdzv-id"
    assert rows["node-rank"] == "1 $SLURM_NODEID"


@pytest.mark.parametrize(
    ("environ", "flags", "row", "value"),
    [
        (ARRAY, "", "rdzv-id", "4_3 $SLURM_ARRAY_JOB_ID, $SLURM_ARRAY_TASK_ID"),
        (SRUN | {"SLURM_STEP_ID": "2"}, "", "rdzv-id", "1.2 $SLURM_JOB_ID, $SLURM_STEP_ID"),
        (REQUEUED, "", "attempt", "2 ($SLURM_RESTART_COUNT)"),
        (REQUEUED, "--standalone", "attempt", "2 ($SLURM_RESTART_COUNT)"),
        (LWS, "", "nnodes", "4 $LWS_GROUP_SIZE"),
        (INDEXED, "--nnodes=3", "node-rank", "2 $JOB_COMPLETION_INDEX"),
        (PYTORCH_JOB, "", "nnodes", "3 $WORLD_SIZE"),
        (PYTORCH_JOB, "", "rdzv-endpoint", "mnist-master-0:23456 $MASTER_ADDR; port: $MASTER_PORT"),
        (DLROVER, "", "nnodes", "4 $NODE_NUM"),
        (DLROVER, "", "node-rank", "2 $NODE_RANK"),
        (SKYPILOT, "", "nproc-per-node", "4 $SKYPILOT_NUM_GPUS_PER_NODE"),
        (DLROVER, "", "rdzv-endpoint", f"{DLROVER['DLROVER_MASTER_ADDR']} $DLROVER_MASTER_ADDR"),
        (DLROVER, "", "rdzv-id", "gpt $ELASTIC_JOB_NAME"),
        (DLROVER, "--node-rank=1", "rdzv-id", "gpt $ELASTIC_JOB_NAME"),
        (DLROVER, "--rdzv-id=mine", "rdzv-id", "mine --rdzv-id"),
        (
            DLROVER,
            "--rdzv-endpoint=h:7 --rdzv-backend=c10d",
            "rdzv-endpoint",
            "h:7 --rdzv-endpoint",
        ),
        (DLROVER, "--rdzv-endpoint=h:7 --rdzv-backend=c10d", "rdzv-id", "none default"),
        ({"NODE_RANK": "1"}, "--nnodes=2", "node-rank", "1 $NODE_RANK"),
        ({"WORKER_RANK": "1"}, "--nnodes=2", "node-rank", "1 $WORKER_RANK"),
        ({"NODE_NUM": "3"}, "--auto-config --master-port=7", "nnodes", "3 $NODE_NUM"),
        ({}, "--nnodes=2 --rdzv-backend=c10d", "node-rank", "by order of arrival"),
        ({}, "", "node-rank", "by order of arrival"),
        (TRAINER_2, "", "nnodes", "4 $PET_NNODES"),
        (TRAINER_2 | {"ELASTICRUN_NNODES": "5"}, "", "nnodes", "5 $ELASTICRUN_NNODES"),
        (TRAINER_2 | {"ELASTICRUN_NNODES": "5"}, "--nnodes=4", "nnodes", "4 --nnodes"),
        ({}, "", "nnodes", "1:1 default"),
    ],
)
def test_where_a_value_came_from(environ: dict[str, str], flags: str, row: str, value: str) -> None:
    assert dry_run(flags, environ, pod("tr-2", "tr.ns"))[row] == value


def test_a_job_that_nobody_has_named_shows_the_name_it_gets() -> None:
    rows = dry_run("", {})
    assert rows["rdzv-id"] == f"{rows['job id'].strip()} new for every run"


def test_a_later_attempt_is_told_whatever_the_flags_say() -> None:
    told = "task 0 of 2 in Slurm step 3.0, attempt 2 ($SLURM_RESTART_COUNT)"
    assert seen("--standalone", REQUEUED).note == told
    assert seen("--nnodes=1", REQUEUED).note == told
    assert seen("--nnodes=2 --rdzv-endpoint=h:7 --rdzv-backend=c10d", REQUEUED).note == told
    assert seen("", REQUEUED).note.startswith(f"{told}, so this equals")


def test_what_the_doctor_says() -> None:
    assert explain(seen("", {})) == (
        "no scheduler is detected; a command without flags is a job of one node"
    )
    assert "so this equals --nnodes=2" in explain(seen("", SRUN))
    assert "use --srun for one job on all nodes" in explain(seen("", BATCH))
    assert explain(seen("", TRAINER_2)) == (
        "a pod of a training job whose operator says PET_NNODES=4; $PET_MASTER_ADDR names the "
        "rendezvous and takes precedence"
    )
    assert explain(seen("--nnodes=1", SRUN)).endswith("is a job of one node")


def test_a_bad_number_of_nodes_is_the_usual_sentence() -> None:
    with pytest.raises(UsageError, match="--nnodes=two is neither"):
        seen("--nnodes=two", SRUN)


def test_ports_are_outside_the_ephemeral_range_and_apart() -> None:
    ephemeral, known = range(32768, 61000), (29400, 29500)
    ports = [port_of_number(job) for job in range(5000, 5000 + len(PORTS))]
    assert len(set(ports)) == len(ports)  # jobs that follow each other never share one
    steps = {port_of_number(77, step) for step in range(50)}
    assert len(steps) == 50
    many = [*ports, *steps, port_of_number(10**12, 10**6), *map(port_of_name, ("", "tr", "é" * 99))]
    for port in many:
        assert port not in ephemeral
        assert port not in known
        assert 1024 < port < 65536
    assert port_of_name("tr") == port_of_name("tr") != port_of_name("tr-1")
