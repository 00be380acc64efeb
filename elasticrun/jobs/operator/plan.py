"""The reconcile decision for an ElasticJob: `plan`, one pure function of the observed state.

Level-triggered: the same state leads to the same orders, and no counters are kept. What the cluster
does not record is in the job's status (since when a condition holds, which nodes to avoid). A
failed pod that counts as a failure is kept as the record of it; other ended pods are deleted once
their successor has a successor.

Exit code 0 means that all ranks of the last round exited with 0, so no pod is created after the
first one. If a run ends otherwise, its pods must exit first; then master and nodes start again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import msgspec

from elasticrun.config import EXIT_BAD_NODE
from elasticrun.core.nodes.admission import ASKED
from elasticrun.core.reasons import failure_in, read
from elasticrun.core.words import some
from elasticrun.host.runs.layout import RunResult
from elasticrun.jobs.operator import objects
from elasticrun.jobs.operator.crd import CONDITIONS, Avoided, ElasticStatus, JobCondition, Json
from elasticrun.jobs.operator.objects import (
    HOPELESS,
    MASTER_INDEX,
    JobObject,
    OwnedPod,
    moment,
    stamp,
)
from elasticrun.jobs.render.elastic import NO_TLS
from elasticrun.wire.messages import JobStatus

HEALTHY: Final = 60.0
"""Seconds of runtime after which a pod that ends is replaced at once, whatever its attempt."""

LONGEST_WAIT: Final = 60.0
"""Longest delay in seconds before replacing pods that end in quick succession."""

PAUSE: Final = 60.0
"""Seconds for which a job holds no pods after it has released them."""

SETTLE: Final = 10.0
"""Seconds for pods to end by themselves, with their last words, when the job is over."""

RUN_ENDS: Final = 5.0
"""Seconds for the nodes of an ended run to end as well. A node that still runs then has not
received the result, or was never in the run, and joins the others at the next master."""

AVOIDED_FOR: Final = 3600.0
"""Seconds for which a node is avoided; the same as the master's default exclusion."""

MOST_AVOIDED: Final = 50
ACCEPTED: Final = "the server takes the job's pods"
GAVE_UP: Final = "GaveUp"
"""Reason of the Scheduled condition while the job holds no pods."""


class JobEvent(NamedTuple):
    """An Event of the job."""

    reason: str
    message: str
    warning: bool = False


class Make(NamedTuple):
    """Create an object; it may already exist."""

    body: Json
    notice: JobEvent | None = None


class MakeSecret(NamedTuple):
    """Create the Secret with the job's token."""


class Delete(NamedTuple):
    """Delete a pod, with its grace period."""

    pod: OwnedPod
    notice: JobEvent


class Resize(NamedTuple):
    """Set the maximum number of nodes at the job's master."""

    nodes: int


class DeleteJob(NamedTuple):
    """Delete the job itself, and all that belongs to it."""


