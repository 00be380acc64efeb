"""Renders a runtime of Kubeflow Trainer: TrainJobs that name it run with elasticrun.

One runtime serves many TrainJobs, whose names and sizes are known only in their pods. The launcher
therefore takes them from variables, which Kubernetes puts into its words: PET_NNODES, which Trainer
sets to the TrainJob's number of nodes, and the labels of JobSet and Job. The words stand in the
container's `command`, because a TrainJob's `args` replace those of the runtime.
"""

from __future__ import annotations

from typing import Any, Final

from elasticrun.jobs.render import checks, pods
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.pods import Gang, PodNames
from elasticrun.jobs.render.settings import INDEX, JOB_UID, PodSettings

API: Final = "trainer.kubeflow.org/v1alpha1"
FRAMEWORK_LABEL: Final = "trainer.kubeflow.org/framework"
STEP_LABEL: Final = "trainer.kubeflow.org/trainjob-ancestor-step"

NODE: Final = "node"
"""The name that Trainer expects of the replicated job and of its container."""

SET_NAME: Final = "ELASTICRUN_TRAINJOB"
"""Variable with the name of the TrainJob, which its JobSet and the pods' domain have too."""

SET_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"

NODES: Final = "PET_NNODES"
RANKS: Final = "PET_NPROC_PER_NODE"
"""Variables that Trainer sets for a TrainJob with a `trainer`. The runtime's own values apply to
other TrainJobs."""

GANGS: Final = ("none", "volcano", "coscheduling")

REMARKS: Final = {
    ("mlPolicy", "numNodes"): "of a TrainJob that does not set it",
    ("spec", "backoffLimit"): "maximum number of failed pods, including deleted ones",
    ("failurePolicy", "maxRestarts"): "lost nodes are replaced; nothing starts over",
}
"""YAML comments that replace those of `text.REMARKS`."""


def runtime_documents(settings: PodSettings) -> list[dict[str, Any]]:
    """The runtime: for all namespaces, or for `settings.namespace`. Raises Invalid for settings
    that only the TrainJob has."""
    _refuse(settings)
    checks.subdomain(settings.name, "--name")
    labels = pods.common_labels(settings) | {FRAMEWORK_LABEL: "torch"}
    job = pods.job_spec(settings, PodNames("", ""), Gang())
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = NODE
    for field in ("completions", "parallelism"):  # Trainer sets both
        del job[field]
    _set_container(settings, job["template"]["spec"]["containers"][0])
    metadata = {"labels": {STEP_LABEL: "trainer"}}
    of_a_set = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": NODE, "replicas": 1, "template": {"metadata": metadata, "spec": job}}
        ],
    }
    gang: dict[str, Any] = (
        {} if settings.gang == "none" else {"podGroupPolicy": {settings.gang: {}}}
    )
    spec = {
        "mlPolicy": {"numNodes": settings.launch.max_nodes, "torch": {}},
        **gang,
        "template": {"spec": of_a_set},
    }
    kind = "TrainingRuntime" if settings.namespace else "ClusterTrainingRuntime"
    named = pods.common_metadata(settings) | {"labels": labels}
    return [{"apiVersion": API, "kind": kind, "metadata": named, "spec": spec}]


def _refuse(settings: PodSettings) -> None:
    its = "a TrainJob has it"
    for flag, given, why in (
        ("--pods", settings.pods, f"{its}: trainer.numNodes"),
        ("--suspend", settings.suspend, f"{its}: suspend"),
        ("--deadline", settings.deadline, f"{its}: activeDeadlineSeconds"),
        ("--ttl", settings.ttl is not None, "Trainer would create the pods again"),
        ("--rdzv-id", settings.launch.job_id, "each TrainJob needs its own"),
        ("--rbac", settings.rbac, "Trainer decides the number of pods"),
        ("--queue", settings.queue, "label the TrainJob with kueue.x-k8s.io/queue-name"),
        ("--scheduler", settings.scheduler, "Trainer chooses it with --gang"),
    ):
        if given:
            raise Invalid(f"{flag}: not for a runtime of TrainJobs: {why}")
    if settings.gang not in GANGS:
        raise Invalid(
            f"--gang {settings.gang}: Trainer supports {' and '.join(GANGS[1:])}; for Kueue, "
            "label the TrainJob with kueue.x-k8s.io/queue-name"
        )


def _set_container(settings: PodSettings, container: dict[str, Any]) -> None:
    """Change the container of the Job into that of a runtime."""
    launch = settings.launch
    low = "" if launch.min_nodes == launch.max_nodes else f"{launch.min_nodes}:"
    words = [f"--nnodes={low}$({NODES})"]
    if not launch.by_etcd:
        head = f"$({SET_NAME})-{NODE}-0-0.$({SET_NAME}):{settings.port}"
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}"]
    words += [f"--rdzv-id=$({SET_NAME})-$({JOB_UID})", f"--node-rank=$({INDEX})"]
    container["name"] = NODE
    container["command"] = ["elasticrun", *words, *map(pods.literal, launch.flags)]
    container["args"] = list(map(pods.literal, launch.program))
    by_label = {"fieldRef": {"fieldPath": f"metadata.labels['{SET_LABEL}']"}}
    container["env"] += [
        {"name": SET_NAME, "valueFrom": by_label},
        {"name": NODES, "value": str(launch.max_nodes)},
        {"name": RANKS, "value": launch.nproc_per_node},
    ]
