"""What a user types, against the stand-in; or against a real cluster, where
ELASTICRUN_TEST_KUBECONFIG names one: so that the stand-in stays true."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kubernetes.cluster import Client, StandIn
from tests.kubernetes.real import AnyCluster, RealCluster

CRD = Path(__file__).with_name("crd.yaml").read_text()
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p", "labels": {"app": "a"}},
    "spec": {"containers": [{"name": "m", "image": "registry.k8s.io/pause:3.9"}]},
}

pytestmark = pytest.mark.slow


def toy(size: object = 2, **spec: object) -> str:
    body = {"color": "red", "size": size, **spec}
    return json.dumps({"apiVersion": "elasticrun.test/v1", "kind": "Toy",
                       "metadata": {"name": "t"}, "spec": body})  # fmt: skip


@pytest.fixture
def kubectl(cluster: AnyCluster) -> Client:
    """An administrator in an empty namespace, of a cluster that knows toys."""
    client = cluster.client()
    client("apply", "-f", "-", given=CRD)
    client("wait", "--for=condition=Established", "crd/toys.elasticrun.test")
    return client


def test_the_life_of_a_custom_resource(kubectl: Client) -> None:
    applied = "toy.elasticrun.test/t "
    assert kubectl("apply", "-f", "-", given=toy()) == applied + "created"
    assert kubectl("apply", "-f", "-", given=toy()) == applied + "unchanged"
    assert kubectl("apply", "-f", "-", given=toy(4, free={"a": [1]})) == applied + "configured"
    assert kubectl("scale", "ty/t", "--replicas=6") == applied + "scaled"
    why = {"type": "A", "status": "True", "reason": "Because"}
    conditions = [why, {"type": "B", "status": "False"}]
    status = {"spec": {"size": 9}, "status": {"there": 3, "conditions": conditions}}
    words = ("patch", "ty", "t", "--type=merge", "-p", json.dumps(status))
    kubectl(*words[:3], "--subresource=status", *words[3:])
    heads, row = kubectl("get", "ty").splitlines()
    assert heads.split() == ["NAME", "SIZE", "WHY", "AGE"]
    assert row.split()[:3] == ["t", "6", "Because"]
    found = json.loads(kubectl("get", "toys.elasticrun.test/t", "-o", "json"))
    assert found["spec"] == {"color": "red", "size": 6, "unit": 1, "free": {"a": [1]}}
    assert found["status"]["there"] == 3
    assert found["metadata"]["generation"] == 3
    assert (
        kubectl("get", "ty", "t", "--subresource=scale", "-o", "jsonpath={.status.replicas}") == "3"
    )
    assert "Because" in kubectl("describe", "ty", "t")
    kubectl("delete", "ty", "t")
    assert "NotFound" in kubectl.refused("get", "ty", "t")


REFUSED = [
    (toy(0), "spec.size: Invalid value: 0: spec.size in body should be greater than or equal"),
    (toy("x"), "spec.size in body must be of type integer"),
    (toy(3, unit=2), "size must be a multiple of unit"),
    (toy(2, least=3), "least must not exceed size"),
    (toy(2, sise=3), 'unknown field "spec.sise"'),
    (toy(2, color="green"), 'Unsupported value: "green": supported values: "red", "blue"'),
    (toy().replace('"color": "red", ', ""), "spec.color: Required value"),
    (toy().replace('"t"', '"T_"'), "metadata.name: Invalid value"),
    (json.dumps({**POD, "spec": {}}), "spec.containers: Required value"),
    (json.dumps(POD).replace('"image"', '"imagee"'), 'unknown field "spec.containers[0].imagee"'),
    (json.dumps(POD).replace('"m"', '"M"'), "spec.containers[0].name: Invalid value"),
    (json.dumps({**POD, "metadata": {"name": "p", "namespace": "elsewhere"}}), "namespace"),
]


def test_what_is_refused(kubectl: Client) -> None:
    for given, said in REFUSED:
        assert said in kubectl.refused("create", "--dry-run=server", "-f", "-", given=given)


def test_writes_that_meet(kubectl: Client) -> None:
    kubectl("create", "-f", "-", given=toy())
    assert "already exists" in kubectl.refused("create", "-f", "-", given=toy())
    old = kubectl("get", "ty", "t", "-o", "json")
    assert "color stays" in kubectl.refused("apply", "-f", "-", given=toy(color="blue"))
    kubectl("label", "ty", "t", "a=b")
    assert "the object has been modified" in kubectl.refused("replace", "-f", "-", given=old)
    was = json.loads(kubectl("get", "ty", "t", "-o", "json"))["metadata"]["resourceVersion"]
    kubectl("label", "ty", "t", "a=b")  # as it is
    assert json.loads(kubectl("get", "ty", "t", "-o", "json"))["metadata"]["resourceVersion"] == was
    kubectl("patch", "ty", "t", "--type=json", "-p", '[{"op": "remove", "path": "/spec/unit"}]')
    assert kubectl("get", "ty", "-l", "a in (b, c),!d", "-o", "name") == "toy.elasticrun.test/t"
    assert kubectl("get", "ty", "-l", "a notin (b)", "-o", "name") == ""
    assert kubectl("get", "ty", "--field-selector=metadata.name=t", "-o", "name")
    assert "not supported" in kubectl.refused("get", "ty", "--field-selector=spec.size=2")


def test_what_is_owned_goes_with_its_owner(kubectl: Client) -> None:
    kubectl("create", "-f", "-", given=toy())
    uid = kubectl("get", "ty", "t", "-o", "jsonpath={.metadata.uid}")
    for cascade, left in (("background", 0), ("orphan", 1)):
        owner = {"apiVersion": "elasticrun.test/v1", "kind": "Toy", "name": "t", "uid": uid}
        child = {"apiVersion": "v1", "kind": "ConfigMap",
                 "metadata": {"name": "c", "ownerReferences": [owner]}}  # fmt: skip
        kubectl("create", "-f", "-", given=json.dumps(child))
        kubectl("delete", "ty", "t", f"--cascade={cascade}")
        if left:
            kubectl("get", "cm", "c")
        else:
            kubectl("wait", "--for=delete", "cm/c")
            kubectl("create", "-f", "-", given=toy())
            uid = kubectl("get", "ty", "t", "-o", "jsonpath={.metadata.uid}")


def test_a_watch_sees_what_comes(kubectl: Client) -> None:
    words = kubectl.command("get", "ty", "--watch", "--output-watch-events", "-o",
                            "jsonpath={.type} {.object.spec.size}{\"\\n\"}")  # fmt: skip
    kubectl("create", "-f", "-", given=toy())
    with subprocess.Popen(
        words, env=kubectl.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("ADDED")  # it watches from here on
        kubectl("scale", "ty/t", "--replicas=4")
        kubectl("delete", "ty", "t")
        seen = [watch.stdout.readline().strip() for _ in range(2)]
        watch.terminate()
    assert seen == ["MODIFIED 4", "DELETED 4"]


def test_a_cluster_known_by_its_kubeconfig_alone(standin: StandIn, tmp_path: Path) -> None:
    """As tests see one that is real."""
    cluster = RealCluster(standin.client().kubeconfig, tmp_path)
    kubectl = cluster.client()
    assert cluster.until("pods", lambda pods: not pods) == []
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(cluster.until, "pods", lambda pods: len(pods) == 1)
        kubectl("create", "-f", "-", given=json.dumps(POD))
        assert [one["metadata"]["name"] for one in seen.result()] == ["p"]
    kubectl("create", "serviceaccount", "op")
    account = cluster.client(f"{cluster.namespace}:op")
    assert f"serviceaccount:{cluster.namespace}:op" in account.refused("get", "pods")
    cluster.close()
    kubectl("wait", "--for=delete", f"namespace/{cluster.namespace}")


def test_roles_are_kept(standin: StandIn) -> None:
    admin, bob = standin.client(), standin.client("bob")
    account = standin.client("default:op")
    assert 'User "bob" cannot list resource "pods" in API group "" in the namespace' in bob.refused(
        "get", "pods"
    )
    rules = [{"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": "reader"}, "rules": rules}  # fmt: skip
    admin("apply", "-f", "-", given=json.dumps(role))
    words = ("create", "rolebinding", "r", "--role=reader", "-o", "yaml", "--dry-run=client")
    binding = admin(*words, "--user=bob", "--serviceaccount=default:op")
    admin("apply", "-f", "-", given=binding)
    for one in (bob, account):
        assert one("get", "pods") == ""
        assert one("auth", "can-i", "get", "pods", "--subresource=log") == "yes"
        assert one.run("auth", "can-i", "create", "pods").stdout.strip() == "no"
        assert one.run("auth", "can-i", "list", "pods", "-n", "kube-system").stdout.strip() == "no"
        assert "forbidden" in one.refused("delete", "pod", "p")
    assert standin.used("system:serviceaccount:default:op") == {
        ("list", "", "pods"),
        ("delete", "", "pods"),
    }
