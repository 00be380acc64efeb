"""Queries a cluster's API server with the user's rights, through lightkube (decision 035).

Every error of a call becomes one sentence (RequestFailed, Forbidden).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from elasticrun.jobs.backend import Forbidden, RequestFailed

try:
    import httpx2
    from lightkube import AsyncClient
    from lightkube.core.exceptions import ApiError, ConfigError
    from lightkube.generic_resource import create_global_resource
    from lightkube.types import CascadeType, OnErrorAction, OnErrorResult, PatchType
except ImportError:
    raise RequestFailed(
        "jobs in Kubernetes need the extra k8s: pip install 'elasticrun[k8s]'"
    ) from None

from elasticrun.jobs.kube.kubeconfig import settings
from elasticrun.jobs.operator.cluster import JOBS, code_of, kind_of
from elasticrun.jobs.operator.crd import API_VERSION, Json

ELASTIC_JOBS: Final = JOBS
INDEXED_JOBS: Final[Any] = kind_of("batch/v1", "Job")
NODES: Final[Any] = create_global_resource("", "v1", "Node", "nodes")
NODE_METRICS: Final[Any] = create_global_resource(
    "metrics.k8s.io", "v1beta1", "NodeMetrics", "nodes"
)

EVERYWHERE: Final = "*"
"""Means all namespaces."""

Listed = tuple[list[Json], str]
"""Objects, and the resource version of their list."""

CALL_LIMIT: Final = 15.0
"""Timeout of a call in seconds."""

MAX_BREAKS: Final = 5
"""Consecutive failures after which a watch or a pod's log is abandoned."""

NOT_FOUND: Final = 404

ASK_ADMINISTRATOR: Final = "; ask the cluster's administrator for a Role"

BAD_CREDENTIALS: Final = "the cluster rejects your credentials (401): log in again"


