"""The operator as a process, with the rights we ship, against the stand-in for an API server or the
cluster that ELASTICRUN_TEST_KUBECONFIG names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.jobs.operator import cluster as api, controller
from elasticrun.jobs.operator.deployment import NEEDED
from tests.further import further
from tests.harness import LIMIT
from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.real import AnyCluster

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("elasticrun"))
NAME = "elasticrun-operator"
ACCOUNT = f"default:{NAME}"
USER = f"system:serviceaccount:{ACCOUNT}"
"""Of the operator in the stand-in."""

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
        self, cluster: AnyCluster, *flags: str, home: str = "", namespace: str | None = None
    ) -> None:
        """`home`: where its account is; `namespace`: whose jobs it sees to. Both the test's."""
        home = home or cluster.namespace
        namespace = cluster.namespace if namespace is None else namespace
        self._command = [COMMAND, "operator", f"--namespace={namespace}", *flags]
        self._env = cluster.client(f"{home}:{NAME}", home).environment
        self._life: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self._life = subprocess.Popen(
            self._command, env=self._env, stderr=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        """0 where it has ended."""
        return self._life.pid if self._life is not None and self._life.poll() is None else 0

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
    cluster: AnyCluster,
    *flags: str,
    deploy: bool = False,
    namespace: str | None = None,
    image: str = "r/elasticrun:1",
) -> Client:
    """As a user does it, who then types on. Without `deploy` the operator runs outside."""
    namespace = cluster.namespace if namespace is None else namespace
    words = [f"--namespace={namespace}", f"--image={image}", *flags]
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
    there("wait", "--for=condition=Established", "crd/elasticjobs.elasticrun.dev")
    return cluster.client()


def account(cluster: AnyCluster) -> Client:
    """The operator's."""
    return cluster.client(f"{cluster.namespace}:{NAME}")


@pytest.fixture
def kubectl(cluster: AnyCluster) -> Iterator[Client]:
    """Of a user of a cluster with an operator."""
    user = install(cluster)
    operator = Operator(cluster)
    yield user
    code, said = operator.stop()
    assert code == 0, said


def used_as_allowed(cluster: AnyCluster) -> set[tuple[str, str, str]]:
    """The operator asks for nothing that its Role does not give; of that, what it has not used."""
    allowed = {
        (verb, group, what)
        for role in cluster.objects("roles", "rbac.authorization.k8s.io")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    used = cluster.used(f"system:serviceaccount:{cluster.namespace}:{NAME}")
    assert used <= allowed
    return allowed - used if used else set()


@contextlib.asynccontextmanager
async def talking(namespace: str) -> AsyncIterator[api.Cluster]:
    """The operator's talk with the API server, by what KUBECONFIG names."""
    server = api.Cluster(namespace)
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def controlling(server: api.Cluster) -> AsyncIterator[None]:
    """An operator in this process."""
    work = asyncio.create_task(controller.Controller(server).run())
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def names(cluster: AnyCluster) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in cluster.objects("pods"))


def test_ten_lines_are_enough_and_the_rights_too(kubectl: Client, cluster: AnyCluster) -> None:
    empty = "image: i, env: null, volumeMounts: null"  # as programs that print YAML leave it
    kubectl("apply", "-f", "-", given=TEN_LINES.replace("image: i", empty))
    cluster.until("pods", lambda pods: len(pods) == 3)
    assert names(cluster) == ["tr-0-0", "tr-1-0", "tr-master-0"]
    for pod in cluster.objects("pods"):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert "finalizers" not in pod["metadata"]
    (job,) = cluster.until(
        "elasticjobs", lambda jobs: jobs[0].get("status"), group="elasticrun.dev"
    )
    assert job["status"]["phase"] == "Pending"
    assert "0/2" in kubectl("get", "ej")
    kubectl("scale", "ej/tr", "--replicas=3")
    cluster.until("pods", lambda pods: len(pods) == 4)
    kubectl("delete", "pod", "tr-1-0")
    made = "created pod tr-1-"  # the second as the first, or as the next where that is there still
    cluster.until("events", lambda events: sum(s.startswith(made) for s in said(events)) == 2)
    kubectl("delete", "pod", "tr-master-0")
    kubectl("scale", "ej/tr", "--replicas=2")
    back = ["tr-0-0", "tr-1-", "tr-master-0"]  # the operator has deleted a pod

    def is_back(pods: list[Any]) -> bool:
        found = sorted(pod["metadata"]["name"] for pod in pods)
        return len(found) == 3 and all(map(str.startswith, found, back))

    cluster.until("pods", is_back)
    short = {"spec": {"runPolicy": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0}}}
    kubectl("patch", "ej/tr", "--type=merge", "-p", json.dumps(short))
    cluster.until("pods", lambda pods: not pods)
    cluster.until("secrets", lambda secrets: len(secrets) == 1)
    assert kubectl("get", "ej") == ""
    unused = {(verb, what) for verb, _, what in used_as_allowed(cluster)}
    gangs = {("create", "podgroups"), ("get", "podgroups")}
    assert unused <= {*gangs, ("get", "pods")}, "the last where a pod is there already"


