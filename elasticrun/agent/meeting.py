"""Where this node meets its job: the master's place settled, hosted where it is ours, and the
address that this node offers to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elasticrun.agent import host
from elasticrun.agent.helpers import DoorHost, MasterHost, MasterProcess
from elasticrun.agent.identity import offered_address
from elasticrun.agent.processes import Reaper
from elasticrun.agent.threads import in_thread
from elasticrun.config import AgentConfig
from elasticrun.operator_log import StderrWriter, logger
from elasticrun.wire.ids import Endpoint

RESOLVE_AGAIN: Final = 1.0
"""Seconds between tries to resolve the endpoint's name: pods get theirs late."""

OVER_LIMIT: Final = 3.0
"""Seconds for a hosted master to end when the job is over: then its port is free again when the
command returns."""

LEAVE_LIMIT: Final = 1.0
"""The same when only this node leaves: the master may live on for the others."""


class Meeting:
    """`met` is called when the master's place is known and whenever one serves there anew;
    `fatal(sentence)` when it cannot be had."""

    def __init__(
        self,
        config: AgentConfig,
        reaper: Reaper,
        writer: StderrWriter,
        met: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        self._config = config
        self._reaper = reaper
        self._writer = writer
        self._met = met
        self._fatal = fatal
        self._master: MasterHost | None = None
        self._door: DoorHost | None = None
        self.dial = Endpoint(config.rendezvous.host, config.rendezvous.port)
        """What the link dials."""
        self.address = ""
        """What other nodes dial to reach a store here; "" until settled."""

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
            self._door = DoorHost(host.listen_door(place.door), self._reaper)
        if place.bind is None:
            self._met()
            return
        self._master = MasterHost(
            self._config,
            place.bind,
            self._reaper,
            self._writer,
            moved=self._moved,
            taken=self._taken,
            failed=self._fatal,
        )
        self._master.start(early)

    def pids(self) -> set[int]:
        """Helpers that a sweep must spare."""
        both = (self._master.pid if self._master else None, self._door.pid if self._door else None)
        return {pid for pid in both if pid is not None}

    def store(self, where: Endpoint | None) -> None:
        """The store behind the door; None between rounds."""
        if self._door is not None:
            self._door.say("store", where)

    async def close(self, *, job_over: bool) -> None:
        """Let the master go and shut the door."""
        if self._master is not None:
            await self._master.close(OVER_LIMIT if job_over else LEAVE_LIMIT)
        if self._door is not None:
            await self._door.close(LEAVE_LIMIT)

    async def _place(self) -> host.Place:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.spec.join_timeout
        told = False
        while True:
            try:
                return await in_thread(lambda: host.settle(self._config), name="resolve")
            except host.NotYet as error:
                if loop.time() >= end:
                    limit = self._config.spec.join_timeout
                    raise host.HostError(f"{error}, for {limit:g} s") from None
                if not told:
                    told = True
                    logger.warning("%s; trying again until it does", error)
            await asyncio.sleep(RESOLVE_AGAIN)

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