Order = Make | MakeSecret | Delete | Resize | DeleteJob


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The observed state of a job. `master`: its master's status, None if it does not answer;
    `unreachable`: why not; `refused`: what the API server or the master refused last time."""

    pods: tuple[OwnedPod, ...] = ()
    master: JobStatus | None = None
    unreachable: str = ""
    refused: str = ""
    version: tuple[int, int] = (1, 37)  # the cluster's version


class ReconcilePlan(NamedTuple):
    """Orders in sequence, the new status, Events. `again`: seconds until the next pass at the
    latest, None if only a change requires one."""

    orders: tuple[Order, ...]
    status: ElasticStatus
    notices: tuple[JobEvent, ...] = ()
    again: float | None = None


class JobEnd(NamedTuple):
    phase: str
    reason: str
    message: str


@dataclass(frozen=True)
class JobView:
    """The observed state of a job at a moment, and values derived from it."""

    job: JobObject
    observed: ObservedState
    now: float

    @cached_property
    def nodes(self) -> list[OwnedPod]:
        return sorted(
            (pod for pod in self.observed.pods if pod.index != MASTER_INDEX),
            key=lambda pod: (pod.index, pod.attempt),
        )

    @cached_property
    def living(self) -> list[OwnedPod]:
        """Pods of nodes that run or may run later."""
        return [pod for pod in self.nodes if pod.is_active(self.now)]

    @cached_property
    def running(self) -> list[OwnedPod]:
        return [pod for pod in self.living if pod.phase == "Running" and not pod.deleted]

    def pods_of(self, index: int) -> list[OwnedPod]:
        """All pods of an index, the newest last."""
        return self._by_index.get(index, [])

    @cached_property
    def _by_index(self) -> dict[int, list[OwnedPod]]:
        found: dict[int, list[OwnedPod]] = {}
        for pod in sorted(self.observed.pods, key=lambda pod: pod.attempt):
            found.setdefault(pod.index, []).append(pod)
        return found

    @cached_property
    def last_master(self) -> OwnedPod | None:
        return next(reversed(self.pods_of(MASTER_INDEX)), None)

    @cached_property
    def result(self) -> RunResult | None:
        """The result of the run, if its last master reports one."""
        return self.last_master.result if self.last_master is not None else None

    @property
    def succeeding(self) -> bool:
        """Whether all ranks have exited with 0."""
        last = self.last_master
        by_master = last is not None and last.run_over and last.code == 0
        return by_master or any(pod.phase == "Succeeded" for pod in self.nodes)

    @property
    def cause(self) -> str:
        """What ended the run, according to its master, else to a pod that failed; "" if unknown."""
        if self.result is not None:
            return self.result.reason
        master = self.observed.master
        ended = sorted((one for one in self.nodes if one.code), key=lambda one: one.ended)
        words = (one.cause for one in ended if one.code in HOPELESS or not one.uncounted)
        return (master.outcome if master else "") or next(filter(None, words), "")

    @property
    def failed_node(self) -> str:
        """The node of the rank that ended the run, according to the master; "" if none did."""
        master = self.observed.master
        failed = failure_in(read(master.outcome, master.ended)) if master else None
        return self.result.failed_node if self.result else failed.node if failed else ""

    @cached_property
    def unattached(self) -> str:
        """A hint if pods end and no agent has ever attached to the master; else ""."""
        master, failed = self.observed.master, self.counted
        if master is None or master.nodes or master.round or master.restart_count:
            return ""
        if any(one.last_word is not None for one in self.nodes):
            return ""
        what = f"{some(len(failed), 'pod')} failed" if failed else "pods ended with 0"
        last = f" {_outcome(failed[-1])}" if failed else ""
        question = "does the template's first container run elasticrun?"
        return (
            f"{what} and no agent has attached: {question}{last}"
            if failed or self.succeeding
            else ""
        )

    @cached_property
    def avoided(self) -> tuple[Avoided, ...]:
        """Cluster nodes that new pods avoid: those that the master excludes, those that a pod found
        bad, and those of both kinds in the job's status. A user's exclusion ends when the answering
        master no longer lists it, or when the job is suspended."""
        master, found = self.observed.master, []
        for one in master.excluded if master else ():
            host, since = one.host.partition(".")[0], self.now - one.age
            mine = [p for p in self.nodes if objects.host_name(self.job, p.index) == host]
            # the first pod alive then (cluster times have whole seconds): later ones ran elsewhere
            then = [p for p in mine if p.created <= since and not 0 < p.ended < since - 1]
            found += [(pod.node, one.reason, since, one.kind) for pod in then[:1]]
        lifted = master is not None or self.job.spec.suspend
        current = {node for node, *_ in found}
        known = {one.node: one for one in self.job.status.excluded_nodes
                 if not (lifted and one.kind == ASKED and one.node not in current)}  # fmt: skip
        found += [(pod.node, _outcome(pod), pod.ended, "") for pod in self.nodes if pod.found_bad]
        for node, reason, since, kind in found:
            if node and node not in known and self.now - since < AVOIDED_FOR:
                known[node] = Avoided(node, reason, stamp(since or self.now), kind)
        fresh = [one for one in known.values() if self.now - moment(one.since) < AVOIDED_FOR]
        return tuple(sorted(fresh, key=lambda one: (one.since, one.node))[-MOST_AVOIDED:])

    @property
    def run_over(self) -> bool:
        """Whether this run of the job has ended, in any way."""
        last, master = self.last_master, self.observed.master
        return (last is not None and last.run_over) or (master is not None and bool(master.outcome))

    @cached_property
    def counted(self) -> list[OwnedPod]:
        return [pod for pod in self.nodes if pod.phase == "Failed" and not pod.uncounted]

    @property
    def training(self) -> bool:
        """Whether ranks run; without the master's answer, whether they ran and enough pods run."""
        master, spec = self.observed.master, self.job.spec
        if master is not None:
            return master.phase == "running"
        trained = self.job.status.condition("Training").status == "True"
        return trained and len(self.running) >= spec.least

    @property
    def gave_up(self) -> float:
        """Seconds for which the job still holds no pods."""
        found = self.job.status.condition("Scheduled")
        if found.reason != GAVE_UP:
            return 0.0
        return max(0.0, moment(found.last_transition_time) + PAUSE - self.now)


