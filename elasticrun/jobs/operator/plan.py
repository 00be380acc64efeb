"""The reconcile decision for an ElasticJob: `plan`, one pure function of the observed state.

Level-triggered: the same state leads to the same orders, and no counters are kept. What no other
object records is in the job's status (since when a condition holds, which nodes to avoid). A failed
pod that counts as a failure is kept as its record; any other failed pod is deleted once its
successor has a successor.

Exit code 0 means that all ranks of the last round exited with 0, so no pod is created after the
first one. If a run ends otherwise, its pods must exit first; then master and nodes start again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from elasticrun.core.words import plural
from elasticrun.jobs.operator import objects
from elasticrun.jobs.operator.crd import ElasticStatus, Json
from elasticrun.jobs.operator.objects import (
    FINAL_CODES,
    MASTER_INDEX,
    JobObject,
    OwnedPod,
    parse_time,
)
from elasticrun.jobs.operator.status import JobEvent, events_of, status_of
from elasticrun.jobs.operator.view import GAVE_UP, JobEnd, JobView, ObservedState, pod_outcome
from elasticrun.jobs.render.elastic import NO_TLS

HEALTHY: Final = 60.0
"""A pod that lived for this many seconds is replaced without delay, whatever its attempt."""

LONGEST_WAIT: Final = 60.0
"""Maximum delay in seconds before replacing a pod, when pods end in quick succession."""

SETTLE: Final = 10.0
"""Seconds for pods to end by themselves, with their last words, when the job is over."""

RUN_ENDS: Final = 5.0
"""Seconds that the nodes of an ended run have to exit before the next master starts. A node that
still runs then has not received the result, or was never in the run; it joins the next master."""


class CreateObject(NamedTuple):
    """Create an object; it may already exist."""

    body: Json
    notice: JobEvent | None = None


class CreateSecret(NamedTuple):
    """Create the Secret with the job's token."""


class Delete(NamedTuple):
    """Delete a pod, with its grace period."""

    pod: OwnedPod
    notice: JobEvent


class Resize(NamedTuple):
    """Set the maximum number of nodes in the job's master."""

    nodes: int


class DeleteJob(NamedTuple):
    """Delete the job itself, and all that belongs to it."""


Order = CreateObject | CreateSecret | Delete | Resize | DeleteJob


class ReconcilePlan(NamedTuple):
    """Orders in sequence, the new status, Events. `again`: maximum seconds until the next pass;
    None if only a change requires one."""

    orders: tuple[Order, ...]
    status: ElasticStatus
    notices: tuple[JobEvent, ...] = ()
    again: float | None = None


def plan(job: JobObject, observed: ObservedState, now: float) -> ReconcilePlan:
    """The orders for `job` at `now` (seconds since 1970), and its status."""
    view = JobView(job, observed, now)
    old = job.status
    if old.is_over:
        return _clean_up(view, None)
    if end := _job_end(view):
        return _clean_up(view, end)
    waits: list[float] = []
    gives_up = False
    if job.spec.suspend:
        orders = _remove_all(view, "Suspended", "the job is suspended")
    else:
        patience = _pending_time_left(view)
        gives_up = patience is not None and patience <= 0
        if patience is not None and not gives_up:
            waits.append(patience)
        why = "too few pods could be placed, so the placed ones are deleted to free their devices"
        given_back = _remove(view.living, GAVE_UP, why) if gives_up else []
        orders = given_back or [*_master_orders(view, waits), *_node_orders(view, waits)]
        if limit := job.spec.run_policy.active_deadline_seconds:
            waits.append((parse_time(old.start_time) or now) + limit - now)
    status = status_of(view, gives_up=gives_up)
    notices = events_of(old, status)
    return ReconcilePlan(tuple(orders), status, notices, min(waits, default=None))


# ---------------------------------------------------------------- the end


