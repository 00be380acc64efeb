"""The operator's API client, on lightkube (decision 035); objects are plain dicts.

Reads use no resource version, so the server answers from its store and not from a cache that lags.
Pods are created with strict validation: a misspelt field in a template is rejected.
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
    """lightkube's class for a kind whose plural ends in s. Cached, because lightkube rejects a
    second class for a kind of the core group."""
    group, _, version = api_version.rpartition("/")
    return create_namespaced_resource(group, version, kind, f"{kind.lower()}s")


JOBS: Final = kind_of(API_VERSION, KIND)
PODS: Final = kind_of("v1", "Pod")
SECRETS: Final = kind_of("v1", "Secret")
EVENTS: Final = kind_of("v1", "Event")
LEASES: Final = kind_of("coordination.k8s.io/v1", "Lease")

CALL_LIMIT: Final = 10.0
"""Timeout of a call in seconds."""

WATCH_LIMIT: Final = 300
"""Seconds after which the server ends a watch; the client then resumes it from the last version."""

NOT_FOUND: Final = 404
CONFLICT: Final = 409
"""An object of that name already exists, or the precondition no longer holds."""

REFUSED: Final = (400, 403, NOT_FOUND, 422)
"""Statuses with which the server rejects an object: invalid fields, quotas, missing rights,
webhooks. Other errors concern the connection or the server itself."""

Key = tuple[str, str]
"""Namespace and name."""


class NotCreated(Exception):
    """The server rejects the object, or its name belongs to another job; the message is a
    sentence."""


def code_of(error: ApiError) -> int:
    """The HTTP status of an error."""
    return int(error.status.code or error.response.status_code)


class Cluster:
    """One API server. Calls raise ApiError, or httpx2.HTTPError if the server does not answer."""

    def __init__(self, namespace: str = "") -> None:
        """`namespace`: the namespace whose jobs are managed, "" for all. Raises ConfigError if
        neither a service account nor a kubeconfig names the server."""
        config = KubeConfig.from_env().get()
        if config is None:
            raise ConfigError("the kubeconfig has no current context")
        params = ConnectionParams(timeout=httpx2.Timeout(CALL_LIMIT), trust_env=True)
        self._client: Any = GenericAsyncClient(params, config, field_manager=OPERATOR)
        self.namespace = namespace or ALL_NS
        self.own = config.namespace
        """The operator's own namespace."""

    async def close(self) -> None:
        await self._client.close()

    async def _request(self, request: BasicRequest, *accepted: int) -> Json | None:
        """The body of the answer; None if its status is in `accepted`. Raises ApiError for other
        errors."""
        answer = await self._client.send(self._client.build_adapter_request(request))
        if answer.status_code in accepted:
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
        """The cluster's version, such as (1, 37)."""
        found = await self._request(BasicRequest(method="GET", url="version")) or {}
        return int(found["major"]), int(found["minor"].rstrip("+"))

    async def jobs(self) -> list[Json]:
        request = self._client.prepare_request("list", JOBS, namespace=self.namespace)
        return [job async for job in self._client.list(request)]

    async def watch(self, kind: Any) -> AsyncIterator[tuple[str, Json]]:
        """Changes of objects of `kind`, beginning with all existing ones. Servers send a BOOKMARK
        once a minute if nothing changes. On a dead connection this waits forever."""
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
        """An object, or None if it does not exist."""
        return await self._request(self._about("get", kind, key), NOT_FOUND)

    async def pods(self, key: Key, uid: str) -> list[Json]:
        """The pods of a job, excluding those of another job with the same name."""
        request = self._client.prepare_request(
            "list", PODS, namespace=key[0], params={"labelSelector": f"{JOB}={key[1]}"}
        )
        return [pod async for pod in self._client.list(request) if _owner(pod) == uid]

    async def create(self, body: Json) -> bool:
        """Create an object of a job; False if it already exists. Raises NotCreated if the server
        rejects it, or if the existing object belongs to another job: if that is an earlier job of
        the same name, the object soon disappears. The owner of a Secret is not checked."""
        kind, meta = kind_of(body["apiVersion"], body["kind"]), body["metadata"]
        what, where = f"{body['kind']} {meta['name']}", meta["namespace"]
        request = self._client.prepare_request(
            "post", obj=kind(body), namespace=where, params={"fieldValidation": "Strict"}
        )
        try:
            if await self._request(request, CONFLICT) is not None:
                return True
        except ApiError as error:
            if code_of(error) in REFUSED:
                raise NotCreated(f"{what}: {error}") from None
            raise
        there = None if kind is SECRETS else await self.get(kind, (where, meta["name"]))
        if there is not None and _owner(there) != _owner(body):
            raise NotCreated(f"a {what} of this name belongs to something else: delete it")
        return False

    async def remove(self, kind: Any, key: Key, uid: str) -> bool:
        """Delete an object, with its grace period; False if it no longer exists, or if its name now
        belongs to another object."""
        request = self._about("delete", kind, key)
        request.data = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        return await self._request(request, NOT_FOUND, CONFLICT) is not None

    async def set_status(self, key: Key, version: str, status: Json) -> bool:
        """Write a job's status; False if the job is gone or has changed since it was read at
        `version`."""
        request = self._about(
            "patch", JOBS.Status, key,
            obj={"metadata": {"resourceVersion": version}, "status": status},
            headers={"Content-Type": PatchType.MERGE.value},
        )  # fmt: skip
        return await self._request(request, NOT_FOUND, CONFLICT) is not None

    async def create_event(self, event: Json) -> None:
        """Create an Event."""
        namespace = event["metadata"]["namespace"]
        await self._request(
            self._client.prepare_request("post", obj=EVENTS(event), namespace=namespace)
        )

    async def put_lease(self, body: Json, *, new: bool) -> bool:
        """Create or replace a Lease; False if another replica was faster."""
        verb = "post" if new else "put"
        request = self._about(verb, LEASES, (self.own, OPERATOR), obj=LEASES(body))
        return await self._request(request, CONFLICT) is not None

    async def key(self) -> bytes:
        """The key from which tokens are derived; created once, in a Secret of the operator."""
        where = (self.own, OPERATOR)
        for _ in range(2):  # the other replica may create it first
            if found := await self.get(SECRETS, where):
                return base64.b64decode(found["data"]["key"])
            made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": OPERATOR}}
            made["stringData"] = {"key": secrets.token_hex(32)}
            await self._request(self._about("post", SECRETS, where, obj=SECRETS(made)), CONFLICT)
        raise ConfigError(f"the Secret {OPERATOR} in {self.own} can neither be read nor created")


def _owner(body: Json) -> str:
    """The uid of the object's owner; "" if it has none."""
    owners = body["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid", ""))