def plan(job: JobObject, observed: ObservedState, now: float) -> ReconcilePlan:
    """The orders for `job` at `now` (seconds since 1970), and its status."""
    view = JobView(job, observed, now)
    old = job.status
    if old.over:
        return _clean_up(view, None)
    if end := _job_end(view):
        return _clean_up(view, end)
    waits: list[float] = []
    gives_up = False
    if job.spec.suspend:
        orders = _remove_all(view, "Suspended", "the job is suspended")
    else:
        patience = _timeout(view)
        gives_up = patience is not None and patience <= 0
        if patience is not None and not gives_up:
            waits.append(patience)
        why = "too few pods could be placed, and those that were held their devices"
        given_back = _remove(view.living, GAVE_UP, why) if gives_up else []
        orders = given_back or [*_master(view, waits), *_nodes(view, waits)]
        if limit := job.spec.run_policy.active_deadline_seconds:
            waits.append((moment(old.start_time) or now) + limit - now)
    status = _status(view, gives_up=gives_up)
    notices = _notices(old, status)
    return ReconcilePlan(tuple(orders), status, notices, min(waits, default=None))


# ---------------------------------------------------------------- the end


def _job_end(view: JobView) -> JobEnd | None:
    """Whether and how the job is over."""
    job, spec, now = view.job, view.job.spec, view.now
    if job.has_tls:
        return JobEnd("Failed", "NoTls", f"--tls-cert and its like: {NO_TLS}; a Job of `elasticrun "
                      "render k8s` has them")  # fmt: skip
    for pod in view.observed.pods:
        if pod.over and pod.code in HOPELESS and not (pod.disrupted or pod.deleted):
            cause = view.cause
            named = (one.name for one in view.nodes if view.failed_node.startswith(
                     f"{objects.host_name(job, one.index)}-"))  # fmt: skip
            return JobEnd(
                "Failed", "NotToBeRetried",
                f"{cause}{cause and '; '}{next(named, pod.name)} ended with {pod.code}: another "
                "pod cannot do better",
            )  # fmt: skip
    if view.succeeding:
        first = [pod for pod in view.living if pod.index == 0]
        rank0 = spec.success_policy != "AllWorkers"
        left = first if rank0 else [pod for pod in view.living if pod.phase != "Pending"]
        if not left:
            return JobEnd("Succeeded", "Done", view.unattached or "all ranks ended with 0")
        return None
    limit = spec.run_policy.active_deadline_seconds
    began = job.status.start_time
    if limit and began and now - moment(began) >= limit:
        return JobEnd("Failed", "DeadlineExceeded", f"the job has run for {limit} s")
    failed, limit = len(view.counted), spec.run_policy.backoff_limit
    if failed > limit:
        worst = max(view.counted, key=lambda pod: pod.ended)
        return JobEnd(
            "Failed", "BackoffLimitExceeded",
            view.unattached or f"{some(failed, 'pod')} failed, and runPolicy.backoffLimit is "
            f"{limit}; the last of them: {_outcome(worst)}",
        )  # fmt: skip
    return None


