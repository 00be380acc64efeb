"""The rendezvous of a job whose master is elected in etcd (`--master-store`).

No host is named in advance: the leader has written its endpoint into etcd, and every agent watches
that key. If there is no leader, one agent at a time takes the candidate key for CANDIDATE_TTL
seconds and starts a master, which campaigns. The candidate key only avoids starting masters that
would lose; the master's own transaction decides who leads.

When the leader's host fails, recovery takes its lease (LEADER_TTL), the start of a process, and a
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from elasticrun.agent.context import NodeContext
from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.master_process import (
    InEtcd,
    MasterHost,
    MasterProcess,
    new_record,
    sweep_records,
)
from elasticrun.agent.rendezvous.place import (
    RESOLVE_AGAIN,
    Bind,
    HostError,
    NotYet,
    bind_test,
    everywhere,
    resolve,
)
from elasticrun.agent.runtime import Tasks, Timer, in_thread
from elasticrun.config import CANDIDATE_TTL, ETCD_CALL_LIMIT, Tls
from elasticrun.core.events import AgentEvent, Ordered
from elasticrun.host.log import logger
from elasticrun.wire.messages import End
from elasticrun.wire.rpc import etcd, protobuf
from elasticrun.wire.rpc.etcd_place import Keys, leader_from_bytes, parse_place
from elasticrun.wire.types import Endpoint, WireError, mint_incarnation

STAND_AFTER: Final = (0.05, 0.2)
"""Minimum and maximum seconds without a leader before this agent becomes a candidate, drawn anew
each time. A master restarted by its own agent is back by then, and a thousand agents do not ask
etcd at the same instant."""

TELL_AFTER: Final = 3.0
"""Seconds without an answer of etcd before the user is warned."""

DEPOSED_LIMIT: Final = 3.0
"""Seconds for a master that has lost its key to exit. After that it is stuck, and its agent kills
it, because the agent may have to start another one."""

CLOSE_LIMIT: Final = 1.0
"""Seconds for releasing the candidate key at the end."""


class EtcdRendezvous:
    """Like `c10d.C10dRendezvous`, but through etcd. If the job is already over, the state machine
    gets its End."""

    def __init__(self, node: NodeContext, met: Callable[[], None]) -> None:
        self._node = node
        self._met = met
        self._launch = node.launch
        self._tasks = Tasks(node.fatal)
        self._chores = Tasks(logger.error)  # nothing waits for them before shutdown
        self._master: MasterHost | None = None
        self._keys = Keys(node.identity.job_id)
        self._me = mint_incarnation()
        self._client: etcd.Etcd | None = None
        self._there: dict[str, etcd.KeyValue] = {}
        self._known = asyncio.Event()
        self._told_end = False
        self._served = False
        self._failed_once = False
        self._listen_at = ""
        self._following: asyncio.Task[None] | None = None
        self._standing: asyncio.Task[None] | None = None
        self._candidacy = 0  # a lease
        self._deposed = Timer()
        self._silence = Timer()
        self._asks_in_vain = False  # etcd does not answer
        self._silent = False  # and the user was warned
        self.dial = Endpoint("", 0)
        """The address that the link dials: the last leader's."""
        self.address = ""
        """The address at which other nodes reach a store or a master here; "" until settled."""

    # ------------------------------------------------------------ called by the node

    async def settle(self, early: MasterProcess | None) -> None:
        """Find the leader, or start a master. HostError if etcd cannot be used or names no leader
        within `join_timeout`."""
        tls = self._node.identity.tls or Tls()
        try:
            place = parse_place(self._launch.master.store)
            self._client = etcd.Etcd(
                place, ca=tls.ca, cert=tls.cert, key=tls.key, limit=ETCD_CALL_LIMIT
            )
        except (ValueError, etcd.EtcdError) as wrong:
            raise HostError(str(wrong)) from None
        limit = self._launch.spec.join_timeout
        try:
            async with asyncio.timeout(limit):
                sweep_records()
                self.address, self._listen_at = await self._own_address(place.servers)
                follow = self._follow(self._client)
                self._following = self._tasks.start(follow, "following etcd")
                await self._known.wait()
        except TimeoutError:
            why = "does not answer" if self._asks_in_vain else "names no job master"
            raise HostError(f"{place} {why}, for {limit:g} s") from None

    def heard(self, event: AgentEvent) -> None:
        """No-op: the leader is known from etcd, not from the link."""

    async def close(self, *, job_over: bool) -> None:
        """Stop watching and release the master."""
        for task in (self._following, self._standing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._deposed.cancel()
        self._silence.cancel()
        if self._master is not None:
            await self._master.close(job_over=job_over)
        await self._chores.over(CLOSE_LIMIT)
        if self._client is not None:
            with contextlib.suppress(TimeoutError, etcd.EtcdError):
                await asyncio.wait_for(self._give_up_candidacy(), CLOSE_LIMIT)
            await self._client.close()

    # ------------------------------------------------------------ following

    async def _own_address(self, servers: tuple[Endpoint, ...]) -> tuple[str, str]:
        """This node's address on the route to etcd, or --local-addr; and the address on which a
        master here listens: the same, or all addresses if it is not this host's (NAT)."""
        told = False
        while True:
            for server in servers:
                try:
                    return await in_thread(partial(self._towards, server), name="resolve")
                except NotYet as wrong:
                    if not told:
                        told = True
                        logger.warning("%s; trying again until it does", wrong)
            await asyncio.sleep(RESOLVE_AGAIN)

    def _towards(self, server: Endpoint) -> tuple[str, str]:
        numbers = resolve(server.host, server.port)[0]
        address = offered_address(self._launch.local_addr, server.host, numbers)
        ours = resolve(address, 0)[0]
        here = bind_test(ours, 0) is Bind.OURS
        return address, ours if here else everywhere()

    async def _follow(self, client: etcd.Etcd) -> None:
        try:
            async for there in client.follow(self._keys.lead, self._trouble):
                self._there = there
                self._look()
        except etcd.EtcdRefused as refused:
            self._node.fatal(str(refused))

    def _look(self) -> None:
        """Act on the current state in etcd."""
        item = self._there.get(self._keys.master)
        leader = None if item is None else leader_from_bytes(item.value)
        if leader is not None and leader.holder == self._me and self._master is not None:
            self._watch_deposed(leading=True)  # its address comes from `master_serves`
        elif leader is not None and leader.holder != self._me:
            self._watch_deposed(leading=False)
            self._lead_is_at(leader.endpoint)
        elif (ended := self._there.get(self._keys.outcome)) is not None:
            self._is_over(ended)
        elif self._master is not None:
            self._watch_deposed(leading=False)  # it campaigns, or has lost its key
        elif self._keys.candidate not in self._there and self._standing is None:
            # There is no leader, or the leader was our own master, which has exited since.
            self._standing = self._tasks.start(self._stand(), "standing for job master")
            self._standing.add_done_callback(self._stood)

    def _lead_is_at(self, endpoint: Endpoint) -> None:
        if endpoint != self.dial or not self._known.is_set():
            self.dial = endpoint
            self._known.set()
            self._met()

    def _is_over(self, item: etcd.KeyValue) -> None:
        """The job and its master have ended."""
        if self._told_end:
            return
        self._told_end = True
        late = not self._known.is_set()
        self._known.set()
        try:
            end = protobuf.order_from_wire(item.value)
        except WireError as wrong:
            self._node.fatal(f"{item.key} in etcd is {wrong}")
            return
        if not isinstance(end, End):
            self._node.fatal(f"{item.key} in etcd is no end of a job")
            return
        if late:
            logger.warning(
                "job %s has ended before, as etcd remembers; a new run needs a new --rdzv-id",
                self._node.identity.job_id,
            )
        self._node.deliver(Ordered(end))

    def _trouble(self, sentence: str) -> None:
        """etcd does not answer; "": it answers again."""
        if not sentence:
            self._silence.cancel()
            self._asks_in_vain = False
            if self._silent:
                self._silent = False
                logger.warning("etcd answers again")
        elif not self._asks_in_vain:
            self._asks_in_vain = True
            self._silence.after(TELL_AFTER, self._tell_silent, sentence)

    def _tell_silent(self, sentence: str) -> None:
        self._silent = True
        if self._known.is_set():
            sentence += "; ranks go on, but this node hears of no other master until it does"
        else:
            sentence += f"; this node asks for {self._launch.spec.join_timeout:g} s in all"
        logger.warning("%s", sentence)

    # ------------------------------------------------------------ candidacy

    async def _stand(self) -> None:
        """Take the candidate key and start a master, unless there is a leader or another candidate
        by then."""
        await asyncio.sleep(random.uniform(*STAND_AFTER))
        if self._failed_once:
            await asyncio.sleep(CANDIDATE_TTL)  # the others first
        if self._keys.candidate in self._there:
            return
        item = self._there.get(self._keys.master)
        free = (
            etcd.created_at(self._keys.candidate, 0),
            etcd.created_at(self._keys.master, 0 if item is None else item.created),
        )
        client = self._client
        assert client is not None
        pause = etcd.BACKOFF_FIRST
        while True:
            try:
                self._candidacy = await client.grant(CANDIDATE_TTL)
                claim = etcd.put(self._keys.candidate, self._me.encode(), self._candidacy)
                if (await client.txn(free, (claim,))).succeeded:
                    break
                await self._give_up_candidacy()
                return  # the change that we have not seen yet will arrive
            except etcd.EtcdSilent:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(etcd.BACKOFF_MOST, 2 * pause)
            except etcd.EtcdRefused as refused:
                self._node.fatal(str(refused))
                return
        # For its trace only; its record is in etcd.
        folder = await in_thread(new_record, name="record")
        bind = Endpoint(self._listen_at, self._node.place.port)
        here = InEtcd(self._me, self.address)
        self._master = MasterHost(self._node, self, bind, folder, here)
        self._master.start()

    def _stood(self, task: asyncio.Task[None]) -> None:
        self._standing = None
        if not task.cancelled() and task.exception() is None:
            self._look()

    async def _give_up_candidacy(self) -> None:
        lease, self._candidacy = self._candidacy, 0
        if lease and self._client is not None:
            await self._client.revoke(lease)

    def master_serves(self, endpoint: Endpoint) -> None:
        """Our master leads and serves (again)."""
        self._served = True
        self._failed_once = False
        self.dial = endpoint
        self._known.set()
        self._met()
        self._release_later()

    def master_taken(self, sentence: str) -> None:
        """Our master has exited because it does not lead, or could not listen."""
        logger.info("%s", sentence)
        if self._master is not None:
            self._chores.start(self._master.close_within(0.0), "telling etcd")
        self._master = None
        self._failed_once = not self._served  # one that led has only lost its lease
        self._served = False
        self._watch_deposed(leading=True)
        self._release_later()
        self._look()

    def _release_later(self) -> None:
        """Release the candidate key without waiting; its lease is short anyway."""

        async def release() -> None:
            with contextlib.suppress(etcd.EtcdError):
                await self._give_up_candidacy()

        if self._candidacy:
            self._chores.start(release(), "telling etcd")

    def _watch_deposed(self, *, leading: bool) -> None:
        """Schedule the end of our master if it is stuck after losing its key."""
        if leading or self._master is None:
            self._deposed.cancel()
        elif not self._deposed.is_set and self._master.serves:
            self._deposed.after(DEPOSED_LIMIT, self._end_deposed)

    def _end_deposed(self) -> None:
        if self._master is not None:
            logger.warning("the job master here leads no more and does not end: it is killed")
            self._master.kill()
