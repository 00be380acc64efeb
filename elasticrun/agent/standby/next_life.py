"""The next life of each local rank, started ahead of time (`--standby`).

While a round runs, the agent foresees the orders with which its ranks would be started after a
failure: the same places, the restart count plus one, the store that is prepared. The fork server
starts a process for each and compares the orders. Nothing depends on a standby: a wrong guess costs
its CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from elasticrun.agent.context import NodeContext
from elasticrun.agent.health.reports import HealthReporter
from elasticrun.agent.runtime import Tasks, Timer, in_thread
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.agent.workers.stores import Stores, next_store
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.memory import available_memory
from elasticrun.wire import env, spawning
from elasticrun.wire.messages import Start
from elasticrun.wire.spawning import StandbyState
from elasticrun.wire.types import RoundName

if TYPE_CHECKING:
    from elasticrun.agent.sight.watching import LocalSight
    from elasticrun.agent.snapshots.snapshots import LocalSnapshots
    from elasticrun.agent.workers.progress import Progress
    from elasticrun.agent.workers.ranks import Ranks

NEEDED: Final = 2 * 512 * 1024 * 1024
"""Bytes of available memory for each standby: twice the memory of large imports."""

MAX_WHY: Final = 200
"""Maximum characters of why there is no standby; it may contain a path."""

WHY_NONE: Final = {
    StandbyState.REFUSED: "processes cannot be traced here",
    StandbyState.EXECED: "the ranks are not forked",
    StandbyState.DIFFERENT: "the next ranks differ from those that were expected",
    StandbyState.CHANGED: "a file that it had read has changed",
    StandbyState.MEMORY: "it needs too much memory",
    StandbyState.READS: "it reads too many files",
    StandbyState.LIMIT: "the deadline of a wait cannot be moved",
    StandbyState.ENDED: "it has exited",
    StandbyState.NO_ANSWER: "its tracer has exited, or does not answer",
}
"""Why a standby is lost, by its last state."""


class NextLife:
    """Starts standbys some time after the ranks; a part of the node."""

    def __init__(
        self,
        node: NodeContext,
        spawners: Spawners,
        ranks: Ranks,
        stores: Stores,
        health: HealthReporter,
        places: tuple[Progress, LocalSnapshots, LocalSight],
    ) -> None:
        """`places`: where ranks of the next round report to, and answer."""
        self._node = node
        self._spawners = spawners
        self._ranks = ranks
        self._stores = stores
        self._health = health
        self._progress, self._snapshots, self._sight = places
        self._children: dict[Child, int] = {}
        self._ready: set[Child] = set()
        self._begin_timer = Timer()
        self._tasks = Tasks(node.fatal)
        self._why_none = ""
        self._running: Start | None = None

    # ------------------------------------------------------------ a round of the ranks

    def round_began(self, start: Start) -> None:
        """Start standbys for the round after this one, when its ranks have run for a while. Those
        of a fork server that is replaced will not be asked for."""
        self._drop([child for child in self._children if self._spawners.is_old(child)])
        self._begin_timer.cancel()
        self._running = start
        after = self._node.launch.standby
        if after < 0:
            return
        if self._spawners.is_caller:
            self._say("the ranks run a function")
            return
        if start.info.restart_count >= self._node.launch.spec.max_restarts:
            self._say("this is the last attempt that --max-restarts allows")
            return
        if not self._children:
            self._say(f"they start {after:g} s after the ranks")
        self._begin_timer.after(after, self._begin, start)

    def _begin(self, start: Start) -> None:
        self._tasks.start(self._prepare(start), "preparing standbys", on_failure=logger.debug)

    async def _prepare(self, start: Start) -> None:
        launch = self._node.launch
        store = next_store(start.store)
        if start.host_store:
            store = await self._stores.prepared(start.store)
        room, bound = await in_thread(available_memory, name="memory")
        if room < NEEDED * launch.nproc_per_node:
            self._say(f"{bound} has too little memory")
            return
        name = start.round
        info = replace(
            start.info,
            name=RoundName(name.term, name.number + 1, name.nonce),
            restart_count=start.info.restart_count + 1,
        )
        local_ranks = range(launch.nproc_per_node)
        orders = await self._ranks.foresee(
            replace(start, info=info, store=store),
            {rank: self._variables(rank) for rank in local_ranks},
            {rank: self._sight.next_place(rank) for rank in local_ranks},
        )
        if not orders:
            self._say("a plug-in chooses the log files")
        if self._running is not start:
            return
        for order in orders:
            self._children[self._spawners.start(order, self)] = order.rank.local_rank
            self._why_none = ""
        self._report()

    def _variables(self, local_rank: int) -> dict[str, str]:
        snapshots = self._snapshots.place(local_rank)
        own = {env.PROGRESS: self._progress.next_place(local_rank), env.SNAPSHOTS: snapshots}
        return {name: place for name, place in own.items() if place}

    def _say(self, why: str) -> None:
        if why != self._why_none:
            self._why_none = why
            logger.debug("no standby: %s", why)
        self._report()

    def _report(self) -> None:
        """Report for `status` and `top` how many standbys are ready, and why others are not."""
        wanted, ready = self._node.launch.nproc_per_node, len(self._ready)
        if not self._children:  # without a reason: all of them have become ranks
            self._health.standby(f"none: {self._why_none}" if self._why_none else "")
            return
        idle = ", only while a core is idle" if self._node.launch.standby > 0 else ""
        imports = f"the rest do their imports{idle}" if ready < len(self._children) else ""
        why = "; ".join(filter(None, (imports, self._why_none)))
        self._health.standby(f"{ready} of {wanted} ready{why and f': {why}'}")

    def ranks_stopping(self) -> None:
        """Start no more: what is there may become the next life."""
        self._begin_timer.cancel()
        self._running = None

    def ranks_gone(self, *, done: bool) -> None:
        """Without a next life, none is needed."""
        self.ranks_stopping()
        if done:
            self._drop(list(self._children))

    def _drop(self, children: list[Child]) -> None:
        for child in children:
            child.send(spawning.DropStandby(child.key))
            self.lost(child)
            self._spawners.forget(child)

    def close(self) -> None:
        """Stop starting standbys; those that are left end with their fork server."""
        self._begin_timer.cancel()
        self._tasks.close()

    # ------------------------------------------------------------ reports

    def on_child_message(self, child: Child, message: spawning.FromSpawner) -> None:
        """A standby has changed its state."""
        if not isinstance(message, spawning.StandbyIs):
            return
        local_rank = self._children.get(child, -1)
        detail = f" ({message.detail})" if message.detail else ""
        logger.debug("standby of local rank %d: %s%s", local_rank, message.state, detail)
        if message.state is StandbyState.READY:
            self._ready.add(child)
        elif message.state is not StandbyState.REHEARSING:
            if message.state is not StandbyState.ACTIVE:
                self._why_none = f"{WHY_NONE[message.state]}{detail}"[:MAX_WHY]
            self.lost(child)
            self._spawners.forget(child)
        self._report()

    def lost(self, child: Child) -> None:
        """Forget a standby."""
        self._children.pop(child, None)
        self._ready.discard(child)
