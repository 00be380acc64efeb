"""Kubernetes documents: an Indexed Job (`render k8s`) or a JobSet with one, its headless Service,
and the additions for a gang scheduler or a resize.

One container per pod runs the launcher. A Job and a JobSet treat its exit codes alike. A gang is
the minimum number of nodes: the scheduler places all their pods or none. Without a gang, too, no
rank starts before that many nodes have joined, but the placed pods hold their devices while they
wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from elasticrun.config import EXIT_BAD_NODE, EXIT_FINAL, EXIT_SAVED, EXIT_USAGE
from elasticrun.jobs.render import checks
from elasticrun.jobs.render.settings import INDEX, JOB_UID, PodSettings, Toleration
from elasticrun.wire import env as env_names

CONTAINER: Final = "elasticrun"
"""The container whose exit code counts."""

FINAL_CODES: Final = (EXIT_USAGE, EXIT_FINAL)
"""Codes that end the whole job: a new pod would fail in the same way."""

UNCOUNTED_CODES: Final = (EXIT_BAD_NODE, EXIT_SAVED)
"""Codes of failures that the job did not cause: of a bad node, and of a node that saved and left.
The pod is replaced without counting as a failure."""


def failure_rules() -> list[dict[str, Any]]:
    """The rules of a Job's podFailurePolicy. The first match applies; without a match, a failure
    counts."""

    def by_code(action: str, codes: tuple[int, ...]) -> dict[str, Any]:
        those = {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}
        return {"action": action, "onExitCodes": those}

    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        by_code("FailJob", FINAL_CODES),
        {"action": "Ignore", "onPodConditions": disrupted},
        by_code("Ignore", UNCOUNTED_CODES),
    ]


def without_empty(made: dict[str, Any]) -> dict[str, Any]:
    """The mapping without empty fields."""
    return {key: value for key, value in made.items() if value not in (None, "", [], {})}


POD_GROUP_BETA: Final = (1, 37)
"""The first Kubernetes version in which its own PodGroup (scheduling.k8s.io) is v1beta1."""


@dataclass(frozen=True, slots=True)
class Gang:
    """Additions to a job for a gang scheduler."""

    documents: tuple[dict[str, Any], ...] = ()
    job_labels: dict[str, str] = field(default_factory=dict)
    job_annotations: dict[str, str] = field(default_factory=dict)
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_spec: dict[str, Any] = field(default_factory=dict)
    scheduler: str = ""


def gang(settings: PodSettings, metadata: dict[str, Any], *, of_a_set: bool = False) -> Gang:
    """The additions for `settings.gang`; `metadata` is shared by every object of the job.

    `of_a_set`: the job is a JobSet, which Kueue admits whole or not at all.
    """
    name, least = settings.name, settings.launch.min_nodes
    if settings.gang == "volcano":
        spec = {"minMember": least, "queue": settings.queue, "priorityClassName": settings.priority}
        group = _group("scheduling.volcano.sh/v1beta1", metadata, without_empty(spec))
        by_name = {"scheduling.k8s.io/group-name": name}
        return Gang((group,), pod_annotations=by_name, scheduler="volcano")
    if settings.gang == "coscheduling":
        group = _group("scheduling.x-k8s.io/v1alpha1", metadata, {"minMember": least})
        by_name = {"scheduling.x-k8s.io/pod-group": name}
        return Gang((group,), pod_labels=by_name, scheduler="scheduler-plugins-scheduler")
    if settings.gang == "koordinator":
        # Without `total-number`, which would become wrong when the job is scaled down.
        prefix = "gang.scheduling.koordinator.sh"
        by_name = {f"{prefix}/name": name, f"{prefix}/min-available": str(least)}
        return Gang(pod_annotations=by_name, scheduler="koord-scheduler")
    if settings.gang == "native":
        stage = "v1beta1" if settings.version >= POD_GROUP_BETA else "v1alpha2"
        policy = {"schedulingPolicy": {"gang": {"minCount": least}}}
        group = _group(f"scheduling.k8s.io/{stage}", metadata, policy)
        return Gang((group,), pod_spec={"schedulingGroup": {"podGroupName": name}})
    if settings.gang == "kueue":
        fewer = {}
        if least < settings.replicas and not of_a_set:
            fewer = {
                "kueue.x-k8s.io/job-min-parallelism": str(least),
                "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
            }
        queue = {"kueue.x-k8s.io/queue-name": settings.queue}
        return Gang(job_labels=queue, job_annotations=fewer)
    return Gang()


def _group(version: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": spec}


UID_LABEL: Final = "batch.kubernetes.io/controller-uid"


class PodNames(NamedTuple):
    """The DNS names of pods."""

    host0: str  # host name of the pod with index 0
    domain: str  # the headless Service, "" if something else sets it


def literal(text: str) -> str:
    """Escape `text` for Kubernetes, which expands $(NAME) and turns two dollars into one."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def template(settings: PodSettings, place: PodNames, gang: Gang) -> dict[str, Any]:
    """The pod template of the Job."""
    labels = common_labels(settings) | gang.pod_labels
    annotations = {**settings.annotations, **gang.pod_annotations}
    metadata = without_empty({"labels": labels, "annotations": annotations})
    return {"metadata": metadata, "spec": _spec(settings, place, gang)}


