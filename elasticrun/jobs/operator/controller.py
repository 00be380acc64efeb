"""The operator's loop: observe a job, query its master, plan, act.

Watches, a list of all jobs every RELIST seconds and the deadlines in plans only wake the loop. Each
pass reads the current state afresh and relies on no earlier pass. A failed pass is retried with
backoff; a failing job does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import time
from typing import Any, Final

import httpx2
from lightkube.core.exceptions import ApiError
from lightkube.core.generic_client import ALL_NS

from elasticrun import __version__
from elasticrun.jobs.operator import cluster as api, objects, plan as planning
from elasticrun.jobs.operator.crd import API_VERSION, KIND, OPERATOR, Json
from elasticrun.jobs.operator.objects import JOB, MASTER_INDEX, JobObject, OwnedPod, format_time
from elasticrun.jobs.operator.status import JobEvent, status_patch
from elasticrun.jobs.operator.view import ObservedState
from elasticrun.jobs.render.settings import MASTER_PORT
from elasticrun.wire.auth import operator_token, reader_token
from elasticrun.wire.messages import JobStatus, Request, Role
from elasticrun.wire.rpc.channel import LinkError, ask_for, get_status
from elasticrun.wire.types import Endpoint

POLL: Final = 10.0
"""Maximum seconds between two passes over a job that is not over."""

BUSY_POLL: Final = 1.0
"""The same while the job is neither fully running, suspended nor pending, or a pass gave orders:
the state then changes quickly."""

RELIST: Final = 30.0
"""Seconds between two lists of all jobs."""

QUERY_LIMIT: Final = 1.5
"""Seconds that a pass waits for a master's answer. Short, because no dead pod is replaced
meanwhile."""

UNREACHABLE_RETRY: Final = 5.0
"""Seconds for which a master that did not answer is not queried again."""

WATCH_SILENCE: Final = 90.0
"""Seconds without an event or a bookmark after which a watch counts as dead."""

MAX_PASSES: Final = 64
"""Maximum number of concurrent passes."""

FIRST_RETRY: Final = 0.2
LAST_RETRY: Final = 30.0
"""Seconds before a failed pass is retried: the first delay and the longest."""

LEASE: Final = 15
"""Seconds after its last renewal until another operator takes the Lease. Its holder stops RENEW
seconds earlier if it cannot renew it."""

RENEW: Final = 3.0
"""Seconds between two attempts to take or renew the Lease."""

NO_CRD: Final = (
    "the cluster has no ElasticJob CRD: elasticrun render operator --image IMAGE | kubectl apply "
    "-f -"
)

logger = logging.getLogger("elasticrun")

Trouble = ApiError, httpx2.HTTPError, TimeoutError, OSError


class LeadLost(Exception):
    """This operator no longer holds the Lease."""


class Controller:
    """Reconciles the jobs of one namespace, or of all."""

    def __init__(self, cluster: api.Cluster) -> None:
        self._cluster = cluster
        self._key = b""
        self._version = (1, 0)
        self._due: dict[api.Key, float] = {}
        self._busy: set[api.Key] = set()
        self._failures: dict[api.Key, int] = {}
        self._refused: dict[api.Key, str] = {}
        self._unreachable_until: dict[api.Key, float] = {}
        self._change = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled. Until the API server answers, retry the start with backoff."""
        tries = 0
        while not self._key:
            try:
                self._version = await self._cluster.version()
                self._key = await self._cluster.key()
            except Exception as error:
                tries += 1
                logger.warning(
                    "the operator cannot start (attempt %d): %s", tries, _error_text(error)
                )
                await asyncio.sleep(_retry_delay(tries))
        where = self._cluster.namespace.replace(ALL_NS, "all namespaces")
        logger.info("the operator watches ElasticJobs in %s", where)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(api.JOBS))
            group.create_task(self._watch(api.PODS))
            group.create_task(self._relist())
            while True:
                self._change.clear()
                for key in self._ready():
                    self._busy.add(key)
                    group.create_task(self._visit(key))
                waits = [due for key, due in self._due.items() if key not in self._busy]
                left = min(waits, default=_clock() + RELIST) - _clock()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, left)):
                        await self._change.wait()

    # ------------------------------------------------------------ the queue

    def _ready(self) -> list[api.Key]:
        now, room = _clock(), MAX_PASSES - len(self._busy)
        ready = [key for key, due in self._due.items() if due <= now and key not in self._busy]
        for key in ready[:room]:
            del self._due[key]
        return ready[:room]

    def _wake(self, key: api.Key, after: float = 0.0) -> None:
        due = _clock() + after
        self._due[key] = min(due, self._due.get(key, due))
        self._change.set()

    async def _watch(self, kind: Any) -> None:
        tries = 0
        while True:
            generations: dict[str, int] = {}
            try:
                async with asyncio.timeout(WATCH_SILENCE) as silence:
                    async for change, found in self._cluster.watch(kind):
                        silence.reschedule(_clock() + WATCH_SILENCE)
                        tries, meta = 0, found["metadata"]
                        if change == "BOOKMARK":
                            continue
                        if kind is api.PODS:
                            self._wake((meta["namespace"], meta["labels"][JOB]))
                        elif change == "DELETED":
                            generations.pop(meta["uid"], None)
                        elif generations.get(meta["uid"]) != meta["generation"]:  # spec changed
                            generations[meta["uid"]] = meta["generation"]
                            self._wake((meta["namespace"], meta["name"]))
            except Exception as error:  # the connection may break in the middle of a line
                tries += 1
                if tries in (2, 5) or tries % 50 == 0:
                    logger.info("a watch broke (attempt %d): %s", tries, _error_text(error))
            await asyncio.sleep(_retry_delay(tries))

    async def _relist(self) -> None:
        tries = 0
        while True:
            try:
                for job in await self._cluster.jobs():
                    self._wake((job["metadata"]["namespace"], job["metadata"]["name"]))
                tries = 0
            except Exception as error:
                tries += 1
                missing = isinstance(error, ApiError) and api.code_of(error) == api.NOT_FOUND
                why = NO_CRD if missing else _error_text(error)
                logger.warning("cannot list the jobs: %s", why)
            await asyncio.sleep(_retry_delay(tries) if tries else RELIST)

    # ------------------------------------------------------------ a pass

    async def _visit(self, key: api.Key) -> None:
        try:
            again = await self._reconcile(key)
            self._failures.pop(key, None)
            if again is not None:
                self._wake(key, again)
        except Exception as error:  # one job's failure must not affect the others
            tries = self._failures[key] = self._failures.get(key, 0) + 1
            if isinstance(error, api.NotCreated):
                self._refused[key] = _error_text(error)
            if tries in (1, 5) or tries % 50 == 0:
                foreign = not isinstance(error, (*Trouble, api.NotCreated))
                words = ("job %s/%s, try %d: %s", *key, tries, _error_text(error))
                logger.warning(*words, exc_info=foreign)
            self._wake(key, _retry_delay(tries))
        finally:
            self._busy.discard(key)
            self._change.set()

    async def _reconcile(self, key: api.Key) -> float | None:
        """One pass over a job. Returns the seconds until the next pass; None if only a change
        requires one."""
        found = await self._cluster.get(api.JOBS, key)
        if found is None or "deletionTimestamp" in found["metadata"]:
            for entries in (self._failures, self._refused, self._unreachable_until):
                entries.pop(key, None)
            return None
        job = objects.parse_job(found)
        read = map(objects.read, await self._cluster.pods(key, job.uid))
        pods = tuple(pod for pod in read if pod is not None)
        status, why = await self._query_master(job, key, pods)
        refused = self._refused.get(key, "")
        decided = planning.plan(
            job, ObservedState(pods, status, why, refused, self._version), time.time()
        )
        if (made := status_patch(found.get("status") or {}, decided.status)) is not None:
            version = found["metadata"]["resourceVersion"]
            if not await self._cluster.set_status(key, version, made):
                return FIRST_RETRY  # the job changed meanwhile
        for notice in decided.notices:
            await self._create_event(job, notice)
        refusal = ""
        for order in decided.orders:
            refusal = await self._execute(job, order, pods) or refusal
        self._refused[key] = refusal
        if refusal != refused:  # the status of the next pass reports it
            return 0.0
        if decided.status.is_over:
            return decided.again
        full = f"{job.spec.nodes}/{job.spec.nodes}"
        trains = status is not None and status.phase == "running" and decided.status.nodes == full
        calm = (trains or decided.status.phase in ("Suspended", "Pending")) and not decided.orders
        return min(POLL if calm else BUSY_POLL, decided.again or POLL)

    async def _execute(
        self, job: JobObject, order: planning.Order, pods: tuple[OwnedPod, ...]
    ) -> str:
        """Carry out an order. Returns the master's refusal as a sentence, "" if there is none.
        Raises NotCreated if the API server rejects an object."""
        where = job.namespace
        match order:
            case planning.CreateObject(body, notice):
                if await self._cluster.create(body) and notice:
                    await self._create_event(job, notice)
            case planning.CreateSecret():
                await self._cluster.create(objects.secret(job, self._token(job)))
            case planning.Delete(pod, notice):
                if await self._cluster.remove(api.PODS, (where, pod.name), pod.uid):
                    await self._create_event(job, notice)
            case planning.Resize(nodes):
                return await self._resize(job, nodes, pods)
            case planning.DeleteJob():
                await self._cluster.remove(api.JOBS, (where, job.name), job.uid)
        return ""

    async def _create_event(self, job: JobObject, notice: JobEvent) -> None:
        """Create an Event; a failure is only logged."""
        now = format_time(time.time())
        about = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{job.name}.", "namespace": job.namespace},
            "involvedObject": {**about, "namespace": job.namespace},
            "type": "Warning" if notice.warning else "Normal",
            "reason": notice.reason,
            "message": notice.message[:1000],
            "source": {"component": OPERATOR},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        logger.info("%s/%s: %s", job.namespace, job.name, notice.message)
        try:
            await self._cluster.create_event(event)
        except Trouble as error:
            logger.info("cannot record an Event of %s: %s", job.name, _error_text(error))

    # ------------------------------------------------------------ the job's master

    def _token(self, job: JobObject) -> str:
        """The job's token, derived from the operator's key, so that it need not be stored."""
        return hmac.digest(self._key, f"elasticrun job {job.uid}".encode(), hashlib.sha256).hex()

    async def _query_master(
        self, job: JobObject, key: api.Key, pods: tuple[OwnedPod, ...]
    ) -> tuple[JobStatus | None, str]:
        """The master's status, or None and the reason, which is "" if no master should answer."""
        master = _master(pods)
        if master is None or job.status.is_over:
            return None, ""
        if _clock() < self._unreachable_until.get(key, 0.0):
            return None, job.status.condition("MasterReachable").message
        began = _clock()
        try:
            token = reader_token(self._token(job))
            status = await get_status(master, QUERY_LIMIT, token=token, version=__version__)
        except LinkError as error:
            if _clock() > began + QUERY_LIMIT / 2:  # a master that is just starting refuses at once
                self._unreachable_until[key] = _clock() + UNREACHABLE_RETRY
            verb = "refuses to answer" if error.rejected else "does not answer"
            return None, f"the master at {master} {verb}: {error}"
        self._unreachable_until.pop(key, None)
        return status, ""

    async def _resize(self, job: JobObject, nodes: int, pods: tuple[OwnedPod, ...]) -> str:
        master = _master(pods)
        if master is None:
            return ""
        request = Request("scale", number=nodes, who=OPERATOR, reason="spec.nodes")
        token = operator_token(self._token(job))
        try:
            reply = await ask_for(master, QUERY_LIMIT, request, token=token, role=Role.OPERATOR)
        except LinkError as error:
            raise TimeoutError(
                f"the master at {master} could not be notified about {nodes}: {error}"
            ) from None
        return "" if reply.ok else f"the master refuses {nodes} nodes: {reply.reason}"


