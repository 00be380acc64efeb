"""Schemas of what is not Kubernetes' own, written from the public documentation of each project.

Strict: of the fields that exist only those that we may write are listed, so a misspelt one fails.
On 2026-11-22 they were compared, field by field, with the projects' own definitions: of JobSet
v1alpha2 (config/components/crd/bases, api/jobset/v1alpha2, and what its webhook checks), of Volcano
v1beta1 and of scheduler-plugins v1alpha1 (config/crd).
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
METADATA = _object(
    {"name": TEXT, "namespace": TEXT, "labels": _TEXTS, "annotations": _TEXTS}, "name"
)


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
                    "template": _object({"metadata": METADATA, "spec": {"type": "object"}}, "spec"),
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

SCHEMAS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _kind("jobset.x-k8s.io/v1alpha2", "JobSet", _JOBSET),
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): _kind(
        "scheduling.volcano.sh/v1beta1", "PodGroup", _VOLCANO
    ),
    ("scheduling.x-k8s.io/v1alpha1", "PodGroup"): _kind(
        "scheduling.x-k8s.io/v1alpha1", "PodGroup", _COSCHEDULING
    ),
}