def common_labels(settings: PodSettings) -> dict[str, str]:
    """Labels of every object."""
    ours = {"app.kubernetes.io/name": settings.name, "app.kubernetes.io/managed-by": "elasticrun"}
    return ours | dict(settings.labels)


def arguments(settings: PodSettings, place: PodNames) -> list[str]:
    """The launcher's own words, then script and arguments."""
    launch = settings.launch
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    if not launch.by_etcd:
        where = f"{place.host0}.{settings.name}:{settings.port}"
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={where}"]
    job_id = literal(launch.job_id) if launch.job_id else f"{settings.name}-$({JOB_UID})"
    words += [f"--rdzv-id={job_id}", f"--node-rank=$({INDEX})"]
    return [*words, *map(literal, launch.flags), *map(literal, launch.program)]


def _spec(settings: PodSettings, place: PodNames, gang: Gang) -> dict[str, Any]:
    host = settings.host_network
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}}
    return without_empty(
        {
            "subdomain": place.domain,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": settings.grace_seconds,
            "automountServiceAccountToken": settings.rbac,
            "serviceAccountName": settings.service_account
            or (settings.name if settings.rbac else ""),
            "priorityClassName": settings.priority,
            "schedulerName": settings.scheduler or gang.scheduler,
            **gang.pod_spec,
            **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if host else {}),
            "nodeSelector": dict(settings.selector),
            "tolerations": list(map(_toleration, settings.tolerations)),
            "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
            "containers": [_container(settings, place)],
            "volumes": [shm, *({"name": v.name, **v.source} for v in settings.volumes)],
        }
    )


def _toleration(one: Toleration) -> dict[str, str]:
    found = {"key": one.key} if one.key else {}
    found |= {"operator": "Exists" if one.value is None else "Equal"}
    found |= {} if one.value is None else {"value": one.value}
    return found | ({"effect": one.effect} if one.effect else {})


LAST_WORDS: Final = "/run/elasticrun-last-words"
"""The file in which a launcher writes why it exits, and a master the job's result. Kubernetes keeps
it as the pod's termination message (`host/runs/last_word.py`)."""


def _container(settings: PodSettings, place: PodNames) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for volume in settings.volumes:
        read_only = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": volume.name, "mountPath": volume.mount, **read_only})
    lock_memory = {"capabilities": {"add": ["IPC_LOCK"]}}
    return without_empty(
        {
            "name": CONTAINER,
            "image": settings.image,
            "command": ["elasticrun"],
            "args": arguments(settings, place),
            "workingDir": settings.working_dir,
            "env": _env(settings),
            "ports": [{"name": "master", "containerPort": settings.port}],
            "resources": _resources(settings),
            "securityContext": lock_memory if settings.rdma else None,
            "terminationMessagePath": LAST_WORDS,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
    )


def _env(settings: PodSettings) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": env_names.LAST_WORDS, "value": LAST_WORDS}]
    if not settings.launch.job_id:
        by_label = {"fieldRef": {"fieldPath": f"metadata.labels['{UID_LABEL}']"}}
        env.append({"name": JOB_UID, "valueFrom": by_label})
    if settings.token_secret:
        by_key = {"secretKeyRef": {"name": settings.token_secret, "key": settings.token_key}}
        env.append({"name": "ELASTICRUN_TOKEN", "valueFrom": by_key})
    for part in ("username", "password") if settings.git_secret else ():
        key: dict[str, Any] = {"name": settings.git_secret, "key": part}
        by_key = {"secretKeyRef": key | ({"optional": True} if part == "username" else {})}
        env.append({"name": f"GIT_SYNC_{part.upper()}", "valueFrom": by_key})
    return env + [{"name": key, "value": literal(value)} for key, value in settings.env.items()]


def _resources(settings: PodSettings) -> dict[str, Any]:
    both = without_empty({"cpu": settings.cpu, "memory": settings.memory})
    limits = both | ({settings.gpu_resource: str(settings.gpus)} if settings.gpus else {})
    limits |= {settings.rdma: "1"} if settings.rdma else {}
    return without_empty({"requests": both, "limits": limits})


SUCCESS_POLICY: Final = (1, 31)
"""The first Kubernetes version in which a Job can succeed with fewer indices than it has."""


def job_spec(settings: PodSettings, place: PodNames, gang: Gang) -> dict[str, Any]:
    """The Job spec, without the fields of `lifetime`: one index per node, whose failed pods are
    replaced while the job continues."""
    count, least = settings.replicas, settings.launch.min_nodes
    enough = least < count and settings.version >= SUCCESS_POLICY
    return without_empty(
        {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": settings.failures_allowed,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": failure_rules()},
            "successPolicy": {"rules": [{"succeededCount": least}]} if enough else None,
            "activeDeadlineSeconds": settings.deadline or None,
            "template": template(settings, place, gang),
        }
    )