def _outcome(pod: OwnedPod) -> str:
    """How a pod ended, with its last message."""
    return f"{pod.name} ended with {pod.code}{pod.cause and ': '}{pod.cause}"


def _clean_up(view: JobView, end: JobEnd | None) -> ReconcilePlan:
    """A job that is over, now (`end`) or earlier: clean up what is left."""
    job, old, now = view.job, view.job.status, view.now
    policy, waits = job.spec.run_policy, []
    over = moment(old.completion_time) if old.completion_time else now
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
    status = _status(view, end=end)
    return ReconcilePlan(tuple(orders), status, _notices(old, status), min(waits, default=None))


# ---------------------------------------------------------------- pods


def _remove(pods: Iterable[OwnedPod], reason: str, why: str) -> list[Order]:
    """Delete the pods that are not being deleted yet."""
    return [
        Delete(pod, JobEvent(reason, f"deleted pod {pod.name}: {why}", reason == GAVE_UP))
        for pod in pods
        if not pod.deleted
    ]


def _remove_all(view: JobView, reason: str, why: str) -> list[Order]:
    """Remove all nodes, so that they save; then the master, with which they agree on the step."""
    masters = view.pods_of(MASTER_INDEX)
    return _remove(view.living or masters, reason, why)


def _timeout(view: JobView) -> float | None:
    """Seconds until the job releases its pods because too few run; None if enough run."""
    found = view.job.status.condition("Scheduled")
    enough = len(view.running) >= view.job.spec.least
    if enough or view.succeeding or not view.living or found.reason != "Waiting":
        return None
    limit = view.job.spec.run_policy.pending_timeout_seconds
    return moment(found.last_transition_time) + limit - view.now


def _next_pod_due(dead: list[OwnedPod], now: float) -> float:
    """Seconds until the next pod of an index may be created. `dead`: the earlier ones."""
    if not dead or dead[-1].deleted:
        return 0.0
    last = dead[-1]
    ended = last.ended or last.created
    if last.attempt == 0 or ended - last.created >= HEALTHY:
        return 0.0
    return max(0.0, ended + min(2.0 ** min(last.attempt - 1, 10), LONGEST_WAIT) - now)


def _master(view: JobView, waits: list[float]) -> list[Order]:
    """Keep one master pod until the job is over."""
    pods = view.pods_of(MASTER_INDEX)
    alive = [pod for pod in pods if pod.is_active(view.now)]
    if alive or view.succeeding or view.gave_up:
        return _delete_duplicates(alive)
    wait = _next_pod_due(pods, view.now)
    if pods and pods[-1].run_over and view.living:
        wait = max(wait, (pods[-1].ended or view.now) + RUN_ENDS - view.now)
    if wait > 0:
        waits.append(wait)
        return []
    body = objects.master_pod(view.job, _attempt(pods))
    first = [Make(one) for one in objects.common(view.job, view.observed.version)]
    old = _remove(pods[:-1], "Cleaned", "replaced")
    return [*first, MakeSecret(), *old, _make(view, body, pods)]


def _nodes(view: JobView, waits: list[float]) -> list[Order]:
    """Keep one pod for every index, and none above the wanted number."""
    if view.succeeding:
        pending = [pod for pod in view.living if pod.phase == "Pending"]
        return _remove(pending, "Cleaned", "the job is about to be done")
    if pause := view.gave_up:
        waits.append(pause)
        return []
    last = view.last_master
    if view.run_over and (view.living or (last and not last.over)):
        return []  # the pods of the ended run and its master must exit first
    orders: list[Order] = []
    for index in range(view.job.spec.nodes + view.job.spec.spares):
        orders += _node(view, index, waits)
    resize = _resize(view)
    return [*resize, *orders, *_surplus(view, resized=not resize), *_delete_old_failures(view)]


