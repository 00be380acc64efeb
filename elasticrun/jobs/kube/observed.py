"""Reads the state of jobs and pods from their objects; makes no requests.

A job is an ElasticJob, or a plain Indexed Job as `elasticrun render k8s` makes it. Both have the
same states. What an Indexed Job cannot know (its step, why nothing runs) is left empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from elasticrun.core.words import index_of
from elasticrun.host.runs import last_word
from elasticrun.jobs.operator.crd import GROUP, KIND, Json
from elasticrun.jobs.operator.objects import (
    INDEX,
    JOB,
    MASTER,
    ROLE,
    command_words,
    named_run_dir,
    parse_time,
    volume_at,
)
from elasticrun.jobs.render.pods import CONTAINER, JOB_LABEL
from elasticrun.jobs.rows import JobRow

STOPPED: Final = f"{GROUP}/stopped"
"""Annotation of a job that a user has stopped: suspended, but not meant to be resumed."""

MANAGED_LABEL: Final = {"app.kubernetes.io/managed-by": "elasticrun"}
"""Label of this program's objects: Indexed Jobs, and pods of either kind."""

POD_INDEX: Final = "batch.kubernetes.io/job-completion-index"

STATES: Final = {
    "": "submitted",
    "Pending": "waiting",
    "Starting": "waiting",
    "Running": "running",
    "Recovering": "recovering",
    "Suspended": "suspended",
    "Succeeded": "succeeded",
    "Failed": "failed",
}
"""States by an ElasticJob's phase; "": no operator has processed it yet."""


