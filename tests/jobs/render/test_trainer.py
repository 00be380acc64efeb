"""`render trainer-runtime`: TrainJobs of Kubeflow Trainer that elasticrun runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticrun.cli.settings import UsageError
from elasticrun.testing.hosts import Lab
from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import MARK, SOCKET, Peer, World
from tests.jobs.render import kubeflow
from tests.jobs.render.rendered import Printed, check, render
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.nodes.container import expand
from tests.kubernetes.server.kinds import Obj

EXAMPLE = Path(__file__).parents[3] / "examples/cluster/trainjob.yaml"


def runtime(*words: str, script: str = "train.py") -> Printed:
    given = ("--name", "elasticrun", "--image", "r/train:1")
    return render("trainer-runtime", *given, *words, "--", script)


def train_job(**trainer: Any) -> Obj:
    spec: Obj = {"runtimeRef": {"name": "elasticrun"}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "tr"},
        "spec": spec | ({"trainer": trainer} if trainer else {}),
    }


def words_of(job: Obj) -> list[str]:
    """The launcher's words in the pod of index 1."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    known = {"JOB_COMPLETION_INDEX": "1"}
    for one in container["env"]:
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        known[one["name"]] = one.get("value", "tr" if "jobset-name" in path else "uid")
    return [expand(word, known) for word in (*container["command"], *container["args"])]


def variables(job: Obj) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"numNodes": 3, "args": ["other.py"]}])
@pytest.mark.parametrize("flags", [("--nnodes", "2:4"), ("--nnodes", "3", "--gang", "volcano")])
def test_clusters_would_take_the_runtime_and_what_trainer_makes(
    flags: tuple[str, ...], trainer: Obj
) -> None:
    documents = runtime(*flags).documents
    _, job = kubeflow.objects(documents[0], train_job(**trainer))
    check(documents, "1.37")
    check([job, train_job(**trainer)], "1.37")


def test_a_train_job_without_a_trainer_is_the_runtime() -> None:
    printed = runtime("--nnodes", "2:4", "--nproc-per-node", "2", "--max-restarts", "5")
    _, job = kubeflow.objects(printed.documents[0], train_job())
    assert job["spec"]["completions"] == 4
    assert words_of(job) == [
        "elasticrun", "--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=tr-node-0-0.tr:29400",
        "--rdzv-id=tr-uid", "--node-rank=1", "--max-restarts=5", "--exit-codes=scheduler",
        "train.py",
    ]  # fmt: skip
    assert variables(job)["PET_NPROC_PER_NODE"] == "2"


def test_a_train_job_has_its_own_size_and_script() -> None:
    printed = runtime("--nnodes", "2:4")
    asked = train_job(numNodes=8, numProcPerNode=3, args=["other.py", "--lr=1"])
    _, job = kubeflow.objects(printed.documents[0], asked)
    assert job["spec"]["completions"] == 8
    words = words_of(job)
    assert words[1] == "--nnodes=2:8"
    assert words[-2:] == ["other.py", "--lr=1"]
    assert variables(job)["PET_NPROC_PER_NODE"] == "3"


def test_a_fixed_number_of_nodes() -> None:
    _, job = kubeflow.objects(runtime("--nnodes", "3").documents[0], train_job(numNodes=2))
    assert words_of(job)[1] == "--nnodes=2"
    assert "successPolicy" not in job["spec"]


def test_one_namespace_has_its_own_kind() -> None:
    (made,) = runtime("--namespace", "team").documents
    assert (made["kind"], made["metadata"]["namespace"]) == ("TrainingRuntime", "team")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--pods", "3"), "a TrainJob has it: trainer.numNodes"),
        (("--suspend",), "a TrainJob has it: suspend"),
        (("--deadline", "60"), "activeDeadlineSeconds"),
        (("--ttl", "60"), "create the pods again"),
        (("--rdzv-id", "x"), "each TrainJob needs its own"),
        (("--rbac",), "Trainer decides the number of pods"),
        (("--gang", "volcano", "--queue", "q"), "label the TrainJob"),
        (("--gang", "volcano", "--scheduler", "s"), "Trainer chooses it"),
        (("--gang", "koordinator"), "Trainer supports volcano and coscheduling"),
    ],
)
def test_what_only_a_train_job_has_is_refused(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        runtime(*flags)


class Trained:
    """A cluster with a TrainJob `tr` of one runtime, whose pods are real processes."""

    def __init__(self, lab: Lab, world: World, scratch: Path) -> None:
        self.world = world
        env = {MARK: world.marker, SOCKET: world.hub.path, "ELASTICRUN_PRELOAD": "off"}
        self.cluster = StandIn(scratch, lab=lab, env=env, pause=0.1)
        for number in range(3):
            self.cluster.node(f"n{number}")
        self.kubectl = self.cluster.client()

    def create(self, made: Obj, asked: Obj) -> None:
        for one in kubeflow.objects(made, asked):
            self.kubectl("create", "-f", "-", given=json.dumps(one))

    def ranks(self, size: int, known: list[Peer]) -> list[Peer]:
        old = {peer.pid for peer in known}
        found = self.world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)
        assert allreduce(self.world, found) == [size] * size
        return found

    def pod(self, index: int) -> str:
        """The name of the pod of an index."""
        found = self.cluster.objects("pods")
        host = f"tr-node-0-{index}"
        return next(p["metadata"]["name"] for p in found if p["spec"]["hostname"] == host)


@pytest.fixture
def trained(lab: Lab, world: World, tmp_path: Path) -> Iterator[Trained]:
    made = Trained(lab, world, tmp_path)
    yield made
    made.cluster.close()


@pytest.mark.slow
@further(
    "test_a_train_job_with_a_command_of_its_own",
    "pods/test_pods::test_pods_come_and_go_and_come_back",
)
def test_a_train_job_goes_on_without_a_pod_and_with_its_replacement(trained: Trained) -> None:
    printed = runtime("--nnodes", "1:4", "--grow=now", "--max-restarts=0")
    trained.create(printed.documents[0], train_job(numNodes=2, args=[PUPPET]))
    two = trained.ranks(2, [])
    assert all(peer.run_id.startswith("tr-") for peer in two)
    trained.kubectl("delete", "pod", trained.pod(1), "--wait=false")
    alone = trained.ranks(1, two)
    again = trained.ranks(2, two + alone)
    finish(again)
    trained.kubectl("wait", "--for=condition=Complete", "job/tr-node-0")


@pytest.mark.slow
def test_a_train_job_with_a_command_of_its_own(trained: Trained) -> None:
    """It replaces the runtime's words, so the launcher reads what Trainer sets for torchrun."""
    command = train_job(numNodes=2, numProcPerNode=2, command=["elasticrun"], args=[PUPPET])
    trained.create(runtime("--nnodes", "1:4").documents[0], command)
    four = trained.ranks(4, [])
    finish(four)
    trained.kubectl("wait", "--for=condition=Complete", "job/tr-node-0")


def test_the_example_names_the_runtime_of_its_first_lines() -> None:
    made, asked = yaml.safe_load_all(EXAMPLE.read_text())
    assert asked["spec"]["runtimeRef"]["name"] == made["metadata"]["name"]
    check([made, asked], "1.37")
    _, job = kubeflow.objects(made, asked)
    assert words_of(job)[1] == "--nnodes=2:4"
