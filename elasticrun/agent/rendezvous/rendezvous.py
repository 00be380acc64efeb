"""The rendezvous: this node follows the job's master, or hosts it.

Who hosts it is agreed on in a registry (`registry`). While another node's master leads, this node
connects to its address. If nobody leads, this node may take the lease and then hosts the master
until the job ends or the lease is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.link.master_process import (
    LEAVE_LIMIT,
    MasterHost,
    MasterProcess,
    new_record,
    sweep_records,
)
from elasticrun.agent.link.port_proxy import PortProxy
from elasticrun.agent.rendezvous.invitation import Invitation
from elasticrun.agent.rendezvous.place import HostError, listen_proxy
from elasticrun.agent.rendezvous.registry import Ended, Leader, Lease, Registry, Seen, Vacant
from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.host.user_folder import LaunchFolder
from elasticrun.wire.messages import End, Refused
from elasticrun.wire.types import Endpoint

CLOSE_LIMIT: Final = 5.0
"""Seconds at the end for printing how to join, and for a deposed master to exit."""


class NodeRendezvous:
    """The rendezvous of one node, over one registry."""

    def __init__(
        self,
        node: NodeContext,
        on_master: Callable[[], None],
        registry: Registry,
        first: Leader | Lease | None = None,
        invitation: Invitation | None = None,
    ) -> None:
        """`on_master` is called when the master's address is known, and whenever a master starts to
        serve there. `first`: what the registry has returned already. `invitation`: shown once, when
        a master here serves."""
        self._node = node
        self._on_master = on_master
        self._registry = registry
        self._first = first
        self._invitation = invitation
        self._tasks = Tasks(node.fatal)
        self._chores = Tasks(node.fatal)  # shutdown waits for these
        self._early: MasterProcess | None = None
        self._record: LaunchFolder | None = None
        self._master: MasterHost | None = None
        self._lease: Lease | None = None
        self._proxy: PortProxy | None = None
        self._search: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None  # the search, while it may be cancelled
        self._settled = asyncio.Event()
        self._linked: bool | None = None  # None: no master has answered yet
        self._over = False
        where = node.place
        self.dial = Endpoint(where.host, where.port)
        """The address that the link dials."""

    @property
    def address(self) -> str:
        """The address at which other nodes reach a store or a master here; "" until settled."""
        return self._registry.address

    async def settle(self, early: MasterProcess | None) -> None:
        """Find the leader, or become it. `early`: a master that already runs. Raises HostError if
        there is no leader within `join_timeout`."""
        self._early = early
        self._start(self._run(self._first))
        limit = self._node.launch.spec.join_timeout
        try:
            await asyncio.wait_for(self._settled.wait(), limit)
        except TimeoutError:
            raise HostError(f"{self._registry.why_no_leader()}, for {limit:g} s") from None

    def on_link_event(self, event: AgentEvent) -> None:
        """Start or stop the search for a master, as an event of the link requires."""
        if isinstance(event, LinkLost):
            self._linked = False
            if not self._is_idle and (self._search is None or self._search.done()):
                self._start(self._run())
        elif isinstance(event, LinkBack):
            self._linked = True
            if self._is_idle and self._reading is not None:
                self._reading.cancel()
                self._reading = self._search = None
        elif isinstance(event, Ordered) and isinstance(event.order, End | Refused):
            self._over = True

    async def close(self, *, job_over: bool) -> None:
        """Release the master, the port and the lease."""
        self._over = True
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        if self._master is not None:
            await self._master.close(job_over=job_over)
        await self._chores.wait(CLOSE_LIMIT)
        if self._proxy is not None:
            await self._proxy.release(LEAVE_LIMIT)
        master_stays = self._master is not None and self._master.is_running and not job_over
        await self._registry.leave(job_over=job_over, master_stays=master_stays)

    # ------------------------------------------------------------ the search

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to learn from the registry now."""
        polls = not self._registry.pushes and self._master is None
        return self._over or (polls and self._linked is True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._search = self._tasks.start(work, "looking for the job master")

    async def _run(self, seen: Seen | Lease | None = None) -> None:
        """Act on what the registry says, until there is nothing to learn from it."""
        try:
            if seen is not None:
                await self._act(seen)
            while not self._is_idle:
                self._reading = self._search
                seen = await self._registry.read(served=self._linked is not None)
                self._reading = None
                await self._act(seen)
        except HostError as wrong:
            self._node.fatal(str(wrong))

    async def _move_master(self, lease: Lease, why: str) -> None:
        """Our master no longer serves there, for this reason: act on the registry's answer."""
        try:
            seen = await self._registry.move(lease, why)
        except HostError as wrong:
            self._node.fatal(str(wrong))
        else:
            await self._run(seen)

    async def _act(self, seen: Seen | Lease) -> None:
        if self._over:
            return
        if not isinstance(seen, Ended):
            self._kill_deposed()
        match seen:
            case Leader(endpoint):
                self._invitation = None
                self._set_master(endpoint)
            case Ended(end):
                self._over = True
                self._settled.set()
                self._node.deliver(Ordered(end))
            case Vacant():
                lease = await self._registry.take()
                if lease is not None and not self._over:
                    await self._host(lease)
            case Lease():
                await self._host(seen)

    def _set_master(self, endpoint: Endpoint) -> None:
        self.dial = endpoint
        self._settled.set()
        self._on_master()

    # ------------------------------------------------------------ hosting the master

    async def _host(self, lease: Lease) -> None:
        """Start a master with this lease."""
        self._lease = lease
        if not self._settled.is_set():
            self.dial = lease.bind
        if lease.in_etcd is None:  # in etcd the master still has to campaign
            self._settled.set()
        if lease.proxy is not None and self._proxy is None:
            self._proxy = PortProxy(listen_proxy(lease.proxy), self._node.reaper)
            self._node.parts.append(self._proxy)
        sweep_records()
        early, self._early = self._early, None
        self._record = None if early is not None else await in_thread(new_record, name="record")
        if self._over:
            return
        self._master = MasterHost(self._node, self, lease.bind, self._record, lease.in_etcd)
        self._master.start(early)

    def master_serves(self, endpoint: Endpoint) -> None:
        """Our master serves, possibly again: use its address."""
        if self._proxy is not None:
            self._proxy.set_target("master", endpoint)
        if self._invitation is not None:
            work = self._invitation.show(endpoint, self._record)
            self._chores.start(work, "printing how to join")
            self._invitation = None
        self._set_master(endpoint)

    def master_taken(self, sentence: str) -> None:
        """Our master has exited because another one leads or another process has its port: ask the
        registry who leads."""
        lease, self._master = self._lease, None
        if self._search is not None:
            self._search.cancel()
        self._reading = None
        if lease is not None and not self._over:
            self._start(self._move_master(lease, sentence))

    def _kill_deposed(self) -> None:
        """Kill our master, which has lost the lease."""
        master, self._master = self._master, None
        if master is not None:
            master.kill()
            self._chores.start(master.close(job_over=False), "ending the job master")
