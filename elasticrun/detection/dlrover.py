"""A pod of DLRover's ElasticJob. Its master is told by DLROVER_MASTER_ADDR, and is somebody else's
to start; NODE_RANK and NODE_NUM mean nodes."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.detection.found import Facts, Found, number, text


def detect(environ: Mapping[str, str], facts: Facts) -> Found | None:
    """What DLRover's operator says; None where it has not made this pod."""
    master = text(environ, "DLROVER_MASTER_ADDR")
    if master is None:
        return None
    return Found(
        "DLRover",
        f"a pod of a DLRover ElasticJob, whose master is to be at {master.value}",
        nodes=number(environ, "NODE_NUM"),
        node_rank=number(environ, "NODE_RANK", "WORKER_RANK"),
        job_id=text(environ, "ELASTIC_JOB_NAME"),
        host=master,
        external=True,
    )
