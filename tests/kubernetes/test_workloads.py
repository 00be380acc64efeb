"""An Indexed Job and a Deployment do in the stand-in what they do in a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import StandIn
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.store import dig

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    """Its pods end when the test says so."""
    made = StandIn(tmp_path, hollow=True, pause=0.1)
    for name in ("n0", "n1", "n2", "n3"):
        made.node(name)
    yield made
    made.close()


def job(**spec: object) -> str:
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "m", "operator": "In",
                                              "values": [93]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]  # fmt: skip
    return json.dumps({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tr"},
        "spec": {
            "completionMode": "Indexed", "completions": 3, "parallelism": 3,
            "backoffLimit": 1000, "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": {"subdomain": "tr", "restartPolicy": "Never",
                                  "containers": [{"name": "m", "image": "i"}]}}, **spec,
        },
    })  # fmt: skip


def pods(cluster: StandIn, count: int, *, but: str = "") -> dict[str, Obj]:
    """By index, once so many run."""

    def running(found: list[Obj]) -> list[Obj]:
        alive = [p for p in found if "deletionTimestamp" not in p["metadata"]]
        alive = [p for p in alive if p["metadata"]["name"] != but]
        return [p for p in alive if p["status"]["phase"] == "Running"]

    found = running(cluster.until("pods", lambda found: len(running(found)) == count))
    return {p["spec"].get("hostname", p["metadata"]["name"]): p for p in found}


def status(cluster: StandIn, **wanted: object) -> Obj:
    def holds(jobs: list[Obj]) -> bool:
        return all(dig(jobs[0], f"status.{name}") == value for name, value in wanted.items())

    return cluster.until("jobs", holds, group="batch")[0]["status"]


def test_a_job_replaces_its_pods_and_is_resized(cluster: StandIn) -> None:
    kubectl = cluster.client()
    kubectl("apply", "-f", "-", given=job())
    first = pods(cluster, 3)
    assert sorted(first) == ["tr-0", "tr-1", "tr-2"]
    labels = first["tr-1"]["metadata"]["labels"]
    assert labels["batch.kubernetes.io/job-completion-index"] == "1"
    assert labels["job-name"] == "tr"
    gone = first["tr-1"]["metadata"]["name"]
    kubectl("delete", "pod", gone)
    assert pods(cluster, 3, but=gone)["tr-1"]["metadata"]["name"] != gone
    status(cluster, failed=1)
    kubectl("drain", pods(cluster, 3)["tr-2"]["spec"]["nodeName"], "--force")
    pods(cluster, 3)
    assert status(cluster, active=3)["failed"] == 1
    for size in (4, 3):
        both = {"spec": {"completions": size, "parallelism": size}}
        kubectl("patch", "job", "tr", "-p", json.dumps(both))
        assert f"tr-{size - 1}" in pods(cluster, size)
    said = kubectl.refused("patch", "job", "tr", "-p", '{"spec": {"completions": 9}}')
    assert "field is immutable" in said
    for pod in pods(cluster, 3).values():
        cluster.finish(pod["metadata"]["name"], 0)
    kubectl("wait", "--for=condition=Complete", "job/tr")
    assert status(cluster)["completedIndexes"] == "0,1,2"


def test_a_job_that_is_not_to_be_tried_again(cluster: StandIn) -> None:
    kubectl = cluster.client()
    kubectl("apply", "-f", "-", given=job())
    cluster.finish(pods(cluster, 3)["tr-0"]["metadata"]["name"], 93)
    kubectl("wait", "--for=condition=Failed", "job/tr")
    assert status(cluster)["conditions"][0]["reason"] == "PodFailurePolicy"
    cluster.until("pods", lambda found: all(p["status"]["phase"] == "Failed" for p in found))
    kubectl("delete", "job", "tr")
    cluster.until("pods", lambda found: not found)


def test_a_deployment_keeps_its_pods(cluster: StandIn) -> None:
    kubectl = cluster.client()
    labels = {"app": "op"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "m", "image": "i"}]},
    }
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "op"}, "spec": spec}
    kubectl("apply", "-f", "-", given=json.dumps(body))
    kubectl("rollout", "status", "deployment/op")
    gone = next(iter(pods(cluster, 2)))
    kubectl("delete", "pod", gone)
    pods(cluster, 2, but=gone)
    kubectl("scale", "deployment/op", "--replicas=1")
    pods(cluster, 1)
    assert kubectl("get", "deploy", "op", "-o", "jsonpath={.status.readyReplicas}") == "1"
