"""Clusters in which all goes wrong at once; pods have no processes there. In the end every job has
converged."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.further import cases, further
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.store import Refusal
from tests.operator.test_operator import TEN_LINES, USER, Operator, install

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    """Four nodes with a GPU each, and an operator."""
    made = StandIn(tmp_path, hollow=True)
    for number in range(4):
        made.node(f"n{number}", gpus=1)
    yield made
    made.close()


def phases(cluster: StandIn) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in cluster.objects("pods")}


def run(pods: list[Obj], *names: str) -> bool:
    """Exactly these run or wait, of all that have not ended."""
    alive = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
    return sorted(pod["metadata"]["name"] for pod in alive) == sorted(names)


def reason(job: Obj, kind: str) -> str:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((one["reason"] for one in conditions if one["type"] == kind), "")


def test_a_bad_node_is_avoided_and_a_lost_one_replaced(cluster: StandIn) -> None:
    kubectl = install(cluster)
    operator = Operator(cluster)
    kubectl("apply", "-f", "-", given=TEN_LINES)
    first = cluster.until("pods", lambda pods: run(pods, "tr-0-0", "tr-1-0", "tr-master-0"))
    cluster.until("pods", lambda pods: all(one["status"]["phase"] == "Running" for one in pods))
    bad = next(one for one in first if one["metadata"]["name"] == "tr-1-0")["spec"]["nodeName"]
    cluster.finish("tr-1-0", 75)
    pods = cluster.until("pods", lambda pods: run(pods, "tr-0-0", "tr-1-1", "tr-master-0"))
    cluster.until("pods", lambda pods: all(one["spec"].get("nodeName") for one in pods))
    pods = cluster.objects("pods")
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods}
    assert where["tr-1-1"] != bad
    (job,) = cluster.objects("elasticjobs", "elasticrun.dev")
    assert [one["node"] for one in job["status"]["excludedNodes"]] == [bad]
    cluster.preempt("tr-0-0")
    cluster.until("events", lambda events: count(events, "created pod tr-0-0") == 2)
    code, said = operator.stop()
    assert code == 0, said


def count(events: list[Obj], message: str) -> int:
    return sum(event["message"].startswith(message) for event in events)


def test_half_a_gang_is_given_back(cluster: StandIn) -> None:
    """Five GPUs are wanted, four are there."""
    kubectl = install(cluster)
    operator = Operator(cluster)
    lines = TEN_LINES.replace("nodes: 2\n  minNodes: 1", "nodes: 5\n  runPolicy: "
                              "{pendingTimeoutSeconds: 2}")  # fmt: skip
    gpu = "image: i, resources: {limits: {nvidia.com/gpu: 1}, requests: {nvidia.com/gpu: 1}}"
    kubectl("apply", "-f", "-", given=lines.replace("image: i", gpu))
    cluster.until("pods", lambda pods: len(pods) == 6)
    cluster.until("pods", lambda pods: run(pods, "tr-master-0"))
    (job,) = cluster.until(
        "elasticjobs", lambda jobs: reason(jobs[0], "Scheduled") == "GaveUp", group="elasticrun.dev"
    )
    assert "5 pods could not be placed in 2 s" in json.dumps(job["status"])
    operator.stop()


@further("test_chaos", why="a Lease runs out after 15 s")
def test_of_two_operators_one_leads(cluster: StandIn) -> None:
    kubectl = install(cluster, "--replicas=2")
    first = Operator(cluster, "--lease")
    cluster.until("leases", lambda leases: bool(leases), group="coordination.k8s.io")
    second = Operator(cluster, "--lease")
    kubectl("apply", "-f", "-", given=TEN_LINES)
    cluster.until("pods", lambda pods: run(pods, "tr-0-0", "tr-1-0", "tr-master-0"))
    first.kill()
    cluster.finish("tr-1-0", 143)
    cluster.until("pods", lambda pods: run(pods, "tr-0-0", "tr-1-1", "tr-master-0"))
    assert second.stop()[0] == 0


@pytest.mark.parametrize("seed", cases(range(8), kept=[0]))
def test_chaos(cluster: StandIn, seed: int) -> None:
    """Three jobs; the operator's requests fail, its watches break, its lists lag, it is killed; and
    pods die of everything. When that is over, each index has one pod that runs."""
    rng = random.Random(seed)
    kubectl = install(cluster)
    operator = Operator(cluster)
    jobs = ("a", "b", "c")
    for name in jobs:
        kubectl("apply", "-f", "-", given=TEN_LINES.replace("{name: tr}", f"{{name: {name}}}"))
    faults = cluster.faults
    faults.users, faults.seed = (USER,), seed
    faults.errors, faults.too_many, faults.stale, faults.cut_after = 0.15, 0.1, 3, 5
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        befall(cluster, operator, rng)
        time.sleep(rng.uniform(0.0, 0.4))  # the moment is what is tested
        assert not doubles(cluster), "never two pods of one index"
    faults.errors = faults.too_many = 0.0
    faults.stale = faults.cut_after = 0
    cluster.until("pods", lambda pods: converged(pods, jobs))
    status = {
        job["metadata"]["name"]: job["status"]["phase"]
        for job in cluster.objects("elasticjobs", "elasticrun.dev")
    }
    assert set(status) == set(jobs)
    operator.stop()


def befall(cluster: StandIn, operator: Operator, rng: random.Random) -> None:
    running = [name for name, phase in phases(cluster).items() if phase == "Running"]
    match rng.randrange(6):
        case 0 | 1 if running:
            name = rng.choice(running)
            killed = [137, 143] if "master" in name else [137, 143, 75, 99]
            try:
                cluster.finish(name, rng.choice(killed))
            except Refusal:
                return  # it has gone
        case 2 if running:
            cluster.client()(
                "delete", "pod", rng.choice(running), "--wait=false", "--ignore-not-found"
            )
        case 3:
            cluster.cut_watches()
        case 4:
            cluster.forget()
        case 5 if rng.random() < 0.5:
            operator.kill()
            operator.start()


def indices(pods: list[Obj], *phase: str) -> list[tuple[str, str]]:
    """Job and index of pods in these phases."""
    return [
        (labels["elasticrun.dev/job"], labels.get("elasticrun.dev/index", "master"))
        for labels in (p["metadata"]["labels"] for p in pods if p["status"]["phase"] in phase)
    ]


def doubles(cluster: StandIn) -> list[Any]:
    found = indices(cluster.objects("pods"), "Pending", "Running")
    return [one for one in found if found.count(one) > 1]


def converged(pods: list[Obj], jobs: tuple[str, ...]) -> bool:
    wanted = [(job, index) for job in jobs for index in ("0", "1", "master")]
    return sorted(indices(pods, "Running")) == sorted(wanted)
