"""What Kubeflow Trainer and the JobSet controller make of a TrainJob, as far as a torch runtime has
it: plain objects in, plain objects out.

Written after Trainer 2.3 (its plugins torch, plainml and jobset) and JobSet v1alpha2. Trainer sets
its variables only for a TrainJob with a `trainer`; a variable of the runtime with the same name is
replaced.
"""

from __future__ import annotations

import copy
from typing import Any

Obj = dict[str, Any]

PORT = 29500
"""Trainer's, which no launcher has to use."""

INDEX = "batch.kubernetes.io/job-completion-index"
SET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def objects(runtime: Obj, train_job: Obj) -> list[Obj]:
    """The headless Service and the Job of a TrainJob that names this runtime."""
    name, asked = train_job["metadata"]["name"], train_job["spec"].get("trainer")
    spec = copy.deepcopy(runtime["spec"])
    (replicated,) = spec["template"]["spec"]["replicatedJobs"]
    step = replicated["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = replicated["template"]["spec"]
    pod = job["template"]
    (container,) = pod["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node"), "Trainer looks for these"
    nodes = (asked or {}).get("numNodes", spec["mlPolicy"]["numNodes"])
    job["completions"] = job["parallelism"] = nodes
    if asked is not None:
        _enforce(container, asked, name, nodes)
    pod["metadata"]["labels"][SET_LABEL] = name
    pod["spec"]["subdomain"] = name
    meta = {"namespace": "default", "labels": {SET_LABEL: name}}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, **meta},
        "spec": {"clusterIP": "None", "selector": {SET_LABEL: name},
                 "publishNotReadyAddresses": True},
    }  # fmt: skip
    called = {"name": f"{name}-node-0", **meta}
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": called, "spec": job}]


def _enforce(container: Obj, asked: Obj, name: str, nodes: int) -> None:
    for field in ("image", "command", "args"):
        if field in asked:
            container[field] = asked[field]
    _upsert(container["env"], asked.get("env", []))
    ranks = str(asked.get("numProcPerNode", "auto"))
    limits = asked.get("resourcesPerNode", container.get("resources", {})).get("limits", {})
    if ranks == "auto" and "nvidia.com/gpu" not in limits:
        ranks = str(max(1, int(limits.get("cpu", 0))))
    place = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    env = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": ranks},
        {"name": "PET_NODE_RANK", "valueFrom": place},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    _upsert(container["env"], env)
    container["ports"].append({"containerPort": PORT})


def _upsert(env: list[Obj], more: list[Obj]) -> None:
    names = {one["name"] for one in more}
    env[:] = [one for one in env if one["name"] not in names] + copy.deepcopy(more)