def _node(view: JobView, index: int, waits: list[float]) -> list[Order]:
    pods = view.pods_of(index)
    alive = [pod for pod in pods if pod.is_active(view.now)]
    if len(alive) == 1 and alive[0].single and view.job.spec.nodes > 1:
        return _remove(alive, "Scaled", "it was started for one node alone")
    if alive:
        return _delete_duplicates(alive)
    if wait := _next_pod_due(pods, view.now):
        waits.append(wait)
        return []
    avoided = [one.node for one in view.avoided]
    body = objects.node_pod(view.job, index, _attempt(pods), avoided, view.observed.version)
    return [_make(view, body, pods)]


def _delete_duplicates(alive: list[OwnedPod]) -> list[Order]:
    """Delete all but the oldest, which the other nodes know."""
    by_age = sorted(alive, key=lambda pod: (pod.created, pod.attempt))
    return _remove(by_age[1:], "Double", "an older one lives")


def _attempt(pods: list[OwnedPod]) -> int:
    return pods[-1].attempt + 1 if pods else 0


def _make(view: JobView, body: Json, pods: list[OwnedPod]) -> Make:
    """`pods`: the existing pods of its index."""
    status = view.job.status
    same = status.observed_generation == view.job.generation
    again = same and status.phase in ("Starting", "Running", "Recovering")
    name = body["metadata"]["name"]
    if not pods:
        of_node = body["metadata"]["labels"][objects.ROLE] == objects.NODE
        cost = ", not counted" if of_node else ""
        deleted = f": the one before it was deleted{cost}" if again else ""
        return Make(
            body, JobEvent("Replaced" if again else "Created", f"created pod {name}{deleted}")
        )
    last, how = pods[-1], f"ended with {pods[-1].code}"
    if last.deleted:
        how = "was not heard of since it was deleted"
    elif last.no_memory:
        how = "was out of memory"
    elif last.disrupted or last.code is None:
        how = "was disrupted"
    note = "" if last.index == MASTER_INDEX else ", not counted" if last.uncounted else ", counted"
    return Make(body, JobEvent("Replaced", f"created pod {name}: {last.name} {how}{note}"))


def _resize(view: JobView) -> list[Order]:
    master, nodes = view.observed.master, view.job.spec.nodes
    if master is None or master.outcome or master.max_nodes in (0, nodes):
        return []
    if any(pod.single for pod in view.living):
        return []  # these pods are removed first
    return [Resize(nodes)]


def _surplus(view: JobView, *, resized: bool) -> list[Order]:
    """Remove pods of surplus indices. The master first leaves them out of the next round, so that
    their removal does not interrupt training."""
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
    settled = view.training and len(hosts) <= view.job.spec.nodes
    replaced = settled and all(index in there for index in range(needed))
    going = [p for p in over if replaced or objects.host_name(view.job, p.index) not in hosts]
    return _remove(going, "Scaled", f"the job has {some(view.job.spec.nodes, 'node')} now")


def _delete_old_failures(view: JobView) -> list[Order]:
    """Delete failed pods that record no failure, except the last two of each index."""
    newest = {pod.index: pod.attempt for pod in view.nodes}
    old = [pod for pod in view.nodes if pod.attempt + 2 <= newest[pod.index]]
    return _remove((pod for pod in old if pod.over and pod.uncounted), "Cleaned", "it was replaced")


# ---------------------------------------------------------------- the status