class KubeApi:
    """One API server, as an async context manager. `context`: a context of the kubeconfig, "" for
    the current one; `namespace`: "" for the context's."""

    def __init__(self, context: str = "", namespace: str = "") -> None:
        """Raises RequestFailed if neither a kubeconfig nor a service account names a server."""
        config = settings(context)
        self.context: str = config.context_name
        """The kubeconfig's context; "" in a pod without a kubeconfig."""

        self.server = config.cluster.server
        self.namespace: str = namespace or config.namespace
        self._config = config
        self._client: Any = None

    async def __aenter__(self) -> KubeApi:
        try:
            limit = httpx2.Timeout(CALL_LIMIT)
            self._client = AsyncClient(self._config, timeout=limit, field_manager="elasticrun")
        except FileNotFoundError:  # ssl does not say which file
            raise RequestFailed(
                f"context {self.context} of the kubeconfig refers to a missing certificate or key"
            ) from None
        except (OSError, ValueError, AssertionError, ConfigError, httpx2.InvalidURL) as wrong:
            raise RequestFailed(
                f"context {self.context} of the kubeconfig cannot be used: {wrong}"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def has_elastic_jobs(self) -> bool:
        """Whether the cluster serves the ElasticJob kind."""
        with self._as_sentences("list its kinds"):
            raw = self._client._client._client
            answer = await raw.get(f"/apis/{API_VERSION}")
            if answer.status_code == NOT_FOUND:
                return False
            answer.raise_for_status()
        return True

    async def get(self, kind: Any, name: str, namespace: str) -> Json | None:
        """An object, or None if it does not exist."""
        with self._as_sentences(f"tell of {kind.__name__} {name}"):
            try:
                found: Json = await self._client.get(kind, name, namespace=namespace)
            except ApiError as error:
                if code_of(error) == NOT_FOUND:
                    return None
                raise
            return found

    async def list(self, kind: Any, namespace: str = "", **selectors: Json) -> list[Json]:
        """All objects of a kind; `namespace` is "" for cluster-scoped kinds."""
        return (await self.list_at(kind, namespace, **selectors))[0]

    async def list_at(self, kind: Any, namespace: str = "", **selectors: Json) -> Listed:
        """As `list`, with the resource version of the list, from which `changes` can continue."""
        where = {"namespace": namespace} if namespace else {}
        with self._as_sentences(f"list {kind.__name__}s"):
            listed = self._client.list(kind, **where, **selectors)
            return [one async for one in listed], str(listed.resourceVersion)

    async def changes(
        self, kind: Any, namespace: str, *, after: str = "", **selectors: Json
    ) -> AsyncIterator[tuple[str, Json]]:
        """Changes of objects, each with its type ADDED, MODIFIED or DELETED. Begins with all
        existing objects, unless `after` gives the resource version to continue from."""
        more = {"resource_version": after} if after else {}
        with self._as_sentences(f"watch {kind.__name__}s"):
            async for change in self._client.watch(
                kind, namespace=namespace, on_error=_on_watch_error, **more, **selectors
            ):
                yield change

    async def create(self, body: Json, namespace: str, *, dry_run: bool = False) -> Json:
        """Create an object; the server rejects unknown fields. `dry_run`: validate only."""
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        with self._as_sentences(f"make {body['kind']} {body['metadata']['name']}"):
            made: Json = await self._client._client.request(
                "post",
                obj=kind_of(body["apiVersion"], body["kind"])(body),
                namespace=namespace,
                params=params,
            )
        return made

    async def patch(self, kind: Any, name: str, namespace: str, change: Json) -> Json:
        """Merge a change into an object; `kind` may be a subresource."""
        with self._as_sentences(f"change {kind.__name__} {name}"):
            made: Json = await self._client.patch(
                kind, name, change, namespace=namespace, patch_type=PatchType.MERGE
            )
        return made

    async def delete(self, kind: Any, name: str, namespace: str) -> None:
        """Delete an object; the cluster then deletes what it owns."""
        with self._as_sentences(f"delete {kind.__name__} {name}"):
            await self._client.delete(
                kind, name, namespace=namespace, cascade=CascadeType.BACKGROUND
            )

    async def log(self, pod: str, namespace: str, **options: Any) -> AsyncIterator[str]:
        """Log lines of a pod's container; `options`: arguments of `AsyncClient.log`."""
        with self._as_sentences(f"give the log of pod {pod}"):
            lines = self._client.log(pod, namespace=namespace, newlines=False, **options)
            async for line in lines:
                yield line

    @contextlib.contextmanager
    def _as_sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            raise _refusal(error, what) from None
        except httpx2.HTTPStatusError as error:
            code = error.response.status_code
            if code == 403:
                raise Forbidden(f"you may not {what}{ASK_ADMINISTRATOR}") from None
            why = BAD_CREDENTIALS if code == 401 else f"the cluster does not {what}: HTTP {code}"
            raise RequestFailed(why) from None
        except httpx2.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RequestFailed(f"the API server at {self.server} does not answer: {why}") from None
        except httpx2.InvalidURL as error:
            raise RequestFailed(
                f"the kubeconfig's server {self.server} is not an address: {error}"
            ) from None
        except (ConfigError, OSError, LookupError, ValueError) as error:  # from the login program
            why = " ".join(str(error).split())[:600]
            raise RequestFailed(f"the kubeconfig's login failed: {why}") from None


def _on_watch_error(error: Exception, count: int) -> OnErrorResult:
    """What lightkube does after the watch has failed `count` times in a row: retry after `count`
    seconds, but raise the error after MAX_BREAKS failures or if the server refuses."""
    refused = isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in (401, 403)
    if refused or count > MAX_BREAKS:
        return OnErrorResult(OnErrorAction.RAISE)
    return OnErrorResult(OnErrorAction.RETRY, sleep=float(count))


def _refusal(error: ApiError, what: str) -> RequestFailed:
    """The server's error as RequestFailed. `what`: what it refuses to do."""
    status, code = error.status, code_of(error)
    message = " ".join((status.message or "").split())[:600] or f"HTTP {code}"
    if code == 401:
        return RequestFailed(BAD_CREDENTIALS)
    if code == 403:
        return Forbidden(f"you may not {what}: {message}{ASK_ADMINISTRATOR}")
    if code == 409 and status.reason == "AlreadyExists":
        return RequestFailed(f"{message}: choose another --name, or `elasticrun delete` that one")
    if code == 422 and status.details and status.details.causes:
        causes = (
            f"{one.field}: {one.message}".removeprefix(': Invalid value: "object": ')
            for one in status.details.causes
        )
        return RequestFailed(f"the cluster does not {what}: {'; '.join(causes)[:1000]}")
    return RequestFailed(f"the cluster does not {what}: {message}")
