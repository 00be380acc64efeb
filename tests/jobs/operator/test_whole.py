"""An ElasticJob whole: the operator as the pod of its Deployment, with the rights it is given; its
jobs' pods each a host with real agents and ranks. Also in the cluster that
ELASTICRUN_TEST_KUBECONFIG names, by an image with elasticrun[k8s] (ELASTICRUN_TEST_IMAGE)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import await_true
from tests.jobs.operator.test_operator import install, used_as_allowed
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.real import IMAGE, KUBECONFIG, AnyCluster, RealCluster
from tests.kubernetes.server.kinds import Obj

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyCluster]:
    made: AnyCluster
    if KUBECONFIG:
        if not IMAGE:
            pytest.skip("ELASTICRUN_TEST_IMAGE names no image with elasticrun[k8s] in it")
        made = RealCluster(Path(KUBECONFIG), tmp_path)
    else:
        made = StandIn(tmp_path, lab=request.getfixturevalue("lab"))
        for name in ("n0", "n1", "n2"):
            made.node(name)
    yield made
    made.close()


def job(go: Path) -> str:
    """Its ranks say that they have started, and end when `go` is there."""
    script = f'echo "$RANK of $WORLD_SIZE"; until [ -e {go} ]; do sleep 0.1; done'
    one = {"name": "t", "image": IMAGE or "i",
           "command": ["elasticrun", "--no-python", "sh", "-c", script]}  # fmt: skip
    return json.dumps({
        "apiVersion": "elasticrun.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "tr"},
        "spec": {"nodes": 2, "minNodes": 1, "template": {"spec": {"containers": [one]}}},
    })  # fmt: skip


def until_runs(cluster: AnyCluster, prefix: str, *, but: str = "") -> str:
    """The name of a pod that runs, and has another uid than `but`."""

    def running(pods: list[Obj]) -> list[Obj]:
        return [p for p in pods if p["metadata"]["name"].startswith(prefix)
                and p["status"]["phase"] == "Running" and p["metadata"]["uid"] != but]  # fmt: skip

    name: str = running(cluster.until("pods", running))[0]["metadata"]["name"]
    return name


def test_training_goes_on_whatever_is_deleted(cluster: AnyCluster, tmp_path: Path) -> None:
    kubectl = install(cluster, deploy=True, image=IMAGE or "i")
    go = tmp_path / "go"
    kubectl("apply", "-f", "-", given=job(go))

    def starts(pod: str) -> int:
        """How often its rank has begun, one of two."""
        return sum(line.endswith(" of 2") for line in kubectl("logs", pod).splitlines())

    def deleted(prefix: str, *how: str) -> str:
        """Such a pod is; the name of the next."""
        name = until_runs(cluster, prefix)
        uid = kubectl("get", "pod", name, "-o", "jsonpath={.metadata.uid}")
        kubectl("delete", "pod", name, *how)
        return until_runs(cluster, prefix, but=uid)

    first, second = until_runs(cluster, "tr-0-"), until_runs(cluster, "tr-1-")
    await_true(lambda: starts(first) == starts(second) == 1, "two ranks")
    second = deleted("tr-1-")
    await_true(lambda: (starts(first), starts(second)) == (2, 1), "two ranks again")

    deleted("elasticrun-operator-", "--now")
    deleted("tr-master-")
    for what in ("MasterReachable", "Training"):
        kubectl("wait", "ej/tr", f"--for=condition={what}", "--timeout=200s")
    for pod in (first, second):
        # where pods share the folder, the second may have ended by the file of the first
        kubectl.run("exec", pod, "--", "sh", "-c", f"mkdir -p {go.parent}; touch {go}")
    kubectl("wait", "ej/tr", "--for=condition=Succeeded", "--timeout=200s")
    assert (starts(first), starts(second)) == (2, 1), "no rank has noticed"
    kubectl("delete", "ej", "tr")
    cluster.until("pods", lambda pods: not [p for p in pods if "tr-" in p["metadata"]["name"][:3]])
    used_as_allowed(cluster)
