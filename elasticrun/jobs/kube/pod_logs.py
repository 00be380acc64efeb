"""Logs of a job's pods from the API server: one pod, the pods of a node, or all. Following
continues across pods that replace others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from elasticrun.jobs.backend import NotDone
from elasticrun.jobs.kube.acts import find_again, pods
from elasticrun.jobs.kube.api import MOST_BREAKS, KubeApi
from elasticrun.jobs.kube.seen import ClusterJob, SeenPod, in_order, seen_pod
from elasticrun.jobs.operator.cluster import PODS
from elasticrun.jobs.operator.objects import MASTER

LAST_WORDS: Final = 10.0
"""Seconds within which the streams of a finished job may end by themselves."""

LASTING: Final = 60.0
"""Seconds after which the break of a stream no longer counts as a consecutive failure."""

MOST_STREAMS: Final = 100
"""Maximum number of pods that are followed at once."""


@dataclass(frozen=True, slots=True)
class LogWish:
    """What to show. `tail`: lines of each pod, 0 for all; `since`: seconds, 0 for no limit; `node`:
    an index of the job, or the name of a pod or of a node; `index`: the node of one rank, and
    `rank`: its number there: only lines that carry it are shown, -1 for all."""

    follow: bool = False
    tail: int = 20
    since: int = 0
    everything: bool = False
    node: str = ""
    index: str = ""
    rank: int = -1
    grep: re.Pattern[str] | None = None

    def takes(self, line: str) -> bool:
        """Whether to show a line."""
        if self.rank >= 0 and not re.match(rf"\[[^\]\d]*{self.rank}\]", line):
            return False
        return self.grep is None or self.grep.search(line) is not None

    @property
    def several(self) -> bool:
        """Whether lines of several pods may be mixed."""
        return self.everything or (self.rank >= 0 and not (self.node or self.index))

    def names(self, pod: SeenPod) -> bool:
        """Whether the pod belongs to the selected node."""
        return all(pod.is_called(word) for word in (self.node, self.index) if word)


Shown = Callable[[SeenPod, str], None]
"""Receives each line with its pod."""


def chosen(found: Iterable[SeenPod], wish: LogWish) -> list[SeenPod]:
    """The existing pods to show. Without a selection: the pod that failed first if all have failed,
    else the newest of the first node."""
    begun = [pod for pod in found if pod.started]
    if wish.node or wish.index:
        named = [pod for pod in begun if wish.names(pod)]
        return named if wish.node or wish.everything else named[-1:]
    nodes = [pod for pod in begun if pod.index != MASTER]
    if wish.several:
        return nodes
    if not any(pod.lives or pod.phase == "Succeeded" for pod in nodes):
        failed = [pod for pod in nodes if pod.has_failed]
        blamed = {pod.blames.partition(".")[0] for pod in failed}
        # finish times have whole seconds and are often equal: the pods' last words are more exact
        failed.sort(key=lambda pod: (pod.host not in blamed, pod.ended))
        if failed:
            return failed[:1]
    first = [pod for pod in nodes if pod.index == nodes[0].index]
    return first[-1:]


async def show(api: KubeApi, job: ClusterJob, wish: LogWish, shown: Shown) -> bool:
    """Pass existing lines to `shown`; with `follow` also new ones, until the job is over or
    stopped. Returns False if no pod has started."""
    found = await pods(api, job)
    there = chosen(found, wish)
    if not wish.follow or job.is_over:
        for pod in there:
            async for _, line in _lines(api, job, pod, wish):
                shown(pod, line)
        return bool(there)
    old = {pod.uid for pod in found if pod.started}
    try:
        return await _Followed(api, job, wish, shown, old).run(there)
    except ExceptionGroup as several:  # such as NotDone
        raise several.exceptions[0] from None


async def _lines(
    api: KubeApi, job: ClusterJob, pod: SeenPod, wish: LogWish, **more: Any
) -> AsyncIterator[tuple[str, str]]:
    """The wanted lines, each with its timestamp."""
    asked: dict[str, Any] = {"container": pod.container, "timestamps": True}
    if wish.since:
        asked["since"] = wish.since
    first = 0  # first line to show
    if wish.tail and wish.grep is None and wish.rank < 0:
        asked["tail_lines"] = wish.tail
    elif wish.tail:  # of the matching lines, which the server cannot count
        newest: deque[int] = deque(maxlen=wish.tail)
        at = 0
        async for line in api.log(pod.name, job.namespace, **asked):
            at += 1
            if wish.takes(_stamped(line)[1]):
                newest.append(at)
        first = newest[0] if len(newest) == wish.tail else 0
    at = 0
    async for line in api.log(pod.name, job.namespace, **asked, **more):
        at += 1
        stamp, text = _stamped(line)
        if at >= first and wish.takes(text):
            yield stamp, text


def _stamped(line: str) -> tuple[str, str]:
    """The timestamp without its Z, so that fractions of different lengths sort correctly, and the
    text."""
    stamp, _, text = line.partition(" ")
    return (stamp.rstrip("Z"), text) if re.match(r"\d{4}-\d\d-\d\dT", stamp) else ("", line)


class _Followed:
    """Follows pods, one task each. `old`: pods that had started before."""

    def __init__(
        self, api: KubeApi, job: ClusterJob, wish: LogWish, shown: Shown, old: set[str]
    ) -> None:
        self._api, self._job, self._wish, self._shown = api, job, wish, shown
        self._seen = old  # uids, because a replacement pod may have the same name
        self._streams: list[asyncio.Task[None]] = []

    async def run(self, there: Iterable[SeenPod]) -> bool:
        """Follow `there` and later pods until the job is over or stopped. Returns whether there was
        a pod."""
        async with asyncio.TaskGroup() as group:
            self._follow(there, self._wish, group)
            watch = group.create_task(self._watch(group))
            await self._until_over()
            watch.cancel()
            self._take(await pods(self._api, self._job), group)
            if self._streams:
                _, left = await asyncio.wait(self._streams, timeout=LAST_WORDS)
                for one in left:
                    one.cancel()
        return bool(self._streams)

    async def _watch(self, group: asyncio.TaskGroup) -> None:
        job = self._job
        async for word, pod in self._api.changes(PODS, job.namespace, labels=job.pods):
            if word != "DELETED":
                self._take(in_order([pod], self._job), group)

    def _take(self, found: Iterable[SeenPod], group: asyncio.TaskGroup) -> None:
        """Follow the selected pods that are new, from their first line."""
        wish = self._wish
        if not (wish.node or wish.index or wish.several):
            wish = replace(wish, index="0")
        new = [
            pod
            for pod in found
            if pod.started and pod.uid not in self._seen and wish.names(pod)
            if wish.node or pod.index != MASTER
        ]
        self._seen |= {pod.uid for pod in new}
        self._follow(new, replace(self._wish, tail=0), group)

    def _follow(self, these: Iterable[SeenPod], wish: LogWish, group: asyncio.TaskGroup) -> None:
        for pod in these:
            if sum(not one.done() for one in self._streams) < MOST_STREAMS:
                self._streams.append(group.create_task(self._stream(pod, wish)))

    async def _stream(self, pod: SeenPod, wish: LogWish) -> None:
        """Follow a pod until its container ends; a stream that breaks earlier is restarted."""
        clock, last, breaks = asyncio.get_running_loop().time, "", 0
        while breaks <= MOST_BREAKS:
            before, began = last, clock()
            with contextlib.suppress(NotDone):
                async for stamp, line in _lines(self._api, self._job, pod, wish, follow=True):
                    if not before or stamp > before:
                        last = max(last, stamp)
                        self._shown(pod, line)
            with contextlib.suppress(NotDone):
                body = await self._api.get(PODS, pod.name, self._job.namespace)
                now = seen_pod(body) if body is not None else None
                if now is None or now.uid != pod.uid or now.code is not None or not now.lives:
                    return
            breaks = 1 if clock() - began > LASTING else breaks + 1
            wish = replace(wish, tail=0)
            await asyncio.sleep(breaks)

    async def _until_over(self) -> None:
        async for word, job in find_again(self._api, self._job):
            if word == "DELETED" or job.is_over or job.state == "stopped":
                return
