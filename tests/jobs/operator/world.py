"""A cluster without machines: an ElasticJob, its pods as objects, and what may befall them; for
`test_plan.py`. What `plan` orders is done here as an API server would do it."""

from __future__ import annotations

from typing import Any

import msgspec

from elasticrun.jobs.operator import objects, plan
from elasticrun.jobs.operator.crd import ElasticStatus
from elasticrun.jobs.operator.objects import INDEX, OwnedPod, format_time
from elasticrun.jobs.operator.plan import (
    CreateObject,
    Delete,
    DeleteJob,
    ReconcilePlan,
    Resize,
)
from elasticrun.jobs.operator.status import status_patch
from elasticrun.jobs.operator.view import ObservedState
from elasticrun.wire.messages import ExcludedNode, JobStatus, NodeStatus

BEGAN = 1_800_000_000.0


def page(**more: Any) -> JobStatus:
    """What a master says; of nothing in particular."""
    said: dict[str, Any] = {
        "job_id": "tr", "phase": "gathering", "reason": "", "round": None, "world_size": 1,
        "restart_count": 0, "restarts_left": 3, "max_restarts": 3, "min_nodes": 1, "max_nodes": 4,
        "nodes": (), "last_failure": "", "outcome": "",
    }  # fmt: skip
    return JobStatus(**{**said, **more})


def placed(*hosts: str) -> tuple[NodeStatus, ...]:
    """Nodes that have a place in the round."""
    return tuple(
        NodeStatus(host, host, "", "alive", "running", "", at, at, 1, ())
        for at, host in enumerate(hosts)
    )


def excluded(
    host: str, why: str = "its matmul is wrong", age: float = 1.0, kind: str = "failed"
) -> ExcludedNode:
    return ExcludedNode(host, host, kind, why, age, 3000.0)


class Cluster:
    """One job in it, `tr`."""

    def __init__(self, **spec: Any) -> None:
        template = {"spec": {"containers": [{"name": "train", "image": "i"}]}}
        self.now = BEGAN
        self.job: dict[str, Any] = {
            "metadata": {
                "name": "tr",
                "namespace": "default",
                "uid": "12345678-9",
                "generation": 1,
            },
            "spec": {"template": template, **spec},
        }
        self.pods: dict[str, dict[str, Any]] = {}
        self.master: JobStatus | None = None
        self.gone = False
        self.resized: list[int] = []
        self.todo: ReconcilePlan | None = None

    # ------------------------------------------------------------ looking and doing

    def sight(self) -> ObservedState:
        read = (objects.read(pod) for pod in self.pods.values())
        return ObservedState(tuple(pod for pod in read if pod is not None), self.master)

    def look(self) -> ReconcilePlan:
        """One pass; what it orders is done."""
        self.todo = todo = plan.plan(objects.parse_job(self.job), self.sight(), self.now)
        if patched := status_patch(self.job.get("status", {}), todo.status):
            self.job["status"] = patched
        for order in todo.orders:
            self._do(order)
        return todo

    def settle(self, most: int = 12) -> int:
        """Passes until nothing is ordered or changed; the number of them."""
        for count in range(most):
            before = self.job.get("status")
            if not self.look().orders and self.job.get("status") == before:
                return count
        raise AssertionError(f"not settled: {self.todo}")

    def _do(self, order: plan.Order) -> None:
        match order:
            case CreateObject(body) if body["kind"] == "Pod":
                name = body["metadata"]["name"]
                if name in self.pods:
                    return
                made = msgspec.json.decode(msgspec.json.encode(body))
                made["metadata"] |= {"uid": name, "creationTimestamp": format_time(self.now)}
                made["status"] = {"phase": "Pending"}
                self.pods[name] = made
            case Delete(pod):
                self.delete(pod.name)
            case Resize(nodes):
                self.resized.append(nodes)
                if self.master is not None:
                    self.master = msgspec.structs.replace(self.master, max_nodes=nodes)
            case DeleteJob():
                self.gone = True

    # ------------------------------------------------------------ what befalls

    def run(self, *names: str, node: str = "") -> None:
        """Pods (all that are pending) are placed and begin."""
        for name in names or tuple(self.pods):
            pod = self.pods[name]
            if pod["status"]["phase"] == "Pending":
                pod["spec"]["nodeName"] = node or f"on-{name}"
                pod["status"] = {"phase": "Running", "podIP": "192.0.2.1"}

    def end(self, name: str, code: int | None, *, reason: str = "", message: str = "") -> None:
        """A pod's container ends; None: it is taken away, and there is no code."""
        pod = self.pods[name]
        status: dict[str, Any] = {"phase": "Succeeded" if code == 0 else "Failed"}
        if code is not None:
            ended = {"exitCode": code, "finishedAt": format_time(self.now), "reason": reason}
            ended["message"] = message
            container = pod["spec"]["containers"][0]["name"]
            status["containerStatuses"] = [{"name": container, "state": {"terminated": ended}}]
        pod["status"] = status

    def delete(self, name: str) -> None:
        """Somebody deletes a pod: at once where it does not run, else it has its grace."""
        pod = self.pods.get(name)
        if pod is None:
            return
        if pod["status"]["phase"] != "Running":
            del self.pods[name]
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = format_time(self.now + 60)

    def vanish(self) -> None:
        """Pods that were deleted have gone."""
        left = self.pods.items()
        self.pods = {k: v for k, v in left if "deletionTimestamp" not in v["metadata"]}

    # ------------------------------------------------------------ reading

    def names(self) -> list[str]:
        return sorted(self.pods)

    def living(self, index: int | None = None) -> list[OwnedPod]:
        """Of an index, or of all nodes."""
        return [
            pod
            for pod in self.sight().pods
            if pod.is_active(self.now)
            and (pod.index == index if index is not None else pod.index >= 0)
        ]

    @property
    def status(self) -> ElasticStatus:
        return msgspec.convert(self.job["status"], ElasticStatus)

    def env(self, name: str) -> dict[str, str]:
        container = self.pods[name]["spec"]["containers"][0]
        return {one["name"]: one.get("value", "") for one in container["env"]}

    def index(self, name: str) -> str:
        return str(self.pods[name]["metadata"]["labels"][INDEX])