def remarks(settings: PodSettings) -> dict[tuple[str, str], str]:
    """YAML comments that replace those of `text.REMARKS`."""
    if settings.backoff_limit is None:
        sum_ = f"{settings.replicas} x (--retries {settings.retries} + 1) - 1"
        return {("spec", "backoffLimit"): f"{sum_}: in a failed attempt all pods fail"}
    return {("spec", "backoffLimit"): "maximum number of failed pods, including deleted ones"}


def lifetime(settings: PodSettings) -> dict[str, Any]:
    """The fields of a Job or a JobSet that make it start suspended, and that have it deleted after
    its end."""
    return without_empty(
        {"suspend": settings.suspend or None, "ttlSecondsAfterFinished": settings.ttl}
    )


def job_metadata(settings: PodSettings, gang: Gang) -> dict[str, Any]:
    """The metadata of the Job or JobSet: the common metadata, annotations, the gang's labels."""
    labels = common_labels(settings) | gang.job_labels
    annotations = {**settings.annotations, **gang.job_annotations}
    return common_metadata(settings) | without_empty({"labels": labels, "annotations": annotations})


def common_metadata(settings: PodSettings) -> dict[str, Any]:
    """Name, namespace and labels of every object of the job."""
    names = without_empty({"name": settings.name, "namespace": settings.namespace})
    return names | {"labels": common_labels(settings)}


def rbac_objects(settings: PodSettings, job: str) -> list[dict[str, Any]]:
    """The objects that permit the pods' service account to read and resize its own Job only; [] if
    the user does not ask for them. Includes the account unless the user named an existing one."""
    if not settings.rbac:
        return []
    account = settings.service_account or settings.name
    subject = {"kind": "ServiceAccount", "name": account, "namespace": settings.namespace}
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "Role", "name": settings.name}
    rule = {
        "apiGroups": ["batch"],
        "resources": ["jobs"],
        "resourceNames": [job],
        "verbs": ["get", "patch"],
    }
    made: list[tuple[str, str, dict[str, Any]]] = [
        ("v1", "ServiceAccount", {"automountServiceAccountToken": False}),
        (f"{rbac}/v1", "Role", {"rules": [rule]}),
        (f"{rbac}/v1", "RoleBinding", {"roleRef": role, "subjects": [without_empty(subject)]}),
    ]
    return [
        {"apiVersion": version, "kind": kind, "metadata": common_metadata(settings), **more}
        for version, kind, more in made
        if kind != "ServiceAccount" or not settings.service_account
    ]


REPLICATED_JOB: Final = "node"
"""The name of the only replicated job; its only Job is NAME-node-0."""

POD_SUFFIX: Final = len("-abcde")
"""Length of a pod name's random suffix, which a JobSet includes when it checks its own name."""

JOBSET_REMARKS: Final = {
    ("spec", "parallelism"): "do not change it here; to resize, patch its Job, NAME-node-0",
}
"""YAML comments of a JobSet that replace those of `text.REMARKS`."""


def jobset_documents(settings: PodSettings) -> list[dict[str, Any]]:
    """The objects in the order of creation. Raises `Invalid` for a name that is too long for the
    host names of its pods."""
    name = settings.name
    child = f"{name}-{REPLICATED_JOB}-0"
    digits = len(str(settings.most_pods - 1))
    room = checks.MAX_LABEL - 1 - digits - len(f"-{REPLICATED_JOB}-0") - POD_SUFFIX
    checks.job_name(name, room, f"NAME-{REPLICATED_JOB}-0-{settings.most_pods - 1}-abcde")
    metadata = common_metadata(settings)
    extra = gang(settings, metadata, of_a_set=True)
    pods = job_spec(settings, PodNames(f"{child}-0", ""), extra)
    spec = lifetime(settings) | {
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
        "metadata": job_metadata(settings, extra),
        "spec": spec,
    }
    return [*rbac_objects(settings, child), *extra.documents, made]


JOB_LABEL: Final = "batch.kubernetes.io/job-name"


def job_documents(settings: PodSettings) -> list[dict[str, Any]]:
    """The objects in the order of creation. Raises `Invalid` for a name that is too long for the
    host names of its pods."""
    name = settings.name
    digits = len(str(settings.most_pods - 1))
    checks.job_name(name, checks.MAX_LABEL - 1 - digits, f"NAME-{settings.most_pods - 1}")
    metadata = common_metadata(settings)
    extra = gang(settings, metadata)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
            "ports": [{"name": "master", "port": settings.port}],
        },
    }
    made = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata(settings, extra),
        "spec": lifetime(settings) | job_spec(settings, PodNames(f"{name}-0", name), extra),
    }
    return [*rbac_objects(settings, name), service, *extra.documents, made]
