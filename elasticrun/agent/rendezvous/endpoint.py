"""The registry by endpoint: the host that can bind the address is the master's (decision 021).

standalone  this agent starts the master on loopback, on a free port
open        this agent starts it on the first free port, and prints its address
elastic     the agent that can bind the address that the endpoint's name resolves to starts it; if
            the address is another host's, or taken, another agent starts it
static      node rank 0 starts it behind a proxy on the port that the user named (decision 008)
external    somebody else has started it
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from typing import Final

from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.rendezvous.place import (
    ANYWHERE,
    LOOPBACK,
    HostError,
    NotYet,
    SettledPlace,
    free_port,
    retry_delay,
    settle,
)
from elasticrun.agent.rendezvous.registry import VACANT, Leader, Lease, Vacant
from elasticrun.agent.runtime import in_thread
from elasticrun.config import Launch, Place
from elasticrun.host import user_folder
from elasticrun.host.log import logger
from elasticrun.wire.types import Endpoint

TAKEOVER_AFTER: Final = 3.0
"""Seconds without a master after which another agent on the master's host starts one. The agent
that started the old master restarts it long before that, if the agent still runs."""


class EndpointRegistry:
    """An endpoint that every node is given. Binding it is the lease.

    An agent that finds its own host's endpoint taken connects to the master there. It may have to
    take over: that master may exit and not be restarted, because its agent has exited, or it may be
    no master at all (another connection briefly holds the port). So this agent tries to bind the
    endpoint whenever no master has answered for TAKEOVER_AFTER seconds."""

    pushes = False

    def __init__(self, launch: Launch, where: Place, job_id: str) -> None:
        self._launch = launch
        self._where = where
        self._job_id = job_id
        # Any agent of the endpoint's host may start the master.
        self._any_agent = where.kind == "elastic" and where.is_host is None
        self._place: SettledPlace | None = None
        self._free: Endpoint | None = None  # where a master may be started
        self._holds = False
        self._why = f"the address of {where.host} is unknown"
        self.address = ""

    async def read(self, *, served: bool) -> Leader | Vacant:
        if self._place is None:
            self._place = place = await self._resolved()
            host = LOOPBACK if self._launch.spec.max_nodes == 1 else self._where.host
            self.address = offered_address(self._launch.local_addr, host, place.address)
            self._free = place.bind
            return Leader(place.dial) if place.bind is None else VACANT
        if self._holds or not self._any_agent:
            # No news will come: nobody can take a bound address, and no other agent may bind ours.
            await asyncio.get_running_loop().create_future()
        # A master that exited by itself had seen the end of the job, which must not start again. So
        # a free address is taken only if the previous master was killed, or none has served us.
        may = not served
        while True:
            # Check before sleeping, too: listing this host's masters removes the evidence.
            may = may or await in_thread(self._was_killed, name="resolve")
            await asyncio.sleep(TAKEOVER_AFTER * random.uniform(1.0, 1.5))
            may = may or await in_thread(self._was_killed, name="resolve")
            self._free = await in_thread(self._free_place, name="resolve") if may else None
            if self._free is not None:
                logger.warning("no job master at %s any longer: this agent starts one", self._free)
                return VACANT

    async def take(self) -> Lease | None:
        assert self._place is not None
        assert self._free is not None
        proxy = self._place.proxy
        if proxy is not None and proxy.host in ANYWHERE and self._launch.spec.max_nodes > 1:
            logger.warning(
                "this node has rank 0 and starts the job master, but %s is not an address of this "
                "host; give each node its --node-rank, or all nodes --rdzv-backend=c10d",
                self._where.host,
            )
        self._holds = True
        return Lease(self._free, proxy)

    async def move(self, lease: Lease, why: str) -> Leader | Vacant:
        host, port = lease.bind.host, lease.bind.port
        if self._where.kind == "open":
            logger.info("%s; trying the next free port", why)
            free = await in_thread(partial(free_port, host, port + 1), name="resolve")
            self._free = Endpoint(host, free)
            return VACANT
        if not self._any_agent:
            raise HostError(why)
        # Another agent of this host was faster: its master is the job's.
        logger.info("%s; connecting to the job master there", why)
        self._holds = False
        return Leader(lease.bind)

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        """No-op: the address becomes free when the master exits."""

    def why_no_leader(self) -> str:
        return self._why

    async def _resolved(self) -> SettledPlace:
        tries = 0
        while True:
            try:
                return await in_thread(partial(settle, self._launch, self._where), name="resolve")
            except NotYet as error:
                self._why = str(error)
                tries += 1
                if tries == 1:
                    logger.warning("%s; trying again until it does", error)
            # No event announces a new name. Jittered, so that a job's pods do not ask at the same
            # time.
            await asyncio.sleep(retry_delay(tries) * random.uniform(0.75, 1.25))

    def _was_killed(self) -> bool:
        """Whether a master of this job was killed at this port of this host."""
        assert self._place is not None
        try:
            folder = user_folder.user_folder(os.environ)
            return user_folder.was_killed(folder, self._job_id, self._place.dial.port)
        except (OSError, RuntimeError):  # RuntimeError: no home directory
            return False

    def _free_place(self) -> Endpoint | None:
        """The endpoint, if it is this host's and nobody listens there."""
        try:
            return settle(self._launch, self._where).bind
        except (NotYet, HostError):
            return None
