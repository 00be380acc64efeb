"""The manifest applied and run: by a stand-in for a cluster, whose pods are hosts, or by the
cluster that ELASTICRUN_TEST_KUBECONFIG names.

There the image must have Python, torch and elasticrun (ELASTICRUN_TEST_IMAGE).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.further import further
from tests.jobs.render.rendered import render
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.real import IMAGE, KUBECONFIG, AnyCluster, RealCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = ("-c", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")


@pytest.fixture
def name() -> str:
    return f"er-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def kubectl(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """Who makes a job there, of which nothing is left when the test is over."""
    cluster: AnyCluster
    if KUBECONFIG:
        if not IMAGE and "runs" in request.function.__name__:
            pytest.skip("ELASTICRUN_TEST_IMAGE names no image with elasticrun in it")
        cluster = RealCluster(Path(KUBECONFIG), tmp_path)
    else:
        cluster = StandIn(tmp_path, lab=request.getfixturevalue("lab"))
        for node in ("n0", "n1"):
            cluster.node(node)
    yield cluster.client()
    cluster.close()


def _manifest(name: str, *words: str) -> str:
    image = IMAGE or "example.invalid/train:1.0"
    base = ("--name", name, "--image", image, "--shm", "64Mi")
    program = ("--no-python", "--", "python", *PROGRAM)
    return render("k8s", *base, *words, *program).out


def test_the_server_takes_it(kubectl: Client, name: str) -> None:
    manifest = _manifest(name, "--nnodes", "2:4", "--rbac")
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=manifest)


@further("test_the_server_takes_it", "pods/test_pods::test_pods_come_and_go_and_come_back")
def test_it_runs_there(kubectl: Client, name: str) -> None:
    manifest = _manifest(name, "--nnodes", "2", "--nproc-per-node", "2")
    kubectl("apply", "-f", "-", given=manifest)
    kubectl("wait", f"job/{name}", "--for=condition=complete", "--timeout=500s")
    status = json.loads(kubectl("get", "job", name, "-o", "json"))["status"]
    assert status["succeeded"] == 2
    logs = kubectl("logs", "-l", f"batch.kubernetes.io/job-name={name}", "--tail=-1")
    assert {f"rank {rank} of 4" for rank in range(4)} <= {
        line.strip() for line in logs.splitlines()
    }
