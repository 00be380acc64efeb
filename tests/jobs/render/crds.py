"""Schemas of what is not Kubernetes' own, written from the public documentation of each project.

Strict: of the fields that exist only those that we may write are listed, so a misspelt one fails.
On 2026-11-22 they were compared, field by field, with the projects' own definitions: of JobSet
v1alpha2 (config/components/crd/bases, api/jobset/v1alpha2, and what its webhook checks), of Volcano
v1beta1 and of scheduler-plugins v1alpha1 (config/crd). On 2026-11-29 the runtimes and TrainJobs of
the tests and examples were held against the CRDs of Kubeflow Trainer 2.3 itself (manifests/base/
crds, of 450 and 680 kB): they passed, with unknown fields refused.
"""

from __future__ import annotations

from typing import Any

COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
MEMBERS = COUNT | {"minimum": 1}
TEXT = {"type": "string", "minLength": 1}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMES = {"name": TEXT, "namespace": TEXT, "labels": _TEXTS, "annotations": _TEXTS}
METADATA = _object(_NAMES, "name")


def _kind(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": METADATA,
            "spec": spec,
        },
        "apiVersion", "kind", "metadata", "spec",
    )  # fmt: skip


# jobset.sigs.k8s.io: JobSetSpec, ReplicatedJob, Network, FailurePolicy of v1alpha2
_JOBSET = _object(
    {
        "replicatedJobs": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
                    "replicas": COUNT,
                    "groupName": TEXT,
                    # its spec is held against the schema of a Job
                    "template": _object(
                        {"metadata": _object(_NAMES), "spec": {"type": "object"}}, "spec"
                    ),
                },
                "name",
                "template",
            ),
        },
        "network": _object(
            {
                "enableDNSHostnames": {"type": "boolean"},
                "subdomain": TEXT,
                "publishNotReadyAddresses": {"type": "boolean"},
            }
        ),
        "failurePolicy": _object({"maxRestarts": COUNT}),
        "suspend": {"type": "boolean"},
        "ttlSecondsAfterFinished": COUNT,
    },
    "replicatedJobs",
)

# volcano.sh: PodGroup; scheduler-plugins: coscheduling
_VOLCANO = _object({"minMember": MEMBERS, "queue": TEXT, "priorityClassName": TEXT}, "minMember")
_COSCHEDULING = _object({"minMember": MEMBERS, "scheduleTimeoutSeconds": COUNT}, "minMember")

# trainer.kubeflow.org: TrainingRuntimeSpec of v1alpha1, as far as the torch policy has it
_RUNTIME = _object(
    {
        "mlPolicy": _object({"numNodes": COUNT, "torch": _object({})}, "numNodes", "torch"),
        "podGroupPolicy": {
            "oneOf": [
                _object({"volcano": _object({})}, "volcano"),
                _object({"coscheduling": _object({"scheduleTimeoutSeconds": COUNT})},
                        "coscheduling"),
            ]
        },
        "template": _object({"spec": _JOBSET}, "spec"),
    },
    "mlPolicy", "template",
)  # fmt: skip
_TRAINER = "trainer.kubeflow.org/v1alpha1"
_TRAIN_JOB = _object(
    {
        "runtimeRef": _object({"name": TEXT, "apiGroup": TEXT, "kind": TEXT}, "name"),
        "trainer": _object(
            {
                "numNodes": COUNT,
                "numProcPerNode": MEMBERS,
                "image": TEXT,
                "command": {"type": "array", "items": {"type": "string"}},
                "args": {"type": "array", "items": {"type": "string"}},
                "env": {"type": "array", "items": {"type": "object"}},
                "resourcesPerNode": {"type": "object"},
            }
        ),
    },
    "runtimeRef",
)

SCHEMAS = {
    (_TRAINER, "ClusterTrainingRuntime"): _kind(_TRAINER, "ClusterTrainingRuntime", _RUNTIME),
    (_TRAINER, "TrainingRuntime"): _kind(_TRAINER, "TrainingRuntime", _RUNTIME),
    (_TRAINER, "TrainJob"): _kind(_TRAINER, "TrainJob", _TRAIN_JOB),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _kind("jobset.x-k8s.io/v1alpha2", "JobSet", _JOBSET),
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): _kind(
        "scheduling.volcano.sh/v1beta1", "PodGroup", _VOLCANO
    ),
    ("scheduling.x-k8s.io/v1alpha1", "PodGroup"): _kind(
        "scheduling.x-k8s.io/v1alpha1", "PodGroup", _COSCHEDULING
    ),
}
