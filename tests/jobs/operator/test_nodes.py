"""What becomes of a job where nodes of the cluster are bad or too few; pods have no processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.jobs.operator import controller
from elasticrun.jobs.operator.crd import GROUP
from elasticrun.wire.messages import JobStatus, Reply
from tests.jobs.operator.test_operator import TEN_LINES, Operator, controlling, install, talking
from tests.jobs.operator.world import page
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.real import standin_only
from tests.kubernetes.server.kinds import Obj

pytestmark = [pytest.mark.slow, standin_only]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    """Four nodes with a GPU each, and an operator."""
    made = StandIn(tmp_path, hollow=True)
    for number in range(4):
        made.node(f"n{number}", gpus=1, labels={"kubernetes.io/hostname": f"host-{number}"})
    yield made
    made.close()


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


def test_a_master_that_does_not_take_a_size_is_no_hindrance(
    cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says so; its pods are replaced all the same."""
    kubectl = install(cluster)
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))

    async def says(*_: object, **__: object) -> JobStatus:
        return page(phase="running", max_nodes=9)

    async def refuses(*_: object, **__: object) -> Reply:
        return Reply(ok=False, reason="2 is no multiple")

    monkeypatch.setattr(controller, "get_status", says)
    monkeypatch.setattr(controller, "ask_for", refuses)
    kubectl("apply", "-f", "-", given=TEN_LINES)

    def seen() -> list[Obj]:
        cluster.until("pods", lambda pods: len(pods) == 3 and all(
            one["status"]["phase"] == "Running" for one in pods))  # fmt: skip
        cluster.finish("tr-1-0", 137)
        cluster.until("pods", lambda pods: run(pods, "tr-0-0", "tr-1-1", "tr-master-0"))
        return cluster.until(
            "elasticjobs", lambda jobs: reason(jobs[0], "Admitted") == "Refused", group=GROUP
        )

    async def operated() -> list[Obj]:
        async with talking("default") as server, controlling(server):
            return await asyncio.to_thread(seen)

    assert "the master refuses 2 nodes: 2 is no multiple" in json.dumps(asyncio.run(operated()))


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
