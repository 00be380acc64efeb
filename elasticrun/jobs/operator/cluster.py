"""The talk with the API server, by lightkube's client (decision 035): plain objects, a kind each.

Reads are lists and gets without a version, which a server answers from its store and not from a
cache that lags. Pods are made with strict validation: a misspelt field of a template is refused.
"""

from __future__ import annotations

import base64
import functools
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.core.generic_client import ALL_NS, BasicRequest, GenericAsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from elasticrun.jobs.operator.crd import API_VERSION, KIND, OPERATOR, Json
from elasticrun.jobs.operator.objects import JOB


@functools.cache
def kind_of(api_version: str, kind: str) -> Any:
    """lightkube's class for a kind whose plural is made by an s."""
    group, _, version = api_version.rpartition("/")
    return create_namespaced_resource(group, version, kind, f"{kind.lower()}s")


JOBS: Final = kind_of(API_VERSION, KIND)
PODS: Final = kind_of("v1", "Pod")
SECRETS: Final = kind_of("v1", "Secret")
EVENTS: Final = kind_of("v1", "Event")
LEASES: Final = kind_of("coordination.k8s.io/v1", "Lease")

CALL_LIMIT: Final = 10.0
"""Seconds for a call."""

WATCH_LIMIT: Final = 300
"""Seconds after which the server ends a watch, which then goes on at the version it has come to."""

GONE: Final = 404
CONFLICT: Final = 409
"""An object of that name is there already, or is not any more the one that is meant."""

REFUSED: Final = (400, 403, GONE, 422)
"""What is asked for cannot be, whoever asks again: fields, quotas, rights, webhooks."""

Key = tuple[str, str]
"""Namespace and name."""


class NotMade(Exception):
    """An object cannot be made as it is, or its name is another's; the text is a sentence."""


def code_of(error: ApiError) -> int:
    """The HTTP status of an answer."""
    return int(error.status.code or error.response.status_code)


class Cluster:
    """One API server. Calls raise ApiError, or httpx2.HTTPError where none answers."""

    def __init__(self, namespace: str = "") -> None:
        """`namespace`: the one whose jobs are seen to, "" for all. ConfigError where neither a
        pod's account nor a kubeconfig says where the server is."""
        config = KubeConfig.from_env().get()
        if config is None:
            raise ConfigError("the kubeconfig has no current context")
        params = ConnectionParams(timeout=httpx2.Timeout(CALL_LIMIT), trust_env=True)
        self._client: Any = GenericAsyncClient(params, config, field_manager=OPERATOR)
        self.namespace = namespace or ALL_NS
        self.own = config.namespace
        """The namespace of the operator itself."""

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, request: BasicRequest, *fine: int) -> Json | None:
        """What is answered; None where that is one of these codes."""
        answer = await self._client.send(self._client.build_adapter_request(request))
        if answer.status_code in fine:
            return None
        self._client.raise_for_status(answer)
        found: Json = answer.json()
        return found

    def _about(self, verb: str, kind: Any, key: Key, **how: Any) -> BasicRequest:
        request: BasicRequest = self._client.prepare_request(
            verb, kind, namespace=key[0], name=key[1], **how
        )
        return request

    async def version(self) -> tuple[int, int]:
        """Of the cluster, as (1, 37)."""
        found = await self._ask(BasicRequest(method="GET", url="version")) or {}
        return int(found["major"]), int(found["minor"].rstrip("+"))

    async def jobs(self) -> list[Json]:
        request = self._client.prepare_request("list", JOBS, namespace=self.namespace)
        return [job async for job in self._client.list(request)]

    async def watch(self, kind: Any) -> AsyncIterator[tuple[str, Json]]:
        """What changes among `kind`, beginning with all that there is; a BOOKMARK, which servers
        send once a minute, says that nothing does. On a line that is dead it waits for ever."""
        params = {"resourceVersion": "0", "timeoutSeconds": WATCH_LIMIT}
        params["allowWatchBookmarks"] = "true"
        if kind is PODS:
            params["labelSelector"] = JOB
        request = self._client.prepare_request(
            "list", kind, namespace=self.namespace, watch=True, params=params
        )
        async for change, found in self._client.watch(request):
            yield change, found

    async def get(self, kind: Any, key: Key) -> Json | None:
        """An object; None where there is none."""
        return await self._ask(self._about("get", kind, key), GONE)

    async def pods(self, key: Key, uid: str) -> list[Json]:
        """The pods of a job, and of no other of that name."""
        request = self._client.prepare_request(
            "list", PODS, namespace=key[0], params={"labelSelector": f"{JOB}={key[1]}"}
        )
        return [pod async for pod in self._client.list(request) if _owner(pod) == uid]

    async def make(self, body: Json) -> bool:
        """Make an object of a job; False where it is there already. NotMade where that is another
        job's, which for one that was made anew passes by itself, and where it is refused."""
        kind, meta = kind_of(body["apiVersion"], body["kind"]), body["metadata"]
        what, where = f"{body['kind']} {meta['name']}", meta["namespace"]
        request = self._client.prepare_request(
            "post", obj=kind(body), namespace=where, params={"fieldValidation": "Strict"}
        )
        try:
            if await self._ask(request, CONFLICT) is not None:
                return True
        except ApiError as error:
            if code_of(error) in REFUSED:
                raise NotMade(f"{what}: {error}") from None
            raise
        there = None if kind is SECRETS else await self.get(kind, (where, meta["name"]))
        if there is not None and _owner(there) != _owner(body):
            raise NotMade(f"a {what} is there that is not this job's: delete it")
        return False

    async def remove(self, kind: Any, key: Key, uid: str) -> bool:
        """Delete an object, with its grace; False where it has gone, or is another of its name."""
        request = self._about("delete", kind, key)
        request.data = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        return await self._ask(request, GONE, CONFLICT) is not None

    async def set_status(self, key: Key, version: str, status: Json) -> bool:
        """Write a job's status; False where it is not any more what was read as `version`."""
        request = self._about(
            "patch", JOBS.Status, key,
            obj={"metadata": {"resourceVersion": version}, "status": status},
            headers={"Content-Type": PatchType.MERGE.value},
        )  # fmt: skip
        return await self._ask(request, GONE, CONFLICT) is not None

    async def tell(self, event: Json) -> None:
        """Make an Event."""
        namespace = event["metadata"]["namespace"]
        await self._ask(
            self._client.prepare_request("post", obj=EVENTS(event), namespace=namespace)
        )

    async def put_lease(self, body: Json, *, new: bool) -> bool:
        """Make or replace a Lease; False where somebody else was faster."""
        verb = "post" if new else "put"
        request = self._about(verb, LEASES, (self.own, OPERATOR), obj=LEASES(body))
        return await self._ask(request, CONFLICT) is not None

    async def key(self) -> bytes:
        """What tokens are made from; made once, and kept in a Secret of the operator's own."""
        where = (self.own, OPERATOR)
        for _ in range(2):  # the other replica may be faster in making it
            if found := await self.get(SECRETS, where):
                return base64.b64decode(found["data"]["key"])
            made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": OPERATOR}}
            made["stringData"] = {"key": secrets.token_hex(32)}
            await self._ask(self._about("post", SECRETS, where, obj=SECRETS(made)), CONFLICT)
        raise ConfigError(f"the Secret {OPERATOR} in {self.own} can neither be read nor made")


def _owner(body: Json) -> str:
    """The uid of what it belongs to."""
    owners = body["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid", ""))
