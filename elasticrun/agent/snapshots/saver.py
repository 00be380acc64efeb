"""The node's saver process: started when a rank first uses snapshots, and restarted when it dies.

Callers await its answers; SaverGone has the reason if there is none. Messages identify segments by
key; the saver gets each one's descriptor once. It hashes each segment's newest snapshot shortly
after the commit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import signal
from collections import deque
from collections.abc import Hashable
from typing import Any, Final, Protocol, TypeVar

from elasticrun.agent.runtime import Patience, Timer
from elasticrun.agent.snapshots.peers import Peer
from elasticrun.agent.snapshots.segments import Held
from elasticrun.agent.workers.spawner import Child, Spawners
from elasticrun.config import Identity
from elasticrun.host.log import logger
from elasticrun.host.system.processes import why_unresponsive
from elasticrun.snapshots.shm.segment import VERSION, Snapshot
from elasticrun.wire import env, messages as m, snapshots as s
from elasticrun.wire.spawning import Exited, FromSpawner, Spawned, SpawnFailed, SpawnSaver
from elasticrun.wire.types import RoundName

T = TypeVar("T")

STARTS_MOST: Final = 4
STARTS_WINDOW: Final = 600.0
"""Maximum number of starts within STARTS_WINDOW seconds; a saver that dies more often is not
restarted. The count restarts when a saver has written a part of a checkpoint. A saver that died
with its fork server does not count."""

RETRY_FIRST: Final = 0.2
RETRY_MOST: Final = 10.0
"""Seconds until the next try if a saver could not start, or exited before it introduced itself.
That happens for lack of processes, threads or memory, which may be temporary. Doubled each time;
such tries do not count as starts."""

PING_EVERY: Final = 5.0
"""Seconds between an answer and the next ping of a saver with pending work."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a saver's loop to answer a ping; long work runs in threads. After that it is killed
and replaced (SIGSTOP, a debugger, a frozen cgroup)."""

START_LIMIT: Final = 60.0
"""Seconds until a saver introduces itself; one started by exec imports torch first."""

HASH_AFTER: Final = 0.1
"""Seconds from a commit to its hashing."""

APART: Final = 1.0
"""Minimum seconds between hashing two snapshots of one segment. If ranks commit faster, only some
snapshots are hashed, so that ranks keep their cores."""


class SaverGone(Exception):
    """There is no saver, or it has exited."""


class SaverOwner(Protocol):
    """What the saver needs from its owner."""

    def socket_name(self) -> str:
        """The agent's socket, to which the saver connects."""

    def serving_host(self) -> str:
        """The address on which it serves other nodes; "": none."""

    def saver_ready(self) -> None:
        """A saver is ready, and has no segments open yet."""

    def saver_lost(self) -> None:
        """The saver has exited."""

    def remark(self, text: str) -> None:
        """A sentence from the saver for the log."""


