"""The template of a pod: one container that runs the launcher, and what it needs around it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from elasticrun.render.gang import Gang
from elasticrun.render.policy import CONTAINER
from elasticrun.render.wanted import INDEX, JOB_UID, Pods

UID_LABEL: Final = "batch.kubernetes.io/controller-uid"


class Place(NamedTuple):
    """Where pods are in DNS."""

    host0: str  # host name of the pod with index 0
    domain: str  # the headless Service, "" where somebody else sets it


def literal(text: str) -> str:
    """`text` so that Kubernetes hands it on as it is: it takes $(NAME) for a variable, and makes
    one dollar of two."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def template(wanted: Pods, place: Place, gang: Gang) -> dict[str, Any]:
    """The pod template of the Job."""
    labels = common_labels(wanted) | gang.pod_labels
    metadata: dict[str, Any] = {"labels": labels}
    if annotations := {**wanted.annotations, **gang.pod_annotations}:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": _spec(wanted, place, gang)}


def common_labels(wanted: Pods) -> dict[str, str]:
    """Labels of every object."""
    ours = {"app.kubernetes.io/name": wanted.name, "app.kubernetes.io/managed-by": "elasticrun"}
    return ours | dict(wanted.labels)


def arguments(wanted: Pods, place: Place) -> list[str]:
    """The launcher's own words, then script and arguments."""
    launch = wanted.launch
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    if not launch.by_etcd:
        where = f"{place.host0}.{wanted.name}:{wanted.port}"
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={where}"]
    job_id = literal(launch.job_id) if launch.job_id else f"{wanted.name}-$({JOB_UID})"
    words += [f"--rdzv-id={job_id}", f"--node-rank=$({INDEX})"]
    return [*words, *map(literal, launch.flags), *map(literal, launch.program)]


def _spec(wanted: Pods, place: Place, gang: Gang) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if place.domain:
        spec["subdomain"] = place.domain
    spec |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": wanted.grace_seconds,
        "automountServiceAccountToken": wanted.rbac,
    }
    if account := wanted.service_account or (wanted.name if wanted.rbac else ""):
        spec["serviceAccountName"] = account
    if wanted.priority:
        spec["priorityClassName"] = wanted.priority
    if scheduler := wanted.scheduler or gang.scheduler:
        spec["schedulerName"] = scheduler
    spec |= gang.pod_spec
    if wanted.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if wanted.selector:
        spec["nodeSelector"] = dict(wanted.selector)
    if wanted.tolerations:
        spec["tolerations"] = [_toleration(one) for one in wanted.tolerations]
    if wanted.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in wanted.pull_secrets]
    spec["containers"] = [_container(wanted, place)]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shm}}
    spec["volumes"] = [shm, *({"name": v.name, **v.source} for v in wanted.volumes)]
    return spec


def _toleration(one: Any) -> dict[str, str]:
    found = {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
    found |= {} if one.value is None else {"value": one.value}
    return found | ({"effect": one.effect} if one.effect else {})


def _container(wanted: Pods, place: Place) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": CONTAINER,
        "image": wanted.image,
        "command": ["elasticrun"],
        "args": arguments(wanted, place),
    }
    if wanted.working_dir:
        made["workingDir"] = wanted.working_dir
    if env := _env(wanted):
        made["env"] = env
    made["ports"] = [{"name": "master", "containerPort": wanted.port}]
    if resources := _resources(wanted):
        made["resources"] = resources
    if wanted.rdma:
        made["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    made["terminationMessagePolicy"] = "FallbackToLogsOnError"
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for volume in wanted.volumes:
        read_only = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": volume.name, "mountPath": volume.mount, **read_only})
    made["volumeMounts"] = mounts
    return made


def _env(wanted: Pods) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = []
    if not wanted.launch.job_id:
        by_label = {"fieldRef": {"fieldPath": f"metadata.labels['{UID_LABEL}']"}}
        env.append({"name": JOB_UID, "valueFrom": by_label})
    if wanted.token_secret:
        by_key = {"secretKeyRef": {"name": wanted.token_secret, "key": wanted.token_key}}
        env.append({"name": "ELASTICRUN_TOKEN", "valueFrom": by_key})
    return env + [{"name": key, "value": literal(value)} for key, value in wanted.env.items()]


def _resources(wanted: Pods) -> dict[str, Any]:
    both = {name: amount for name, amount in (("cpu", wanted.cpu), ("memory", wanted.memory))
            if amount}  # fmt: skip
    limits = dict(both)
    if wanted.gpus:
        limits[wanted.gpu_resource] = str(wanted.gpus)
    if wanted.rdma:
        limits[wanted.rdma] = "1"
    found: dict[str, Any] = {"requests": both} if both else {}
    return found | ({"limits": limits} if limits else {})
