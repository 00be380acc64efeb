"""Builds the objects of an ElasticJob, and reads its pods.

One headless Service gives them host names that stay the same when a pod is replaced: the master is
`JOB-master.JOB`, the node of index 1 is `JOB-1.JOB`. A pod's own name ends with its attempt
(`JOB-1-0`), so creating it twice fails. Agents get their settings from environment variables; the
template's command stays unchanged.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import msgspec

from elasticrun.config import ELASTIC_RESTARTS, EXIT_BAD_NODE, EXIT_FINAL, EXIT_SAVED, EXIT_USAGE
from elasticrun.core import reasons
from elasticrun.core.nodes.admission import ASKED
from elasticrun.core.reasons import exclusion_in
from elasticrun.host.runs import last_word
from elasticrun.host.runs.last_word import LastWord
from elasticrun.host.runs.layout import RunResult
from elasticrun.jobs.operator.crd import API_VERSION, GROUP, KIND, ElasticSpec, ElasticStatus, Json
from elasticrun.jobs.render import pods as rendered
from elasticrun.jobs.render.elastic import has_tls, own_words
from elasticrun.jobs.render.settings import GRACE, MASTER_PORT, NodeCommand, PodSettings
from elasticrun.wire import env

JOB: Final = f"{GROUP}/job"
ROLE: Final = f"{GROUP}/role"
INDEX: Final = f"{GROUP}/index"
"""Labels of a pod: its job's name; NODE or MASTER; the index of a node."""

MASTER: Final = "master"
NODE: Final = "node"
MASTER_INDEX: Final = -1

FINAL_CODES: Final = (EXIT_USAGE, EXIT_FINAL)
"""Exit codes of a pod that end the job: a new pod would fail in the same way."""

KILLED: Final = (128 + 9, 128 + 15)
UNCOUNTED_CODES: Final = (*KILLED, EXIT_BAD_NODE, EXIT_SAVED)
"""Exit codes of a pod that is replaced without counting as a failure."""

LOST_AFTER: Final = 30.0
"""Seconds beyond its grace period for which a deleted pod counts as alive. After that its node is
assumed lost, because no kubelet confirms the deletion."""


def parse_time(text: str | None) -> float:
    """A Kubernetes timestamp as seconds since 1970; 0.0 for None."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def format_time(now: float) -> str:
    """A time as a Kubernetes timestamp."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod of a job, as the API server returned it. `index` is MASTER_INDEX for the master's."""

    name: str
    uid: str
    index: int
    attempt: int
    phase: str
    node: str  # the cluster's node, "" before it is placed
    address: str
    created: float  # this and the next two: seconds since 1970
    deleted: float  # when its grace period ends, if it was deleted; 0.0: not deleted
    ended: float  # when its first container ended; 0.0: not, or unknown
    code: int | None  # exit code of its first container, if any
    disrupted: bool  # evicted, preempted, drained; or its node is lost
    no_memory: bool
    single: bool  # started as a one-node job, which other nodes cannot reach
    waits: str  # why it does not run, in the cluster's words
    message: str = ""  # its termination message; for the master, the job's result

    @property
    def is_over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def is_active(self, now: float) -> bool:
        """Whether it runs, will run, or may still be terminating."""
        return not self.is_over and not (self.deleted and now > self.deleted + LOST_AFTER)

    @property
    def is_uncounted(self) -> bool:
        """Whether its failure does not count towards runPolicy.backoffLimit. A pod without an exit
        code did not fail: something removed it."""
        if self.disrupted or self.deleted or self.code is None:
            return True
        return self.code in UNCOUNTED_CODES and not self.no_memory

    @property
    def has_run_ended(self) -> bool:
        """For the master's pod: whether it exited because the run had ended, and was not killed or
        disrupted."""
        return self.is_over and not self.disrupted and self.code is not None and self.code < 128

    @property
    def result(self) -> RunResult | None:
        """For the master's pod: the job's result, if the message contains it."""
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(self.message, type=RunResult)
        return None

    @property
    def last_word(self) -> LastWord | None:
        """For a node's pod: why its launcher exited, in the launcher's words; None if that was
        killed, is of another release, or is another program."""
        return last_word.read(self.message)

    @property
    def cause(self) -> str:
        """For a node's pod: why it ended, from its launcher's last words, else its last printed
        line."""
        if self.last_word is not None:
            return self.last_word.text[:400]
        lines = [line for line in self.message.splitlines() if line.strip(" =")]
        return lines[-1].strip()[:400] if lines else ""

    @property
    def found_node_bad(self) -> bool:
        """Whether the pod or the master found the pod's node bad. False if the master refused to
        admit the pod, or if a user excluded the node: the master then records the exclusion and
        its duration."""
        if not self.is_over or self.code != EXIT_BAD_NODE:
            return False
        word = self.last_word
        banned = exclusion_in(reasons.read(word.text, word.reason)) if word is not None else None
        return banned is None or not (banned.node or banned.how.by == ASKED)


