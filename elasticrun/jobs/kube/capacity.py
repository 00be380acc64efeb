"""The nodes of a cluster: their capacity, what pods request, and what is in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from elasticrun.jobs.backend import Forbidden, RequestFailed
from elasticrun.jobs.kube.api import EVERYWHERE, NODE_METRICS, NODES, KubeApi
from elasticrun.jobs.operator.cluster import PODS
from elasticrun.jobs.operator.crd import Json
from elasticrun.jobs.rows import NodeRow

GPU_WORDS: Final = ("gpu", "npu", "ascend", "gaudi", "tpu", "mig-")
"""A resource counts as a GPU or similar device if its name contains one of these after the
slash."""

_UNITS: Final = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0,
    "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


async def nodes(api: KubeApi) -> tuple[list[NodeRow], list[str]]:
    """All nodes, and a sentence for each kind of data that is unavailable. Raises RequestFailed if
    this user may not list nodes."""
    bodies = await api.list(NODES)
    notes: list[str] = []
    requests: dict[str, Json] | None = None
    try:
        requests = _requests(await api.list(PODS, EVERYWHERE))
    except Forbidden as why:
        notes.append(f"the pods' requests are unknown: {why}")
    used: dict[str, Json] = {}
    try:
        used = {one["metadata"]["name"]: one.get("usage") or {}
                for one in await api.list(NODE_METRICS)}  # fmt: skip
    except RequestFailed:
        notes.append("the usage is unknown: you cannot reach a metrics server")
    rows = [_row(body, requests, used.get(body["metadata"]["name"], {})) for body in bodies]
    return sorted(rows, key=lambda row: row.node), notes


def _row(body: Json, requested: dict[str, Json] | None, used: Json) -> NodeRow:
    name, has = body["metadata"]["name"], (body.get("status") or {}).get("allocatable") or {}
    taken = None if requested is None else requested.get(name, {})
    conditions = (body.get("status") or {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    cordoned = bool((body.get("spec") or {}).get("unschedulable"))
    return NodeRow(
        node=name,
        state="not ready" if not ready else "cordoned" if cordoned else "ready",
        gpus=_gpus(has),
        gpus_taken=-1 if taken is None else _gpus(taken),
        cpus=quantity(has.get("cpu", 0)),
        cpus_taken=-1.0 if taken is None else quantity(taken.get("cpu", 0)),
        cpus_used=quantity(used["cpu"]) if "cpu" in used else -1.0,
        memory=mib(has.get("memory", 0)),
        memory_taken=-1 if taken is None else mib(taken.get("memory", 0)),
        memory_used=mib(used["memory"]) if "memory" in used else -1,
    )


def _requests(pods: Iterable[Json]) -> dict[str, Json]:
    """The sum of the requests of the active pods on each node; where a container has none, its
    limits count."""
    found: dict[str, Json] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        total = found.setdefault(node, {})
        for container in pod["spec"].get("containers") or ():
            resources = container.get("resources") or {}
            amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
            for name, amount in amounts.items():
                total[name] = total.get(name, 0.0) + quantity(amount)
    return found


def _gpus(resources: Json) -> int:
    named = (
        quantity(amount)
        for name, amount in resources.items()
        if "/" in name and any(word in name.partition("/")[2].lower() for word in GPU_WORDS)
    )
    return round(sum(named))


def mib(amount: object) -> int:
    """An amount of memory in MiB."""
    return round(quantity(amount) / 2**20)


def quantity(amount: object) -> float:
    """A Kubernetes quantity such as `500m`, `16Gi` or `1e3`; 0.0 if it is invalid."""
    text = str(amount)
    for unit in sorted(_UNITS, key=len, reverse=True):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * _UNITS[unit]
            except ValueError:
                continue
    return 0.0
