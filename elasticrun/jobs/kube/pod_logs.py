"""Logs of a job's pods from the API server: of one pod, the pods of a node, or all. Following
continues with pods that replace others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.kube.acts import pods, watch_job
from elasticrun.jobs.kube.api import MAX_BREAKS, KubeApi
from elasticrun.jobs.kube.observed import ClusterJob, ObservedPod, in_order, observe_pod
from elasticrun.jobs.operator.cluster import PODS
from elasticrun.jobs.operator.objects import MASTER

STREAM_END_LIMIT: Final = 10.0
"""Seconds that the log streams of a finished job have to end by themselves."""

STABLE_AFTER: Final = 60.0
"""A stream that lasted longer than this many seconds resets the count of consecutive breaks."""

MAX_STREAMS: Final = 100
"""Maximum number of pods that are followed at once."""


@dataclass(frozen=True, slots=True)
class PodLogQuery:
    """What to show. `tail`: last lines of each pod, 0 for all; `since`: seconds, 0 for no limit;
    `everything`: all pods, also earlier ones; `node`: the index of a node in the job, or the name
    of a pod or of a cluster node. `index`: only the node with this index. `rank`: only lines
    prefixed with this number; -1: all."""

    follow: bool = False
    tail: int = 20
    since: int = 0
    everything: bool = False
    node: str = ""
    index: str = ""
    rank: int = -1
    grep: re.Pattern[str] | None = None

    def matches(self, line: str) -> bool:
        """Whether to show a line."""
        if self.rank >= 0 and not re.match(rf"\[[^\]\d]*{self.rank}\]", line):
            return False
        return self.grep is None or self.grep.search(line) is not None

    @property
    def mixes_pods(self) -> bool:
        """Whether lines of several pods may be mixed."""
        return self.everything or (self.rank >= 0 and not (self.node or self.index))

    def selects(self, pod: ObservedPod) -> bool:
        """Whether the pod belongs to the selected node."""
        return all(pod.is_called(word) for word in (self.node, self.index) if word)


ShowLine = Callable[[ObservedPod, str], None]
"""Receives each line with its pod."""


def selected_pods(found: Iterable[ObservedPod], query: PodLogQuery) -> list[ObservedPod]:
    """The existing pods to show. Without a selection: the pod that failed first if none is active
    or has succeeded, else the newest of the first node."""
    started = [pod for pod in found if pod.started]
    if query.node or query.index:
        named = [pod for pod in started if query.selects(pod)]
        return named if query.node or query.everything else named[-1:]
    nodes = [pod for pod in started if pod.index != MASTER]
    if query.mixes_pods:
        return nodes
    if not any(pod.is_active or pod.phase == "Succeeded" for pod in nodes):
        failed = [pod for pod in nodes if pod.has_failed]
        blamed = {pod.failed_rank_node.partition(".")[0] for pod in failed}
        # Finish times are whole seconds and often equal; the pods' termination messages name the
        # first failure.
        failed.sort(key=lambda pod: (pod.host not in blamed, pod.ended))
        if failed:
            return failed[:1]
    first = [pod for pod in nodes if pod.index == nodes[0].index]
    return first[-1:]


async def show(api: KubeApi, job: ClusterJob, query: PodLogQuery, show_line: ShowLine) -> bool:
    """Pass existing lines to `show_line`; with `follow` also new ones, until the job is over or
    stopped. Returns False if no pod has started."""
    found = await pods(api, job)
    there = selected_pods(found, query)
    if not query.follow or job.is_over:
        for pod in there:
            async for _, line in _lines(api, job, pod, query):
                show_line(pod, line)
        return bool(there)
    old = {pod.uid for pod in found if pod.started}
    try:
        return await _Follower(api, job, query, show_line, old).run(there)
    except ExceptionGroup as errors:  # such as RequestFailed
        raise errors.exceptions[0] from None


async def _lines(
    api: KubeApi, job: ClusterJob, pod: ObservedPod, query: PodLogQuery, **more: Any
) -> AsyncIterator[tuple[str, str]]:
    """The lines of a pod that the query selects, each with its timestamp."""
    options: dict[str, Any] = {"container": pod.container, "timestamps": True}
    if query.since:
        options["since"] = query.since
    first = 0  # first line to show
    if query.tail and query.grep is None and query.rank < 0:
        options["tail_lines"] = query.tail
    elif query.tail:  # of the matching lines, which the server cannot count
        newest: deque[int] = deque(maxlen=query.tail)
        at = 0
        async for line in api.log(pod.name, job.namespace, **options):
            at += 1
            if query.matches(_stamped(line)[1]):
                newest.append(at)
        first = newest[0] if len(newest) == query.tail else 0
    at = 0
    async for line in api.log(pod.name, job.namespace, **options, **more):
        at += 1
        stamp, text = _stamped(line)
        if at >= first and query.matches(text):
            yield stamp, text


def _stamped(line: str) -> tuple[str, str]:
    """The timestamp without its Z, so that fractions of different lengths sort correctly, and the
    text."""
    stamp, _, text = line.partition(" ")
    return (stamp.rstrip("Z"), text) if re.match(r"\d{4}-\d\d-\d\dT", stamp) else ("", line)


class _Follower:
    """Follows pods, one task each. `old`: the uids of pods that had started before."""

    def __init__(
        self, api: KubeApi, job: ClusterJob, query: PodLogQuery, show_line: ShowLine, old: set[str]
    ) -> None:
        self._api, self._job, self._query, self._show_line = api, job, query, show_line
        self._seen = old  # uids, because a replacement pod may have the same name
        self._streams: list[asyncio.Task[None]] = []

    async def run(self, there: Iterable[ObservedPod]) -> bool:
        """Follow `there` and later pods until the job is over or stopped. Returns whether there was
        a pod."""
        async with asyncio.TaskGroup() as group:
            self._follow(there, self._query, group)
            watch = group.create_task(self._watch(group))
            await self._wait_until_over()
            watch.cancel()
            self._follow_new(await pods(self._api, self._job), group)
            if self._streams:
                _, left = await asyncio.wait(self._streams, timeout=STREAM_END_LIMIT)
                for one in left:
                    one.cancel()
        return bool(self._streams)

    async def _watch(self, group: asyncio.TaskGroup) -> None:
        job = self._job
        async for word, pod in self._api.changes(PODS, job.namespace, labels=job.pods):
            if word != "DELETED":
                self._follow_new(in_order([pod], self._job), group)

    def _follow_new(self, found: Iterable[ObservedPod], group: asyncio.TaskGroup) -> None:
        """Follow the selected pods that are new, from their first line."""
        query = self._query
        if not (query.node or query.index or query.mixes_pods):
            query = replace(query, index="0")
        new = [
            pod
            for pod in found
            if pod.started and pod.uid not in self._seen and query.selects(pod)
            if query.node or pod.index != MASTER
        ]
        self._seen |= {pod.uid for pod in new}
        self._follow(new, replace(self._query, tail=0), group)

    def _follow(
        self, these: Iterable[ObservedPod], query: PodLogQuery, group: asyncio.TaskGroup
    ) -> None:
        for pod in these:
            if sum(not one.done() for one in self._streams) < MAX_STREAMS:
                self._streams.append(group.create_task(self._stream(pod, query)))

    async def _stream(self, pod: ObservedPod, query: PodLogQuery) -> None:
        """Follow a pod until its container ends. A stream that breaks earlier is restarted, until
        it has broken more than MAX_BREAKS times in a row."""
        clock, last, breaks = asyncio.get_running_loop().time, "", 0
        while breaks <= MAX_BREAKS:
            before, began = last, clock()
            with contextlib.suppress(RequestFailed):
                async for stamp, line in _lines(self._api, self._job, pod, query, follow=True):
                    if not before or stamp > before:
                        last = max(last, stamp)
                        self._show_line(pod, line)
            with contextlib.suppress(RequestFailed):
                body = await self._api.get(PODS, pod.name, self._job.namespace)
                now = observe_pod(body) if body is not None else None
                if now is None or now.uid != pod.uid or now.code is not None or not now.is_active:
                    return
            breaks = 1 if clock() - began > STABLE_AFTER else breaks + 1
            query = replace(query, tail=0)
            await asyncio.sleep(breaks)

    async def _wait_until_over(self) -> None:
        async for word, job in watch_job(self._api, self._job):
            if word == "DELETED" or job.is_over or job.state == "stopped":
                return