def test_without_an_image_it_says_what_to_type() -> None:
    words = [COMMAND, "render", "operator"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "fails for as long as PyPI does not have it" in made.stderr
    assert "elasticrun render operator --image registry.example/train:1.0" in made.stderr
    deployment = made.stdout.rpartition("---\n")[2]
    assert "ranks" not in deployment, "there are none"
    project = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert all(f"'{one}'" in deployment and f'"{one}"' in project for one in NEEDED)


@further("test_ten_lines_are_enough_and_the_rights_too")
def test_one_operator_for_all_namespaces(standin: StandIn) -> None:
    """Its own things are in a namespace of its own, and its rights are enough. (In a cluster of
    others it would see to their jobs.)"""
    kubectl = install(standin, namespace="")
    kubectl("create", "namespace", "team")
    operator = Operator(standin, home="elasticrun", namespace="")
    for namespace in ("default", "team"):
        standin.client(namespace=namespace)("apply", "-f", "-", given=TEN_LINES)
    standin.until("pods", lambda pods: len(pods) == 6)
    found = {pod["metadata"]["namespace"] for pod in standin.objects("pods")}
    assert found == {"default", "team"}
    assert operator.stop()[0] == 0


def test_what_was_made_anew_is_left_alone(
    cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions and statuses are for the object that was looked at, not for its name."""
    kubectl = install(cluster)
    kubectl("apply", "-f", "-", given=TEN_LINES)
    monkeypatch.setenv("KUBECONFIG", str(account(cluster).kubeconfig))

    async def late() -> None:
        key = (cluster.namespace, "tr")
        async with talking(cluster.namespace) as server:
            (job,) = await server.jobs()
            kubectl("label", "ej/tr", "a=b")
            version = job["metadata"]["resourceVersion"]
            assert not await server.set_status(key, version, {"phase": "Running"})
            assert not await server.remove(api.JOBS, key, "of another")
            found = await server.get(api.JOBS, key)
            assert found is not None
            assert "status" not in found
            uid = found["metadata"]["uid"]
            assert [await server.remove(api.JOBS, key, uid) for _ in range(2)] == [True, False]

    asyncio.run(late())


def test_a_watch_whose_line_is_dead_is_begun_again(
    cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None says a word within SILENCE, so all are taken for dead."""
    install(cluster)
    monkeypatch.setenv("KUBECONFIG", str(account(cluster).kubeconfig))
    monkeypatch.setattr(controller, "WATCH_SILENCE", 0.2)
    begun: Counter[Any] = Counter()

    async def again() -> None:
        enough = asyncio.Event()
        async with talking(cluster.namespace) as server:
            watch = server.watch

            def counted(kind: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
                begun[kind] += 1
                if min(begun[api.PODS], begun[api.JOBS]) == 3:
                    enough.set()
                return watch(kind)

            monkeypatch.setattr(server, "watch", counted)
            async with controlling(server), asyncio.timeout(LIMIT):
                await enough.wait()

    asyncio.run(again())


def said(events: list[dict[str, str]]) -> list[str]:
    return [event["message"] for event in events]


def test_a_lease_that_is_renewed_is_left_to_its_holder(
    cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one, too, who has slept for longer than it lasts."""
    install(cluster, "--replicas=2")
    monkeypatch.setenv("KUBECONFIG", str(account(cluster).kubeconfig))

    async def held() -> list[bool]:
        words, found = [""], []
        async with talking(cluster.namespace) as server:
            for who, expired in (("a", 0), ("b", 0), ("a", 0), ("b", 1), ("b", 3), ("a", 4)):
                ours, word = await controller.take_lease(server, who, words[expired])
                found.append(ours)
                words.append(word)
        return found

    assert asyncio.run(held()) == [True, False, True, False, True, False]


@further(why="a Lease runs out after 15 s")
def test_of_two_operators_one_leads(cluster: AnyCluster) -> None:
    kubectl = install(cluster, "--replicas=2")
    first = Operator(cluster, "--lease")
    cluster.until("leases", lambda leases: bool(leases), group="coordination.k8s.io")
    second = Operator(cluster, "--lease")
    kubectl("apply", "-f", "-", given=TEN_LINES)
    cluster.until("pods", lambda pods: len(pods) == 3)
    first.kill()
    kubectl("delete", "pod", "tr-1-0")
    cluster.until("pods", lambda pods: len(pods) == 3)
    assert second.stop()[0] == 0


REFUSED = [
    ("nodes: 2", "nodess: 2", 'unknown field "spec.nodess"'),
    ("minNodes: 1", "minNodes: 3", "minNodes is larger than nodes"),
    ("minNodes: 1", "nodeUnit: 3", "nodes is not a multiple of nodeUnit"),
    ("minNodes: 1", "gang: {scheduler: kueue}", "gang.scheduler kueue needs gang.queue"),
    ("minNodes: 1", "gang: {scheduler: native, queue: q}", "gang.queue is only for volcano"),
    ("name: tr", f"name: {'a' * 51}", "has 50 characters at most"),
    ("name: tr", "name: 1tr", "with a letter first"),
]


def test_what_is_wrong_is_refused(cluster: AnyCluster) -> None:
    kubectl = install(cluster)
    for right, wrong, why in REFUSED:
        assert why in kubectl.refused("apply", "-f", "-", given=TEN_LINES.replace(right, wrong))


def test_what_a_server_refuses_of_the_template_is_a_condition(
    kubectl: Client, cluster: AnyCluster
) -> None:
    kubectl("apply", "-f", "-", given=TEN_LINES.replace("image: i", "image: i, comand: [x]"))

    def refused(jobs: list[dict[str, dict[str, list[dict[str, str]]]]]) -> bool:
        return any(
            one["reason"] == "Refused" and "comand" in one["message"]
            for job in jobs
            for one in job.get("status", {}).get("conditions", ())
        )

    cluster.until("elasticjobs", refused, group="elasticrun.dev")
    assert names(cluster) == ["tr-master-0"]
    gang = TEN_LINES.replace("name: tr", "name: ga").replace(
        "minNodes: 1", "gang: {scheduler: volcano}"
    )
    kubectl("apply", "-f", "-", given=gang)
    cluster.until(
        "elasticjobs",
        lambda jobs: "PodGroup ga: the server could not find" in json.dumps(jobs),
        group="elasticrun.dev",
    )
