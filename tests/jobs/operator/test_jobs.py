"""ElasticJobs whose pods are real processes: what befalls them, and that training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing.hosts import Lab
from tests.compat.live import PUPPET, allreduce
from tests.further import further
from tests.harness import MARK, SOCKET, Peer, World
from tests.jobs.operator.test_operator import install
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.real import standin_only
from tests.kubernetes.server.kinds import Obj

pytestmark = [pytest.mark.slow, standin_only]

JOB = f"""\
apiVersion: elasticrun.dev/v1alpha1
kind: ElasticJob
metadata: {{name: tr}}
spec:
  nodes: 2
  minNodes: 1
  template:
    spec:
      containers:
      - name: train
        image: i
        command: [elasticrun, --grow=now, {PUPPET}]
        env: [{{name: LOGLEVEL, value: INFO}}]
"""


class Running:
    """A job `tr` in a cluster with an operator."""

    def __init__(self, world: World, scratch: Path, lab: Lab) -> None:
        self.world = world
        env = {MARK: world.marker, SOCKET: world.hub.path, "ELASTICRUN_PRELOAD": "off"}
        self.cluster = StandIn(scratch, lab=lab, env=env)
        for number in range(4):
            self.cluster.node(f"n{number}")
        self.kubectl: Client = install(self.cluster, deploy=True)
        self._known: set[int] = set()

    def close(self) -> None:
        self.cluster.close()

    def operators(self, number: int) -> None:
        """So many operators run."""
        self.kubectl("scale", "deployment/elasticrun-operator", f"--replicas={number}")
        self.cluster.until("pods", lambda pods: len(pods) - len(of_job(pods)) == number)

    def now(self) -> None:
        """Ranks that come from here on are another world's."""
        self._known = {peer.pid for peer in self.world.hub.peers}

    def ranks(self, size: int) -> list[Peer]:
        old = self._known
        found = self.world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)
        assert allreduce(self.world, found) == [size] * size
        return found

    def pod(self, name: str) -> Obj | None:
        found = self.cluster.objects("pods")
        return next((pod for pod in found if pod["metadata"]["name"] == name), None)

    def until_pod(self, name: str, *, other: str = "") -> Obj:
        """A pod of that name runs; `other`: than the one with this uid."""

        def holds(pods: list[Obj]) -> Any:
            return [
                pod
                for pod in pods
                if pod["metadata"]["name"] == name
                and pod["metadata"]["uid"] != other
                and pod["status"]["phase"] == "Running"
            ]

        return next(iter(holds(self.cluster.until("pods", holds))))

    def until(self, holds: Callable[[Obj], bool]) -> Obj:
        """This is true of the job's status, which it returns."""
        (job,) = self.cluster.until(
            "elasticjobs", lambda jobs: holds(jobs[0].get("status", {})), group="elasticrun.dev"
        )
        status: Obj = job["status"]
        return status

    def until_trained(self, nodes: int) -> Obj:
        whole = f"{nodes}/{nodes}"
        return self.until(lambda at: (at.get("phase"), at.get("nodes")) == ("Running", whole))

    def delete(self, name: str) -> float:
        """kubectl delete; seconds from its end to the next pod of that name."""
        old = self.until_pod(name)["metadata"]["uid"]
        self.kubectl("delete", "pod", name)
        began = time.monotonic()
        self.until_pod(name, other=old)
        return time.monotonic() - began


def of_job(pods: list[Obj]) -> list[Obj]:
    """Without the operator's."""
    return [pod for pod in pods if "elasticrun.dev/job" in pod["metadata"].get("labels", {})]


def last_words(pods: list[Obj], name: str) -> str:
    """Those that a pod has ended with."""
    (pod,) = (one for one in pods if one["metadata"]["name"] == name)
    states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
    return "".join(one.get("terminated", {}).get("message", "") for one in states)


def condition(status: Obj, kind: str) -> Obj:
    return next(one for one in status["conditions"] if one["type"] == kind)


@pytest.fixture
def job(world: World, lab: Lab, tmp_path: Path) -> Iterator[Running]:
    made = Running(world, tmp_path, lab)
    made.kubectl("apply", "-f", "-", given=JOB)
    yield made
    made.close()


@further(
    "jobs/operator/test_whole::test_training_goes_on_whatever_is_deleted",
    "jobs/operator/test_plan::test_whatever_happens",
)
def test_pods_die_and_training_goes_on(job: Running) -> None:
    two = job.ranks(2)
    job.until_trained(2)

    job.now()
    assert job.delete("tr-1-0") < 2.0
    job.ranks(2)
    job.now()
    job.cluster.kill("tr-1-0")
    job.until_pod("tr-1-1")
    two = job.ranks(2)
    job.until_trained(2)

    count = len(job.world.hub.peers)
    assert job.delete("tr-master-0") < 2.0
    assert allreduce(job.world, two) == [2, 2]
    job.until(lambda at: condition(at, "MasterReachable")["reason"] != "Answers")
    job.until(lambda at: condition(at, "MasterReachable")["reason"] == "Answers")
    assert allreduce(job.world, two) == [2, 2]
    assert len(job.world.hub.peers) == count, "no rank has noticed"

    job.operators(0)
    assert allreduce(job.world, two) == [2, 2]
    job.now()
    job.cluster.kill("tr-0-0")
    (alone,) = job.ranks(1)
    assert job.pod("tr-0-1") is None
    job.operators(1)
    two = job.ranks(2)
    for peer in two:
        peer.order("exit", code=0)
    status = job.until(lambda at: at["phase"] == "Succeeded")
    assert condition(status, "Succeeded")["message"] == "all ranks ended with 0"
    assert alone.gone
    job.cluster.until("pods", lambda pods: '"state":"succeeded"' in last_words(pods, "tr-master-0"))


@further(
    "jobs/operator/test_whole::test_training_goes_on_whatever_is_deleted",
    "jobs/operator/test_plan::test_a_job_is_scaled_live",
    "jobs/operator/test_plan::test_a_suspended_job_saves_and_has_no_pods",
)
def test_a_job_is_resized_and_suspended_live(job: Running) -> None:
    job.ranks(2)
    first = [job.until_pod(name)["metadata"]["uid"] for name in ("tr-0-0", "tr-1-0")]
    job.now()
    job.kubectl("scale", "ej/tr", "--replicas=3")
    job.ranks(3)
    job.until_trained(3)
    job.now()
    job.kubectl("scale", "ej/tr", "--replicas=2")
    job.ranks(2)
    job.cluster.until("pods", lambda pods: len(of_job(pods)) == 3)
    assert [job.until_pod(name)["metadata"]["uid"] for name in ("tr-0-0", "tr-1-0")] == first

    job.now()
    job.kubectl("patch", "ej/tr", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    ended = ("Failed", "Succeeded")
    job.cluster.until(
        "pods", lambda pods: all(one["status"]["phase"] in ended for one in of_job(pods))
    )
    assert job.until(lambda at: at["phase"] == "Suspended")["nodes"] == "0/2"
    job.kubectl("patch", "ej/tr", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    two = job.ranks(2)
    two[1].order("exit", code=93)
    status = job.until(lambda at: at["phase"] == "Failed")
    assert condition(status, "Failed")["reason"] == "NotToBeRetried"