def read(pod: Json) -> OwnedPod | None:
    """Read a pod; None if it does not have our labels."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, attempt = meta.get("labels") or {}, meta["name"].rpartition("-")[2]
    index = labels.get(INDEX, MASTER if labels.get(ROLE) == MASTER else "")
    if not (index == MASTER or index.isdecimal()) or not attempt.isdecimal():
        return None
    container = (spec.get("containers") or [{}])[0]
    found = {one.get("name"): one for one in status.get("containerStatuses") or ()}
    state = (found.get(container.get("name")) or {}).get("state") or {}
    ended = state.get("terminated") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    sizes = [one.get("value") for one in container.get("env") or () if one["name"] == NNODES]
    return OwnedPod(
        name=meta["name"],
        uid=meta["uid"],
        index=MASTER_INDEX if index == MASTER else int(index),
        attempt=int(attempt),
        phase=status.get("phase") or "Pending",
        node=spec.get("nodeName") or "",
        address=status.get("podIP") or "",
        created=parse_time(meta.get("creationTimestamp")),
        deleted=parse_time(meta.get("deletionTimestamp")),
        ended=parse_time(ended.get("finishedAt")),
        code=ended.get("exitCode"),
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        no_memory=ended.get("reason") == "OOMKilled",
        single=sizes == ["1:1"],
        waits=_waiting_reason(state.get("waiting") or {}, conditions.get("PodScheduled", {})),
        message=ended.get("message") or "",
    )


def _waiting_reason(waiting: Json, scheduled: Json) -> str:
    if scheduled.get("status") == "False" and scheduled.get("message"):
        return str(scheduled["message"])
    reason, message = waiting.get("reason") or "", waiting.get("message") or ""
    return f"{reason}: {message}" if message else reason


# ---------------------------------------------------------------- the job


NNODES: Final = "ELASTICRUN_NNODES"
TOKEN: Final = "ELASTICRUN_TOKEN"
RUN_DIR: Final = "ELASTICRUN_RUN_DIR"


@dataclass(frozen=True, slots=True)
class JobObject:
    """An ElasticJob: its spec, and the metadata for every object made for it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ElasticSpec
    status: ElasticStatus

    @property
    def run_id(self) -> str:
        """The rendezvous id, different for a recreated job of the same name."""
        return f"{self.name}-{self.uid[:8]}"

    @property
    def selector(self) -> str:
        """The label selector of its nodes' pods."""
        return f"{JOB}={self.name},{ROLE}={NODE}"

    @property
    def has_tls(self) -> bool:
        """Whether its command or its variables name TLS files, which the master's pod would
        lack."""
        first = self.spec.template["spec"]["containers"][0]
        names = [one["name"] for one in first.get("env") or ()]
        return has_tls(command_words(first)) or any(
            name.startswith("ELASTICRUN_TLS_") for name in names
        )

    @property
    def secret(self) -> str:
        """The name of the Secret with its token, different for a recreated job of the same name."""
        return f"{self.run_id}-token"


def parse_job(job: Json) -> JobObject:
    """Parse an ElasticJob. Raises msgspec.ValidationError if it violates the schema, which the API
    server should have enforced."""
    meta = job["metadata"]
    return JobObject(
        name=meta["name"],
        namespace=meta.get("namespace") or "default",
        uid=meta["uid"],
        generation=meta.get("generation") or 0,
        spec=msgspec.convert(job["spec"], ElasticSpec),
        status=msgspec.convert(job.get("status") or {}, ElasticStatus),
    )


def pod_name(job: JobObject, index: int, attempt: int) -> str:
    """The pod name of one attempt at an index."""
    return f"{job.name}-{MASTER if index == MASTER_INDEX else index}-{attempt}"


def host_name(job: JobObject, index: int) -> str:
    """The host name of the pods of an index, the same for every attempt."""
    return f"{job.name}-{MASTER if index == MASTER_INDEX else index}"


def _metadata(job: JobObject, name: str, **labels: str) -> Json:
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    ours = {JOB: job.name, "app.kubernetes.io/managed-by": "elasticrun"}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": ours | labels,
        "ownerReferences": [{**owner, "controller": True}],
    }


def _core_object(job: JobObject, kind: str, name: str, **body: Json) -> Json:
    return {"apiVersion": "v1", "kind": kind, "metadata": _metadata(job, name), **body}


