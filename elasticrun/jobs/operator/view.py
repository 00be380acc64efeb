"""What is known of an ElasticJob at one moment: the observed state, and values derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from elasticrun.core.nodes.admission import ASKED
from elasticrun.core.reasons import failure_in, read
from elasticrun.core.words import plural
from elasticrun.host.runs.layout import RunResult
from elasticrun.jobs.operator import objects
from elasticrun.jobs.operator.crd import AvoidedNode
from elasticrun.jobs.operator.objects import (
    FINAL_CODES,
    MASTER_INDEX,
    JobObject,
    OwnedPod,
    format_time,
    parse_time,
)
from elasticrun.wire.messages import JobStatus

PAUSE: Final = 60.0
"""Seconds from deleting a job's pods, because too few could be placed, to creating new ones."""

AVOIDED_FOR: Final = 3600.0
"""Seconds for which a node is avoided, as long as an exclusion by the master lasts by default."""

MAX_AVOIDED: Final = 50

GAVE_UP: Final = "GaveUp"
"""Reason of the Scheduled condition after all pods were deleted because too few could be placed."""


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The observed state of a job. `master`: its master's status, None if that does not answer;
    `unreachable`: why it does not; `refused`: what the API server or the master refused in the last
    pass."""

    pods: tuple[OwnedPod, ...] = ()
    master: JobStatus | None = None
    unreachable: str = ""
    refused: str = ""
    version: tuple[int, int] = (1, 37)  # the cluster's version


class JobEnd(NamedTuple):
    """How a job ends: the final phase, the reason in one word, a sentence."""

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
        """Pods of nodes that run, will run, or may still be terminating."""
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
    def is_succeeding(self) -> bool:
        """Whether all ranks have exited with 0."""
        last = self.last_master
        by_master = last is not None and last.has_run_ended and last.code == 0
        return by_master or any(pod.phase == "Succeeded" for pod in self.nodes)

    @property
    def cause(self) -> str:
        """What ended the run, according to its master, else to a pod that failed; "" if unknown."""
        if self.result is not None:
            return self.result.reason
        master = self.observed.master
        ended = sorted((one for one in self.nodes if one.code), key=lambda one: one.ended)
        words = (one.cause for one in ended if one.code in FINAL_CODES or not one.is_uncounted)
        return (master.outcome if master else "") or next(filter(None, words), "")

    @property
    def failed_node(self) -> str:
        """The node of the rank that ended the run, according to the master; "" if none did."""
        master = self.observed.master
        failed = failure_in(read(master.outcome, master.ended)) if master else None
        return self.result.failed_node if self.result else failed.node if failed else ""

    @cached_property
    def unattached_hint(self) -> str:
        """A hint for the user if pods end and no agent has ever attached to the master; else ""."""
        master, failed = self.observed.master, self.counted_failures
        if master is None or master.nodes or master.round or master.restart_count:
            return ""
        if any(one.last_word is not None for one in self.nodes):
            return ""
        what = f"{plural(len(failed), 'pod')} failed" if failed else "pods ended with 0"
        last = f" {pod_outcome(failed[-1])}" if failed else ""
        question = "does the template's first container run elasticrun?"
        return (
            f"{what} and no agent has attached: {question}{last}"
            if failed or self.is_succeeding
            else ""
        )

    @cached_property
    def avoided(self) -> tuple[AvoidedNode, ...]:
        """Cluster nodes that new pods avoid: those that the master excludes, those that a pod found
        bad, and those of either kind in the job's status; each for AVOIDED_FOR seconds. A user's
        exclusion ends earlier if the master answers without it, or if the job is suspended."""
        master, found = self.observed.master, []
        for one in master.excluded if master else ():
            host, since = one.host.partition(".")[0], self.now - one.age
            mine = [p for p in self.nodes if objects.host_name(self.job, p.index) == host]
            # Only the first pod that was alive then: later pods ran elsewhere. Cluster times are
            # whole seconds.
            then = [p for p in mine if p.created <= since and not 0 < p.ended < since - 1]
            found += [(pod.node, one.reason, since, one.kind) for pod in then[:1]]
        lifted = master is not None or self.job.spec.suspend
        current = {node for node, *_ in found}
        known = {one.node: one for one in self.job.status.excluded_nodes
                 if not (lifted and one.kind == ASKED and one.node not in current)}  # fmt: skip
        found += [
            (pod.node, pod_outcome(pod), pod.ended, "") for pod in self.nodes if pod.found_node_bad
        ]
        for node, reason, since, kind in found:
            if node and node not in known and self.now - since < AVOIDED_FOR:
                known[node] = AvoidedNode(node, reason, format_time(since or self.now), kind)
        fresh = [one for one in known.values() if self.now - parse_time(one.since) < AVOIDED_FOR]
        return tuple(sorted(fresh, key=lambda one: (one.since, one.node))[-MAX_AVOIDED:])

    @property
    def has_run_ended(self) -> bool:
        """Whether this run of the job has ended, in any way."""
        last, master = self.last_master, self.observed.master
        return (last is not None and last.has_run_ended) or (
            master is not None and bool(master.outcome)
        )

    @cached_property
    def counted_failures(self) -> list[OwnedPod]:
        return [pod for pod in self.nodes if pod.phase == "Failed" and not pod.is_uncounted]

    @property
    def is_training(self) -> bool:
        """Whether ranks run; if the master does not answer, whether they ran in the last status and
        enough pods run."""
        master, spec = self.observed.master, self.job.spec
        if master is not None:
            return master.phase == "running"
        trained = self.job.status.condition("Training").status == "True"
        return trained and len(self.running) >= spec.least

    @property
    def pause_left(self) -> float:
        """Seconds until pods are created again after all were deleted because too few could be
        placed; 0.0 if none are awaited."""
        found = self.job.status.condition("Scheduled")
        if found.reason != GAVE_UP:
            return 0.0
        return max(0.0, parse_time(found.last_transition_time) + PAUSE - self.now)


def pod_outcome(pod: OwnedPod) -> str:
    """How a pod ended, with its last message."""
    return f"{pod.name} ended with {pod.code}{pod.cause and ': '}{pod.cause}"
