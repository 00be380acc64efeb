"""The operator as a process, against the stand-in for an API server, with the rights we ship."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