def _status(view: JobView, *, end: JobEnd | None = None, gives_up: bool = False) -> ElasticStatus:
    job, master, old, refused = (
        view.job,
        view.observed.master,
        view.job.status,
        view.observed.refused,
    )
    over = end is not None or old.over
    suspended = job.spec.suspend and not over
    training = view.training and not over and not suspended
    trained = any(old.condition(kind).status == "True" for kind in ("Training", "Recovering"))
    recovering = trained and not (training or over or suspended or view.succeeding)
    if over:
        phase = end.phase if end else old.phase
    elif suspended:
        phase = "Suspended"
    elif training or view.succeeding or recovering:
        phase = "Recovering" if recovering else "Running"
    else:
        phase = "Starting" if len(view.running) >= job.spec.least else "Pending"
    placed = sum(one.group_rank >= 0 for one in master.nodes) if master and training else None
    count = len(view.running) if placed is None else placed
    nodes = f"{min(count, job.spec.nodes)}/{job.spec.nodes}"
    truths = {
        "Admitted": (not refused, *(("Refused", refused) if refused else ("Accepted", ACCEPTED))),
        "Scheduled": (
            (False, "Over", "the job is over")
            if over
            else _scheduled(view, suspended=suspended, gives_up=gives_up)
        ),
        "MasterReachable": _reachable(view, over=over),
        "Training": _training(view, training),
        "Recovering": _recovering(view, recovering),
        "Succeeded": _finished_condition(old, end, "Succeeded"),
        "Failed": _finished_condition(old, end, "Failed"),
    }
    return ElasticStatus(
        phase=phase,
        nodes=old.nodes if phase == "Succeeded" or view.succeeding else nodes,
        running=len(view.running),
        selector=job.selector,
        restarts=_restarts(view),
        step=_step(view),
        observed_generation=job.generation,
        start_time=None if suspended else old.start_time or stamp(view.now),
        completion_time=(old.completion_time or stamp(view.now)) if over else None,
        excluded_nodes=view.avoided if not over else old.excluded_nodes,
        conditions=tuple(_since(old, kind, truths[kind], view.now) for kind in CONDITIONS),
    )


def _restarts(view: JobView) -> int | None:
    """The master's count; the number of failed pods if no agent has ever attached."""
    master = view.observed.master
    if view.result is not None:
        return view.result.restarts
    if master is None:
        return view.job.status.restarts
    return len(view.counted) if view.unattached else master.restart_count


def _step(view: JobView) -> int | None:
    """The newest known step; after the end, the one in the master's result."""
    result, master = view.result, view.observed.master
    step = result.step if result is not None else master.step if master is not None else -1
    return step if step >= 0 else view.job.status.step


Truth = tuple[bool, str, str]
"""A condition: whether it holds, the reason in one word, a sentence."""


def _since(old: ElasticStatus, kind: str, truth: Truth, now: float) -> JobCondition:
    before, made = old.condition(kind), JobCondition(kind, str(truth[0]), *truth[1:], stamp(now))
    if (before.status, before.reason) != (made.status, made.reason):
        return made
    return msgspec.structs.replace(made, last_transition_time=before.last_transition_time)


def _scheduled(view: JobView, *, suspended: bool, gives_up: bool) -> Truth:
    spec, count = view.job.spec, len(view.running)
    if suspended:
        return False, "Suspended", "spec.suspend is set"
    if gives_up or view.gave_up:
        limit = spec.run_policy.pending_timeout_seconds
        least = some(spec.least, "pod")
        return False, GAVE_UP, (
            f"{least} could not be placed in {limit} s (runPolicy.pendingTimeoutSeconds): all were "
            f"given back, and are made again after {PAUSE:g} s"
        )  # fmt: skip
    run = "runs" if count == 1 else "run"
    waiting = next((pod for pod in view.living if pod.waits and pod.phase == "Pending"), None)
    why = f"; {waiting.name}: {waiting.waits}" if waiting else ""
    if waiting and (avoided := view.avoided):
        until = stamp(min(moment(one.since) for one in avoided) + AVOIDED_FOR)
        names = ", ".join(one.node for one in avoided[:5])
        why += (
            f"; pods keep away from {names} (excludedNodes), from the first of them until {until}"
        )
    enough = count >= spec.least
    reason = "Placed" if enough else "Waiting"
    return enough, reason, f"{count} of {some(spec.nodes + spec.spares, 'pod')} {run}{why}"


