"""The record in etcd, and the leadership on which every write depends.

A master leads while `lead/master` has the value that it wrote, under a lease that it renews every
LEADER_RENEW seconds. There are three fences, each sufficient against a master that was stopped and
resumed:

* every write is a transaction conditional on the key's create_revision, so nothing that a replaced
  master decides becomes durable;
* orders are sent only while `leads()`: until LEADER_TTL after the last confirmed renewal was sent,
  measured on the boot-time clock. etcd starts the same TTL later than that, so no other master can
  hold the key before then;
* its term is that create_revision, which only increases; agents obey no lower term.

An etcd that was wiped, or restored from a backup, counts revisions from a lower number again. This
master detects that when an agent reports a higher term than its own. It then writes the reported
term into the key `terms`, which every later master adds to its revision, and exits so that the next
master has a higher term.

A master whose lease expires exits (`lost`) instead of waiting for etcd. When its stream closes, an
agent starts its own deadline for stopping its ranks, and the next master's wait for that deadline
assumes that the stream closed without delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from elasticrun.config import (
    ETCD_CALL_LIMIT,
    EXIT_NOT_LEADING,
    EXIT_SAVED,
    LEADER_CALL_LIMIT,
    LEADER_RENEW,
    LEADER_TTL,
    OUTCOME_TTL,
    RECORD_TTL,
    SAVED_OUTCOME_TTL,
    MasterConfig,
    Tls,
)
from elasticrun.core.persisted import Facts
from elasticrun.master.file_store import CRASH_WINDOW, MAX_CRASHES
from elasticrun.master.store import StoreRefused
from elasticrun.wire.rpc import etcd, protobuf
from elasticrun.wire.rpc.etcd_place import Keys, LeaderKey, leader_from_bytes, parse_place
from elasticrun.wire.types import dumps, loads

CAMPAIGN_LIMIT: Final = 10.0
"""Seconds to win or lose the campaign; then the master exits, and its agent waits for etcd."""

PAUSE: Final = 0.2
"""Seconds between two tries of a call while etcd does not answer."""

CLOSE_LIMIT: Final = 1.0
"""Seconds to revoke the leader's lease; if that fails, the lease expires by itself."""

RENEW_RECORD: Final = 3600.0
"""Seconds between renewals of the record's own lease, which lasts RECORD_TTL."""

HEAD: Final = b"elasticrun facts 2\n"
MAX_BYTES: Final = 1_400_000
"""Maximum size of a record: etcd's limit for a request (1.5 MiB by default), minus room for the
rest of the transaction."""
MAX_TERM: Final = 2**62
"""Highest accepted term: revisions are added to it, and it has 64 bits on the wire."""

MAX_TEXT: Final = 64 * 1024 * 1024
"""Maximum size of the unpacked JSON, so that a record cannot use unbounded memory."""

logger = logging.getLogger("elasticrun")


