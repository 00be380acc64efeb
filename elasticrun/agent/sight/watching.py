"""This node's ranks, looked at every PULSE_EVERY seconds, and in full where the master asks.

A look asks each rank's own thread and reads what the kernel knows of it. What comes of it goes to
the master as Quiet, Inspected and Stacks; nothing is decided here and no rank is touched.
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
from elasticrun.agent.sight import dump, looked
from elasticrun.agent.sight.activity import Activities, Activity
from elasticrun.agent.sight.asking import Asking
from elasticrun.agent.sight.pulse import PULSE_EVERY, LocalQuiet, RankBeat
from elasticrun.agent.workers.progress import Progress
from elasticrun.agent.workers.ranks import Ranks
from elasticrun.host import accelerators
from elasticrun.host.accelerators import Load
from elasticrun.host.log import logger
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import messages as m

PULSE_LIMIT: Final = 1.0
"""Seconds for the answer to a pulse."""

LOOK_LIMIT: Final = 2.0
"""Seconds for a full answer; who is silent for so long does not get at its interpreter."""

DEVICES_LIMIT: Final = 1.5
"""Seconds for asking how busy the devices are; a driver that takes longer is not waited for."""

OUTSIDE_LIMIT: Final = 4.0
"""Seconds for reading the stacks of ranks that are silent, in all."""

WRITE_LIMIT: Final = 2.0
"""Seconds for writing them down: together they end before the master waits no more."""

MAX_LOOKS: Final = 4
"""Full looks under way at a time; a master asks for one after the other. Of looks at /proc too."""


@dataclass(slots=True)
class _Watched:
    """One life of the ranks."""

    start: m.Start
    quiet: LocalQuiet
    tells: bool = True  # its ranks are not being stopped
    looked: float = 0.0
    seen: Mapping[int, Activity] = field(default_factory=dict)  # by pid, at the last look
    beats: dict[int, RankBeat] = field(default_factory=dict)  # by local rank, without its groups
    acted: dict[int, float] = field(default_factory=dict)  # when it did anything, by local rank


class LocalSight:
    """See the module's head."""

    def __init__(self, node: NodeContext, ranks: Ranks, progress: Progress) -> None:
        self._node = node
        self._ranks = ranks
        self._progress = progress
        self._asking = Asking()
        self._activities = Activities()
        self._life: _Watched | None = None
        self.places: Mapping[int, str] = {}
        """Where each local rank of the present life is to answer, as far as they are to."""
        self._tasks = Tasks(node.fatal)
        self._told = Once()
        self._under_way: set[object] = set()  # looks that threads have not come back from

    # ------------------------------------------------------------ a life of the ranks

    def round_began(self, start: m.Start) -> None:
        self.close()
        self.places = {}
        nproc, spec = self._node.config.nproc_per_node, self._node.config.spec
        if spec.watch.on_hang == "off":
            return
        now = asyncio.get_running_loop().time()
        life = _Watched(start, LocalQuiet(start.round, range(nproc), now))
        self._life = life
        self.places = self._asking.begin(nproc)
        self._tasks.start(self._watch(life), "watching the ranks", tell=logger.warning)

    def ranks_stopping(self) -> None:
        """That they do not get on is no news."""
        if self._life is not None:
            self._life.tells = False

    def ranks_gone(self, *, done: bool) -> None:
        self.close()

    def close(self) -> None:
        """Look no more. Harmless where that is so already."""
        self._life = None
        self._tasks.close()
        self._asking.end()

    def again(self) -> None:
        """The link is back: the master is told anew."""
        if self._life is not None:
            self._life.quiet.again()
            self._tell(self._life)

    def obey(self, order: m.Inspect) -> None:
        """Look at every rank, and report; nothing if the order is of another round."""
        life = self._life
        if life is None or order.round != life.start.round or len(self._tasks) > MAX_LOOKS:
            return
        self._tasks.start(self._inspect(life, order), "a look at the ranks", tell=logger.warning)

    # ------------------------------------------------------------ the pulse

    async def _watch(self, life: _Watched) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._life is life:
            due = max(due + PULSE_EVERY, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                await self._beat(life)
                self._tell(life)
            except Exception as error:  # one beat; a node that is never quiet would hide every hang
                self._told.tell(f"a look at the ranks failed: {error!r}", kind="beat")

    async def _beat(self, life: _Watched) -> None:
        answers = await self._asking.ask(self._ranks.forked, PULSE_LIMIT)
        await self._look(life)
        beats = {}
        for rank in range(self._node.config.nproc_per_node):
            said = answers.get(rank)
            step, _ = self._progress.seen(rank)
            beat = life.beats.get(rank, RankBeat())
            groups = said.groups if said is not None else None
            beats[rank] = replace(beat, groups=groups, step=step)
        life.quiet.beat(beats, asyncio.get_running_loop().time())

    async def _look(self, life: _Watched, *, measure: bool = True) -> Mapping[int, Activity]:
        """What the kernel says now, by local rank; rates since the last look are kept."""
        pids, this = dict(self._ranks.pids), object()
        if len(self._under_way) > MAX_LOOKS:  # /proc does not answer, and threads wait for it
            return {}

        def work() -> dict[int, Activity]:
            try:
                return self._activities.look(pids.values())
            finally:
                self._under_way.discard(this)

        self._under_way.add(this)
        try:
            seen = await in_thread(work, limit=LOOK_LIMIT, name="activity")
        except NoThread:
            self._under_way.discard(this)
            return {}
        except TimeoutError:
            return {}
        now = asyncio.get_running_loop().time()
        if measure:
            for rank, pid in pids.items():
                before, after = life.seen.get(pid), seen[pid]
                cpu, io = looked.rates(before, after, now - life.looked)
                acts = before is not None and before.own != after.own
                life.beats[rank] = beat = RankBeat(cpu=cpu, io=io, acts=acts)
                if before is None or beat.works:
                    life.acted[rank] = now
            life.seen, life.looked = seen, now
        return {rank: seen[pid] for rank, pid in pids.items()}

    def _tell(self, life: _Watched) -> None:
        news = life.quiet.news(asyncio.get_running_loop().time())
        if news is not None and news.seconds > 0.0:
            self._progress.last_words()
        if news is not None and life.tells and self._node.link.offer(news):
            life.quiet.told()

    # ------------------------------------------------------------ a full look

    async def _inspect(self, life: _Watched, order: m.Inspect) -> None:
        forked = self._ranks.forked
        answers, devices = await asyncio.gather(
            self._asking.ask(forked, LOOK_LIMIT, full=True, stacks=True), self._devices()
        )
        seen = await self._look(life, measure=False)
        now = asyncio.get_running_loop().time()
        found = []
        for rank, pid in sorted(self._ranks.pids.items()):
            row = looked.RankLook(
                rank=life.start.first_rank + rank,
                pid=pid,
                forked=rank in forked,
                asked=rank in answers,
                said=answers.get(rank),
                activity=seen.get(rank, Activity(m.Being.SLEEPS)),
                beat=life.beats.get(rank, RankBeat()),
                quiet=life.quiet.rank_seconds(rank, now),
                idle=max(0.001, now - life.acted[rank]) if rank in life.acted else 0.0,
                progress=self._progress.seen(rank),
                word=self._progress.word(rank),
                device=devices[rank] if rank < len(devices) else looked.UNKNOWN_LOAD,
            )
            found.append(row)
        if order.stacks:
            found = await self._from_outside(found)
        lines = await self._lines(life.start.first_rank) if order.lines else ()
        for report in looked.reports(order.round, order.number, found, lines):
            self._node.link.say(report)
        if order.stacks:
            folder = await self._write_down(order.dump, found) if order.dump else ""
            self._node.link.say(looked.stacks(order.round, order.number, found, folder))

    async def _devices(self) -> tuple[Load, ...]:
        """How busy the devices of this node are; local rank r is taken to compute on the r-th that
        it sees, as nearly all scripts have it."""
        word = self._node.config.accelerator
        try:
            return await in_thread(
                lambda: accelerators.loads(word, os.environ, DEVICES_LIMIT),
                limit=2 * DEVICES_LIMIT,
                name="devices",
            )
        except TimeoutError:
            return ()

    async def _from_outside(self, found: list[looked.RankLook]) -> list[looked.RankLook]:
        """With what other programs can read of ranks that did not answer."""
        try:
            return await in_thread(
                lambda: looked.from_outside(found, OUTSIDE_LIMIT), limit=OUTSIDE_LIMIT + 1.0
            )
        except TimeoutError:
            return found

    async def _lines(self, first_rank: int) -> tuple[m.StackGroup, ...]:
        """What the ranks have written last; nothing where the disk does not answer."""

        def work() -> tuple[m.StackGroup, ...]:
            texts = self._ranks.last_lines()
            return looked.said({first_rank + rank: text for rank, text in texts.items()})

        try:
            return await in_thread(work, limit=LIMIT, name="last-lines")
        except TimeoutError:
            return ()

    async def _write_down(self, number: int, found: list[looked.RankLook]) -> str:
        """The folder; "" where the disk does not answer, or there is none for logs and no run
        folder here."""
        folder, job_id = self._ranks.log_folder, self._node.config.spec.job_id
        master = self._node.link.dialled

        def work() -> str:
            place = folder or dump.run_logs(os.environ, job_id, master)
            return looked.write_down(place, number, found)

        try:
            return await in_thread(work, limit=WRITE_LIMIT, name="dump")
        except TimeoutError:
            return ""
