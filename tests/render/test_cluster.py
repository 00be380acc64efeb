"""Where ELASTICRUN_TEST_KUBECONFIG names a cluster: the manifest applied there, and run.

The image must have Python, torch and elasticrun (ELASTICRUN_TEST_IMAGE).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.render.rendered import render

KUBECONFIG = os.environ.get("ELASTICRUN_TEST_KUBECONFIG", "")
IMAGE = os.environ.get("ELASTICRUN_TEST_IMAGE", "")

pytestmark = [
    pytest.mark.skipif(not KUBECONFIG, reason="ELASTICRUN_TEST_KUBECONFIG names no cluster"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    pytest.mark.timeout(900),
]
PROGRAM = ("-c", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")


def kubectl(*words: str, given: str = "") -> str:
    """The output of a kubectl that ended well."""
    command = ["kubectl", "--kubeconfig", KUBECONFIG, *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a job of this test, which is gone when the test is over."""
    made = f"er-{uuid.uuid4().hex[:8]}"
    yield made
    for kind in ("job", "service", "role", "rolebinding", "serviceaccount"):
        kubectl("delete", kind, made, "--ignore-not-found", "--wait=true")


def _manifest(name: str, *words: str) -> str:
    image = IMAGE or "example.invalid/train:1.0"
    base = ("--name", name, "--image", image, "--shm", "64Mi")
    program = ("--no-python", "--", "python", *PROGRAM)
    return render("k8s", *base, *words, *program).out


def test_the_server_takes_it(name: str) -> None:
    manifest = _manifest(name, "--nnodes", "2:4", "--rbac")
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=manifest)


@pytest.mark.skipif(not IMAGE, reason="ELASTICRUN_TEST_IMAGE names no image with elasticrun in it")
def test_it_runs_there(name: str) -> None:
    kubectl("apply", "-f", "-", given=_manifest(name, "--nnodes", "2", "--nproc-per-node", "2"))
    kubectl("wait", f"job/{name}", "--for=condition=complete", "--timeout=500s")
    status = json.loads(kubectl("get", "job", name, "-o", "json"))["status"]
    assert status["succeeded"] == 2
    logs = kubectl("logs", "-l", f"batch.kubernetes.io/job-name={name}", "--tail=-1")
    assert {f"rank {rank} of 4" for rank in range(4)} <= {
        line.strip() for line in logs.splitlines()
    }