def boot_clock() -> float:
    """Seconds since boot, including suspension of the host, during which leases expire too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdStore:
    """A `FactStore` whose `load` first campaigns for the leadership, which sets `term`."""

    def __init__(
        self, config: MasterConfig, port: int, clock: Callable[[], float] = boot_clock
    ) -> None:
        """`port`: where this master will serve. Raises StoreRefused if --master-store is
        invalid."""
        tls = config.identity.tls or Tls()
        try:
            place = parse_place(config.launch.store)
            self._etcd = etcd.Etcd(
                place, ca=tls.ca, cert=tls.cert, key=tls.key, limit=ETCD_CALL_LIMIT
            )
        except (ValueError, etcd.EtcdError) as wrong:
            raise StoreRefused(str(wrong), EXIT_NOT_LEADING) from None
        self._place = place
        self._keys = Keys(config.identity.job_id)
        host = config.advertise or config.host
        self._own_key = LeaderKey(host, port, config.holder, secrets.token_hex(8))
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self.term = 0
        """0 before `load`; then higher than the term of every earlier master of this job."""
        self._revision = 0
        """The fencing token: the create_revision of our leader key."""
        self._began_empty = False
        self._lease = 0
        self._record_lease = 0
        self._outcome_lease = 0
        self._leads_until = math.inf  # no lease yet, so nothing can expire
        self._timer: asyncio.TimerHandle | None = None
        self._pending: Facts | None = None
        self._waiting: list[Callable[[], None]] = []
        self._to_write = asyncio.Event()
        self._etcd_is_silent = False
        self._crashes = 0
        self._has_seen_term = self._raises_terms = False
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ FactStore

    def leads(self) -> bool:
        self._check_lease()
        return self.term > 0 and not self.lost.done()

    async def load(self) -> Facts | None:
        try:
            await asyncio.wait_for(self._campaign(), CAMPAIGN_LIMIT)
            keys = self._keys
            read = tuple(map(etcd.get, (keys.record, keys.crashes, keys.terms)))
            answer = await self._retry(lambda: self._etcd.txn((), read))
            there = {item.key: item for item in answer.items}
            self.term = self._revision + _number(there.get(keys.terms))
            facts = await self._facts(there)
            self._began_empty = facts is None
            if not self._record_lease:
                self._record_lease = await self._retry(lambda: self._etcd.grant(RECORD_TTL))
        except (TimeoutError, etcd.EtcdError, StoreRefused) as wrong:
            await self._withdraw()
            late = f"{self._place} does not answer"
            why = late if isinstance(wrong, TimeoutError) else str(wrong)
            raise StoreRefused(why, EXIT_NOT_LEADING) from None
        self._tasks = [self._task(self._keep_writing()), self._task(self._keep_renewing())]
        return facts

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        self._pending = facts
        self._waiting.append(done)
        self._to_write.set()

    def term_seen(self, term: int) -> None:
        """See `FactStore.term_seen`."""
        first, self._has_seen_term = not self._has_seen_term, True
        if not term or not self.leads() or (term == self.term and not first):
            return  # it has obeyed no master yet, or this one
        if self._began_empty:
            self._began_empty = False
            logger.warning(
                "%s has lost this job's record (was it wiped?): the round is restored from the "
                "nodes; the count of restarts and the exclusions are lost",
                self._place,
            )
        if self.term <= term <= MAX_TERM and not self._raises_terms:
            self._raises_terms = True
            self._tasks.append(self._task(self._raise_terms(term)))

    async def crashed(self) -> None:
        keys, count = self._keys, self._crashes + 1
        ours = (etcd.created_at(keys.master, self._revision),)
        with contextlib.suppress(etcd.EtcdError):
            lease = await self._etcd.grant(int(CRASH_WINDOW))
            count_key = etcd.put(keys.crashes, str(count).encode(), lease)
            await self._etcd.txn(ours, (count_key,))

    async def close(self) -> None:
        self._lose("this master has ended")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._withdraw()

    # ------------------------------------------------------------ the campaign

    async def _campaign(self) -> None:
        """Become the leader. Raises StoreRefused if another master leads or the key is unreadable,
        EtcdRefused if etcd rejects the request."""
        key, mine = self._keys.master, self._own_key.to_bytes()
        while True:
            began = self._clock()
            self._lease = await self._retry(lambda: self._etcd.grant(LEADER_TTL))
            free = (etcd.created_at(key, 0),)
            then = (etcd.put(key, mine, self._lease),)
            answer = await self._retry(partial(self._etcd.txn, free, then, (etcd.get(key),)))
            if answer.succeeded:
                return self._won(answer.revision, began)
            there = answer.items[0]
            leader = leader_from_bytes(there.value)
            if leader == self._own_key:  # the transaction succeeded, and its answer was lost
                return self._won(there.created, began)
            why = ""
            if leader is None:
                why = f"{key} in etcd was written by another version"
            elif not leader.holder or leader.holder != self._own_key.holder:
                why = f"the master at {leader.endpoint} leads this job"
            if why:
                raise StoreRefused(why, EXIT_NOT_LEADING)
            # Our own agent saw its last master exit before it started this one, so there is no need
            # to wait for the old lease.
            await self._withdraw(close=False)
            stale = (etcd.created_at(key, there.created),)
            await self._retry(partial(self._etcd.txn, stale, (etcd.delete(key),)))

    def _won(self, revision: int, since: float) -> None:
        self._revision = revision
        self._extend(since)

    async def _facts(self, there: dict[str, etcd.KeyValue]) -> Facts | None:
        item = there.get(self._keys.record)
        if item is None:
            return None
        self._record_lease = item.lease
        self._crashes = _number(there.get(self._keys.crashes))
        if self._crashes >= MAX_CRASHES:
            logger.warning(
                "%d masters failed to read the job's record in etcd; using the agents' state",
                self._crashes,
            )
            self._crashes = 0
            return None
        try:
            return await asyncio.to_thread(facts_from_bytes, item.value)
        except ValueError as wrong:
            logger.warning(
                "cannot read the job's record in etcd (%s); using the agents' state",
                wrong,
            )
            return None

    # ------------------------------------------------------------ leading

    def _extend(self, since: float) -> None:
        """Extend the leadership until LEADER_TTL after `since`, when the newest confirmed renewal
        was sent. If that time has passed, give the leadership up."""
        # a lease that has expired here is not extended: another master may already lead
        self._check_lease()
        if self.lost.done():
            return
        self._leads_until = since + LEADER_TTL
        if self._timer is not None:
            self._timer.cancel()
        # fires when the lease expires, and re-arms itself if the loop's clock is ahead of ours
        after = max(0.0, self._leads_until - self._clock())
        self._timer = self._loop.call_later(after, self._extend, since)

    def _check_lease(self) -> None:
        """Give up the leadership if the lease has expired."""
        now = self._clock()
        if now >= self._leads_until and not self.lost.done():
            ago = now - self._leads_until + LEADER_TTL
            self._lose(
                f"{self._place} last confirmed this master's lease of {LEADER_TTL} s "
                f"{ago:.0f} s ago: it sends no more orders"
            )

    async def _keep_renewing(self) -> None:
        """Renew the lease and check that the key is still ours, while this master leads."""
        renewed = self._clock()
        ours = (etcd.created_at(self._keys.master, self._revision),)
        while not self.lost.done():
            await asyncio.sleep(LEADER_RENEW)
            since = self._clock()
            try:
                alive = await self._etcd.renew(self._lease, LEADER_CALL_LIMIT)
                if alive:
                    alive = (await self._etcd.txn(ours, (), limit=LEADER_CALL_LIMIT)).succeeded
                if since - renewed > RENEW_RECORD and self._record_lease:
                    await self._etcd.renew(self._record_lease)
                    renewed = since
            except etcd.EtcdSilent as silent:
                self._log_silent(str(silent))
                continue
            except etcd.EtcdRefused as refused:
                self._lose(str(refused))
                return
            if not alive:
                self._lose("another master may lead: this one's lease in etcd has expired")
                return
            if self._etcd_is_silent:
                self._etcd_is_silent = False
                logger.warning("etcd answers again, and this master is still the leader")
            self._extend(since)

    async def _raise_terms(self, term: int) -> None:
        """An agent has obeyed `term`, not below ours, although only this master leads: make all
        later masters start above it, and give up the leadership."""
        ours = (etcd.created_at(self._keys.master, self._revision),)
        then = (etcd.put(self._keys.terms, str(term).encode(), self._record_lease),)
        try:
            await self._retry(lambda: self._etcd.txn(ours, then))
        except etcd.EtcdRefused as refused:
            self._lose(str(refused))
            return
        self._lose(
            f"{self._place} restarted its revisions (was it wiped, or restored from a backup?): "
            f"an agent has obeyed term {term}, and this is {self.term}; the next master has a "
            "higher one"
        )

    def _log_silent(self, why: str) -> None:
        if not self._etcd_is_silent:
            self._etcd_is_silent = True
            logger.warning(
                "%s; decisions are delayed until it does, and the ranks keep running", why
            )

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _withdraw(self, *, close: bool = True) -> None:
        """Revoke the lease, so that the next master need not wait until it expires; then disconnect
        if `close` is set."""
        if self._lease:
            lease, self._lease = self._lease, 0
            with contextlib.suppress(etcd.EtcdError, TimeoutError):
                await asyncio.wait_for(self._etcd.revoke(lease), CLOSE_LIMIT)
        if close:
            await self._etcd.close()

    # ------------------------------------------------------------ writing

    async def _keep_writing(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            if not self.leads():
                return
            if self._pending is None:
                continue
            waiting, self._waiting = self._waiting, []
            try:
                durable = await self._write_newest()
            except (etcd.EtcdRefused, ValueError) as wrong:
                self._lose(f"the job's record cannot be written: {wrong}")
                return
            if not durable or not self.leads():
                return  # the next master counts this write if it finds it in etcd
            for done in waiting:
                done()

    async def _write_newest(self) -> bool:
        """Write the pending facts; False if another master leads. Raises EtcdRefused; ValueError if
        the facts are too large."""
        facts, self._pending = self._pending, None
        assert facts is not None
        data = await asyncio.to_thread(facts_to_bytes, facts)
        lease, outcome, ended = self._record_lease, facts.outcome, []
        if outcome is not None:
            if not self._outcome_lease:
                kept = SAVED_OUTCOME_TTL if outcome.exit_code == EXIT_SAVED else OUTCOME_TTL
                self._outcome_lease = await self._retry(lambda: self._etcd.grant(kept))
            lease = self._outcome_lease
            ended = [etcd.put(self._keys.outcome, protobuf.order_to_wire(outcome), lease)]
        then = (etcd.put(self._keys.record, data, lease), *ended)
        ours = (etcd.created_at(self._keys.master, self._revision),)
        answer = await self._retry(lambda: self._etcd.txn(ours, then))
        if not answer.succeeded:
            self._lose("another master leads this job: this one's last decisions are discarded")
        return bool(answer.succeeded)

    async def _retry(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Retry a call until etcd answers. Raises EtcdRefused if etcd rejects it, or once the
        leadership is lost."""
        while not self.lost.done():
            try:
                return await call()
            except etcd.EtcdSilent as silent:
                self._log_silent(str(silent))
            await asyncio.sleep(PAUSE)
        raise etcd.EtcdRefused(self.lost.result())

    def _task(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; a bug in it ends the leadership with the error as reason."""

        def report_bug(done_task: asyncio.Task[None]) -> None:
            if not done_task.cancelled() and (error := done_task.exception()) is not None:
                self._lose(f"a bug in elasticrun: {error!r}")

        made = asyncio.ensure_future(body)
        made.add_done_callback(report_bug)
        return made


# ---------------------------------------------------------------- the record as bytes


def _number(item: etcd.KeyValue | None) -> int:
    """The integer in an item; 0 if there is no item or no integer in it."""
    return int(item.value[:19]) if item is not None and item.value.isdigit() else 0


def facts_to_bytes(facts: Facts) -> bytes:
    """The facts as one etcd value: a line with the format, then compressed JSON. Raises ValueError
    if it is too large.

    The record of 10,000 nodes is 2.5 MB of JSON and about 0.5 MB compressed
    (tests/etcd/test_store.py).
    """
    data = HEAD + zlib.compress(dumps(facts).encode(), 6)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the job's record of {len(data)} bytes is more than etcd takes")
    return data


def facts_from_bytes(data: bytes) -> Facts:
    """The facts in a value. Raises ValueError, with a sentence, if it has another format or is
    damaged."""
    if not data.startswith(HEAD):
        raise ValueError("it was written by another version")
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(data[len(HEAD) :], MAX_TEXT)
    except zlib.error as wrong:
        raise ValueError(f"it is damaged: {wrong}") from None
    if unpack.unconsumed_tail or not unpack.eof:
        raise ValueError("it is truncated")
    return loads(text, Facts)
