"""An ElasticJob whole: the operator as the pod of its Deployment, with the rights it is given; its
jobs' pods each a host with real agents and ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.testing.hosts import Lab
from tests.harness import until_file
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.server.kinds import Obj

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("elasticrun"))
GROUP = "elasticrun.dev"
OPERATOR = "system:serviceaccount:default:elasticrun-operator"


@pytest.fixture
def cluster(lab: Lab, tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path, lab=lab)
    for name in ("n0", "n1", "n2"):
        made.node(name, gpus=1)
    yield made
    made.close()


@pytest.fixture
def kubectl(cluster: StandIn) -> Client:
    words = (COMMAND, "render", "operator", "--namespace=default", "--image=r/elasticrun:1")
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    kubectl = cluster.client()
    kubectl("apply", "-f", "-", given=printed)
    return kubectl


def job(starts: Path, go: Path, **spec: object) -> str:
    """Its ranks say that they have started, and end when `go` is there."""
    script = f'echo "$RANK of $WORLD_SIZE" >>{starts}; until [ -e {go} ]; do sleep 0.1; done'
    one = {"name": "t", "image": "i", "command": ["elasticrun", "--no-python", "sh", "-c", script],
           "resources": {"limits": {"nvidia.com/gpu": 1}}}  # fmt: skip
    return json.dumps({
        "apiVersion": f"{GROUP}/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "tr"},
        "spec": {"nodes": 2, "minNodes": 1, "template": {"spec": {"containers": [one]}}, **spec},
    })  # fmt: skip


def until_runs(cluster: StandIn, prefix: str, *, but: str) -> Obj:
    """A pod that runs, and is another than the one with this uid."""

    def running(pods: list[Obj]) -> list[Obj]:
        return [p for p in pods if p["metadata"]["name"].startswith(prefix)
                and p["status"]["phase"] == "Running" and p["metadata"]["uid"] != but]  # fmt: skip

    return running(cluster.until("pods", running))[0]


def test_training_goes_on_whatever_is_deleted(
    cluster: StandIn, kubectl: Client, tmp_path: Path
) -> None:
    starts, go = tmp_path / "starts", tmp_path / "go"
    kubectl("apply", "-f", "-", given=job(starts, go))

    def two(count: int) -> None:
        whole = {"0 of 2", "1 of 2"}
        until_file(starts, lambda text: set(text.splitlines()[-2:]) == whole
                   and text.count("1 of 2") == count)  # fmt: skip

    two(1)
    first = until_runs(cluster, "tr-1-", but="")
    kubectl("delete", "pod", first["metadata"]["name"])
    until_runs(cluster, "tr-1-", but=first["metadata"]["uid"])
    two(2)
    lives = starts.read_text()

    operator = until_runs(cluster, "elasticrun-operator-", but="")["metadata"]["name"]
    cluster.kill(operator)
    master = until_runs(cluster, "tr-master-", but="")["metadata"]
    kubectl("delete", "pod", master["name"])
    until_runs(cluster, "tr-master-", but=master["uid"])
    kubectl("wait", "ej/tr", "--for=condition=Training", "--timeout=100s")
    assert starts.read_text() == lives, "no rank has noticed"

    go.touch()
    kubectl("wait", "ej/tr", "--for=condition=Succeeded", "--timeout=100s")
    assert starts.read_text() == lives
    kubectl("delete", "ej", "tr")
    cluster.until("pods", lambda pods: not [p for p in pods if "tr-" in p["metadata"]["name"][:3]])
    (role,) = cluster.objects("roles", "rbac.authorization.k8s.io")
    allowed = {
        (verb, group, what)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert cluster.used(OPERATOR) <= allowed
