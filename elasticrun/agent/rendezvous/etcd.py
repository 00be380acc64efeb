"""The registry in etcd: the nodes elect who hosts the master (`--master-store`).

No host is named in advance: the leader has written its endpoint into etcd, and every agent watches
that key. If there is no leader, one agent at a time takes the candidate key for CANDIDATE_TTL
seconds and starts a master, which campaigns. The candidate key only avoids starting masters that
would lose; the master's own transaction decides who leads, and the master renews its own lease.

When the leader's host fails, recovery takes its lease (LEADER_TTL), the start of a process, and a
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from functools import partial
from typing import Final

from elasticrun.agent.link.identity import offered_address
from elasticrun.agent.link.master_process import InEtcd
from elasticrun.agent.rendezvous.place import (
    RESOLVE_RETRY,
    Bind,
    HostError,
    NotYet,
    bind_test,
    resolve,
    wildcard_address,
)
from elasticrun.agent.rendezvous.registry import (
    VACANT,
    Ended,
    Leader,
    Lease,
    Seen,
    Vacant,
)
from elasticrun.agent.runtime import Timer, awaited, in_thread
from elasticrun.config import CANDIDATE_TTL, ETCD_CALL_LIMIT, Identity, Launch, Place, Tls
from elasticrun.host.log import logger
from elasticrun.wire.messages import End
from elasticrun.wire.rpc import etcd, protobuf
from elasticrun.wire.rpc.etcd_place import Keys, LeaderKey, leader_from_bytes, parse_place
from elasticrun.wire.types import Endpoint, WireError, mint_incarnation

CANDIDATE_AFTER: Final = (0.05, 0.2)
"""Minimum and maximum seconds without a leader before this agent becomes a candidate, drawn anew
each time. A master restarted by its own agent is back by then, and a thousand agents do not ask
etcd at the same instant."""

WARN_AFTER: Final = 3.0
"""Seconds without an answer from etcd before the user is warned."""

DEPOSED_LIMIT: Final = 3.0
"""Seconds for a master that has lost its key to exit. After that it is stuck, and its agent kills
it, because the agent may have to start another one."""

CLOSE_LIMIT: Final = 1.0
"""Seconds for releasing the candidate key at the end."""


class EtcdRegistry:
    """The keys of one job in etcd, watched from the first `read` on."""

    pushes = True

    def __init__(self, launch: Launch, where: Place, identity: Identity) -> None:
        """Raises HostError if etcd cannot be used."""
        self._launch = launch
        self._port = where.port
        self._job_id = identity.job_id
        tls = identity.tls or Tls()
        try:
            self._place = parse_place(launch.master.store)
            self._client = etcd.Etcd(
                self._place, ca=tls.ca, cert=tls.cert, key=tls.key, limit=ETCD_CALL_LIMIT
            )
        except (ValueError, etcd.EtcdError) as wrong:
            raise HostError(str(wrong)) from None
        self._keys = Keys(identity.job_id)
        self._me = mint_incarnation()
        self._states = self._client.follow(self._keys.lead, self._trouble)
        self._next: asyncio.Future[dict[str, etcd.KeyValue]] | None = None
        self._items: dict[str, etcd.KeyValue] = {}
        self._candidacy = 0  # the lease of our candidate key; 0: none
        self._hosts = False  # a master of ours runs or campaigns
        self._led = True  # our last master has led, or there was none
        self._known = False  # a leader was seen
        self._listen_at = ""
        self._warning_timer = Timer()
        self._unanswered = False  # etcd does not answer
        self._has_warned = False  # and the user was warned
        self.address = ""

    async def read(self, *, served: bool) -> Seen:
        if not self.address:
            self.address, self._listen_at = await self._own_address()
        if self._hosts:
            return await self._wait_until_deposed()
        await self._await_change()
        return self._seen()

    async def take(self) -> Lease | None:
        """Take the candidate key; None if anything changes before it is this agent's turn. Raises
        HostError if etcd refuses."""
        wait = random.uniform(*CANDIDATE_AFTER)
        if not self._led:
            wait += CANDIDATE_TTL  # other agents go first
        if self._keys.candidate in self._items or await self._changes_within(wait):
            return None
        item = self._items.get(self._keys.master)
        free = (
            etcd.created_at(self._keys.candidate, 0),
            etcd.created_at(self._keys.master, 0 if item is None else item.created),
        )
        pause = etcd.FIRST_BACKOFF
        while True:
            try:
                self._candidacy = await self._client.grant(CANDIDATE_TTL)
                claim = etcd.put(self._keys.candidate, self._me.encode(), self._candidacy)
                if (await self._client.txn(free, (claim,))).succeeded:
                    break
                await self._end_candidacy()
                return None  # the change that we have not seen yet will arrive
            except etcd.EtcdSilent:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(etcd.MAX_BACKOFF, 2 * pause)
            except etcd.EtcdRefused as refused:
                raise HostError(str(refused)) from None
        self._hosts, self._led = True, False
        bind = Endpoint(self._listen_at, self._port)
        return Lease(bind, in_etcd=InEtcd(self._me, self.address))

    async def move(self, lease: Lease, why: str) -> Seen:
        logger.info("%s", why)
        self._hosts = False
        await self._end_candidacy()
        return self._seen()

    async def leave(self, *, job_over: bool, master_stays: bool) -> None:
        self._warning_timer.cancel()
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._states.aclose()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_candidacy(), CLOSE_LIMIT)
        await self._client.close()

    def why_no_leader(self) -> str:
        why = "does not answer" if self._unanswered else "has no job master"
        return f"{self._place} {why}"

    # ------------------------------------------------------------ the keys

    def _seen(self) -> Leader | Vacant | Ended:
        """Who leads according to the keys; for a node that hosts no master."""
        leader = self._leader()
        if leader is not None and leader.holder != self._me:
            self._known = True
            return Leader(leader.endpoint)
        if (outcome := self._items.get(self._keys.outcome)) is not None:
            return self._over(outcome)
        return VACANT

    def _leader(self) -> LeaderKey | None:
        item = self._items.get(self._keys.master)
        return None if item is None else leader_from_bytes(item.value)

    async def _wait_until_deposed(self) -> Leader | Vacant | Ended:
        """Wait until our master has led, has lost the lead, and has not exited within
        DEPOSED_LIMIT; or until the job has ended."""
        loop, end = asyncio.get_running_loop(), math.inf
        while loop.time() < end:
            leader = self._leader()
            if leader is not None and leader.holder == self._me:
                self._known = self._led = True
                end = math.inf
                await self._end_candidacy()
            elif isinstance(seen := self._seen(), Ended):
                return seen
            elif self._led:
                end = min(end, loop.time() + DEPOSED_LIMIT)
            if await self._changes_within(None if end == math.inf else end - loop.time()):
                await self._await_change()
        logger.warning("the job master here has lost its leadership and does not exit; killing it")
        self._hosts = False
        return self._seen()

    def _over(self, item: etcd.KeyValue) -> Ended:
        try:
            end = protobuf.order_from_wire(item.value)
        except WireError as wrong:
            raise HostError(f"{item.key} in etcd is {wrong}") from None
        if not isinstance(end, End):
            raise HostError(f"{item.key} in etcd is not a job's result")
        if not self._known:
            logger.warning(
                "etcd has the result of an earlier run of job %s; a new run needs a new --rdzv-id",
                self._job_id,
            )
        return Ended(end)

    async def _await_change(self) -> None:
        """Wait for the next state of the keys."""
        while not await self._changes_within(None):
            pass
        assert self._next is not None
        done, self._next = self._next, None
        try:
            self._items = done.result()
        except etcd.EtcdRefused as refused:
            raise HostError(str(refused)) from None

    async def _changes_within(self, seconds: float | None) -> bool:
        """Whether a further state arrives within this time (None: no limit); `_await_change` then
        takes it."""
        if self._next is None:
            self._next = awaited(self._state(), "the next state in etcd")
        done, _ = await asyncio.wait({self._next}, timeout=seconds)
        return bool(done)

    async def _state(self) -> dict[str, etcd.KeyValue]:
        return await anext(self._states)

    async def _end_candidacy(self) -> None:
        """Release the candidate key, if we hold it; if that fails, its short lease expires."""
        lease, self._candidacy = self._candidacy, 0
        if lease:
            with contextlib.suppress(etcd.EtcdError):
                await self._client.revoke(lease)

    # ------------------------------------------------------------ etcd does not answer

    def _trouble(self, sentence: str) -> None:
        """Called with the reason when etcd does not answer, and with "" when it answers again."""
        if not sentence:
            self._warning_timer.cancel()
            self._unanswered = False
            if self._has_warned:
                self._has_warned = False
                logger.warning("etcd answers again")
        elif not self._unanswered:
            self._unanswered = True
            self._warning_timer.after(WARN_AFTER, self._warn_silent, sentence)

    def _warn_silent(self, sentence: str) -> None:
        self._has_warned = True
        if self._known:
            sentence += (
                "; the ranks keep running, but this node cannot find another master until it does"
            )
        else:
            sentence += f"; this node retries for {self._launch.spec.join_timeout:g} s"
        logger.warning("%s", sentence)

    # ------------------------------------------------------------ this host

    async def _own_address(self) -> tuple[str, str]:
        """This node's address on the route to etcd, or --local-addr; and the address on which a
        master here listens: the same, or all addresses if it is not this host's (NAT)."""
        warned = False
        while True:
            for server in self._place.servers:
                try:
                    return await in_thread(partial(self._route_to, server), name="resolve")
                except NotYet as wrong:
                    if not warned:
                        warned = True
                        logger.warning("%s; trying again until it does", wrong)
            await asyncio.sleep(RESOLVE_RETRY)

    def _route_to(self, server: Endpoint) -> tuple[str, str]:
        numbers = resolve(server.host, server.port)[0]
        address = offered_address(self._launch.local_addr, server.host, numbers)
        ours = resolve(address, 0)[0]
        here = bind_test(ours, 0) is Bind.OURS
        return address, ours if here else wildcard_address()
