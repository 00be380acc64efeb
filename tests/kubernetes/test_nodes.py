"""Pods of the stand-in are real processes, and end as pods do."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.testing.hosts import Lab
from tests import needs
from tests.further import cases
from tests.harness import await_true
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.server.kinds import Obj

pytestmark = pytest.mark.slow

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "svc"},
           "spec": {"clusterIP": "None", "selector": {"app": "a"}}}  # fmt: skip
STAYS = "trap 'echo bye; exit 7' TERM; echo up; sleep 1000 & wait"


def manifest(name: str, script: str, *, gpus: int = 1, **spec: object) -> str:
    one = {"name": "m", "image": "i", "command": ["sh", "-c"], "args": [script],
           "env": [{"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                   {"name": "TOLD", "value": "$(ME)-$(NOT)-$$(ME)"}],
           "resources": {"limits": {"nvidia.com/gpu": gpus}}}  # fmt: skip
    if "volumes" in spec:
        one["volumeMounts"] = spec.pop("mounts")
    return json.dumps({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "a"}},
        "spec": {"restartPolicy": "Never", "hostname": name, "subdomain": "svc", **spec,
                 "containers": [one]},
    })  # fmt: skip


@pytest.fixture(params=cases(["loopback", "lab"], kept=["lab"]))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandIn]:
    """Two nodes with two GPUs each."""
    needs.several_hosts()
    lab: Lab | None = request.getfixturevalue("lab") if request.param == "lab" else None
    made = StandIn(tmp_path, lab=lab)
    made.node("n0", gpus=2)
    made.node("n1", gpus=2)
    yield made
    made.close()


def phases(cluster: StandIn) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in cluster.objects("pods")}


def until(cluster: StandIn, pod: str, phase: str) -> Obj:
    def holds(pods: list[Obj]) -> bool:
        return any(p["metadata"]["name"] == pod and p["status"]["phase"] == phase for p in pods)

    found = cluster.until("pods", holds)
    return next(one for one in found if one["metadata"]["name"] == pod)


def make(kubectl: Client, *manifests: object) -> None:
    for one in manifests:
        given = one if isinstance(one, str) else json.dumps(one)
        kubectl("apply", "-f", "-", given=given)


def test_a_pod_runs_and_ends(cluster: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREIGN", "not a pod's")
    kubectl = cluster.client()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
              "stringData": {"key": "hidden"}}  # fmt: skip
    volumes = [{"name": "v", "secret": {"secretName": "s"}}, {"name": "e", "emptyDir": {}}]
    mounts = [{"name": "v", "mountPath": "/run/v"}, {"name": "e", "mountPath": "/of-this-pod/e"}]
    script = "echo $TOLD; hostname; cat /run/v/key; echo; env | grep -c FOREIGN; "
    script += "cd /of-this-pod/e && exit 3"
    make(kubectl, SERVICE, manifest("p", script, volumes=volumes, mounts=mounts))
    waiting = cluster.until("pods", lambda pods: pods[0]["status"].get("containerStatuses"))[0][
        "status"
    ]["containerStatuses"][0]["state"]["waiting"]
    assert waiting == {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}
    make(kubectl, secret)
    ended = until(cluster, "p", "Failed")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (3, "Error")
    assert kubectl("logs", "p").split() == ["p-$(NOT)-$(ME)", "p", "hidden", "0"]
    assert not Path("/of-this-pod").exists()
    assert kubectl("get", "pod", "p").splitlines()[1].split()[:3] == ["p", "0/1", "Error"]

    make(kubectl, manifest("q", STAYS), manifest("r", "until getent hosts q.svc; do :; done"))
    until(cluster, "r", "Succeeded")
    address = until(cluster, "q", "Running")["status"]["podIP"]
    assert kubectl("logs", "-f", "r").split()[:2] == [address, "q.svc"]
    done = kubectl.run("exec", "-i", "q", "--", "sh", "-c", "cat; exit 4", given="typed")
    assert (done.stdout, done.returncode) == ("typed", 4)
    with subprocess.Popen(
        kubectl.command("logs", "-f", "q"), env=kubectl.environment, stdout=subprocess.PIPE,
        text=True,
    ) as logs:  # fmt: skip
        assert logs.stdout is not None
        assert logs.stdout.readline() == "up\n"
        kubectl("delete", "pod", "q")
        assert logs.communicate()[0] == "bye\n"
    seen = [c for c in cluster.store.changes if c.obj["metadata"]["name"] == "q"]
    assert seen[-1].type == "DELETED"
    (last,) = seen[-1].obj["status"]["containerStatuses"]
    assert last["state"]["terminated"]["exitCode"] == 7


def test_pods_are_taken_away(cluster: StandIn) -> None:
    kubectl = cluster.client()
    make(kubectl, *(manifest(f"p{i}", STAYS) for i in range(4)))
    for i in range(4):
        until(cluster, f"p{i}", "Running")
    make(kubectl, manifest("late", STAYS))
    late = cluster.until("pods", lambda pods: pods[0]["status"].get("conditions"))[0]
    (why,) = late["status"]["conditions"]
    assert why["message"] == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    avoided = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n0", "n1"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [avoided]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    make(kubectl, manifest("shy", STAYS, gpus=0, affinity=affinity))

    cluster.kill("p0", reason="OOMKilled")
    (state,) = until(cluster, "p0", "Failed")["status"]["containerStatuses"]
    assert state["state"]["terminated"]["exitCode"] == 137
    assert state["state"]["terminated"]["reason"] == "OOMKilled"
    assert until(cluster, "late", "Running")["spec"]["nodeName"] in ("n0", "n1")
    assert phases(cluster)["shy"] == "Pending"

    home = until(cluster, "p1", "Running")["spec"]["nodeName"]
    kubectl("drain", home, "--force")
    taken = [c.obj for c in cluster.store.changes if c.type == "DELETED"]
    for pod in taken:
        (why,) = [c for c in pod["status"]["conditions"] if c["type"] == "DisruptionTarget"]
        assert why["reason"] == "EvictionByEvictionAPI"
    assert "p1" in {pod["metadata"]["name"] for pod in taken}

    other = ({"n0", "n1"} - {home}).pop()
    left = [p for p in cluster.objects("pods") if p["status"]["phase"] == "Running"]
    assert {pod["spec"]["nodeName"] for pod in left} == {other}
    cluster.lose_node(other)
    lost = [p for p in cluster.objects("pods") if p["metadata"].get("deletionTimestamp")]
    assert len(lost) == len(left)
    assert {pod["status"]["phase"] for pod in lost} == {"Running"}
    kubectl("delete", "node", other)
    cluster.until("pods", lambda pods: not any(p["spec"].get("nodeName") == other for p in pods))


def test_a_grace_ends(cluster: StandIn) -> None:
    kubectl = cluster.client()
    deaf = "trap '' TERM; echo deaf; sleep 1000 & while :; do wait; done"
    make(kubectl, manifest("p", deaf, terminationGracePeriodSeconds=1))
    until(cluster, "p", "Running")
    await_true(lambda: "deaf" in cluster.log("p"), "trap in the pod")
    kubectl("delete", "pod", "p")
    gone = cluster.store.changes[-1].obj
    (last,) = gone["status"]["containerStatuses"]
    assert last["state"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
