"""The status of an ElasticJob: its phase and conditions, and the Events for their changes."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from elasticrun.config import EXIT_BAD_NODE
from elasticrun.core.words import plural
from elasticrun.jobs.operator.crd import CONDITIONS, ElasticStatus, JobCondition, Json
from elasticrun.jobs.operator.objects import format_time, parse_time
from elasticrun.jobs.operator.view import AVOIDED_FOR, GAVE_UP, PAUSE, JobEnd, JobView, pod_outcome

ACCEPTED: Final = "the server accepts the job's pods"


class JobEvent(NamedTuple):
    """An Event of the job."""

    reason: str
    message: str
    warning: bool = False


def status_of(view: JobView, *, end: JobEnd | None = None, gives_up: bool = False) -> ElasticStatus:
    """The new status. `end`: how the job ends now; `gives_up`: too few pods could be placed."""
    job, master, old, refused = (
        view.job,
        view.observed.master,
        view.job.status,
        view.observed.refused,
    )
    over = end is not None or old.is_over
    suspended = job.spec.suspend and not over
    training = view.is_training and not over and not suspended
    trained = any(old.condition(kind).status == "True" for kind in ("Training", "Recovering"))
    recovering = trained and not (training or over or suspended or view.is_succeeding)
    if over:
        phase = end.phase if end else old.phase
    elif suspended:
        phase = "Suspended"
    elif training or view.is_succeeding or recovering:
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
        nodes=old.nodes if phase == "Succeeded" or view.is_succeeding else nodes,
        running=len(view.running),
        selector=job.selector,
        restarts=_restarts(view),
        step=_step(view),
        observed_generation=job.generation,
        start_time=None if suspended else old.start_time or format_time(view.now),
        completion_time=(old.completion_time or format_time(view.now)) if over else None,
        excluded_nodes=view.avoided if not over else old.excluded_nodes,
        conditions=tuple(_condition(old, kind, truths[kind], view.now) for kind in CONDITIONS),
    )


def _restarts(view: JobView) -> int | None:
    """The master's count of restarts; the number of failed pods if no agent has ever attached;
    without an answering master, the last known count."""
    master = view.observed.master
    if view.result is not None:
        return view.result.restarts
    if master is None:
        return view.job.status.restarts
    return len(view.counted_failures) if view.unattached_hint else master.restart_count


def _step(view: JobView) -> int | None:
    """The newest known step; after the end, that in the master's result; None: unknown."""
    result, master = view.result, view.observed.master
    step = result.step if result is not None else master.step if master is not None else -1
    return step if step >= 0 else view.job.status.step


Truth = tuple[bool, str, str]
"""A condition: whether it holds, the reason in one word, a sentence."""


def _condition(old: ElasticStatus, kind: str, truth: Truth, now: float) -> JobCondition:
    before, made = (
        old.condition(kind),
        JobCondition(kind, str(truth[0]), *truth[1:], format_time(now)),
    )
    if (before.status, before.reason) != (made.status, made.reason):
        return made
    return msgspec.structs.replace(made, last_transition_time=before.last_transition_time)


def _scheduled(view: JobView, *, suspended: bool, gives_up: bool) -> Truth:
    spec, count = view.job.spec, len(view.running)
    if suspended:
        return False, "Suspended", "spec.suspend is set"
    if gives_up or view.pause_left:
        limit = spec.run_policy.pending_timeout_seconds
        least = plural(spec.least, "pod")
        return False, GAVE_UP, (
            f"{least} could not be placed in {limit} s (runPolicy.pendingTimeoutSeconds): all were "
            f"deleted, and are created again after {PAUSE:g} s"
        )  # fmt: skip
    run = "runs" if count == 1 else "run"
    waiting = next((pod for pod in view.living if pod.waits and pod.phase == "Pending"), None)
    why = f"; {waiting.name}: {waiting.waits}" if waiting else ""
    if waiting and (avoided := view.avoided):
        until = format_time(min(parse_time(one.since) for one in avoided) + AVOIDED_FOR)
        names = ", ".join(one.node for one in avoided[:5])
        why += f"; pods avoid {names} (excludedNodes), the first of them until {until}"
    enough = count >= spec.least
    reason = "Placed" if enough else "Waiting"
    return enough, reason, f"{count} of {plural(spec.nodes + spec.spares, 'pod')} {run}{why}"


def _reachable(view: JobView, *, over: bool) -> Truth:
    last = view.last_master
    if over:
        return False, "Over", "the job is over"
    if last is None or last.is_over:
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
        count = plural(len(view.running), "pod")
        return True, "Unasked", f"{count} run; only their master knows their activity"
    if training and master is not None:
        placed = sum(one.group_rank >= 0 for one in master.nodes)
        number = f"round {master.round.number}, " if master.round else ""
        size = plural(master.world_size, "rank")
        return True, "Round", f"{number}{size} on {plural(placed, 'node')}"
    if view.unattached_hint:
        return False, "PodsFail", view.unattached_hint
    if master is not None and (master.outcome or master.reason):
        return False, "NoRound", master.outcome or master.reason
    return False, "NoRound", "no ranks run"


def _recovering(view: JobView, recovering: bool) -> Truth:
    master = view.observed.master
    if not recovering:
        return False, "NothingLost", "nothing to recover from"
    missing = view.job.spec.nodes - len(view.running)
    if missing > 0:
        newest = {pod.index: pod for pod in view.nodes if pod.index < view.job.spec.nodes}
        ended = [pod for pod in newest.values() if pod.code == EXIT_BAD_NODE]
        why = f"; {pod_outcome(ended[0])}" if ended else ""
        return True, "PodsLost", f"{plural(missing, 'pod')} of {view.job.spec.nodes} missing{why}"
    return True, "Restarting", (master.last_failure if master else "") or "the ranks are restarting"


def _finished_condition(old: ElasticStatus, end: JobEnd | None, kind: str) -> Truth:
    if end is not None and end.phase == kind:
        return True, end.reason, end.message
    before = old.condition(kind)
    if old.is_over and before.status == "True":
        return True, before.reason, before.message
    return False, "NotOver" if end is None and not old.is_over else "Otherwise", ""


def events_of(old: ElasticStatus, new: ElasticStatus) -> tuple[JobEvent, ...]:
    """The Events for the changes between two statuses."""
    known = {one.node for one in old.excluded_nodes}
    made = [
        JobEvent("Excluded", f"new pods avoid {one.node}: {one.reason}", warning=True)
        for one in new.excluded_nodes
        if one.node not in known
    ]
    before, after = old.condition("Scheduled").reason, new.condition("Scheduled")
    if after.reason == GAVE_UP != before:
        made.append(JobEvent(GAVE_UP, after.message, warning=True))
    if old.phase != new.phase:
        if new.is_over:
            now = new.condition(new.phase)
            message = f"{now.reason}: {now.message}"
            made.append(JobEvent(new.phase, message, warning=new.phase == "Failed"))
        elif new.phase == "Suspended":
            made.append(JobEvent("Suspended", "all pods are deleted after saving"))
        elif old.phase == "Suspended":
            made.append(JobEvent("Resumed", "pods are created again"))
    return tuple(made)


def status_patch(old: Json, new: ElasticStatus) -> Json | None:
    """The fields of `new`, as a merge patch; None if the status already matches them."""
    fields: Json = msgspec.to_builtins(new)
    return None if all(old.get(key) == value for key, value in fields.items()) else fields
