"""The files of examples/cluster run: with one rank on a node in the place of eight, a small model,
and this machine's Python in the place of an image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elasticrun.testing.hosts import Lab
from tests.further import further
from tests.jobs.operator.test_operator import install
from tests.jobs.render import kubeflow
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.server.kinds import Obj

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "--steps=40", "--batch=8", "--micro-batch=2", "--length=16", "--width=32", "--layers=1",
    "--persist=20",
)  # fmt: skip
SECRET = {"metadata": {"name": "pretrain"}, "stringData": {"token": "a-secret-of-this-test"}}


@pytest.fixture
def cluster(lab: Lab, tmp_path: Path) -> Iterator[StandIn]:
    """Four nodes with GPUs, and what the files expect: a claim and a secret."""
    env = {"OMP_NUM_THREADS": "1", "ELASTICRUN_PRELOAD": "off"}
    made = StandIn(tmp_path, lab=lab, env=env, pause=0.1)
    for number in range(4):
        made.node(f"n{number}", gpus=8)
    kubectl = made.client()
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    for kind, one in (
        ("Secret", SECRET),
        ("PersistentVolumeClaim", {"metadata": {"name": "runs"}, "spec": claim}),
    ):
        given = json.dumps({"apiVersion": "v1", "kind": kind, **one})
        kubectl("create", "-f", "-", given=given)
    yield made
    made.close()


def smaller(pod: Obj) -> None:
    """The container of a pod template runs here, at a small size."""
    (container,) = pod["spec"]["containers"]
    for field in ("command", "args"):
        words = container.get(field, [])
        container[field] = [word.replace("per-node=8", "per-node=1") for word in words]
    container["args"] += SMALL
    container["workingDir"] = str(ROOT)


@further(
    "jobs/operator/test_whole::test_training_goes_on_whatever_is_deleted",
    "e2e/test_examples::test_the_users_test_passes",
    "e2e/test_examples::test_the_elastic_job_is_one",
    "e2e/test_examples::test_files_are_what_render_prints",
)
@pytest.mark.parametrize("name", ["job.yaml", "elasticjob.yaml", "trainjob.yaml"])
def test_a_file_trains_to_its_end(name: str, cluster: StandIn, tmp_path: Path) -> None:
    kubectl = cluster.client()
    objects = list(yaml.safe_load_all((ROOT / "examples/cluster" / name).read_text()))
    last = objects[-1]
    if name == "trainjob.yaml":
        last["spec"]["trainer"]["numProcPerNode"] = 1
        objects = kubeflow.objects(*objects)
    if name == "elasticjob.yaml":
        kubectl = install(cluster, deploy=True)
    smaller(objects[-1]["spec"]["template"])
    for one in objects:
        kubectl("create", "-f", "-", given=json.dumps(one))
    what, ended = {
        "job.yaml": ("job/pretrain", "Complete"),
        "trainjob.yaml": ("job/pretrain-node-0", "Complete"),
        "elasticjob.yaml": ("ej/pretrain", "Succeeded"),
    }[name]
    kubectl("wait", f"--for=condition={ended}", what, "--timeout=400s")
    # a Job that has succeeded deletes pods that have not ended yet
    printed = "".join(cluster.log(pod) for _, pod in list(cluster.kubelet.printed))
    assert re.search("step=40 ranks=[234] ", printed), printed
    checkpoints = tmp_path / "claims/default/runs/pretrain"
    assert any(checkpoints.iterdir())