def _reachable(view: JobView, *, over: bool) -> Truth:
    last = view.last_master
    if over:
        return False, "Over", "the job is over"
    if last is None or last.over:
        return False, "NoPod", "the master has no pod"
    if last.phase != "Running":
        why = f": {last.waits}" if last.waits else ""
        return False, "Starting", f"{last.name} does not run yet{why}"
    if view.observed.master is None:
        return False, "Silent", view.observed.unreachable or f"{last.name} has not answered yet"
    return True, "Answers", f"{last.name} answers"


def _training(view: JobView, training: bool) -> Truth:
    master = view.observed.master
    if training and master is None:
        count = some(len(view.running), "pod")
        return True, "Unasked", f"{count} run; what they do their master alone knows"
    if training and master is not None:
        placed = sum(one.group_rank >= 0 for one in master.nodes)
        number = f"round {master.round.number}, " if master.round else ""
        size = some(master.world_size, "rank")
        return True, "Round", f"{number}{size} on {some(placed, 'node')}"
    if view.unattached:
        return False, "PodsFail", view.unattached
    if master is not None and (master.outcome or master.reason):
        return False, "NoRound", master.outcome or master.reason
    return False, "NoRound", "no ranks run"


def _recovering(view: JobView, recovering: bool) -> Truth:
    master = view.observed.master
    if not recovering:
        return False, "NothingLost", "nothing is to be recovered from"
    missing = view.job.spec.nodes - len(view.running)
    if missing > 0:
        newest = {pod.index: pod for pod in view.nodes if pod.index < view.job.spec.nodes}
        ended = [pod for pod in newest.values() if pod.code == EXIT_BAD_NODE]
        why = f"; {_outcome(ended[0])}" if ended else ""
        return True, "PodsLost", f"{some(missing, 'pod')} of {view.job.spec.nodes} missing{why}"
    return True, "Restarting", (master.last_failure if master else "") or "the ranks start again"


def _finished_condition(old: ElasticStatus, end: JobEnd | None, kind: str) -> Truth:
    if end is not None and end.phase == kind:
        return True, end.reason, end.message
    before = old.condition(kind)
    if old.over and before.status == "True":
        return True, before.reason, before.message
    return False, "NotOver" if end is None and not old.over else "Otherwise", ""


def _notices(old: ElasticStatus, new: ElasticStatus) -> tuple[JobEvent, ...]:
    """The Events for the changes between two statuses."""
    known = {one.node for one in old.excluded_nodes}
    made = [
        JobEvent("Excluded", f"new pods keep away from {one.node}: {one.reason}", warning=True)
        for one in new.excluded_nodes
        if one.node not in known
    ]
    before, after = old.condition("Scheduled").reason, new.condition("Scheduled")
    if after.reason == GAVE_UP != before:
        made.append(JobEvent(GAVE_UP, after.message, warning=True))
    if old.phase != new.phase:
        if new.over:
            now = new.condition(new.phase)
            message = f"{now.reason}: {now.message}"
            made.append(JobEvent(new.phase, message, warning=new.phase == "Failed"))
        elif new.phase == "Suspended":
            made.append(JobEvent("Suspended", "all pods are taken away, after they have saved"))
        elif old.phase == "Suspended":
            made.append(JobEvent("Resumed", "pods are made again"))
    return tuple(made)


def patch(old: Json, new: ElasticStatus) -> Json | None:
    """The changes that turn a status into `new`; None if it already matches."""
    fields: Json = msgspec.to_builtins(new)
    return None if all(old.get(key) == value for key, value in fields.items()) else fields
