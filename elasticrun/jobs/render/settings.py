"""The settings of a rendered job: typed, and validated on construction (`checks.Invalid`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elasticrun.config import DEPARTURE_GRACE, SHUTDOWN_TIMEOUT
from elasticrun.jobs.render import checks
from elasticrun.jobs.render.checks import Invalid

MASTER_PORT: Final = 29400
"""Default port of the job's master in pod 0."""

GRACE: Final = 60
"""Default seconds between SIGTERM and SIGKILL of a pod, if no flag makes the launcher take
longer."""

GRACE_MARGIN: Final = 5
"""Seconds for what follows the ranks' exit: last words, cleanup, the kubelet."""

OLDEST: Final = (1, 29)
NEWEST: Final = (1, 37)
"""Versions of Kubernetes whose schemas the output was checked against."""

DEFAULT_VERSION: Final = (1, 31)
"""Version assumed if the user gives none: the first that enables all fields in use by default."""

JOB_UID: Final = "ELASTICRUN_JOB_UID"
"""Variable with the Job's uid: a recreated job of the same name is a different job."""

INDEX: Final = "JOB_COMPLETION_INDEX"
"""Variable that the Job's controller sets in each pod."""

_RESERVED_LABEL = re.compile(
    r"(batch\.kubernetes\.io/|jobset\.sigs\.k8s\.io/|(job-name|controller-uid)$)"
)
"""Labels that Kubernetes refuses or overwrites if others set them."""

GANGS: Final = ("none", "volcano", "coscheduling", "kueue", "koordinator", "native")
MAX_NODES: Final = 100_000
"""Maximum number of indices of an Indexed Job."""


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The command of every node: number of nodes, launcher flags, the script.

    `flags` are whole words (`--max-restarts=3`) that are passed on; `departure_time` is the maximum
    number of seconds that a node takes to exit after SIGTERM (departure grace plus shutdown
    timeout).
    """

    script: str
    args: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: str = "1"
    job_id: str = ""  # "": derived from the scheduler's values
    by_etcd: bool = False  # --master-store: no node's address makes it the master
    flags: tuple[str, ...] = ()
    departure_time: float = DEPARTURE_GRACE + SHUTDOWN_TIMEOUT

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes <= MAX_NODES:
            raise Invalid(
                f"{self.min_nodes}:{self.max_nodes} nodes: the minimum must be at least 1, the "
                f"maximum not below it and at most {MAX_NODES}"
            )
        if not self.script or self.script.startswith("-"):
            raise Invalid(f"{self.script!r} is not a script: put the script first after --")
        for word in (self.script, *self.args, *self.flags, self.job_id):
            checks.plain(word, "the command")

    @property
    def nodes(self) -> str:
        """The value of --nnodes."""
        low, high = self.min_nodes, self.max_nodes
        return str(high) if low == high else f"{low}:{high}"

    @property
    def program(self) -> tuple[str, ...]:
        """Script and arguments, in a form that the launcher parses back unchanged."""
        guard = ("--",) if self.args and self.args[0] == "--" else ()
        return (*guard, self.script, *self.args)


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of every pod; `source` is its entry in a pod's `volumes`, in Kubernetes' form."""

    name: str
    mount: str
    source: Mapping[str, Any]
    read_only: bool = False

    def __post_init__(self) -> None:
        checks.label(self.name, "--volume")
        checks.path(self.mount, f"--volume {self.name}")
        if self.name == "shm":
            raise Invalid(
                "--volume shm: this name is reserved for /dev/shm; set its size with --shm"
            )