def common_objects(job: JobObject, version: tuple[int, int]) -> list[Json]:
    """Objects created before the first pod: the Service, and those of the gang scheduler."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: job.name},
        "ports": [{"name": MASTER, "port": MASTER_PORT}],
    }
    return [_core_object(job, "Service", job.name, spec=spec), *_gang(job, version).documents]


def secret(job: JobObject, token: str) -> Json:
    """The Secret with the job's token."""
    return _core_object(job, "Secret", job.secret, stringData={"token": token})


def _gang(job: JobObject, version: tuple[int, int]) -> rendered.Gang:
    """The gang settings, as in `render k8s`, except for Kueue, which gets a group of plain pods."""
    gang = job.spec.gang
    if gang is None:
        return rendered.Gang()
    if gang.scheduler == "kueue":
        labels = {
            "kueue.x-k8s.io/queue-name": gang.queue,
            "kueue.x-k8s.io/pod-group-name": job.name,
        }
        total = {"kueue.x-k8s.io/pod-group-total-count": str(job.spec.nodes + job.spec.spares)}
        return rendered.Gang(pod_labels=labels, pod_annotations=total)
    least = job.spec.least
    launch = NodeCommand("unread", min_nodes=least, max_nodes=job.spec.nodes)
    group = PodSettings(
        name=job.name,
        image="unread",
        launch=launch,
        gang=gang.scheduler,
        queue=gang.queue,
        priority=job.spec.template["spec"].get("priorityClassName", ""),
        version=max(version, (1, 36)),
    )
    return rendered.gang(group, _metadata(job, job.name))


def _env(kept: list[Json], ours: Json, defaults: list[Json]) -> list[Json]:
    """A pod's environment: the template's variables (`kept`), overridden by `ours`, and `defaults`
    for variables that the template omits. A token in the template is ignored."""
    kept = [one for one in kept if one["name"] not in (*ours, TOKEN)]
    names = {one["name"] for one in kept}
    return [
        *kept,
        *({"name": key, "value": value} for key, value in ours.items()),
        *(one for one in defaults if one["name"] not in names),
    ]


def _token(job: JobObject) -> Json:
    return {
        "name": TOKEN,
        "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "token"}},
    }


