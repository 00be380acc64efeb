"""`render jobset`: the same job as a JobSet, whose controller makes the headless Service."""

from __future__ import annotations

from typing import Any, Final

from elasticrun.render import checks, job
from elasticrun.render.gang import gang
from elasticrun.render.pod import Place
from elasticrun.render.wanted import Pods

REPLICATED_JOB: Final = "node"
"""The one replicated job; its one Job is NAME-node-0."""

POD_SUFFIX: Final = len("-abcde")
"""Characters at the end of a pod's name; a JobSet counts them when it checks its own name."""

REMARKS: Final = {
    ("spec", "parallelism"): "not to be changed here; to resize, patch its Job, NAME-node-0",
}
"""What is said of a JobSet in the place of `text.REMARKS`."""


def documents(wanted: Pods) -> list[dict[str, Any]]:
    """The objects in the order in which they are made; raises `Invalid` for a name that is too long
    for the host names of its pods."""
    name = wanted.name
    child = f"{name}-{REPLICATED_JOB}-0"
    digits = len(str(wanted.most_pods - 1))
    room = checks.MAX_LABEL - 1 - digits - len(f"-{REPLICATED_JOB}-0") - POD_SUFFIX
    checks.job_name(name, room, f"NAME-{REPLICATED_JOB}-0-{wanted.most_pods - 1}-abcde")
    metadata = job.metadata(wanted)
    extra = gang(wanted, metadata, of_a_set=True)
    pods = job.spec(wanted, Place(f"{child}-0", ""), extra)
    spec = job.lifetime(wanted) | {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": pods}}],
    }
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job.labelled(wanted, extra),
        "spec": spec,
    }
    return [*job.rights(wanted, child), *extra.documents, made]
