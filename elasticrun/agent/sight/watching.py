"""Samples this node's ranks every PULSE_EVERY seconds, and in full when the master asks.

A sample queries each rank's answering thread and reads /proc. The results go to the master as
Quiet, Inspected and Stacks. This module makes no decision and does not touch the ranks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.logs.last_lines import LIMIT
from elasticrun.agent.runtime import Once, Tasks, in_thread
from elasticrun.agent.sight import dump, samples
from elasticrun.agent.sight.activity import Activities, Activity
from elasticrun.agent.sight.asking import RankQueries
from elasticrun.agent.sight.pulse import PULSE_EVERY, QuietTracker, RankBeat
from elasticrun.agent.workers.progress import Progress
from elasticrun.agent.workers.ranks import Ranks
from elasticrun.host import accelerators
from elasticrun.host.accelerators import Load
from elasticrun.host.log import logger
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import messages as m

PULSE_LIMIT: Final = 1.0
"""Seconds for the answers to a pulse."""

SAMPLE_LIMIT: Final = 2.0
"""Seconds for full answers; a rank that is silent this long does not get the interpreter lock."""

DEVICES_LIMIT: Final = 1.5
"""Seconds for querying the load of devices; a slower driver is ignored."""

OUTSIDE_LIMIT: Final = 4.0
"""Seconds for reading the stacks of silent ranks, in total."""

WRITE_LIMIT: Final = 2.0
"""Seconds for writing the dump to files. The sum of these limits is less than the master's
timeout."""

MAX_SAMPLES: Final = 4
"""Maximum number of concurrent full samples, and of reads of /proc; the master asks for one sample
at a time."""


@dataclass(slots=True)
class _WatchedRound:
    """The ranks of one round."""

    start: m.Start
    quiet: QuietTracker
    active: bool = True  # False while its ranks are being stopped
    sampled_at: float = 0.0
    seen: Mapping[int, Activity] = field(default_factory=dict)  # by pid, from the last sample
    beats: dict[int, RankBeat] = field(default_factory=dict)  # by local rank, without groups
    acted: dict[int, float] = field(default_factory=dict)  # time of its last work, by local rank


class LocalSight:
    """Watches the ranks of this node; see the module's docstring."""

    def __init__(self, node: NodeContext, ranks: Ranks, progress: Progress) -> None:
        self._node = node
        self._ranks = ranks
        self._progress = progress
        self._queries = RankQueries()
        self._activities = Activities()
        self._watched: _WatchedRound | None = None
        self.places: Mapping[int, str] = {}
        """The address at which each local rank of this round answers; empty if they are not
        queried."""
        self._tasks = Tasks(node.fatal)
        self._once = Once()
        self._under_way: set[object] = set()  # threads that have not returned

    # ------------------------------------------------------------ a round of the ranks

    def round_began(self, start: m.Start) -> None:
        self.close()
        self.places = {}
        nproc, watch = self._node.launch.nproc_per_node, self._node.launch.spec.watch
        if watch.on_hang == "off":
            return
        now = asyncio.get_running_loop().time()
        watched = _WatchedRound(start, QuietTracker(start.round, range(nproc), now))
        self._watched = watched
        self.places = self._queries.start(nproc, self._ranks.kept_monitors)
        self._tasks.start(self._watch(watched), "watching the ranks", on_failure=logger.warning)

    def next_place(self, local_rank: int) -> str:
        """The address of this rank in the next round; "" if ranks are not queried."""
        is_off = self._node.launch.spec.watch.on_hang == "off"
        return "" if is_off else self._queries.next_place(local_rank)

    def ranks_stopping(self) -> None:
        """Stop reports, because ranks that are being stopped make no progress."""
        if self._watched is not None:
            self._watched.active = False

    def ranks_gone(self, *, done: bool) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. May be called again."""
        self._watched = None
        self._tasks.close()
        self._queries.stop()

    def resend(self) -> None:
        """Send the state to the master again, after a reconnect."""
        if self._watched is not None:
            self._watched.quiet.mark_unsent()
            self._report(self._watched)

    def obey(self, order: m.Inspect) -> None:
        """Sample every rank in full and report. No-op if the order is for another round, or if too
        many samples are in progress."""
        watched = self._watched
        if watched is None or order.round != watched.start.round or len(self._tasks) > MAX_SAMPLES:
            return
        self._tasks.start(
            self._inspect(watched, order), "a sample of the ranks", on_failure=logger.warning
        )

    # ------------------------------------------------------------ the pulse

    async def _watch(self, watched: _WatchedRound) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._watched is watched:
            due = max(due + PULSE_EVERY, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                await self._beat(watched)
                self._report(watched)
            except Exception as error:  # ending the watch would hide hangs
                self._once.log(f"a sample of the ranks failed: {error!r}", kind="beat")

    async def _beat(self, watched: _WatchedRound) -> None:
        answers = await self._queries.ask(self._ranks.forked, PULSE_LIMIT)
        await self._sample(watched)
        beats = {}
        for rank in range(self._node.launch.nproc_per_node):
            answer = answers.get(rank)
            step, _ = self._progress.seen(rank)
            beat = watched.beats.get(rank, RankBeat())
            groups = answer.groups if answer is not None else None
            beats[rank] = replace(beat, groups=groups, step=step)
        watched.quiet.beat(beats, asyncio.get_running_loop().time())

    async def _sample(
        self, watched: _WatchedRound, *, measure: bool = True
    ) -> Mapping[int, Activity]:
        """Activity by local rank, as the kernel reports it now; empty if /proc does not answer.
        With `measure`, also compute the rates since the last such sample."""
        pids, this = dict(self._ranks.pids), object()
        if len(self._under_way) > MAX_SAMPLES:  # threads hang in /proc
            return {}

        def work() -> dict[int, Activity]:
            try:
                return self._activities.sample(pids.values())
            finally:
                self._under_way.discard(this)

        self._under_way.add(this)
        try:
            seen = await in_thread(work, limit=SAMPLE_LIMIT, name="activity")
        except NoThread:
            self._under_way.discard(this)
            return {}
        except TimeoutError:
            return {}
        now = asyncio.get_running_loop().time()
        if measure:
            for rank, pid in pids.items():
                before, after = watched.seen.get(pid), seen[pid]
                cpu, io = samples.rates(before, after, now - watched.sampled_at)
                did_io = before is not None and before.own != after.own
                watched.beats[rank] = beat = RankBeat(cpu=cpu, io=io, did_io=did_io)
                if before is None or beat.is_working:
                    watched.acted[rank] = now
            watched.seen, watched.sampled_at = seen, now
        return {rank: seen[pid] for rank, pid in pids.items()}

    def _report(self, watched: _WatchedRound) -> None:
        news = watched.quiet.news(asyncio.get_running_loop().time())
        if news is not None and news.seconds > 0.0:
            self._progress.flush()
        if news is not None and watched.active and self._node.link.offer(news):
            watched.quiet.mark_sent()

    # ------------------------------------------------------------ a full sample

    async def _inspect(self, watched: _WatchedRound, order: m.Inspect) -> None:
        forked = self._ranks.forked
        answers, devices = await asyncio.gather(
            self._queries.ask(forked, SAMPLE_LIMIT, full=True, stacks=True), self._devices()
        )
        seen = await self._sample(watched, measure=False)
        now = asyncio.get_running_loop().time()
        found = []
        for rank, pid in sorted(self._ranks.pids.items()):
            row = samples.RankSample(
                rank=watched.start.first_rank + rank,
                pid=pid,
                forked=rank in forked,
                queried=rank in answers,
                answer=answers.get(rank),
                activity=seen.get(rank, Activity(m.Being.SLEEPS)),
                beat=watched.beats.get(rank, RankBeat()),
                quiet=watched.quiet.rank_seconds(rank, now),
                idle=max(0.001, now - watched.acted[rank]) if rank in watched.acted else 0.0,
                progress=self._progress.seen(rank),
                quiet_phase=self._progress.quiet_phase(rank),
                device=devices[rank] if rank < len(devices) else samples.UNKNOWN_LOAD,
            )
            found.append(row)
        if order.stacks:
            found = await self._from_outside(found)
        lines = await self._lines(watched.start.first_rank) if order.lines else ()
        for report in samples.reports(order.round, order.number, found, lines):
            self._node.link.send(report)
        if order.stacks:
            folder = await self._write_dump(order.dump, found) if order.dump else ""
            self._node.link.send(samples.stacks(order.round, order.number, found, folder))

    async def _devices(self) -> tuple[Load, ...]:
        """The load of this node's devices; assumes that local rank r computes on the r-th visible
        device, as nearly all scripts do."""
        word = self._node.launch.accelerator
        try:
            return await in_thread(
                lambda: accelerators.loads(word, os.environ, DEVICES_LIMIT),
                limit=2 * DEVICES_LIMIT,
                name="devices",
            )
        except TimeoutError:
            return ()

    async def _from_outside(self, found: list[samples.RankSample]) -> list[samples.RankSample]:
        """Add the stacks that are read from outside the ranks (`samples.from_outside`)."""
        try:
            return await in_thread(
                lambda: samples.from_outside(found, OUTSIDE_LIMIT), limit=OUTSIDE_LIMIT + 1.0
            )
        except TimeoutError:
            return found

    async def _lines(self, first_rank: int) -> tuple[m.StackGroup, ...]:
        """The last output of the ranks; empty if the disk does not answer."""

        def work() -> tuple[m.StackGroup, ...]:
            texts = self._ranks.last_lines()
            return samples.last_output({first_rank + rank: text for rank, text in texts.items()})

        try:
            return await in_thread(work, limit=LIMIT, name="last-lines")
        except TimeoutError:
            return ()

    async def _write_dump(self, number: int, found: list[samples.RankSample]) -> str:
        """Write the dump and return its folder; "" if the disk does not answer, or without a log
        folder and a run folder here."""
        folder, job_id = self._ranks.log_folder, self._node.identity.job_id
        master = self._node.link.dialled

        def work() -> str:
            place = folder or dump.run_logs(os.environ, job_id, master)
            return samples.write_dump(place, number, found)

        try:
            return await in_thread(work, limit=WRITE_LIMIT, name="dump")
        except TimeoutError:
            return ""
