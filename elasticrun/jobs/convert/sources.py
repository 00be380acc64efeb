"""The source kinds: how each of their fields is converted, or why it is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elasticrun.jobs.convert.command import convert
from elasticrun.jobs.convert.document import Document, Fields, NotConvertible

MASTER_DOES: Final = "elasticrun's job master does that"
NOT_PODS: Final = "the pod of another kind of role; elasticrun has nodes of one kind"
FOREIGN_VARIABLES: Final = re.compile(
    r"\$[({]*((?:NODE|WORKER)_(?:NUM|RANK|ID|TYPE)|(?:PET|MS|DLROVER)_\w+|MASTER_ADDR|MASTER_PORT|"
    r"WORLD_SIZE|RANK)\b"
)
"""Variables that other operators set in a pod and ours does not."""

BY_THE_POLICY: Final = "the exit code decides whether a pod is replaced (docs/exit-codes.md)"


@dataclass(slots=True)
class ForeignJob:
    """What the source kinds have in common. `template` is a pod template of Kubernetes; 0, "" and a
    `restarts` of -1 mean unset."""

    name: str
    namespace: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    min_nodes: int = 0
    ranks: str = ""  # per node, as in --nproc-per-node
    default: str = ""  # default for a torchrun without the flag: "auto" where the operator sets it
    restarts: int = -1
    suspend: bool = False
    success: str = ""
    gang: bool = False
    queue: str = ""
    priority: str = ""
    policy: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)


def read(document: Document, image: str | None = "") -> ForeignJob:
    """The job in a document. `image`: the ranks' image if the job names none; None if none is
    needed. Raises NotConvertible."""
    top = document.fields()
    kind, version = top.value("kind", str, ""), top.value("apiVersion", str, "")
    group = version.partition("/")[0]
    reader = READERS.get((group, kind))
    if reader is None:
        known = ", ".join(f"{kind} ({group})" for group, kind in READERS)
        raise NotConvertible(
            f"{kind or 'a document without kind'} ({version}) is not one of {known}"
        )
    job = _metadata(top.inner("metadata"))
    top.drop("status", "it belongs to the job that ran there")
    spec = top.inner("spec")
    reader(spec, job, image)
    spec.close()
    top.close()
    return job


def _metadata(meta: Fields) -> ForeignJob:
    job = ForeignJob(meta.value("name", str, ""), meta.value("namespace", str, ""))
    if not job.name:
        raise meta.error("name", "a job has a name")
    job.labels, job.annotations = (
        meta.value("labels", dict, {}),
        meta.value("annotations", dict, {}),
    )
    job.annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    for name in ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
                 "selfLink", "ownerReferences", "finalizers", "deletionTimestamp"):  # fmt: skip
        meta.drop(name, "it belongs to the object that ran there")
    meta.close()
    return job


def _run_policy(run: Fields, job: ForeignJob) -> None:
    """Kubeflow's run policy, which MindSpore's operator also uses."""
    if clean := run.value("cleanPodPolicy", str, ""):
        job.policy["cleanPodPolicy"] = clean
    for name, least in (("ttlSecondsAfterFinished", 0), ("activeDeadlineSeconds", 1),
                        ("backoffLimit", 0)):  # fmt: skip
        if (value := run.number(name, -1, least)) >= 0:
            job.policy[name] = value
    job.suspend = run.value("suspend", bool, job.suspend)
    run.drop("managedBy", "the ElasticJob's operator manages it")
    scheduling = run.inner("schedulingPolicy")
    if least := scheduling.number("minAvailable", 0):
        job.gang = True
        if job.min_nodes and job.min_nodes != least:
            scheduling.note("minAvailable", f"left out: the gang is minNodes, {job.min_nodes}")
        job.min_nodes = job.min_nodes or least
    job.queue = scheduling.value("queue", str, "")
    job.gang = job.gang or bool(job.queue)
    job.priority = scheduling.value("priorityClass", str, "")
    scheduling.drop("minResources", "the gang is as many pods as minNodes")
    if timeout := scheduling.number("scheduleTimeoutSeconds", 0):
        job.policy["pendingTimeoutSeconds"] = timeout
    scheduling.close()
    run.close()


def _read_role(role: Fields, job: ForeignJob) -> int:
    """Read a replica spec whose pods are nodes. Returns their number, and sets the job's template
    unless an earlier role has."""
    count = role.number("replicas", 1)
    role.drop("restartPolicy", BY_THE_POLICY)
    template = role.value("template", dict, {})
    if job.template and template != job.template:
        role.note("template", "left out: all nodes get the first role's, from which it differs")
    job.template = job.template or template
    return count


def _container(spec: Fields, job: ForeignJob, path: str, called: str) -> dict[str, Any]:
    """Validate the containers of the job's template, move the ranks' container (`called`) to the
    front, and return it. Raises NotConvertible."""
    pod = job.template.setdefault("spec", {})
    containers = pod.get("containers") if isinstance(pod, dict) else None
    if not isinstance(containers, list) or not containers:
        raise spec.error(path, "its template has no container")
    if not all(isinstance(one, dict) for one in containers):
        raise spec.error(path, "a container of its template is not a mapping")
    containers.sort(key=lambda one: one.get("name") != called)
    main: dict[str, Any] = containers[0]
    words = [main.get(name, []) for name in ("command", "args")]
    if not all(isinstance(one, list) and all(isinstance(w, str) for w in one) for one in words):
        raise spec.error(path, "the container's command and args are not lists of strings")
    if not isinstance(main.get("env", []), list) or not isinstance(main.get("resources", {}), dict):
        raise spec.error(path, "the container's env is no list, or its resources no mapping")
    if pod.pop("restartPolicy", "Never") != "Never":
        spec.note(path, f"its template's restartPolicy is left out: {BY_THE_POLICY}")
    if job.priority:
        pod.setdefault("priorityClassName", job.priority)
    return main


def _command(spec: Fields, job: ForeignJob, path: str, called: str) -> None:
    """Convert the command of the ranks' container to run elasticrun, with a note for each
    change."""
    main = _container(spec, job, path, called)
    words = [main.pop(name, []) for name in ("command", "args")]
    made = convert(*words, ranks=job.ranks, default=job.default, restarts=job.restarts)
    if not made.known:
        why = "has no known launcher, or several" if words[0] else "is the image's own"
        by_hand = f"the command {why}: start it with elasticrun yourself"
        spec.note(path, f"{by_hand}, and set --nproc-per-node if it is not 1")
    for flag in made.dropped:
        why = "the operator configures the agents"
        if least := re.match(r"--nnodes[= ]\W?(\d+):", flag):
            job.min_nodes = job.min_nodes or int(least[1])
        elif re.match(r"--nnodes[= ].*:", flag) and not job.min_nodes:
            why = "set the minimum as minNodes"
        spec.note(path, f"the command's {flag} is left out: {why}")
    launch = "torch.distributed.launch" in " ".join((*words[0], *words[1]))
    if launch and not any(flag.startswith("--use") for flag in made.dropped):
        spec.note(path, "the script gets no --local-rank here: use LOCAL_RANK in its environment")
    for name in sorted({found for one in (*made.command, *made.args)
                        for found in FOREIGN_VARIABLES.findall(one)}):  # fmt: skip
        spec.note(path, f"the command reads ${name}, which is not set here: remove it")
    for name, value in (("command", made.command), ("args", made.args)):
        if value:
            main[name] = value
    if job.nodes < 1:
        spec.note(path, "it has 0 pods: the job gets 1 node, the minimum")


# ---------------------------------------------------------------- the kinds


def _dlrover(spec: Fields, job: ForeignJob, image: str | None) -> None:
    del image
    for name, why in (
        ("distributionStrategy", "only all-reduce training is supported"),
        ("optimizeMode", "it has no visible effect"),
        ("brainService", "nothing scales jobs by itself"),
        ("resourceLimits", "nothing scales jobs by itself"),
        ("enableElasticScheduling", "set minNodes below nodes"),
        ("enableDynamicSharding", "the script's sampler divides the data"),
    ):
        spec.drop(name, why)
    job.suspend = spec.value("suspend", bool, False)
    shared = spec.value("envs", dict, {})
    roles = spec.inner("replicaSpecs")
    for name, role in roles.roles():
        if name != "worker":
            why = MASTER_DOES if name == "dlrover-master" else NOT_PODS
            spec.note(f"replicaSpecs.{name}", f"left out: {why}")
            continue
        for left, why in (("autoScale", "nothing scales jobs by itself"),
                          ("restartTimeout", "a pod is replaced at once")):  # fmt: skip
            role.drop(left, why)
        role.drop("priority", "set a priorityClassName in the template")
        scheduler = role.value("BatchScheduler", str, "")
        job.gang = scheduler == "volcano"
        if scheduler and not job.gang:
            role.note(
                "BatchScheduler",
                "left out: set the gang in the ElasticJob yourself",
            )
        job.nodes = _read_role(role, job)
        if (limit := role.number("restartCount", -1)) >= 0:
            job.policy["backoffLimit"] = min(limit * max(job.nodes, 1), 1000)
            role.note("restartCount", "it counts per pod; runPolicy.backoffLimit counts all pods")
        role.close()
    _command(spec, job, "replicaSpecs.worker", "main")
    for name, value in shared.items():  # {name: value} or {name: {value: ...}}
        made = value if isinstance(value, dict) else {"value": str(value)}
        job.template["spec"]["containers"][0].setdefault("env", []).append({**made, "name": name})


def _pytorch(spec: Fields, job: ForeignJob, image: str | None) -> None:
    del image
    job.ranks, job.default = spec.value("nprocPerNode", str, ""), "auto"
    elastic = spec.inner("elasticPolicy")
    job.min_nodes, most = elastic.number("minReplicas", 0), elastic.number("maxReplicas", 0)
    if ranks := elastic.number("nProcPerNode", 0):
        job.ranks = job.ranks or str(ranks)
    job.restarts = elastic.number("maxRestarts", -1)
    for name in ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "standalone"):
        elastic.drop(name, "the operator sets the rendezvous")
    elastic.drop("rdzvConf", "set what you need with --rdzv-conf in the command")
    elastic.drop("metrics", "nothing scales jobs by itself; kubectl scale does")
    elastic.close()
    roles, count = spec.inner("pytorchReplicaSpecs"), 0
    for name, role in roles.roles():
        if name not in ("Master", "Worker"):
            raise roles.error(name, "a PyTorchJob has the roles Master and Worker")
        count += _read_role(role, job)
        role.close()
    job.nodes = max(count, most)
    _run_policy(spec.inner("runPolicy"), job)
    _command(spec, job, "pytorchReplicaSpecs", "pytorch")


def _trainjob(spec: Fields, job: ForeignJob, image: str | None) -> None:
    spec.drop("runtimeRef", "add what the runtime adds to pods to the template")
    spec.drop("initializer", "fetch data and models in an init container of the template")
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides"):
        spec.drop(name, "add it to the template yourself")
    spec.drop("managedBy", "the ElasticJob's operator manages it")
    job.suspend = spec.value("suspend", bool, False)
    if (limit := spec.number("activeDeadlineSeconds", 0)) > 0:
        job.policy["activeDeadlineSeconds"] = limit
    for name, own in (("labels", job.labels), ("annotations", job.annotations)):
        own.update(spec.value(name, dict, {}))
    trainer = spec.inner("trainer")
    container: dict[str, Any] = {"name": "node"}
    if named := trainer.value("image", str, "") or image:
        container["image"] = named
    elif image is not None:
        raise trainer.error("image", "it has none, and the runtime's is unknown here: use --image")
    for name, kind in (("command", list), ("args", list), ("env", list)):
        if value := trainer.value(name, kind, []):
            container[name] = value
    if resources := trainer.value("resourcesPerNode", dict, {}):
        container["resources"] = resources
    job.nodes = trainer.number("numNodes", 1, 1)
    ranks = trainer.value("numProcPerNode", object, "")  # a string in older versions
    if not isinstance(ranks, int | str):
        raise trainer.error("numProcPerNode", f"{ranks!r} is not a number of ranks")
    job.ranks, job.default = str(ranks), "auto"
    trainer.close()
    job.template = {"spec": {"containers": [container]}}
    _command(spec, job, "trainer", "node")


def _msjob(spec: Fields, job: ForeignJob, image: str | None) -> None:
    del image
    success = spec.value("successPolicy", str, "")
    job.success = success or "Rank0"
    spec.drop("enableDynamicWorker", "every job is elastic; set minNodes")
    roles = spec.inner("msReplicaSpecs")
    for name, role in roles.roles():
        if name.lower() != "worker":
            spec.note(f"msReplicaSpecs.{name}", f"left out: {NOT_PODS}")
            continue
        job.nodes = _read_role(role, job)
        role.close()
    _run_policy(spec.inner("runPolicy"), job)
    spec.note("msReplicaSpecs", "elasticrun starts torch's ranks: MS_* variables are not set")
    _command(spec, job, "msReplicaSpecs", "mindspore")


def scale_plan(document: Document) -> tuple[str, int]:
    """A ScalePlan of dlrover: the name of its job, and the wanted number of nodes. Raises
    NotConvertible."""
    top = document.fields()
    if top.value("kind", str, "") != "ScalePlan":
        raise top.error("kind", "only a ScalePlan sets the size of a job")
    for name in ("apiVersion", "metadata", "status"):
        top.value(name, object, None)
    spec = top.inner("spec")
    job = spec.value("ownerJob", str, "")
    spec.value("manualScaling", bool, True)
    replicas = -1
    roles = spec.inner("replicaResourceSpecs")
    for name, role in roles.roles():
        if name != "worker":
            raise roles.error(name, "a job has only workers")
        if (replicas := role.number("replicas", -1)) < 0:
            raise role.error("replicas", "the number of replicas is missing or negative")
        role.drop("resource", "the pods' resources stay as they are")
        role.close()
    spec.close()
    top.close()
    if not job or replicas < 0:
        raise spec.error("ownerJob", "a plan needs its ownerJob and the replicas of its workers")
    return job, replicas


READERS: Final[Mapping[tuple[str, str], Callable[[Fields, ForeignJob, str | None], None]]] = {
    ("elastic.iml.github.io", "ElasticJob"): _dlrover,
    ("kubeflow.org", "PyTorchJob"): _pytorch,
    ("trainer.kubeflow.org", "TrainJob"): _trainjob,
    ("mindspore.gitee.com", "MSJob"): _msjob,
}