def _job_end(view: JobView) -> JobEnd | None:
    """How the job ends now; None if it does not."""
    job, spec, now = view.job, view.job.spec, view.now
    if job.has_tls:
        return JobEnd("Failed", "NoTls", f"TLS flags: {NO_TLS}; a Job of `elasticrun "
                      "render k8s` has them")  # fmt: skip
    for pod in view.observed.pods:
        if pod.is_over and pod.code in FINAL_CODES and not (pod.disrupted or pod.deleted):
            cause = view.cause
            named = (one.name for one in view.nodes if view.failed_node.startswith(
                     f"{objects.host_name(job, one.index)}-"))  # fmt: skip
            return JobEnd(
                "Failed", "NotToBeRetried",
                f"{cause}{cause and '; '}{next(named, pod.name)} ended with {pod.code}: another "
                "pod would fail in the same way",
            )  # fmt: skip
    if view.is_succeeding:
        first = [pod for pod in view.living if pod.index == 0]
        rank0 = spec.success_policy != "AllWorkers"
        left = first if rank0 else [pod for pod in view.living if pod.phase != "Pending"]
        if not left:
            return JobEnd("Succeeded", "Done", view.unattached_hint or "all ranks ended with 0")
        return None
    limit = spec.run_policy.active_deadline_seconds
    began = job.status.start_time
    if limit and began and now - parse_time(began) >= limit:
        return JobEnd("Failed", "DeadlineExceeded", f"the job has run for {limit} s")
    failed, limit = len(view.counted_failures), spec.run_policy.backoff_limit
    if failed > limit:
        worst = max(view.counted_failures, key=lambda pod: pod.ended)
        return JobEnd(
            "Failed", "BackoffLimitExceeded",
            view.unattached_hint or f"{plural(failed, 'pod')} failed, and runPolicy.backoffLimit "
            f"is {limit}; the last of them: {pod_outcome(worst)}",
        )  # fmt: skip
    return None


def _clean_up(view: JobView, end: JobEnd | None) -> ReconcilePlan:
    """The plan for a job that ends now (`end`) or has ended earlier (None)."""
    job, old, now = view.job, view.job.status, view.now
    policy, waits = job.spec.run_policy, []
    over = parse_time(old.completion_time) if old.completion_time else now
    failed = (end.phase if end else old.phase) == "Failed"
    whole = policy.clean_pod_policy == "All"
    ends = view.living if failed or policy.clean_pod_policy == "Running" else []
    leaving = view.nodes if whole else ends
    master = view.last_master
    if master and not view.living and (whole or master.is_active(now)):
        leaving = [*leaving, master]
    leaving = [pod for pod in leaving if not pod.deleted]
    if leaving and now < over + SETTLE:
        waits.append(over + SETTLE - now)
        leaving = []
    orders = _remove(leaving, "Cleaned", "the job is over")
    if (ttl := policy.ttl_seconds_after_finished) is not None:
        if now >= over + ttl:
            orders = [DeleteJob()]
        else:
            waits.append(over + ttl - now)
    status = status_of(view, end=end)
    return ReconcilePlan(tuple(orders), status, events_of(old, status), min(waits, default=None))


# ---------------------------------------------------------------- pods


def _remove(pods: Iterable[OwnedPod], reason: str, why: str) -> list[Order]:
    """Orders to delete those of the pods that are not being deleted yet."""
    return [
        Delete(pod, JobEvent(reason, f"deleted pod {pod.name}: {why}", reason == GAVE_UP))
        for pod in pods
        if not pod.deleted
    ]


def _remove_all(view: JobView, reason: str, why: str) -> list[Order]:
    """Orders to delete the pods of all nodes, which then save; once these are gone, of the master,
    with which they agree on the step."""
    masters = view.pods_of(MASTER_INDEX)
    return _remove(view.living or masters, reason, why)


def _pending_time_left(view: JobView) -> float | None:
    """Seconds until the job releases its pods because too few run; None if enough run."""
    found = view.job.status.condition("Scheduled")
    enough = len(view.running) >= view.job.spec.least
    if enough or view.is_succeeding or not view.living or found.reason != "Waiting":
        return None
    limit = view.job.spec.run_policy.pending_timeout_seconds
    return parse_time(found.last_transition_time) + limit - view.now


def _next_pod_delay(dead: list[OwnedPod], now: float) -> float:
    """Seconds until the next pod of an index may be created. `dead`: its earlier pods."""
    if not dead or dead[-1].deleted:
        return 0.0
    last = dead[-1]
    ended = last.ended or last.created
    if last.attempt == 0 or ended - last.created >= HEALTHY:
        return 0.0
    return max(0.0, ended + min(2.0 ** min(last.attempt - 1, 10), LONGEST_WAIT) - now)


def _master_orders(view: JobView, waits: list[float]) -> list[Order]:
    """Orders that keep one master pod until the job is over. A delay is appended to `waits`."""
    pods = view.pods_of(MASTER_INDEX)
    alive = [pod for pod in pods if pod.is_active(view.now)]
    if alive or view.is_succeeding or view.pause_left:
        return _delete_duplicates(alive)
    wait = _next_pod_delay(pods, view.now)
    if pods and pods[-1].has_run_ended and view.living:
        wait = max(wait, (pods[-1].ended or view.now) + RUN_ENDS - view.now)
    if wait > 0:
        waits.append(wait)
        return []
    body = objects.master_pod(view.job, _next_attempt(pods))
    first = [CreateObject(one) for one in objects.common_objects(view.job, view.observed.version)]
    old = _remove(pods[:-1], "Cleaned", "replaced")
    return [*first, CreateSecret(), *old, _create_pod(view, body, pods)]


