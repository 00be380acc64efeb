"""The operator as a process, against the stand-in for an API server, with the rights we ship."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.operator import cluster as api, controller
from tests.harness import LIMIT
from tests.kubernetes.cluster import Client, StandIn

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("elasticrun"))
ACCOUNT = "default:elasticrun-operator"
USER = f"system:serviceaccount:{ACCOUNT}"

TEN_LINES = """\
apiVersion: elasticrun.dev/v1alpha1
kind: ElasticJob
metadata: {name: tr}
spec:
  nodes: 2
  minNodes: 1
  template:
    spec:
      containers:
      - {name: train, image: i, command: [elasticrun, train.py]}
"""


class Operator:
    """`elasticrun operator` as the account that `elasticrun render operator` made."""

    def __init__(
        self, cluster: StandIn, *flags: str, account: str = ACCOUNT, namespace: str = "default"
    ) -> None:
        self._command = [COMMAND, "operator", f"--namespace={namespace}", *flags]
        self._env = cluster.client(account, account.partition(":")[0]).environment
        self._life: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self._life = subprocess.Popen(
            self._command, env=self._env, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> str:
        """SIGKILL; what it has said."""
        assert self._life is not None
        self._life.kill()
        return self._life.communicate()[1]

    def stop(self) -> tuple[int, str]:
        """SIGTERM; its exit code, and what it has said."""
        assert self._life is not None
        self._life.terminate()
        try:
            said = self._life.communicate(timeout=LIMIT)[1]
        except subprocess.TimeoutExpired:
            said = f"it did not end on SIGTERM: {self.kill()}"
        return self._life.returncode, said


def install(
    cluster: StandIn, *flags: str, deploy: bool = False, namespace: str = "default"
) -> Client:
    """As a user does it, who then types on. Without `deploy` the operator runs outside."""
    words = [f"--namespace={namespace}", "--image=r/elasticrun:1", *flags]
    made = subprocess.run(
        [COMMAND, "render", "operator", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    documents = made.stdout.split("---\n")
    wanted = [one for one in documents if deploy or "\nkind: Deployment\n" not in one]
    there = cluster.client(namespace=namespace or "elasticrun")
    there("apply", "-f", "-", given="---\n".join(wanted))
    return cluster.client()


@pytest.fixture
def kubectl(standin: StandIn) -> Iterator[Client]:
    """Of a user of a cluster with an operator."""
    user = install(standin)
    operator = Operator(standin)
    yield user
    code, said = operator.stop()
    assert code == 0, said


def names(standin: StandIn) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in standin.objects("pods"))


def test_ten_lines_are_enough_and_the_rights_too(kubectl: Client, standin: StandIn) -> None:
    kubectl("apply", "-f", "-", given=TEN_LINES)
    standin.until("pods", lambda pods: len(pods) == 3)
    assert names(standin) == ["tr-0-0", "tr-1-0", "tr-master-0"]
    for pod in standin.objects("pods"):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert "finalizers" not in pod["metadata"]
    (job,) = standin.until(
        "elasticjobs", lambda jobs: jobs[0].get("status"), group="elasticrun.dev"
    )
    assert job["status"]["phase"] == "Pending"
    assert "0/2" in kubectl("get", "ej")
    kubectl("scale", "ej/tr", "--replicas=3")
    standin.until("pods", lambda pods: len(pods) == 4)
    kubectl("delete", "pod", "tr-1-0")
    standin.until("events", lambda events: said(events).count("created pod tr-1-0") == 2)
    kubectl("delete", "ej", "tr")
    standin.until("pods", lambda pods: not pods)
    standin.until("secrets", lambda secrets: len(secrets) == 1)
    allowed = {
        (verb, group, what)
        for role in standin.objects("roles", "rbac.authorization.k8s.io")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert standin.used(USER) <= allowed


def test_without_an_image_it_says_what_to_type() -> None:
    words = [COMMAND, "render", "operator"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "fails for as long as PyPI does not have it" in made.stderr
    assert "elasticrun render operator --image registry.example/train:1.0" in made.stderr
    assert "ranks" not in made.stdout.rpartition("---\n")[2], "there are none in the Deployment"


def test_one_operator_for_all_namespaces(standin: StandIn) -> None:
    """Its own things are in a namespace of its own, and its rights are enough."""
    kubectl = install(standin, namespace="")
    kubectl("create", "namespace", "team")
    operator = Operator(standin, account="elasticrun:elasticrun-operator", namespace="")
    for namespace in ("default", "team"):
        standin.client(namespace=namespace)("apply", "-f", "-", given=TEN_LINES)
    standin.until("pods", lambda pods: len(pods) == 6)
    found = {pod["metadata"]["namespace"] for pod in standin.objects("pods")}
    assert found == {"default", "team"}
    assert operator.stop()[0] == 0


def test_what_was_made_anew_is_left_alone(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions and statuses are for the object that was looked at, not for its name."""
    kubectl = install(standin)
    kubectl("apply", "-f", "-", given=TEN_LINES)
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))

    async def late() -> None:
        cluster, key = api.Cluster("default"), ("default", "tr")
        (job,) = await cluster.jobs()
        kubectl("label", "ej/tr", "a=b")
        version = job["metadata"]["resourceVersion"]
        assert not await cluster.set_status(key, version, {"phase": "Running"})
        assert not await cluster.remove(api.JOBS, key, "of another")
        found = await cluster.get(api.JOBS, key)
        assert found is not None
        assert "status" not in found
        uid = found["metadata"]["uid"]
        assert [await cluster.remove(api.JOBS, key, uid) for _ in range(2)] == [True, False]
        await cluster.close()

    asyncio.run(late())


