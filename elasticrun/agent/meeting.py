"""Where this node meets its job: the master's place settled, hosted where it is ours, and the
address that this node offers to others."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticrun.agent import host
from elasticrun.agent.door_host import DoorHost
from elasticrun.agent.helpers import MasterHost, MasterProcess, new_record, sweep_records
from elasticrun.agent.identity import offered_address
from elasticrun.agent.meeting_base import LEAVE_LIMIT, MeetingBase, resolve_again
from elasticrun.agent.processes import Reaper
from elasticrun.agent.threads import in_thread, tell_failure
from elasticrun.config import AgentConfig
from elasticrun.core.effects import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.operator_log import StderrWriter, logger
from elasticrun.wire import published
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import End, Refused

if TYPE_CHECKING:
    from elasticrun.agent.etcd_meeting import EtcdMeeting
    from elasticrun.agent.file_meeting import FileMeeting
    from elasticrun.agent.finding import Found

HEIR_AFTER: Final = 3.0
"""Seconds without a master after which an agent of its host starts one: the agent to which it
belonged, if it lives, has done so long before."""


def meeting_of(
    config: AgentConfig,
    reaper: Reaper,
    writer: StderrWriter,
    met: Callable[[], None],
    fatal: Callable[[str], None],
    deliver: Callable[[AgentEvent], None],
    found: Found | None = None,
) -> Meeting | EtcdMeeting | FileMeeting:
    """The way in which the nodes of this job meet. `found`: see `finding`."""
    if found is not None:
        from elasticrun.agent.file_meeting import FileMeeting

        return FileMeeting(config, reaper, writer, met, fatal, found)
    if config.rendezvous.kind == "etcd":
        from elasticrun.agent.etcd_meeting import EtcdMeeting

        return EtcdMeeting(config, reaper, writer, met, fatal, deliver)
    return Meeting(config, reaper, writer, met, fatal)


class Meeting(MeetingBase):
    """By way of an endpoint that every node was given.

    An agent that found the endpoint of its own host taken attaches to the master there. Should that
    one end while nobody starts it again (the agent it belonged to is gone), or should it be no
    master at all (a connection of somebody's holds the port for a moment), this agent is the next
    that can: it tries to take the endpoint whenever no master has answered for HEIR_AFTER
    seconds."""

    def __init__(
        self,
        config: AgentConfig,
        reaper: Reaper,
        writer: StderrWriter,
        met: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        super().__init__(config, reaper, writer, met, fatal)
        self._door: DoorHost | None = None
        self._heir: asyncio.Task[None] | None = None
        self._over = False

    async def settle(self, early: MasterProcess | None) -> None:
        """Find the place, and start what is ours; `early` is a master that already runs. HostError
        with a sentence when the endpoint can never be met."""
        place = await self._place()
        where = self._config.rendezvous
        self.address = offered_address(
            self._config.local_addr,
            host.LOOPBACK if self._config.spec.max_nodes == 1 else where.host,
            place.address,
        )
        self.dial = place.dial
        if place.door is not None:
            if place.door.host in host.ANYWHERE and self._config.spec.max_nodes > 1:
                logger.warning(
                    "this node has rank 0 and starts the job master, but %s is no address of this "
                    "host; give every node a --node-rank of its own, or all --rdzv-backend=c10d",
                    where.host,
                )
            self._door = DoorHost(host.listen_door(place.door), self._reaper)
        if place.bind is None:
            self._met()
            # No master has answered us yet, so none that we know of has ended the job.
            self._look_after(may_succeed=True)
            return
        await self._host(place.bind, early)

    async def _host(self, bind: Endpoint, early: MasterProcess | None = None) -> None:
        sweep_records()
        record = None if early is not None else await in_thread(new_record, name="record")
        self._master = MasterHost(
            self._config,
            bind,
            self._reaper,
            self._writer,
            moved=self._moved,
            taken=self._taken,
            failed=self._fatal,
            record=record,
        )
        self._master.start(early)

    def overhear(self, deliver: Callable[[AgentEvent], None]) -> Callable[[AgentEvent], None]:
        """`deliver`, for what the link says; it is heard here too."""

        def both(event: AgentEvent) -> None:
            if isinstance(event, LinkLost):
                self._look_after(may_succeed=False)
            elif isinstance(event, LinkBack):
                self._forget_heir()
            elif isinstance(event, Ordered) and isinstance(event.order, End | Refused):
                self._over = True
            deliver(event)

        return both

    def _look_after(self, *, may_succeed: bool) -> None:
        where = self._config.rendezvous
        mine = where.kind == "elastic" and where.is_host is None
        if mine and self._master is None and self._heir is None and not self._over:
            self._heir = asyncio.create_task(self._succeed(may_succeed))
            tell_failure(self._heir, self._fatal, "looking after the job master")

    async def _succeed(self, may_succeed: bool) -> None:
        """Host the master, once its place on this host is free and nobody else has taken it. One
        that ended by itself had seen the end of the job, which must not begin again: so a free
        place is taken only where one was killed, or with `may_succeed`: none has served us."""
        while True:
            # At once, too: whoever lists the masters of this host removes what shows it.
            may_succeed = may_succeed or await in_thread(self._was_killed, name="resolve")
            await asyncio.sleep(HEIR_AFTER * random.uniform(1.0, 1.5))
            may_succeed = may_succeed or await in_thread(self._was_killed, name="resolve")
            bind = await in_thread(self._free_place, name="resolve") if may_succeed else None
            if bind is not None and not self._over:
                logger.warning("no job master is left at %s: this agent starts one", bind)
                self._heir = None
                await self._host(bind)
                return

    def _was_killed(self) -> bool:
        try:
            folder = published.run_folder(os.environ)
            return published.was_killed(folder, self._config.spec.job_id, self.dial.port)
        except (OSError, RuntimeError):  # RuntimeError: nobody knows our home
            return False

    def _free_place(self) -> Endpoint | None:
        """The endpoint, where it is this host's and nobody listens there."""
        try:
            return host.settle(self._config).bind
        except (host.NotYet, host.HostError):
            return None

    def _forget_heir(self) -> None:
        if self._heir is not None:
            self._heir.cancel()
            self._heir = None

    def pids(self) -> set[int]:
        """Helpers that a sweep must spare."""
        pid = self._door.pid if self._door else None
        return super().pids() | (set() if pid is None else {pid})

    def store(self, where: Endpoint | None) -> None:
        """The store behind the door; None between rounds."""
        if self._door is not None:
            self._door.say("store", where)

    async def close(self, *, job_over: bool) -> None:
        """Let the master go and shut the door."""
        self._over = True
        self._forget_heir()
        await self._let_master_go(job_over=job_over)
        if self._door is not None:
            await self._door.close(LEAVE_LIMIT)

    async def _place(self) -> host.Place:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.spec.join_timeout
        tries = 0
        while True:
            try:
                return await in_thread(lambda: host.settle(self._config), name="resolve")
            except host.NotYet as error:
                if loop.time() >= end:
                    limit = self._config.spec.join_timeout
                    raise host.HostError(f"{error}, for {limit:g} s") from None
                tries += 1
                if tries == 1:
                    logger.warning("%s; trying again until it does", error)
            # No event tells of a new name. Not all pods of a job ask in the same moment.
            wait = resolve_again(tries) * random.uniform(0.75, 1.25)
            await asyncio.sleep(min(wait, max(0.0, end - loop.time())))

    def _moved(self, endpoint: Endpoint) -> None:
        self.dial = endpoint
        if self._door is not None:
            self._door.say("master", endpoint)
        self._met()

    def _taken(self, sentence: str) -> None:
        if self._config.rendezvous.kind == "elastic" and self._config.rendezvous.is_host is None:
            # Another agent of this host was faster: the master there is the job's.
            logger.info("%s; the job master is looked for there", sentence)
            self._master = None
            self._met()
        else:
            self._fatal(sentence)
