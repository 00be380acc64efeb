"""Detects the scheduler: the first family that recognizes the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from elasticrun.cli.detection import kubernetes, slurm
from elasticrun.cli.detection.found import (
    TERMINAL,
    Found,
    Given,
    HostFacts,
    as_int,
    number,
    port_of_name,
    text,
)


def dlrover(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """The values of DLRover's operator; None unless it created this pod. The master is started
    elsewhere, and NODE_RANK and NODE_NUM count nodes."""
    master = text(environ, "DLROVER_MASTER_ADDR")
    if master is None:
        return None
    return Found(
        "DLRover",
        f"a pod of a DLRover ElasticJob, whose master should be at {master.value}",
        nodes=number(environ, "NODE_NUM"),
        node_rank=number(environ, "NODE_RANK", "WORKER_RANK"),
        job_id=text(environ, "ELASTIC_JOB_NAME"),
        host=master,
        external=True,
    )


def skypilot(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """SkyPilot's values; None outside SkyPilot."""
    rank = number(environ, "SKYPILOT_NODE_RANK")
    addresses = text(environ, "SKYPILOT_NODE_IPS")
    if rank is None or addresses is None:
        return None
    each = addresses.value.split()
    nodes = number(environ, "SKYPILOT_NUM_NODES") or Given(str(len(each)), addresses.source)
    task = text(environ, "SKYPILOT_TASK_ID") or Given(f"sky-{each[0]}", addresses.source)
    devices = number(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    count = as_int(nodes)
    found = Found(
        "SkyPilot",
        f"node {rank.value} of {count} of SkyPilot task {task.value}",
        nodes=nodes,
        node_rank=rank,
        nproc=devices if as_int(devices) else None,
        job_id=task,
    )
    if count <= 1:
        return found
    why = TERMINAL if facts.terminal else ""
    if len(each) != count:
        why = f"SKYPILOT_NODE_IPS has {len(each)} address(es) for {count} nodes"
    port = Given(str(port_of_name(task.value)), task.source)
    host, use = Given(each[0], addresses.source), f"--nnodes={count}"
    return replace(found, host=host, port=port, why_alone=why, use=use)


Family = Callable[[Mapping[str, str], HostFacts], Found | None]

ORDER: Final[tuple[Family, ...]] = (
    kubernetes.kubeflow,  # PET_*: torchrun's own variables take precedence over any scheduler's
    dlrover,
    slurm.detect,  # before Kubernetes: slurmd may run in a pod
    kubernetes.leader_worker_set,
    kubernetes.volcano,
    kubernetes.indexed_job,  # and JobSet
    kubernetes.pytorch_job,
    skypilot,
    kubernetes.stateful_set,  # last: only the host name indicates it
)

INSIDE: Final = "TORCHELASTIC_RUN_ID"
"""A variable that is set in every rank. A process that a rank starts inherits the scheduler's
variables too, but is a single process on one node."""


def detect(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """This node's place in its job; None if no scheduler is detected."""
    found = next(filter(None, (family(environ, facts) for family in ORDER)), None)
    if found is None or INSIDE not in environ or found.external:
        return found
    several = found.why_alone or as_int(found.nodes) > 1
    why = "a rank of another job started this process" if several else ""
    return replace(found, why_alone=why, host=None, use="")