class Savers:
    """Runs at most one saver at a time."""

    def __init__(self, identity: Identity, spawners: Spawners, owner: SaverOwner) -> None:
        self._identity = identity
        self._spawners = spawners
        self._owner = owner
        self._child: Child | None = None  # until it is reaped
        self._peer: Peer | None = None
        self._connecting: asyncio.Future[None] | None = None
        self._starts: deque[float] = deque()
        self._last_end = ""
        self._open: set[int] = set()
        self._answers: dict[Hashable, asyncio.Future[Any]] = {}
        self._closed = False
        self._why_not_started = ""  # why no more are started
        self._has_introduced = False  # the last one has introduced itself
        self._misses = 0  # failed starts in a row
        self._retry = Timer()  # no start before it fires
        self._pings = 0
        self._ping = Timer()
        self._patience = Patience()
        self._pid = 0
        self._kill_reason = ""  # why it was killed, if it hung
        self.port = 0
        """The port on which it serves other nodes; 0: none."""

    @property
    def is_connected(self) -> bool:
        """Whether a saver is connected."""
        return self._peer is not None

    def ensure(self) -> None:
        """Start a saver, unless there is one or starting is useless."""
        if self._peer is None and self._connecting is None and not self._closed:
            self._connecting = asyncio.get_running_loop().create_future()
            self._connecting.add_done_callback(retrieve_failure)
            self._start()

    def replace_old(self) -> None:
        """Between two generations of ranks: end a saver whose spawner is being replaced, so that
        the spawner can exit too. Does nothing while answers are pending."""
        if self._child is not None and not self._answers and self._spawners.is_old(self._child):
            self._starts.clear()  # it did not crash
            if self._peer is not None:
                self._peer.close()

    async def wait_connected(self) -> None:
        """Wait until a saver is connected. One that has not connected within START_LIMIT is killed.
        Raises SaverGone."""
        self.ensure()
        if self._peer is not None:
            return
        if self._connecting is None:
            raise SaverGone(self._why_not_started or "this agent is exiting")
        try:
            await asyncio.wait_for(asyncio.shield(self._connecting), START_LIMIT)
        except TimeoutError:
            self._connecting = None
            self._kill()
            if not self._misses:
                self._lose(f"the saver has not connected within {START_LIMIT:g} s")
            raise SaverGone(self._last_end) from None

    # ------------------------------------------------------------ orders

    async def check(self, held: Held, snapshot: Snapshot) -> s.Checked:
        """Compare a snapshot with its hashes. Raises SaverGone."""
        which = (held.key, snapshot.slot, snapshot.sequence)
        return await self._ask(("check", *which), s.CheckSnapshot(*which), s.Checked, held)

    async def digest(self, held: Held, snapshot: Snapshot, order: m.CompareReplicas) -> s.Digested:
        """Hash what a snapshot has in common with its replicas. Raises SaverGone."""
        which = (held.key, snapshot.slot, snapshot.sequence, order.number)
        parts = (order.first, order.last, order.left_out)
        name = ("digest", held.key, order.number)
        return await self._ask(name, s.DigestSnapshot(*which, *parts), s.Digested, held)

    async def persist(self, order: s.PersistParts, helds: list[Held]) -> s.PartsDone:
        """Write parts of a checkpoint. Raises SaverGone."""
        return await self._ask(("parts", order.attempt), order, s.PartsDone, *helds)

    async def commit(self, attempt: str, writers: int) -> s.CommitDone:
        """Write the marker. Raises SaverGone."""
        if self._peer is None:
            raise SaverGone(self._last_end or "the saver that had collected the parts has exited")
        return await self._ask(("commit", attempt), s.CommitNow(attempt, writers), s.CommitDone)

    async def fetch_size(self, order: s.Fetch) -> s.FetchSize:
        """Ask another node's saver for the size of a snapshot. Raises SaverGone."""
        return await self._ask(("size", order.key), order, s.FetchSize)

    async def fetch_into(self, key: int, held: Held, slot: int = 0) -> s.Fetched:
        """Copy the snapshot that `fetch_size` asked for under this key into this segment. Raises
        SaverGone."""
        answer = self._answer(("fetched", key))
        self._send(s.FetchInto(key, slot, held.sizes.layout), held.fd)
        return await self._result_of(answer, s.Fetched)

    def hash(self, held: Held, snapshot: Snapshot) -> None:
        """Have the saver hash a snapshot, without waiting for it; no-op without a saver."""
        if self._peer is not None:
            self._open_segment(held)
            self._send(s.HashSnapshot(held.key, snapshot.slot, snapshot.sequence))

    def serve(self, held: Held, snapshot: Snapshot, round: RoundName, rank: int) -> None:
        """Have the saver serve a snapshot to other nodes; no-op without a saver."""
        if self._peer is not None:
            self._open_segment(held)
            which = (held.key, snapshot.slot, snapshot.sequence)
            self._send(s.Serve(*which, round, snapshot.step, rank))

    def give_up(self, attempt: str) -> None:
        """Cancel an attempt to write a checkpoint."""
        for kind in ("parts", "commit"):
            answer = self._answers.pop((kind, attempt), None)
            if answer is not None and not answer.done():
                answer.cancel()
        self._send(s.GiveUp(attempt))

    def forget(self, held: Held) -> None:
        """Have the saver close this segment, because it is dropped."""
        if held.key in self._open:
            self._open.discard(held.key)
            self._send(s.SegmentClosed(held.key))

    def close(self) -> None:
        """Stop, because the agent ends; its spawners kill and reap the saver."""
        self._closed = True
        self._retry.cancel()
        self._stop_pings()
        self._fail("this agent is exiting")

    # ------------------------------------------------------------ messages of the saver

    def on_message(self, peer: Peer, message: s.FromSaver) -> None:
        """Handle a message of a process that introduces itself as the saver."""
        if isinstance(message, s.SaverHere):
            self._introduced(peer, message)
        elif peer is not self._peer:
            return
        elif isinstance(message, s.Checked):
            self._settle(("check", message.key, message.slot, message.sequence), message)
        elif isinstance(message, s.Digested):
            self._settle(("digest", message.key, message.number), message)
        elif isinstance(message, s.PartsDone):
            if message.ok:
                self._starts.clear()
            self._settle(("parts", message.attempt), message)
        elif isinstance(message, s.CommitDone):
            self._settle(("commit", message.attempt), message)
        elif isinstance(message, s.FetchSize):
            self._settle(("size", message.key), message)
        elif isinstance(message, s.Fetched):
            self._settle(("fetched", message.key), message)
        elif isinstance(message, s.SaverPong):
            if message.number == self._pings:
                self._patience.cancel()
                self._ping.after(PING_EVERY, self._send_ping)
        elif isinstance(message, s.Remark):
            self._owner.remark(message.text)

    def on_close(self, peer: Peer) -> None:
        """Handle a closed connection: kill the saver; the spawner reports its exit."""
        if peer is self._peer:
            self._peer = None
            if self._child is None:
                self._lose("the saver has closed its connection")
            else:
                self._kill()

    def on_child_message(self, child: Child, message: FromSpawner) -> None:
        """Handle a report: the saver's process has started, could not start, or has exited."""
        if isinstance(message, Spawned):
            self._pid = message.pid
        if not isinstance(message, Exited | SpawnFailed):
            return
        self._spawners.forget(child)
        self._child = None
        if isinstance(message, SpawnFailed):
            why = f"the saver could not be started: {message.reason}"
        else:
            why = self._kill_reason or f"the saver ended ({_exit_text(message.code)})"
        if isinstance(message, SpawnFailed) or not self._has_introduced:
            self._retry_later(why)
        if isinstance(message, SpawnFailed) or not self._closed:
            self._lose(why)
        if self._connecting is not None:
            self._start()

    def lost(self, child: Child) -> None:
        """Handle the death of the saver's spawner, and of the saver with it."""
        self._child = None
        if self._starts:
            self._starts.pop()
        self._lose("the saver died with the fork server")
        if self._connecting is not None:
            self._start()

    # ------------------------------------------------------------ start and end

    def _start(self) -> None:
        """Request a saver from the spawner, if one is needed and the last one is reaped."""
        if self._child is not None or self._connecting is None or self._retry.is_set:
            return
        now = asyncio.get_running_loop().time()
        while self._starts and now - self._starts[0] > STARTS_WINDOW:
            self._starts.popleft()
        if len(self._starts) >= STARTS_MOST:
            times = f"{len(self._starts)} times in {STARTS_WINDOW / 60:g} minutes"
            coming, self._connecting = self._connecting, None
            sentence = f"{self._last_end}, {times}: it is not restarted for a while"
            coming.set_exception(SaverGone(sentence))
            if not self._why_not_started:
                self._why_not_started = sentence
                logger.warning("no checkpoints are written from memory: %s", sentence)
            return
        self._why_not_started, self._has_introduced, self._kill_reason = "", False, ""
        self._starts.append(now)
        self._child = self._spawners.start(
            SpawnSaver(
                key=0,
                place=self._owner.socket_name(),
                host=self._owner.serving_host(),
                secret=_secret(self._identity),
                env={env.OMP_NUM_THREADS: "1", env.CUDA_VISIBLE_DEVICES: ""},
                unset=(),
            ),
            self,
        )

    def _retry_later(self, why: str) -> None:
        """Retry later, because this failure may be temporary."""
        if self._closed:
            return
        if self._starts:
            self._starts.pop()
        wait = min(RETRY_MOST, RETRY_FIRST * 2.0 ** min(self._misses, 16))
        self._misses += 1
        if self._misses == 1:
            logger.warning("%s; retrying within %g s", why, RETRY_MOST)
        self._retry.after(wait, self._start)

    def _introduced(self, peer: Peer, here: s.SaverHere) -> None:
        if here.version != VERSION:
            peer.break_off(f"its segments are of version {here.version}, ours of {VERSION}")
        elif self._child is None or here.key != self._child.key or self._peer is not None:
            peer.break_off("no such saver was started")
        else:
            self._peer, self.port = peer, here.port
            self._has_introduced, self._misses = True, 0
            coming, self._connecting = self._connecting, None
            if coming is not None and not coming.done():
                coming.set_result(None)
            self._owner.saver_ready()

    def _lose(self, sentence: str) -> None:
        """Handle the loss of the saver, with its reason: fail all pending answers, and notify the
        owner."""
        peer, self._peer, self.port = self._peer, None, 0
        if peer is not None:
            peer.close()
        self._stop_pings()
        self._open.clear()
        lasting = bool(self._answers)
        if sentence != self._last_end or lasting:
            logger.log(30 if lasting else 20, "%s", sentence)
        self._last_end = sentence
        self._fail(sentence)
        if not self._closed:
            self._owner.saver_lost()

    def _fail(self, sentence: str) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(SaverGone(sentence))
        if self._closed and self._connecting is not None and not self._connecting.done():
            self._connecting.set_exception(SaverGone(sentence))
            self._connecting = None

    # ------------------------------------------------------------ a saver that is stuck

    def _send_ping(self) -> None:
        """Ping the saver if there is pending work."""
        if self._answers and self._peer is not None:
            self._pings += 1
            self._send(s.PingSaver(self._pings))
            self._patience.wait(ANSWER_LIMIT, self._on_no_answer)

    def _on_no_answer(self) -> None:
        how = why_unresponsive(self._pid)
        self._kill_reason = (
            f"the saver has not answered for {ANSWER_LIMIT:g} s: {how}, and was killed"
        )
        self._kill()

    def _stop_pings(self) -> None:
        self._ping.cancel()
        self._patience.cancel()

    # ------------------------------------------------------------ helpers

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _open_segment(self, held: Held) -> None:
        if self._peer is not None and held.key not in self._open and not held.is_lost:
            self._open.add(held.key)
            self._peer.send(s.SegmentOpen(held.key, held.local_rank), held.fd)

    def _send(self, message: Any, fd: int = -1) -> None:
        if self._peer is not None:
            self._peer.send(message, fd)

    async def _ask(self, name: Hashable, order: s.ToSaver, kind: type[T], *shown: Held) -> T:
        """Send an order once these segments are open; returns the answer. Raises SaverGone."""
        await self.wait_connected()
        for held in shown:
            self._open_segment(held)
        answer = self._answer(name)
        self._send(order)
        return await self._result_of(answer, kind)

    def _answer(self, name: Hashable) -> asyncio.Future[Any]:
        """The future for this answer; a second caller shares it."""
        if name not in self._answers:
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(retrieve_failure)
            self._answers[name] = answer
            if not (self._ping.is_set or self._patience.is_set):
                self._send_ping()
            if self._peer is None:
                answer.set_exception(SaverGone(self._last_end or "there is no saver"))
        return self._answers[name]

    async def _result_of(self, answer: asyncio.Future[Any], kind: type[T]) -> T:
        found = await asyncio.shield(answer)
        assert isinstance(found, kind)
        return found

    def _settle(self, name: Hashable, message: s.FromSaver) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None and not answer.done():
            answer.set_result(message)