def test_a_watch_whose_line_is_dead_is_begun_again(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the stand-in says a word within SILENCE, so all are taken for dead."""
    monkeypatch.setenv("KUBECONFIG", str(install(standin).kubeconfig))
    monkeypatch.setattr(controller, "SILENCE", 0.2)
    begun: Counter[Any] = Counter()

    async def again() -> None:
        cluster, enough = api.Cluster("default"), asyncio.Event()
        watch = cluster.watch

        def counted(kind: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
            begun[kind] += 1
            if min(begun[api.PODS], begun[api.JOBS]) == 3:
                enough.set()
            return watch(kind)

        monkeypatch.setattr(cluster, "watch", counted)
        work = asyncio.create_task(controller.Controller(cluster).run())
        async with asyncio.timeout(LIMIT):
            await enough.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await cluster.close()

    asyncio.run(again())


def said(events: list[dict[str, str]]) -> list[str]:
    return [event["message"] for event in events]


REFUSED = [
    ("nodes: 2", "nodess: 2", 'unknown field "spec.nodess"'),
    ("minNodes: 1", "minNodes: 3", "minNodes is larger than nodes"),
    ("minNodes: 1", "nodeUnit: 3", "nodes is no multiple of nodeUnit"),
    ("minNodes: 1", "gang: {scheduler: kueue}", "gang.scheduler kueue needs gang.queue"),
    ("minNodes: 1", "gang: {scheduler: native, queue: q}", "gang.queue belongs to volcano"),
    ("name: tr", f"name: {'a' * 51}", "has 50 characters at most"),
    ("name: tr", "name: 1tr", "with a letter first"),
]


@pytest.mark.parametrize(("right", "wrong", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_what_is_wrong_is_refused(standin: StandIn, right: str, wrong: str, why: str) -> None:
    kubectl = install(standin)
    assert why in kubectl.refused("apply", "-f", "-", given=TEN_LINES.replace(right, wrong))


def test_what_a_server_refuses_of_the_template_is_a_condition(
    kubectl: Client, standin: StandIn
) -> None:
    kubectl("apply", "-f", "-", given=TEN_LINES.replace("image: i", "image: i, comand: [x]"))

    def refused(jobs: list[dict[str, dict[str, list[dict[str, str]]]]]) -> bool:
        return any(
            one["reason"] == "Refused" and "comand" in one["message"]
            for job in jobs
            for one in job.get("status", {}).get("conditions", ())
        )

    standin.until("elasticjobs", refused, group="elasticrun.dev")
    assert names(standin) == ["tr-master-0"]
    gang = TEN_LINES.replace("name: tr", "name: ga").replace(
        "minNodes: 1", "gang: {scheduler: volcano}"
    )
    kubectl("apply", "-f", "-", given=gang)
    standin.until(
        "elasticjobs",
        lambda jobs: "PodGroup ga: the server could not find" in json.dumps(jobs),
        group="elasticrun.dev",
    )
