"""What `kubectl get` shows: objects as rows, by the kind's columns."""

from __future__ import annotations

import datetime
import re
from typing import Any

from tests.kubernetes.server.kinds import Kind, Obj

NAME = {"name": "Name", "type": "string", "format": "name", "jsonPath": ".metadata.name"}
AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def _c(name: str, path: str, *, wide: bool = False) -> Obj:
    return {"name": name, "type": "string", "jsonPath": path, "priority": int(wide)}


COLUMNS: dict[str, tuple[Obj, ...]] = {
    "pods": (
        _c("Ready", "<ready>"), _c("Status", "<phase>"), _c("Restarts", "<restarts>"), AGE,
        _c("IP", ".status.podIP", wide=True), _c("Node", ".spec.nodeName", wide=True),
    ),
    "jobs": (_c("Status", ".status.conditions[?(@.status==\"True\")].type"),
             _c("Completions", ".status.succeeded"), AGE),
    "events": (_c("Last Seen", ".lastTimestamp"), _c("Type", ".type"), _c("Reason", ".reason"),
               _c("Object", "<object>"), _c("Message", ".message")),
    "services": (_c("Type", ".spec.type"), _c("Cluster-IP", ".spec.clusterIP"), AGE),
    "nodes": (_c("Status", "<node>"), AGE),
    "leases": (_c("Holder", ".spec.holderIdentity"), AGE),
}  # fmt: skip


def table(kind: Kind, objects: list[Obj], include: str, version: str) -> Obj:
    """A meta.k8s.io Table. `include`: Object, Metadata or None."""
    columns = [NAME, *(kind.columns or COLUMNS.get(kind.plural, (AGE,)))]
    if kind.plural == "events":
        columns = columns[1:]
    shown = ("name", "type", "format", "description", "priority")
    heads = [
        {"format": "", "description": "", "priority": 0, **{k: c[k] for k in shown if k in c}}
        for c in columns
    ]
    rows = []
    for obj in objects:
        part = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        carried = obj if include == "Object" else {**part, "metadata": obj["metadata"]}
        cells = [cell(obj, column) for column in columns]
        rows.append({"cells": cells} | ({} if include == "None" else {"object": carried}))
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": heads,
        "rows": rows,
    }


def cell(obj: Obj, column: Obj) -> Any:
    path = column["jsonPath"]
    if path.startswith("<"):
        return _COUNTED[path](obj)
    found = at_path(obj, path)
    if not found:
        return None if column["type"] != "date" else "<unknown>"
    if column["type"] == "date":
        return _age(found[0])
    if column["type"] in ("integer", "number", "boolean"):
        return found[0]
    return ",".join(str(one) for one in found)


def at_path(obj: Any, path: str) -> list[Any]:
    """What a JSONPath of names, indices, `[*]` and `[?(@.a=="b")]` finds."""
    found = [obj]
    token = r"\.((?:\\.|[^.\[\\])+)|\[\?\(@\.([\w.]+)\s*==\s*[\"']([^\"']*)[\"']\)\]|\[(\*|\d+)\]"
    for name, field, value, index in re.findall(token, path):
        if name:
            name = name.replace("\\", "")
            found = [one[name] for one in found if isinstance(one, dict) and name in one]
        else:
            items = [item for one in found if isinstance(one, list) for item in one]
            if field:
                found = [one for one in items if at_path(one, f".{field}") == [value]]
            else:
                found = items if index == "*" else items[int(index) : int(index) + 1]
    return [one for one in found if one is not None]


def _age(text: str) -> str:
    then = datetime.datetime.fromisoformat(text)
    seconds = int((datetime.datetime.now(datetime.UTC) - then).total_seconds())
    for most, unit, size in ((120, "s", 1), (7200, "m", 60), (172800, "h", 3600)):
        if seconds < most:
            return f"{max(seconds, 0) // size}{unit}"
    return f"{seconds // 86400}d"


def _phase(pod: Obj) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for one in pod["status"].get("containerStatuses", ()):
        state = one.get("state", {})
        for part in ("waiting", "terminated"):
            if reason := state.get(part, {}).get("reason"):
                return str(reason)
    return str(pod["status"].get("reason") or pod["status"].get("phase"))


def _ready(pod: Obj) -> str:
    states = pod["status"].get("containerStatuses", ())
    return f"{sum(one['ready'] for one in states)}/{len(pod['spec']['containers'])}"


def _node(node: Obj) -> str:
    ready = at_path(node, '.status.conditions[?(@.type=="Ready")].status')
    cordoned = ",SchedulingDisabled" if node.get("spec", {}).get("unschedulable") else ""
    return ("Ready" if ready == ["True"] else "NotReady") + cordoned


_COUNTED = {
    "<ready>": _ready,
    "<phase>": _phase,
    "<restarts>": lambda pod: sum(
        one["restartCount"] for one in pod["status"].get("containerStatuses", ())
    ),
    "<object>": lambda event: (
        f"{event['involvedObject'].get('kind', '').lower()}/{event['involvedObject'].get('name')}"
    ),
    "<node>": _node,
}