@dataclass(frozen=True, slots=True)
class Toleration:
    """A tolerated taint. Without `value` any value matches; "" as key or effect matches all."""

    key: str
    value: str | None = None
    effect: str = ""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """An elastic job on Kubernetes: one pod per node.

    Times are in seconds, quantities in Kubernetes' form; "" and 0 mean unset.
    """

    name: str
    image: str
    launch: NodeCommand
    pods: int = 0  # 0: the maximum number of nodes
    namespace: str = ""
    working_dir: str = ""
    port: int = MASTER_PORT
    cpu: str = ""
    memory: str = ""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    rdma: str = ""  # a resource; one per pod
    shm: str = "8Gi"
    host_network: bool = False
    gang: str = "none"
    queue: str = ""
    scheduler: str = ""
    volumes: tuple[Volume, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    token_secret: str = ""
    token_key: str = "token"
    git_secret: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    service_account: str = ""
    priority: str = ""
    pull_secrets: tuple[str, ...] = ()
    grace: int = 0  # 0: as long as the launcher needs
    ttl: int | None = None
    deadline: int = 0
    suspend: bool = False
    retries: int = 0
    backoff_limit: int | None = None  # None: derived from `retries`
    rbac: bool = False
    version: tuple[int, int] = DEFAULT_VERSION

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        _check_gang(self)

    @property
    def replicas(self) -> int:
        """The initial number of pods."""
        return self.pods or self.launch.max_nodes

    @property
    def most_pods(self) -> int:
        """One more than the largest possible index, also after a resize."""
        return max(self.replicas, self.launch.max_nodes)

    @property
    def failures_allowed(self) -> int:
        """Maximum number of failed pods that do not fail the Job. When a job exits with 1, all of
        its pods fail, which uses up one try; a pod that fails while the job continues uses up a
        part of one."""
        if self.backoff_limit is not None:
            return self.backoff_limit
        return (self.retries + 1) * self.replicas - 1

    @property
    def needed_grace(self) -> int:
        """Seconds that a pod needs to exit after SIGTERM."""
        return math.ceil(self.launch.departure_time) + GRACE_MARGIN

    @property
    def grace_seconds(self) -> int:
        """Seconds from SIGTERM to SIGKILL of a pod."""
        return self.grace or max(GRACE, self.needed_grace)


def _check_names(settings: PodSettings) -> None:
    checks.image(settings.image)
    if settings.namespace:
        checks.label(settings.namespace, "--namespace")
    if settings.working_dir:
        checks.path(settings.working_dir, "--working-dir")
    for key, value in settings.env.items():
        by_secret = "create a Secret and pass it with"
        token, password = f"{by_secret} --token-secret", f"{by_secret} --git-secret"
        checks.setting(key, value, "manifest", token, password)
        if key in (JOB_UID, INDEX):
            raise Invalid(f"--env {key}: Kubernetes sets it in pods; choose another name")
    for key, value in settings.labels.items():
        checks.label_value(value, f"--label {checks.label_key(key, '--label')}")
        if _RESERVED_LABEL.match(key):
            raise Invalid(f"--label {key}: the controller sets it; choose another key")
    for key, value in settings.annotations.items():
        checks.plain(value, f"--annotation {checks.label_key(key, '--annotation')}")
    for key, value in settings.selector.items():
        checks.label_value(value, f"--selector {checks.label_key(key, '--selector')}")
    _check_tolerations(settings.tolerations)
    named = (
        ("--service-account", settings.service_account),
        ("--priority", settings.priority),
        ("--token-secret", settings.token_secret),
        ("--git-secret", settings.git_secret),
    )
    for flag, text in (*named, *(("--image-pull-secret", text) for text in settings.pull_secrets)):
        if text:
            checks.subdomain(text, flag)
    if settings.token_secret:
        checks.label_key(settings.token_key, "--token-secret: the key")
    _check_volumes(settings.volumes)


def _check_tolerations(tolerations: tuple[Toleration, ...]) -> None:
    for one in tolerations:
        if one.key:
            checks.label_key(one.key, "--toleration")
        checks.label_value(one.value or "", "--toleration")
        if one.effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            raise Invalid(
                f"--toleration: the effect {one.effect!r} is not one of NoSchedule, "
                "PreferNoSchedule, NoExecute"
            )


def _check_volumes(volumes: tuple[Volume, ...]) -> None:
    names: set[str] = set()
    mounts = {"/dev/shm"}
    for volume in volumes:
        if volume.name in names:
            raise Invalid(f"--volume {volume.name} is given twice: each needs a different name")
        if volume.mount in mounts:
            raise Invalid(f"--volume {volume.name}: {volume.mount} is already mounted")
        names.add(volume.name)
        mounts.add(volume.mount)


def _check_numbers(settings: PodSettings) -> None:
    low = settings.launch.min_nodes
    if not low <= settings.replicas <= MAX_NODES:
        raise Invalid(
            f"--pods {settings.pods}: {low} nodes are the fewest that train (--nnodes) and "
            f"{MAX_NODES} pods the most"
        )
    if not 1 <= settings.port <= 65535:
        raise Invalid(f"--port {settings.port}: a port is a number from 1 to 65535")
    if settings.cpu:
        checks.quantity(settings.cpu, "--cpu")
    checks.quantity(settings.shm, "--shm", memory=True)
    if settings.memory:
        checks.quantity(settings.memory, "--memory", memory=True)
        if checks.amount(settings.shm) >= checks.amount(settings.memory):
            raise Invalid(
                f"--shm {settings.shm} does not fit into --memory {settings.memory}: "
                "/dev/shm counts as the pod's memory"
            )
    checks.resource(settings.gpu_resource, "--gpu-resource")
    if settings.rdma:
        checks.resource(settings.rdma, "--rdma")
    numbers = (
        ("--gpus", settings.gpus),
        ("--grace", settings.grace),
        ("--deadline", settings.deadline),
        ("--ttl", settings.ttl or 0),
        ("--retries", settings.retries),
        ("--backoff-limit", settings.backoff_limit or 0),
    )
    for flag, number in numbers:
        if not 0 <= number < 2**31:
            raise Invalid(f"{flag} {number}: it must be a number from 0 to {2**31 - 1}")
    if settings.version < OLDEST:
        raise Invalid(
            f"--k8s-version {settings.version[0]}.{settings.version[1]} is too old: replacing "
            f"pods by index needs {OLDEST[0]}.{OLDEST[1]}"
        )


def _check_gang(settings: PodSettings) -> None:
    if settings.gang not in GANGS:
        raise Invalid(f"--gang {settings.gang!r} is not one of {', '.join(GANGS)}")
    if settings.gang == "kueue" and not settings.queue:
        raise Invalid("--gang kueue needs --queue NAME, a LocalQueue of the namespace")
    if settings.queue and settings.gang not in ("kueue", "volcano"):
        raise Invalid(
            f"--queue {settings.queue}: --gang {settings.gang} has no queues; only kueue and "
            "volcano do"
        )
    if settings.queue:
        checks.subdomain(settings.queue, "--queue")
    if settings.scheduler:
        checks.subdomain(settings.scheduler, "--scheduler")
    if settings.gang == "native" and settings.version < (1, 36):
        raise Invalid(
            "--gang native needs --k8s-version 1.36 or newer (and its feature gates): "
            "use another gang scheduler, or none: ranks start only when the minimum number of "
            "nodes has joined"
        )
