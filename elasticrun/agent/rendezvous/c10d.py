"""The rendezvous by endpoint: who starts the master, and at which address (decision 021).

standalone  this agent starts it on loopback, on a free port
elastic     the agent that can bind the address that the endpoint's name resolves to starts it; if
            the address is another host's, or taken, another agent starts it
static      node rank 0 starts it behind a proxy on the port that the user named (decision 008)
external    somebody else has started it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticrun.agent.boot import Reaper
from elasticrun.agent.context import NodeContext
from elasticrun.agent.link import port_proxy_child
from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.master_process import (
    LEAVE_LIMIT,
    RESTARTS,
    MasterHost,
    MasterProcess,
    new_record,
    shielded,
    sweep_records,
)
from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.host import user_folder
from elasticrun.host.log import logger
from elasticrun.wire import debugger
from elasticrun.wire.messages import End, Refused, Start
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    pass

from elasticrun.agent.rendezvous.place import (
    ANYWHERE,
    LOOPBACK,
    HostError,
    NotYet,
    SettledPlace,
    listen_proxy,
    resolve_again,
    settle,
)

HEIR_AFTER: Final = 3.0
"""Seconds without a master after which an agent of its host starts one. The agent that started the
old one, if it runs, does so long before."""


class PortProxy:
    """The port proxy of a static job, as a process that its agent keeps running (decision 008). The
    agent owns the listening socket."""

    def __init__(self, listener: socket.socket, reaper: Reaper) -> None:
        self._listener = listener
        self._reaper = reaper
        self._said: dict[str, str | None] = {}
        self._closing = False
        self._deaths = 0
        self._control: socket.socket | None = None
        self._gone = asyncio.Event()
        self._start()

    def say(self, target: str, where: Endpoint | None) -> None:
        """Set the address of the `master` or the `store` behind the proxy."""
        self._said[target] = None if where is None else str(where)
        self._tell({target: self._said[target]})

    def round_began(self, start: Start) -> None:
        """Forward the port to this round's store."""
        self.say("store", start.store)

    def ranks_stopping(self) -> None:
        """No-op: ranks may still need their store."""

    def ranks_gone(self, *, done: bool) -> None:
        """Between two rounds there is no store."""
        if not done:
            self.say("store", None)

    def close(self) -> None:
        """Stop restarting it. `end` releases the port, after the master has been closed."""
        self._closing = True

    async def end(self, limit: float) -> None:
        """Release the port, and wait briefly for the proxy to exit."""
        self._closing = True
        self._listener.close()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit)

    def _start(self) -> None:
        if self._closing:
            return
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        try:
            with theirs, shielded(), debugger.escaped():
                process = subprocess.Popen(
                    port_proxy_child.command(*fds),
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._again(f"the port proxy of the master port cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        self._control = ours
        self._reaper.watch(process, self._ended)
        self._reaper.spared.add(process.pid)
        self._tell(self._said)

    def _tell(self, what: dict[str, str | None]) -> None:
        if self._control is not None and what:
            with contextlib.suppress(OSError):  # it has exited; its successor gets everything
                self._control.send(json.dumps(what).encode() + b"\n")

    def _ended(self, code: int) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._gone.set()
        if self._closing:
            return
        self._again(f"the port proxy of the master port ended ({code})")

    def _again(self, sentence: str) -> None:
        logger.warning("%s; another one is started", sentence)
        wait = RESTARTS[min(self._deaths, len(RESTARTS) - 1)]
        self._deaths += 1
        asyncio.get_running_loop().call_later(wait, self._start)


class C10dRendezvous:
    """The rendezvous by an endpoint that every node is given.

    An agent that finds its own host's endpoint taken connects to the master there. It may have to
    take over: that master may exit and not be restarted, because its agent has exited, or it may be
    no master at all (another connection briefly holds the port). So this agent tries to bind the
    endpoint whenever no master has answered for HEIR_AFTER seconds."""

    def __init__(self, node: NodeContext, met: Callable[[], None]) -> None:
        self._node = node
        self._met = met
        self._launch, self._where = node.launch, node.place
        self._tasks = Tasks(node.fatal)
        self._master: MasterHost | None = None
        self._proxy: PortProxy | None = None
        self._heir: asyncio.Task[None] | None = None
        self._over = False
        self.dial = Endpoint(self._where.host, self._where.port)
        """The address that the link dials."""
        self.address = ""
        """The address at which other nodes reach a store or a master here; "" until settled."""

    async def settle(self, early: MasterProcess | None) -> None:
        """Determine the master's address, and start the processes that this agent hosts. `early` is
        a master that already runs. HostError with a sentence if the endpoint can never work."""
        place = await self._place()
        where = self._where
        self.address = offered_address(
            self._launch.local_addr,
            LOOPBACK if self._launch.spec.max_nodes == 1 else where.host,
            place.address,
        )
        self.dial = place.dial
        if place.proxy is not None:
            if place.proxy.host in ANYWHERE and self._launch.spec.max_nodes > 1:
                logger.warning(
                    "this node has rank 0 and starts the job master, but %s is no address of this "
                    "host; give every node a --node-rank of its own, or all --rdzv-backend=c10d",
                    where.host,
                )
            self._proxy = PortProxy(listen_proxy(place.proxy), self._node.reaper)
            self._node.parts.append(self._proxy)
        if place.bind is None:
            self._met()
            # No master has answered yet, so none known to us has ended the job.
            self._look_after(may_succeed=True)
            return
        await self._host(place.bind, early)

    async def _host(self, bind: Endpoint, early: MasterProcess | None = None) -> None:
        sweep_records()
        record = None if early is not None else await in_thread(new_record, name="record")
        self._master = MasterHost(self._node, self, bind, record)
        self._master.start(early)

    def heard(self, event: AgentEvent) -> None:
        """Handle an event of the link."""
        if isinstance(event, LinkLost):
            self._look_after(may_succeed=False)
        elif isinstance(event, LinkBack):
            self._forget_heir()
        elif isinstance(event, Ordered) and isinstance(event.order, End | Refused):
            self._over = True

    def _look_after(self, *, may_succeed: bool) -> None:
        where = self._where
        mine = where.kind == "elastic" and where.is_host is None
        if mine and self._master is None and self._heir is None and not self._over:
            work = self._succeed(may_succeed)
            self._heir = self._tasks.start(work, "looking after the job master")

    async def _succeed(self, may_succeed: bool) -> None:
        """Host the master once its address on this host is free and nobody else has taken it.

        A master that exited by itself had seen the end of the job, which must not start again. So
        this takes a free address only if the previous master was killed, or with `may_succeed`: no
        master has served us."""
        while True:
            # Check before sleeping, too: listing this host's masters removes the evidence.
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
            folder = user_folder.user_folder(os.environ)
            return user_folder.was_killed(folder, self._node.identity.job_id, self.dial.port)
        except (OSError, RuntimeError):  # RuntimeError: no home directory
            return False

    def _free_place(self) -> Endpoint | None:
        """The endpoint, if it is this host's and nobody listens there."""
        try:
            return settle(self._launch, self._where).bind
        except (NotYet, HostError):
            return None

    def _forget_heir(self) -> None:
        if self._heir is not None:
            self._heir.cancel()
            self._heir = None

    async def close(self, *, job_over: bool) -> None:
        """Release the master and the port."""
        self._over = True
        self._forget_heir()
        if self._master is not None:
            await self._master.close(job_over=job_over)
        if self._proxy is not None:
            await self._proxy.end(LEAVE_LIMIT)

    async def _place(self) -> SettledPlace:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._launch.spec.join_timeout
        tries = 0
        while True:
            try:
                return await in_thread(lambda: settle(self._launch, self._where), name="resolve")
            except NotYet as error:
                if loop.time() >= end:
                    limit = self._launch.spec.join_timeout
                    raise HostError(f"{error}, for {limit:g} s") from None
                tries += 1
                if tries == 1:
                    logger.warning("%s; trying again until it does", error)
            # No event announces a new name. Jittered, so that a job's pods do not ask at the same
            # time.
            wait = resolve_again(tries) * random.uniform(0.75, 1.25)
            await asyncio.sleep(min(wait, max(0.0, end - loop.time())))

    # ------------------------------------------------------------ callbacks of the hosted master

    def master_serves(self, endpoint: Endpoint) -> None:
        self.dial = endpoint
        if self._proxy is not None:
            self._proxy.say("master", endpoint)
        self._met()

    def master_taken(self, sentence: str) -> None:
        if self._where.kind == "elastic" and self._where.is_host is None:
            # Another agent of this host was faster: its master is the job's.
            logger.info("%s; the job master is looked for there", sentence)
            self._master = None
            self._met()
        else:
            self._node.fatal(sentence)
