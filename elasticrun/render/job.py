"""An Indexed Job's spec, which a Job of its own and a JobSet's have alike."""

from __future__ import annotations

from typing import Any, Final

from elasticrun.render import pod
from elasticrun.render.gang import Gang
from elasticrun.render.pod import Place
from elasticrun.render.policy import failure_rules
from elasticrun.render.wanted import Pods

SUCCESS_POLICY: Final = (1, 31)
"""From this version of Kubernetes on a Job may succeed with fewer indices than it has."""


def spec(wanted: Pods, place: Place, gang: Gang) -> dict[str, Any]:
    """One index a node, replaced for as long as the master goes on; how the object itself begins
    and ends (`lifetime`) is not part of it."""
    count = wanted.replicas
    made: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": wanted.failures_allowed,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules()},
    }
    least = wanted.launch.min_nodes
    if least < count and wanted.version >= SUCCESS_POLICY:
        made["successPolicy"] = {"rules": [{"succeededCount": least}]}
    if wanted.deadline:
        made["activeDeadlineSeconds"] = wanted.deadline
    made["template"] = pod.template(wanted, place, gang)
    return made


def remarks(wanted: Pods) -> dict[tuple[str, str], str]:
    """What is said of it in the place of `text.REMARKS`."""
    if wanted.backoff_limit is None:
        sum_ = f"{wanted.replicas} x (--retries {wanted.retries} + 1) - 1"
        return {("spec", "backoffLimit"): f"{sum_}: a try that fails has all pods fail"}
    return {("spec", "backoffLimit"): "so many failed pods end the job, deleted ones among them"}


def lifetime(wanted: Pods) -> dict[str, Any]:
    """Whether it waits for somebody's word, and when it is removed: of a Job or of a JobSet."""
    made: dict[str, Any] = {"suspend": True} if wanted.suspend else {}
    return made | ({} if wanted.ttl is None else {"ttlSecondsAfterFinished": wanted.ttl})


def labelled(wanted: Pods, gang: Gang) -> dict[str, Any]:
    """The metadata of the Job or JobSet: that of every object, annotations, a gang's words."""
    made = metadata(wanted)
    made["labels"] |= gang.job_labels
    annotations = {**wanted.annotations, **gang.job_annotations}
    return made | ({"annotations": annotations} if annotations else {})


def metadata(wanted: Pods) -> dict[str, Any]:
    """Name, namespace and labels of every object of the job."""
    made: dict[str, Any] = {"name": wanted.name}
    if wanted.namespace:
        made["namespace"] = wanted.namespace
    return made | {"labels": pod.common_labels(wanted)}


def rights(wanted: Pods, job: str) -> list[dict[str, Any]]:
    """A ServiceAccount that may read and resize its own Job, and nothing else; [] unless wanted."""
    if not wanted.rbac:
        return []
    account = wanted.service_account or wanted.name
    rule = {
        "apiGroups": ["batch"],
        "resources": ["jobs"],
        "resourceNames": [job],
        "verbs": ["get", "patch"],
    }
    made: list[dict[str, Any]] = []
    if not wanted.service_account:
        made.append(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": metadata(wanted),
                "automountServiceAccountToken": False,
            }
        )
    subject = {"kind": "ServiceAccount", "name": account}
    if wanted.namespace:
        subject["namespace"] = wanted.namespace
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "Role", "name": wanted.name}
    made.append({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata(wanted),
                 "rules": [rule]})  # fmt: skip
    made.append({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": metadata(wanted),
                 "roleRef": role, "subjects": [subject]})  # fmt: skip
    return made
