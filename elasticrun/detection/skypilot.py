"""SkyPilot: the run section of a task, on one of its nodes."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.detection.found import (
    TERMINAL,
    Facts,
    Found,
    Given,
    amount,
    number,
    port_of_name,
    text,
)


def detect(environ: Mapping[str, str], facts: Facts) -> Found | None:
    """What SkyPilot says; None outside it."""
    rank = number(environ, "SKYPILOT_NODE_RANK")
    addresses = text(environ, "SKYPILOT_NODE_IPS")
    if rank is None or addresses is None:
        return None
    each = addresses.value.split()
    nodes = number(environ, "SKYPILOT_NUM_NODES") or Given(str(len(each)), addresses.source)
    task = text(environ, "SKYPILOT_TASK_ID") or Given(f"sky-{each[0]}", addresses.source)
    devices = number(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    count = amount(nodes)
    found = Found(
        "SkyPilot",
        f"node {rank.value} of {count} of SkyPilot task {task.value}",
        nodes=nodes,
        node_rank=rank,
        nproc=devices if amount(devices) else None,
        job_id=task,
    )
    if count <= 1:
        return found
    why = TERMINAL if facts.terminal else ""
    if len(each) != count:
        why = f"SKYPILOT_NODE_IPS has {len(each)} address(es) for {count} nodes"
    port = Given(str(port_of_name(task.value)), task.source)
    return Found(
        found.family, found.seen, nodes, rank, found.nproc, task,
        host=Given(each[0], addresses.source), port=port, why_alone=why, use=f"--nnodes={count}",
    )  # fmt: skip
