"""ElasticJob: the structs of its spec and status, and the CustomResourceDefinition generated from
them.

`plan` reads these structs, and the schema that the API server enforces is generated from them: a
field that nothing reads cannot be written, and a misspelt one is rejected. Names follow Kubernetes
(`minNodes`); `kubectl explain ej.spec` shows the descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

Json = dict[str, Any]

GROUP: Final = "elasticrun.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"
API_VERSION: Final = f"{GROUP}/{VERSION}"

OPERATOR: Final = "elasticrun-operator"
"""Name of the operator's own objects (service account, Secret, Lease) and the source of its
Events."""

MAX_NAME_LENGTH: Final = 50
"""Maximum length of a job's name: pods' host names and the job's objects contain it."""

NodeCount = Annotated[int, Meta(ge=1, le=10_000)]
Seconds = Annotated[int, Meta(ge=1, le=2**31 - 1)]


def _about(text: str) -> Meta:
    return Meta(description=text)


class RunPolicy(Struct, frozen=True, rename="camel"):
    """How a job ends, and what remains of it."""

    clean_pod_policy: Annotated[
        Literal["None", "Running", "All"],
        _about("Which pods to delete when the job has ended: none, running ones, or all."),
    ] = "Running"
    active_deadline_seconds: Annotated[
        Seconds | None,
        _about("Seconds after which the job fails; suspended time does not count."),
    ] = None
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        _about("Seconds after its end until the job is removed. By default it stays."),
    ] = None
    backoff_limit: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        _about(
            "Number of failed pods that the job tolerates. Not counted are those that were "
            "disrupted, deleted, killed (137, 143), on a bad node (75) or had saved (99)."
        ),
    ] = 10
    pending_timeout_seconds: Annotated[
        Seconds,
        _about(
            "Seconds after which pods are deleted if fewer than minNodes could be placed; they are "
            "created again a minute later."
        ),
    ] = 900


class GangSpec(Struct, frozen=True, rename="camel"):
    """The scheduler that places all minNodes pods or none."""

    scheduler: Annotated[
        Literal["volcano", "coscheduling", "kueue", "koordinator", "native"],
        _about("The gang scheduler."),
    ]
    queue: Annotated[str, _about("Queue of volcano or kueue.")] = ""


class MasterSpec(Struct, frozen=True, rename="camel"):
    """The pod of the job's master."""

    resources: Annotated[
        Json, _about("Requests and limits of the master's pod, in Kubernetes' form.")
    ] = msgspec.field(default_factory=lambda: {"requests": {"cpu": "100m", "memory": "128Mi"}})


class ElasticSpec(Struct, frozen=True, rename="camel"):
    """The spec of an ElasticJob."""

    template: Annotated[
        Json,
        _about("Template of every pod. Its first container runs elasticrun; its exit code counts."),
    ]
    nodes: Annotated[NodeCount, _about("Number of nodes; `kubectl scale` changes it live.")] = 1
    min_nodes: Annotated[NodeCount | None, _about("Minimum number of nodes. Default: nodes.")] = (
        None
    )
    spares: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        _about("Additional pods that replace lost ones."),
    ] = 0
    node_unit: Annotated[NodeCount, _about("Rounds have a multiple of this many nodes.")] = 1
    suspend: Annotated[bool, _about("Save a step and delete all pods until this is unset.")] = False
    run_policy: Annotated[RunPolicy, _about("How the job ends, and what remains of it.")] = (
        RunPolicy()
    )
    success_policy: Annotated[
        Literal["Rank0", "AllWorkers", ""],
        _about(
            'When the job has succeeded: when the pod of index 0 has ("", the default), or all.'
        ),
    ] = "AllWorkers"
    gang: Annotated[
        GangSpec | None, _about("The scheduler that places all minNodes pods or none.")
    ] = None
    master: Annotated[MasterSpec, _about("The pod of the job's master.")] = msgspec.field(
        default_factory=MasterSpec
    )

    @property
    def least(self) -> int:
        """The minimum number of nodes that train."""
        return min(self.min_nodes or self.nodes, self.nodes)