def _node_orders(view: JobView, waits: list[float]) -> list[Order]:
    """Orders that keep one pod for every index and none for surplus indices. Delays are appended to
    `waits`."""
    if view.is_succeeding:
        pending = [pod for pod in view.living if pod.phase == "Pending"]
        return _remove(pending, "Cleaned", "the job is finishing")
    if pause := view.pause_left:
        waits.append(pause)
        return []
    last = view.last_master
    if view.has_run_ended and (view.living or (last and not last.is_over)):
        return []  # the pods of the ended run and its master must exit first
    orders: list[Order] = []
    for index in range(view.job.spec.nodes + view.job.spec.spares):
        orders += _index_orders(view, index, waits)
    resize = _resize(view)
    return [
        *resize,
        *orders,
        *_remove_surplus(view, resized=not resize),
        *_delete_old_failures(view),
    ]


def _index_orders(view: JobView, index: int, waits: list[float]) -> list[Order]:
    pods = view.pods_of(index)
    alive = [pod for pod in pods if pod.is_active(view.now)]
    if len(alive) == 1 and alive[0].single and view.job.spec.nodes > 1:
        return _remove(alive, "Scaled", "it was started for exactly one node")
    if alive:
        return _delete_duplicates(alive)
    if wait := _next_pod_delay(pods, view.now):
        waits.append(wait)
        return []
    avoided = [one.node for one in view.avoided]
    body = objects.node_pod(view.job, index, _next_attempt(pods), avoided, view.observed.version)
    return [_create_pod(view, body, pods)]


def _delete_duplicates(alive: list[OwnedPod]) -> list[Order]:
    """Orders to delete all but the oldest pod of an index, which the other nodes know."""
    by_age = sorted(alive, key=lambda pod: (pod.created, pod.attempt))
    return _remove(by_age[1:], "Double", "an older one still exists")


def _next_attempt(pods: list[OwnedPod]) -> int:
    return pods[-1].attempt + 1 if pods else 0


def _create_pod(view: JobView, body: Json, pods: list[OwnedPod]) -> CreateObject:
    """The order that creates a pod, with its Event. `pods`: the existing pods of its index."""
    status = view.job.status
    same = status.observed_generation == view.job.generation
    again = same and status.phase in ("Starting", "Running", "Recovering")
    name = body["metadata"]["name"]
    if not pods:
        of_node = body["metadata"]["labels"][objects.ROLE] == objects.NODE
        cost = ", not counted" if of_node else ""
        deleted = f": the one before it was deleted{cost}" if again else ""
        return CreateObject(
            body, JobEvent("Replaced" if again else "Created", f"created pod {name}{deleted}")
        )
    last, how = pods[-1], f"ended with {pods[-1].code}"
    if last.deleted:
        how = "has not reported since it was deleted"
    elif last.no_memory:
        how = "ran out of memory"
    elif last.disrupted or last.code is None:
        how = "was disrupted"
    note = (
        "" if last.index == MASTER_INDEX else ", not counted" if last.is_uncounted else ", counted"
    )
    return CreateObject(body, JobEvent("Replaced", f"created pod {name}: {last.name} {how}{note}"))


def _resize(view: JobView) -> list[Order]:
    master, nodes = view.observed.master, view.job.spec.nodes
    if master is None or master.outcome or master.max_nodes in (0, nodes):
        return []
    if any(pod.single for pod in view.living):
        return []  # these pods are removed first
    return [Resize(nodes)]


def _remove_surplus(view: JobView, *, resized: bool) -> list[Order]:
    """Orders to delete pods of surplus indices, once the master has formed a round without them, so
    that this does not interrupt training."""
    needed = view.job.spec.nodes + view.job.spec.spares
    over = [pod for pod in view.living if pod.index >= needed]
    if not over or not resized:
        return []
    master = view.observed.master
    hosts = (
        {one.host.partition(".")[0] for one in master.nodes if one.group_rank >= 0}
        if master
        else ()
    )
    there = {pod.index for pod in view.running}
    settled = view.is_training and len(hosts) <= view.job.spec.nodes
    replaced = settled and all(index in there for index in range(needed))
    going = [p for p in over if replaced or objects.host_name(view.job, p.index) not in hosts]
    return _remove(going, "Scaled", f"the job now has {plural(view.job.spec.nodes, 'node')}")


def _delete_old_failures(view: JobView) -> list[Order]:
    """Orders to delete failed pods that do not count as failures, except the last two of each
    index."""
    newest = {pod.index: pod.attempt for pod in view.nodes}
    old = [pod for pod in view.nodes if pod.attempt + 2 <= newest[pod.index]]
    return _remove(
        (pod for pod in old if pod.is_over and pod.is_uncounted), "Cleaned", "it was replaced"
    )
