"""All pods or none: what each gang scheduler wants to see; the gang is the fewest nodes that train.

Without one the job is whole as well: no rank starts before that many nodes have joined; but the
pods that are there hold their devices while they wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from elasticrun.render.wanted import Pods

BETA: Final = (1, 37)
"""From this version of Kubernetes on its own PodGroup is v1beta1."""


@dataclass(frozen=True, slots=True)
class Gang:
    """What a gang scheduler adds to a job."""

    documents: tuple[dict[str, Any], ...] = ()
    job_labels: dict[str, str] = field(default_factory=dict)
    job_annotations: dict[str, str] = field(default_factory=dict)
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_spec: dict[str, Any] = field(default_factory=dict)
    scheduler: str = ""


def gang(wanted: Pods, metadata: dict[str, Any], *, of_a_set: bool = False) -> Gang:
    """The additions that `wanted.gang` calls for; `metadata` is that of every object of the job.

    `of_a_set`: the job is a JobSet, which Kueue admits whole or not at all.
    """
    name, least = wanted.name, wanted.launch.min_nodes
    if wanted.gang == "volcano":
        spec: dict[str, Any] = {"minMember": least}
        spec |= {"queue": wanted.queue} if wanted.queue else {}
        spec |= {"priorityClassName": wanted.priority} if wanted.priority else {}
        group = _group("scheduling.volcano.sh/v1beta1", metadata, spec)
        by_name = {"scheduling.k8s.io/group-name": name}
        return Gang((group,), pod_annotations=by_name, scheduler="volcano")
    if wanted.gang == "coscheduling":
        group = _group("scheduling.x-k8s.io/v1alpha1", metadata, {"minMember": least})
        by_name = {"scheduling.x-k8s.io/pod-group": name}
        return Gang((group,), pod_labels=by_name, scheduler="scheduler-plugins-scheduler")
    if wanted.gang == "koordinator":
        # Without `total-number`: of a job that was made smaller it would not be true any more.
        prefix = "gang.scheduling.koordinator.sh"
        by_name = {f"{prefix}/name": name, f"{prefix}/min-available": str(least)}
        return Gang(pod_annotations=by_name, scheduler="koord-scheduler")
    if wanted.gang == "native":
        stage = "v1beta1" if wanted.version >= BETA else "v1alpha2"
        policy = {"schedulingPolicy": {"gang": {"minCount": least}}}
        group = _group(f"scheduling.k8s.io/{stage}", metadata, policy)
        return Gang((group,), pod_spec={"schedulingGroup": {"podGroupName": name}})
    if wanted.gang == "kueue":
        fewer = {}
        if least < wanted.replicas and not of_a_set:
            fewer = {
                "kueue.x-k8s.io/job-min-parallelism": str(least),
                "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
            }
        queue = {"kueue.x-k8s.io/queue-name": wanted.queue}
        return Gang(job_labels=queue, job_annotations=fewer)
    return Gang()


def _group(version: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": spec}
