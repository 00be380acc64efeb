"""Everything goes wrong between the operator and the API server, and the operator dies: never are
there two pods of one place, and in the end each job has what it is to have. Where lists are older
than what the operator has made itself, which no API server does, there may be two for a moment."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.further import further
from tests.jobs.operator.test_operator import USER, Operator, install
from tests.kubernetes.cluster import StandIn
from tests.kubernetes.real import standin_only
from tests.kubernetes.server.kinds import Obj

pytestmark = [pytest.mark.slow, standin_only]

JOBS, NODES, TROUBLES = 6, 3, 30
OVER = ("Succeeded", "Failed")


def job(name: str) -> str:
    container = {"name": "t", "image": "i", "command": ["elasticrun", "train.py"]}
    return json.dumps({
        "apiVersion": "elasticrun.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name},
        "spec": {"nodes": NODES, "runPolicy": {"backoffLimit": 1000},
                 "template": {"spec": {"containers": [container]}}},
    })  # fmt: skip


def places(pods: list[Obj]) -> Counter[str]:
    """How many pods that live there are of each host name."""
    return Counter(p["spec"]["hostname"] for p in pods if p["status"]["phase"] not in OVER)


def whole(pods: list[Obj]) -> bool:
    """All places are taken, by pods that run."""
    running = [p for p in pods if p["status"]["phase"] == "Running"]
    running = [p for p in running if "deletionTimestamp" not in p["metadata"]]
    return len(running) == JOBS * (NODES + 1) == len(places(running))


@further(
    "jobs/operator/test_whole::test_training_goes_on_whatever_is_deleted",
    "jobs/operator/test_nodes",
)
@pytest.mark.parametrize("seed", range(5))
def test_every_job_is_whole_in_the_end(tmp_path: Path, seed: int) -> None:
    cluster = StandIn(tmp_path, hollow=True, workloads=False, seed=seed)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.close)
        for i in range(4):
            cluster.node(f"n{i}")
        replicas = 1 + seed % 2
        kubectl = install(cluster, f"--replicas={replicas}")
        flags = ["--lease"] if replicas > 1 else []
        operators = [Operator(cluster, *flags) for _ in range(replicas)]
        for one in operators:
            stack.callback(one.kill)
        for i in range(JOBS):
            kubectl("apply", "-f", "-", given=job(f"j{i}"))
        cluster.until("pods", whole)
        rng = random.Random(seed)
        faults = cluster.faults
        faults.users, faults.delay = (USER,), 0.02
        faults.errors, faults.too_many, faults.cut_after = 0.2, 0.1, 7
        faults.stale = 20 if seed % 4 > 1 else 0
        for _ in range(TROUBLES):
            trouble(cluster, operators, rng)
        faults.errors = faults.too_many = faults.delay = 0.0
        faults.stale = faults.cut_after = 0
        cluster.until("pods", whole, limit=120)
        assert seed % 4 > 1 or most_at_once(cluster) == 1, "two pods of one place"
        for operator in operators:
            code, said = operator.stop()
            assert code == 0 or "another operator leads" in said, said
            assert "Traceback" not in said


def leader(cluster: StandIn, operators: list[Operator]) -> Operator:
    """Who has the Lease; the one there is, where there is none."""
    leases = cluster.objects("leases", "coordination.k8s.io")
    held = {lease["spec"]["holderIdentity"].rpartition("-")[2] for lease in leases}
    return next((one for one in operators if str(one.pid) in held), operators[0])


def trouble(cluster: StandIn, operators: list[Operator], rng: random.Random) -> None:
    for ended in [one for one in operators if not one.pid]:  # its Lease was another's
        assert len(operators) > 1, ended.kill()
        ended.start()
    pods = [p for p in cluster.objects("pods") if p["status"]["phase"] == "Running"
            and "deletionTimestamp" not in p["metadata"]]  # fmt: skip
    name = rng.choice(pods)["metadata"]["name"] if pods else ""
    what = rng.randrange(10)
    if what == 0:
        operator = leader(cluster, operators)
        operator.kill()
        operator.start()
    elif what == 1:
        cluster.cut_watches()
    elif what == 2:
        cluster.forget()
    elif name and what < 6:
        cluster.finish(name, rng.choice((137, 143)))
    elif name and what < 8:
        cluster.preempt(name)
    elif name:
        cluster.do(lambda registry: registry.delete(registry.kind("pods"), ("default", name), {}))
    seen = cluster.store.version
    with contextlib.suppress(TimeoutError):
        cluster.until("pods", lambda _: cluster.store.version > seen + 5, limit=0.3)


def most_at_once(cluster: StandIn) -> int:
    """The most pods that lived at one place at any version."""
    most, there = 0, {}
    for change in cluster.store.changes:
        if change.key == ("", "pods"):
            name = change.obj["metadata"]["name"]
            there[name] = change.obj
            if change.type == "DELETED":
                del there[name]
            if change.type == "ADDED":
                most = max(most, *places(list(there.values())).values())
    return most
