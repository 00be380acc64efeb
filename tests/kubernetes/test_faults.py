"""What the stand-in lets go wrong, seen by a client library."""

from __future__ import annotations

import httpx2
import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from tests.kubernetes.cluster import StandIn

pytestmark = pytest.mark.slow


@pytest.fixture
def client(standin: StandIn) -> Client:
    path = standin.client().kubeconfig
    return Client(KubeConfig.from_dict(yaml.safe_load(path.read_text())).get(), namespace="default")


def make(client: Client, *names: str) -> None:
    for name in names:
        client.create(ConfigMap(metadata=ObjectMeta(name=name)))


def code(failed: pytest.ExceptionInfo[ApiError]) -> int | None:
    return failed.value.status.code


def names(client: Client) -> list[str]:
    return [one.metadata.name for one in client.list(ConfigMap)]


def test_answers_that_are_none(standin: StandIn, client: Client) -> None:
    make(client, "a")
    standin.faults.errors = 1.0
    with pytest.raises(ApiError) as failed:
        names(client)
    assert code(failed) == 500
    done = []
    for i in range(8):
        with pytest.raises(ApiError):
            make(client, f"b{i}")
        done = [one["metadata"]["name"] for one in standin.objects("configmaps")]
    assert 1 < len(done) < 9, "some of those that failed were done"
    standin.faults.errors, standin.faults.too_many = 0.0, 1.0
    with pytest.raises(ApiError) as failed:
        names(client)
    assert code(failed) == 429
    assert failed.value.response.headers["Retry-After"] == "1"
    standin.faults.users = ("somebody else",)
    assert names(client) == done


def test_lists_that_are_old(standin: StandIn, client: Client) -> None:
    make(client, "a", "b", "c")
    client.delete(ConfigMap, "a")
    standin.faults.stale = 4
    seen = {tuple(names(client)) for _ in range(50)}
    assert seen == {(), ("a",), ("a", "b"), ("a", "b", "c"), ("b", "c")}


def test_watches_that_end(standin: StandIn, client: Client) -> None:
    make(client, "a", "b")
    version = standin.store.version - 1
    for change, one in client.watch(ConfigMap, resource_version=str(version)):
        assert (change, one.metadata.name) == ("ADDED", "b")
        break
    watch = client.watch(ConfigMap, resource_version=str(version), server_timeout=60)
    next(watch)
    assert standin.cut_watches() >= 1
    with pytest.raises(httpx2.TransportError):
        next(watch)
    standin.forget()
    with pytest.raises(ApiError) as failed:
        next(client.watch(ConfigMap, resource_version=str(version)))
    assert code(failed) == 410
    standin.faults.cut_after = 1
    cut = client.watch(ConfigMap, resource_version=str(standin.store.version))
    make(client, "d", "e")
    assert next(cut)[1].metadata.name == "d"
    with pytest.raises(httpx2.TransportError):
        next(cut)