def _master(pods: tuple[OwnedPod, ...]) -> Endpoint | None:
    for pod in pods:
        if pod.index == MASTER_INDEX and pod.phase == "Running" and pod.address:
            return Endpoint(pod.address, MASTER_PORT)
    return None


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _retry_delay(tries: int) -> float:
    return min(FIRST_RETRY * 2.0 ** min(tries, 10), LAST_RETRY)


def _error_text(error: BaseException) -> str:
    text = str(error).partition("For more information check")[0]  # a suffix that httpx2 adds
    return " ".join(text.split())[:400] or type(error).__name__


# ---------------------------------------------------------------- leader election


async def lead(cluster: api.Cluster, me: str, controller: Controller) -> None:
    """Wait for the Lease, then run while this operator holds it. Raises LeadLost when it loses
    it."""
    task: asyncio.Task[None] | None = None
    seen, since, renewed = "", _clock(), -math.inf
    try:
        while task is None or not task.done():
            held = _clock() - renewed < LEASE - RENEW
            try:
                expired = seen if _clock() - since > LEASE else ""
                held, version = await take_lease(cluster, me, expired)
                since = since if version == seen else _clock()
                renewed, seen = _clock() if held else renewed, version
            except Exception as error:
                logger.warning("cannot renew the Lease: %s", _error_text(error))
            if task is not None and not held:
                raise LeadLost("another operator leads, or the Lease cannot be renewed")
            if held and task is None:
                task = asyncio.create_task(controller.run())
            await (asyncio.wait([task], timeout=RENEW) if task else asyncio.sleep(RENEW))
        await task
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def take_lease(cluster: api.Cluster, me: str, expired: str) -> tuple[bool, str]:
    """Try to take or renew the Lease. Returns whether this operator now holds it, and a value that
    changes with each renewal. Another operator's Lease is taken only if its value is still
    `expired`, because an operator that was itself suspended has missed later renewals."""
    found: Json | None = await cluster.get(api.LEASES, (cluster.own, OPERATOR))
    renewed = f"{format_time(time.time())[:-1]}.{int(time.time() % 1 * 1e6):06d}Z"
    spec = {"holderIdentity": me, "leaseDurationSeconds": LEASE, "renewTime": renewed}
    body: Json = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    body |= {"metadata": {"name": OPERATOR, "namespace": cluster.own}, "spec": spec}
    if found is None:
        return await cluster.put_lease(body, new=True), renewed
    old, version = found.get("spec") or {}, found["metadata"]["resourceVersion"]
    word = str(old.get("renewTime"))
    if old.get("holderIdentity") not in (me, "", None) and word != expired:
        return False, word
    body["metadata"]["resourceVersion"] = version
    return await cluster.put_lease(body, new=False), renewed
