"""`render k8s`: an Indexed Job, its headless Service, and what a gang or a resize needs."""

from __future__ import annotations

from typing import Any, Final

from elasticrun.render import checks, job
from elasticrun.render.gang import gang
from elasticrun.render.pod import Place
from elasticrun.render.wanted import Pods

JOB_LABEL: Final = "batch.kubernetes.io/job-name"


def documents(wanted: Pods) -> list[dict[str, Any]]:
    """The objects in the order in which they are made; raises `Invalid` for a name that is too long
    for the host names of its pods."""
    name = wanted.name
    digits = len(str(wanted.most_pods - 1))
    checks.job_name(name, checks.MAX_LABEL - 1 - digits, f"NAME-{wanted.most_pods - 1}")
    metadata = job.metadata(wanted)
    extra = gang(wanted, metadata)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
            "ports": [{"name": "master", "port": wanted.port}],
        },
    }
    made = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job.labelled(wanted, extra),
        "spec": job.lifetime(wanted) | job.spec(wanted, Place(f"{name}-0", name), extra),
    }
    return [*job.rights(wanted, name), service, *extra.documents, made]