class JobCondition(Struct, frozen=True, rename="camel"):
    """One of the seven that a job has, in Kubernetes' form."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class AvoidedNode(Struct, frozen=True, rename="camel"):
    """A node of the cluster that new pods keep away from."""

    node: str
    reason: str = ""
    since: str = ""
    kind: str = ""  # of the master's exclusion: failed, slow, asked; "": a pod found it bad


CONDITIONS: Final = (
    "Admitted", "Scheduled", "MasterReachable", "Training", "Recovering", "Succeeded", "Failed",
)  # fmt: skip


class ElasticStatus(Struct, frozen=True, rename="camel"):
    """The status of an ElasticJob; None: unknown."""

    phase: str = ""
    nodes: str = ""
    running: int = 0
    selector: str = ""
    restarts: int | None = None
    step: int | None = None
    observed_generation: int | None = None
    start_time: str | None = None
    completion_time: str | None = None
    excluded_nodes: tuple[AvoidedNode, ...] = ()
    conditions: tuple[JobCondition, ...] = ()

    def condition(self, kind: str) -> JobCondition:
        """The condition of that type; a false one if it is missing."""
        return next(
            (one for one in self.conditions if one.type == kind), JobCondition(kind, "False")
        )

    @property
    def is_over(self) -> bool:
        """Whether the job has succeeded or failed, which is final."""
        return self.phase in ("Succeeded", "Failed")


# ---------------------------------------------------------------- the schema

_MAP: Final[Json] = {"type": "object", "additionalProperties": {"type": "string"}}


def _open(*required: str, **properties: Json) -> Json:
    """An object with the `properties` that the operator reads or changes; other fields are
    preserved."""
    made: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    made |= {"required": list(required)} if required else {}
    return made | ({"properties": properties} if properties else {})


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_TERMS: Final = _list(_open(matchFields=_list(_open())))
_AFFINITY: Final = _open(
    nodeAffinity=_open(
        requiredDuringSchedulingIgnoredDuringExecution=_open(nodeSelectorTerms=_TERMS)
    )
)
_CONTAINER: Final = _open(
    "name", "image", env=_list(_open("name")), volumeMounts=_list(_open())
)  # fmt: skip
_TEMPLATE: Final = _open(
    "spec",
    metadata=_open(labels=_MAP, annotations=_MAP),
    spec=_open(
        "containers",
        containers={**_list(_CONTAINER), "minItems": 1},
        volumes=_list(_open()),
        affinity=_AFFINITY,
    ),
)

_RULES: Final = (
    ("!has(self.minNodes) || self.minNodes <= self.nodes", "minNodes is larger than nodes"),
    ("self.nodes % self.nodeUnit == 0", "nodes is not a multiple of nodeUnit"),
    (
        "!has(self.minNodes) || self.minNodes % self.nodeUnit == 0",
        "minNodes is not a multiple of nodeUnit",
    ),
    (
        "!has(self.gang) || !has(self.gang.queue) || self.gang.queue == '' || "
        "self.gang.scheduler in ['volcano', 'kueue']",
        "gang.queue is only for volcano and kueue",
    ),
    (
        "!has(self.gang) || self.gang.scheduler != 'kueue' || "
        "(has(self.gang.queue) && self.gang.queue != '')",
        "gang.scheduler kueue needs gang.queue, a LocalQueue of the namespace",
    ),
)

_NAME_RULE: Final = (
    f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && "
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    f"the name of an ElasticJob has {MAX_NAME_LENGTH} characters at most: lower case letters, "
    "digits and dashes, with a letter first",
)


def _rules(*pairs: tuple[str, str]) -> list[Json]:
    return [{"rule": rule, "message": message} for rule, message in pairs]


def schema_of(struct: type[Struct]) -> Json:
    """The structural schema of a struct: references inlined, no null."""
    made = msgspec.json.schema(struct)
    names = made["$defs"]

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(one) for one in part]
        if not isinstance(part, dict):
            return part
        rest = {key: part[key] for key in part if key not in ("$ref", "anyOf", "title")}
        if ref := part.get("$ref"):
            rest = names[ref.rpartition("/")[2]] | rest
            rest.pop("title", None)
        elif kinds := part.get("anyOf"):
            (kind,) = (one for one in kinds if one != {"type": "null"})
            return plain(kind | {key: rest[key] for key in rest if key != "default"})
        found = {key: plain(value) for key, value in rest.items() if value != []}
        if "enum" in found:
            found["type"] = "string"
        if isinstance(found.get("default"), dict):  # its fields have their own defaults
            found["default"] = {}
        return found

    whole: Json = plain({"$ref": made["$ref"]})
    return whole


def crd() -> Json:
    """The CustomResourceDefinition."""
    spec = schema_of(ElasticSpec)
    about = spec["properties"]["template"].get("description", "")
    spec["properties"]["template"] = {**_TEMPLATE, "description": about}
    resources = spec["properties"]["master"]["properties"]["resources"]
    resources |= {"x-kubernetes-preserve-unknown-fields": True}
    spec["x-kubernetes-validations"] = _rules(*_RULES)
    status = schema_of(ElasticStatus)
    for field in status["properties"].values():
        field.pop("default", None)
    status["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes",
                "statusReplicasPath": ".status.running",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Phase", "string", ".status.phase"),
            _column("Nodes", "string", ".status.nodes"),
            _column("Restarts", "integer", ".status.restarts"),
            _column("Step", "integer", ".status.step"),
            _column("Age", "date", ".metadata.creationTimestamp"),
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {"spec": spec, "status": status},
                "x-kubernetes-validations": _rules(_NAME_RULE),
            }
        },
    }
    names = {"plural": PLURAL, "singular": "elasticjob", "kind": KIND, "shortNames": ["ej"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _column(name: str, kind: str, path: str) -> Json:
    return {"name": name, "type": kind, "jsonPath": path}
