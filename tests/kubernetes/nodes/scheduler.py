"""Which node a pod gets: selectors, affinity, taints, and what is left of cpu, memory and GPUs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import FINAL, Registry, now
from tests.kubernetes.server.store import place_of

UNITS = {"": 1.0, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {f"{letter}i": 1024.0 ** (i + 1) for i, letter in enumerate("KMGT")}


def quantity(text: Any) -> float:
    """Of `500m`, `2Gi`, 4."""
    found = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text))
    assert found is not None, f"no quantity: {text}"
    return float(found[1]) * UNITS[found[2]]


def wanted(pod: Obj) -> Counter[str]:
    total: Counter[str] = Counter({"pods": 1})
    for one in pod["spec"]["containers"]:
        for name, value in (one.get("resources") or {}).get("requests", {}).items():
            total[name] += quantity(value)  # type: ignore[assignment]
    return total


class Scheduler:
    """Binds pods, or says on them why not."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._store = registry, registry.store

    def look(self) -> None:
        pods = list(self._store.all(("", "pods")))
        waiting = [
            pod
            for pod in pods
            if not pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
            and not pod["spec"].get("schedulingGates")
        ]
        if not waiting:
            return
        used: dict[str, Counter[str]] = {}
        for pod in pods:
            if (node := pod["spec"].get("nodeName")) and pod["status"]["phase"] not in FINAL:
                used.setdefault(node, Counter()).update(wanted(pod))
        nodes = list(self._store.all(("", "nodes")))
        for pod in sorted(waiting, key=lambda pod: int(pod["metadata"]["resourceVersion"])):
            self._place(pod, nodes, used)

    def _place(self, pod: Obj, nodes: list[Obj], used: dict[str, Counter[str]]) -> None:
        refusals: Counter[str] = Counter()
        needs, fitting = wanted(pod), []
        for node in nodes:
            taken = used.setdefault(node["metadata"]["name"], Counter())
            if why := _why_not(pod, node, needs, taken):
                refusals[why] += 1
            else:
                fitting.append((taken["pods"], node["metadata"]["name"]))
        kind = self._registry.kind("pods")
        if not fitting:
            told = ", ".join(f"{count} {why}" for why, count in sorted(refusals.items()))
            message = f"0/{len(nodes)} nodes are available: {told or 'there are none'}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                         "message": message}  # fmt: skip
            self._registry.edit(kind, place_of(pod), lambda obj: _say(obj, condition), "status")
            return
        chosen = min(fitting)[1]
        used[chosen].update(needs)
        self._registry.edit(kind, place_of(pod), lambda obj: obj["spec"].update(nodeName=chosen))
        condition = {"type": "PodScheduled", "status": "True"}
        self._registry.edit(kind, place_of(pod), lambda obj: _say(obj, condition), "status")


def _say(pod: Obj, condition: Obj) -> None:
    """The time is that of the last change of status."""
    old = pod["status"].get("conditions", [])
    was = next((one for one in old if one["type"] == condition["type"]), {})
    same = was.get("status") == condition["status"]
    when = was["lastTransitionTime"] if same else now()
    kept = [one for one in old if one["type"] != condition["type"]]
    pod["status"]["conditions"] = [*kept, {**condition, "lastTransitionTime": when}]


def _why_not(pod: Obj, node: Obj, needs: Counter[str], taken: Counter[str]) -> str:
    spec, labels = pod["spec"], node["metadata"].get("labels") or {}
    own = node.get("spec", {})
    if own.get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in own.get("taints", ()):
        hard = taint["effect"] in ("NoSchedule", "NoExecute")
        if hard and not any(_tolerates(one, taint) for one in spec.get("tolerations", ())):
            return f"node(s) had untolerated taint(s) {taint['key']}"
    selector = spec.get("nodeSelector") or {}
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    name = {"metadata.name": node["metadata"]["name"]}
    fits = all(labels.get(key) == value for key, value in selector.items())
    if terms:
        fits = fits and any(
            all(_matches(one, labels) for one in term.get("matchExpressions") or ())
            and all(_matches(one, name) for one in term.get("matchFields") or ())
            for term in terms["nodeSelectorTerms"]
        )
    if not fits:
        return "node(s) didn't match Pod's node affinity/selector"
    room = node["status"]["allocatable"]
    for name, value in sorted(needs.items()):
        if taken[name] + value > quantity(room.get(name, 0)):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""


def _tolerates(toleration: Obj, taint: Obj) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key", taint["key"]) == taint["key"]
    same = toleration.get("value", "") == taint.get("value", "")
    return toleration.get("key") == taint["key"] and same


def _matches(expression: Obj, labels: Obj) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case _:
            return value is not None and int(value) < int(values[0])