def node_pod(
    job: JobObject, index: int, attempt: int, avoided: list[str], version: tuple[int, int]
) -> Json:
    """The pod of an index: the template with its name, labels and its agent's environment.
    `avoided`: cluster nodes on which it must not run."""
    gang = _gang(job, version)
    template = copy.deepcopy(job.spec.template)
    spec: Json = {**template["spec"], "restartPolicy": "Never"}
    spec |= {"hostname": host_name(job, index), "subdomain": job.name, **gang.pod_spec}
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("terminationGracePeriodSeconds", GRACE)
    if gang.scheduler:
        spec.setdefault("schedulerName", gang.scheduler)
    container = spec["containers"][0]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    least, most = job.spec.least, job.spec.nodes
    ours = {
        NNODES: f"{least}:{most}",
        "ELASTICRUN_NODE_RANK": str(index),
        "ELASTICRUN_NODE_UNIT": str(job.spec.node_unit),
        "ELASTICRUN_RDZV_ID": job.run_id,
        "ELASTICRUN_RDZV_BACKEND": "c10d",
        "ELASTICRUN_RDZV_ENDPOINT": f"{host_name(job, MASTER_INDEX)}.{job.name}:{MASTER_PORT}",
    }
    container.setdefault("terminationMessagePath", rendered.LAST_WORDS)
    ours[env.LAST_WORDS] = container["terminationMessagePath"]
    its_node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    defaults: list[Json] = [
        {"name": env.CLUSTER_NODE, "valueFrom": its_node},
        {"name": "ELASTICRUN_EXIT_CODES", "value": "scheduler"},
        {"name": "ELASTICRUN_MAX_RESTARTS", "value": str(ELASTIC_RESTARTS)},
        {"name": "ELASTICRUN_RDZV_CONF", "value": "is_host=false"},
        _token(job),
    ]
    container["env"] = _env(container.get("env") or [], ours, defaults)
    _shared_memory(spec, container)
    if avoided:
        _avoid_nodes(spec, avoided)
    given = template.get("metadata") or {}
    metadata = _metadata(job, pod_name(job, index, attempt))
    metadata["labels"] = {**(given.get("labels") or {}), **metadata["labels"], **gang.pod_labels}
    metadata["labels"] |= {ROLE: NODE, INDEX: str(index)}
    metadata["annotations"] = {**(given.get("annotations") or {}), **gang.pod_annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _shared_memory(spec: Json, container: Json) -> None:
    """Mount a volume at /dev/shm if the template does not: the default of 64 MiB is too small for
    a snapshot."""
    mounts = container.setdefault("volumeMounts", [])
    if any(one.get("mountPath") == "/dev/shm" for one in mounts):
        return
    mounts.append({"name": "elasticrun-shm", "mountPath": "/dev/shm"})
    spec.setdefault("volumes", []).append(
        {"name": "elasticrun-shm", "emptyDir": {"medium": "Memory"}}
    )


def _avoid_nodes(spec: Json, nodes: list[str]) -> None:
    """Exclude the nodes in every node selector term, because the terms are alternatives. Each
    requirement names one node, as the API demands, and by metadata.name, because on some clouds the
    label kubernetes.io/hostname differs from the name."""
    required = (
        spec.setdefault("affinity", {})
        .setdefault("nodeAffinity", {})
        .setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    for term in required.setdefault("nodeSelectorTerms", [{}]):
        term.setdefault("matchFields", []).extend(
            {"key": "metadata.name", "operator": "NotIn", "values": [node]}
            for node in sorted(nodes)
        )


def command_words(container: Json) -> list[str]:
    """A container's command with its arguments."""
    return [str(one) for key in ("command", "args") for one in container.get(key) or ()]


def named_run_dir(container: Json) -> str:
    """The run folder that a container's command or its environment names; "" for none."""
    for flag, after in pairwise([*own_words(command_words(container)), ""]):
        name, _, value = flag.partition("=")
        if name in ("--run-dir", "--run_dir"):
            return value or after
    given = {one["name"]: str(one.get("value") or "") for one in container.get("env") or ()}
    return given.get(RUN_DIR, "")


def volume_at(spec: Json, path: str) -> Json | None:
    """What identifies the persistent volume that contains `path` in a pod's first container: its
    mount path, subpath and source. None if the path is not on one."""
    found = _mount_and_volume(spec, path)
    if found is None:
        return None
    mount, volume = found
    source = {key: of for key, of in volume.items() if key != "name"}
    return {"at": mount["mountPath"], "sub": mount.get("subPath"), **source}


def _mount_and_volume(spec: Json, path: str) -> tuple[Json, Json] | None:
    """The mount in a pod's first container that contains `path`, and its volume; None if there is
    none or it is an emptyDir."""
    first: Json = next(iter(spec.get("containers") or ()), {})
    mounts = first.get("volumeMounts") or ()
    there = [one for one in mounts if f"{path}/".startswith(one["mountPath"].rstrip("/") + "/")]
    if not there:
        return None
    mount = max(there, key=lambda one: len(one["mountPath"]))
    volumes = {one["name"]: one for one in spec.get("volumes") or ()}
    volume = volumes.get(mount["name"], {})
    return (mount, volume) if len(volume) > 1 and "emptyDir" not in volume else None


_COPIED_POD_FIELDS: Final = (
    "nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "priorityClassName",
)  # fmt: skip
"""Fields of the template's pod spec that the master's pod copies."""


_COPIED_CONTAINER_FIELDS: Final = ("image", "imagePullPolicy", "securityContext")


def master_pod(job: JobObject, attempt: int) -> Json:
    """The pod of the job's master: the template's image, without devices, and only the volume that
    contains the job's run folder."""
    template = job.spec.template["spec"]
    first = template["containers"][0]
    its_address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "name": MASTER,
        **{key: first[key] for key in _COPIED_CONTAINER_FIELDS if key in first},
        "command": ["elasticrun", MASTER],
        "args": ["--host=$(POD_IP)", f"--port={MASTER_PORT}", f"--rdzv-id={job.run_id}"],
        "env": [
            {"name": "POD_IP", "valueFrom": its_address},
            {"name": env.LAST_WORDS, "value": rendered.LAST_WORDS},
            _token(job),
        ],
        "terminationMessagePath": rendered.LAST_WORDS,
        "ports": [{"name": MASTER, "containerPort": MASTER_PORT}],
        "resources": job.spec.master.resources,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        **{key: template[key] for key in _COPIED_POD_FIELDS if key in template},
        "hostname": host_name(job, MASTER_INDEX),
        "subdomain": job.name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
    }
    folder = named_run_dir(first)
    if found := _mount_and_volume(template, folder):
        container["args"].append(f"--run-dir={folder}")
        first_of_all = attempt == 0 and job.status.restarts is None  # later attempts resume in it
        if first_of_all and "--fresh" in own_words(command_words(first)):
            container["args"].append("--fresh")
        container["volumeMounts"], spec["volumes"] = [found[0]], [found[1]]
    metadata = _metadata(job, pod_name(job, MASTER_INDEX, attempt), **{ROLE: MASTER})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