@dataclass(frozen=True)
class ClusterJob:
    """A job, read from its object."""

    body: Json

    @property
    def is_elastic(self) -> bool:
        """Whether it is an ElasticJob and not an Indexed Job."""
        return bool(self.body.get("kind", KIND) == KIND)

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"].get("namespace") or "default")

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def _spec(self) -> Json:
        return self.body.get("spec") or {}

    @property
    def _status(self) -> Json:
        return self.body.get("status") or {}

    @property
    def pods(self) -> dict[str, str]:
        """The label that selects its pods, and those of another job of the same name."""
        return {JOB if self.is_elastic else JOB_LABEL: self.name}

    @property
    def is_suspended(self) -> bool:
        """Whether its spec suspends it: its pods are, or will be, deleted."""
        return bool(self._spec.get("suspend"))

    @property
    def is_unprocessed(self) -> bool:
        """Whether no operator has processed its newest change; False for an Indexed Job."""
        meta = self.body["metadata"]
        return self.is_elastic and self._status.get("observedGeneration") != meta["generation"]

    @property
    def conditions(self) -> list[Json]:
        """Its conditions, in Kubernetes' form."""
        return [one for one in self._status.get("conditions") or () if isinstance(one, dict)]

    @property
    def nodes(self) -> int:
        """The number of nodes that it should have."""
        return int(self._spec.get("nodes" if self.is_elastic else "completions") or 1)

    @property
    def template_max_nodes(self) -> int:
        """For an Indexed Job: MAX of --nnodes, fixed by its template; 0: unknown."""
        found = re.search(r"--nnodes=(?:\d+:)?(\d+)", self.words)
        return int(found[1]) if found and not self.is_elastic else 0

    @property
    def words(self) -> str:
        """The command and arguments of its pods' first container, which runs the ranks."""
        return " ".join(command_words(self._container))

    @property
    def ranks_per_node(self) -> int:
        """The ranks per node according to its command, 1 without the flag; 0 if they depend on the
        node, as with `gpu`."""
        found = re.search(r"--nproc[-_]per[-_]node[= ](\w+)", self.words)
        number = found[1] if found else "1"
        return int(number) if number.isdecimal() else 0

    @property
    def run_dir(self) -> str:
        """The run folder that its pods use; "" if they name none."""
        return named_run_dir(self._container)

    def volume_at(self, path: str) -> Json | None:
        """The persistent volume of its pods that contains the path, as in `objects.volume_at`."""
        return volume_at(self._pod_spec, path)

    @property
    def grace(self) -> float:
        """Seconds that a pod has to save and exit."""
        return float(self._pod_spec.get("terminationGracePeriodSeconds") or 60)

    @property
    def _pod_spec(self) -> Json:
        return (self._spec.get("template") or {}).get("spec") or {}

    @property
    def _container(self) -> Json:
        first: Json = next(iter(self._pod_spec.get("containers") or ()), {})
        return first

    @cached_property
    def state(self) -> str:
        """Its state, in the words of `elasticrun list`."""
        status, stopped = self._status, STOPPED in (self.body["metadata"].get("annotations") or {})
        if self.is_elastic:
            state = STATES.get(status.get("phase") or "", "waiting")
            if state == "suspended" and status.get("running"):
                state = "leaving"
        else:
            true = {one.get("type") for one in self.conditions if one.get("status") == "True"}
            if ends := true & {"Complete", "Failed"}:
                return "succeeded" if "Complete" in ends else "failed"
            if self.is_suspended:
                state = "leaving" if status.get("active") else "suspended"
            else:
                state = "running" if status.get("ready") else "waiting"
        return "stopped" if state == "suspended" and stopped else state

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ("succeeded", "failed")

    @property
    def reason(self) -> str:
        """The reason for its state, in the cluster's words; "" if there is none."""
        ends = {"succeeded": ("Succeeded", "Complete"), "failed": ("Failed",)}
        ends["recovering"] = ("Recovering",)
        if self.state in ends:
            return self._condition_message(ends[self.state], "True")
        if self.state == "waiting":
            return self._condition_message(
                ("Admitted", "Scheduled", "MasterReachable", "Training"), "False"
            )
        if self.is_unprocessed and not self._status:
            return "no operator has handled it yet"
        return ""

    def _condition_message(self, types: tuple[str, ...], status: str) -> str:
        """The message of the first of these types of conditions, in this order, that has the status
        and a message; "" if none."""
        for one in sorted(
            (one for one in self.conditions if one.get("type") in types),
            key=lambda one: types.index(one["type"]),
        ):
            if one.get("status") == status and one.get("message"):
                return str(one["message"])
        return ""

    def row(self, now: float, run: str = "") -> JobRow:
        """Its row in a list; `run`: its run folder on this host."""
        status, meta = self._status, self.body["metadata"]
        if self.is_elastic:
            has = str(status.get("nodes") or "0").partition("/")[0]
            nodes = int(has) if has.isdecimal() else 0
            step = status.get("step")
        else:
            nodes, step = int(status.get("ready") or 0), None
        if self.is_over or self.is_suspended:
            nodes = 0 if self.state in ("suspended", "stopped") else nodes
        return JobRow(
            name=self.name,
            state=self.state,
            where="k8s",
            id=f"{self.namespace}/{self.name}",
            run=run,
            nodes=nodes,
            max_nodes=self.nodes,
            step=-1 if step is None else int(step),
            restarts=int(status.get("restarts" if self.is_elastic else "failed") or 0),
            age=max(0.0, now - parse_time(meta.get("creationTimestamp"))),
            reason=self.reason,
        )


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod of either kind of job, as the API server returned it."""

    uid: str  # unlike the name, never reused by a replacement
    name: str
    host: str  # its host name, which its replacement keeps
    index: str  # of its node in the job; "master" for the master
    phase: str
    node: str  # the cluster's node; "" before it is placed
    container: str  # the container that runs elasticrun
    created: float
    ended: float  # when its container ended; 0.0: not ended or unknown
    code: int | None  # its exit code, if any
    started: bool  # whether its container has started, so that a log exists
    is_terminating: bool
    message: str  # why it waits, or how it ended
    failed_rank_node: str = ""  # the host whose rank failed first, according to its last words

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def has_failed(self) -> bool:
        """Whether it failed and was not deleted."""
        return self.phase == "Failed" and self.code not in (None, 0) and not self.is_terminating

    def is_called(self, word: str) -> bool:
        """Whether the word names it: its index, its name, its host name or its cluster node. As in
        Arena, `JOB-worker-N` is index N + 1; `JOB-master-0` is only the name of a pod here."""
        word = index_of(word) if "-worker-" in word else word
        return word in (self.index, self.name, self.host, self.node)


def observe_pod(pod: Json) -> ObservedPod:
    """Read a pod."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    containers = [one["name"] for one in spec.get("containers") or ()]
    main = CONTAINER if CONTAINER in containers else next(iter(containers), "")
    found = {one.get("name"): one for one in status.get("containerStatuses") or ()}
    state: Json = (found.get(main) or {}).get("state") or {}
    ended: Json = state.get("terminated") or {}
    index = labels.get(INDEX) or labels.get(POD_INDEX) or ""
    if labels.get(ROLE) == MASTER:
        index = MASTER
    word = last_word.read(ended.get("message") or "")
    return ObservedPod(
        uid=meta["uid"],
        name=meta["name"],
        host=spec.get("hostname") or meta["name"],
        index=index,
        phase=status.get("phase") or "Pending",
        node=spec.get("nodeName") or "",
        container=main,
        created=parse_time(meta.get("creationTimestamp")),
        ended=parse_time(ended.get("finishedAt")),
        code=ended.get("exitCode"),
        started=bool(state.get("running") or ended),
        is_terminating=bool(meta.get("deletionTimestamp")),
        message=_pod_message(state, ended, status),
        failed_rank_node=word.host if word is not None else "",
    )


def _pod_message(state: Json, ended: Json, status: Json) -> str:
    if ended:
        reason = ended.get("reason") or ""
        word = f", {reason}" if reason not in ("", "Error", "Completed") else ""
        return f"ended with {ended.get('exitCode')}{word}"
    waiting = state.get("waiting") or {}
    scheduled: Json = next(
        (one for one in status.get("conditions") or () if one.get("type") == "PodScheduled"), {}
    )
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or "not placed yet")
    parts = (waiting.get("reason") or status.get("reason"), waiting.get("message"))
    return ": ".join(str(one) for one in parts if one)


def in_order(pods: Iterable[Json], job: ClusterJob) -> list[ObservedPod]:
    """The pods of exactly this job: nodes' pods by index, the oldest of each first; then the
    master's."""
    ours = (pod for pod in pods if job.uid in _owners(pod))
    found = [observe_pod(pod) for pod in ours]
    return sorted(
        found,
        key=lambda pod: (
            pod.index == MASTER, int(pod.index) if pod.index.isdecimal() else 0,
            pod.created, len(pod.name), pod.name,
        ),
    )  # fmt: skip


def _owners(pod: Json) -> list[str]:
    return [str(one.get("uid")) for one in pod["metadata"].get("ownerReferences") or ()]