def retrieve_failure(future: asyncio.Future[Any]) -> None:
    """Mark the failure as retrieved, in case no caller waits for it."""
    if not future.cancelled():
        future.exception()


def _secret(identity: Identity) -> str:
    """The secret with which savers of this job authenticate to each other. The token cannot be
    derived from it."""
    if not identity.token:
        return ""
    what = f"elasticrun saver of {identity.job_id}".encode()
    return hmac.new(identity.token.encode(), what, hashlib.sha256).hexdigest()


def _exit_text(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class Hashing:
    """Schedules the hashing of snapshots: one timer per segment."""

    def __init__(self, savers: Savers) -> None:
        self._savers = savers
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._hashed: dict[int, float] = {}  # time on the loop's clock

    def hash_soon(self, held: Held) -> None:
        """Schedule hashing after a commit in this segment."""
        if held.key not in self._timers:
            loop = asyncio.get_running_loop()
            last = self._hashed.get(held.key, -APART)
            at = max(loop.time() + HASH_AFTER, last + APART)
            self._timers[held.key] = loop.call_at(at, self.hash_now, held)

    def hash_now(self, held: Held) -> None:
        """Request the hash of the segment's newest snapshot now."""
        timer = self._timers.pop(held.key, None)
        if timer is not None:
            timer.cancel()
        newest = held.find_newest()
        if newest is not None:
            self._hashed[held.key] = asyncio.get_running_loop().time()
            self._savers.hash(held, newest)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
