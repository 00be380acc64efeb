"""Attempts to write a checkpoint: this node's parts, the parts that a coordinator collects, the
commit.

Storage may hang, so the event loop never accesses it. An order to give up an attempt is carried out
at once. If the attempt's thread does not return in time, the process exits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar

from elasticrun.host.system.reasons import reason_of
from elasticrun.snapshots.saver import transfer, work
from elasticrun.snapshots.saver.hashing import OpenSegment
from elasticrun.snapshots.saver.part_written import PartWritten
from elasticrun.snapshots.saver.pool import WorkerPool, WorkItem
from elasticrun.snapshots.saver.transfer import ConnectionBroken, PeerRefused
from elasticrun.snapshots.saver.work import Outcome
from elasticrun.wire import snapshots as m
from elasticrun.wire.types import Endpoint

T = TypeVar("T")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds before the second try; doubled after each try, up to LONGEST_PAUSE."""

STOP_LIMIT: Final = 10.0
"""Seconds for a thread to return from writing a part after its attempt was given up."""

CLEAN_LIMIT: Final = 60.0
"""The same for a commit, and for removing the files of an attempt."""

SWEEP_LIMIT: Final = 600.0
"""Seconds for removing old checkpoints. Limited because nothing is written meanwhile."""

PUT_LIMIT: Final = 600.0
"""Seconds of retries to send a part's description to the coordinator; usually the attempt is given
up earlier."""

MAX_ATTEMPTS: Final = 8
"""Maximum number of attempts in progress."""

MAX_OVER: Final = 16
"""Maximum number of finished attempts whose answers are kept, in case an order is repeated."""


def retry(work: Callable[[], T], stop: Event, limit: float) -> T:
    """Call `work` until it succeeds: repeats it while the other side is unreachable or busy, for
    `limit` seconds or until `stop` is set. Raises ConnectionBroken, NotAuthenticated or
    PeerRefused."""
    end = time.monotonic() + limit
    pause = FIRST_PAUSE
    while True:
        try:
            return work()
        except (ConnectionBroken, PeerRefused) as error:
            final = isinstance(error, PeerRefused) and not error.again
            if final or time.monotonic() + pause > end or stop.wait(pause):
                raise
        pause = min(2 * pause, LONGEST_PAUSE)


@dataclass(eq=False)
class WriteAttempt:
    """One attempt as this node sees it."""

    order: m.PersistParts
    began: float
    parts: dict[int, PartWritten] = field(default_factory=dict)  # by rank; of this node and others
    running: WorkItem[Any] | None = None
    on_disk: bool = False  # whether `running` accesses storage
    wrote: m.PartsDone | None = None
    committing: bool = False
    committed: m.CommitDone | None = None
    finished: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether this saver still has something to do for it."""
        waits = self.order.coordinates or self.wrote is None
        return self.running is not None or (waits and not self.finished)


class Attempts:
    """All attempts of this saver. Used by the loop's thread only."""

    def __init__(
        self,
        secret: str,
        segments: Mapping[int, OpenSegment],
        send: Callable[[m.FromSaver], None],
        disk: WorkerPool,
        puts: WorkerPool,
    ) -> None:
        self._secret = secret
        self._segments = segments
        self._send = send
        self._disk = disk
        self._puts = puts
        self._attempts: dict[str, WriteAttempt] = {}
        self._watched: dict[WorkItem[Any], tuple[str, float, float | None]] = {}
        """Work with a time limit: the message if it is exceeded, the limit in seconds, the start
        time (None: when its thread started)."""

    def import_modules(self) -> None:
        """Import in advance, in a thread, what the first attempt needs."""
        done = partial(self._remark, "checkpoints cannot be written")
        self._disk.add(WorkItem(lambda stop: work.import_modules(), Outcome.failed, done))

    def next_deadline(self) -> float | None:
        """When to call `has_hung`; None: not now."""
        return min((due for due, _ in self._deadlines()), default=None)

    def has_hung(self, now: float) -> bool:
        """Whether a thread has taken too long; if so, sends the reason to the agent."""
        for due, what in self._deadlines():
            if now >= due:
                self._send(m.Remark(f"{what}; the saver exits and is replaced"))
                return True
        return False

    def _deadlines(self) -> Iterator[tuple[float, str]]:
        for piece, (what, limit, since) in self._watched.items():
            began = piece.began if since is None else since
            if began is not None:
                yield began + limit, f"{what} within {limit:g} s"

    # ------------------------------------------------------------ this node's parts

    def start(self, order: m.PersistParts) -> None:
        """Start to write this node's parts; answered by PartsDone. A repeated order only gets the
        answer again."""
        known = self._attempts.get(order.attempt)
        if known is not None:
            if known.wrote is not None:
                self._send(known.wrote)
            return
        if sum(each.is_under_way for each in self._attempts.values()) >= MAX_ATTEMPTS:
            reason = f"{MAX_ATTEMPTS} attempts are under way already"
            self._send(m.PartsDone(order.attempt, False, reason, 0, 0.0))
            return
        attempt = self._attempts[order.attempt] = WriteAttempt(order, time.monotonic())
        opened = {part.key: self._segments.get(part.key) for part in order.parts}

        def write(stop: Event) -> Outcome:
            return work.write_parts(opened, order, stop.is_set)

        def done(outcome: Outcome) -> None:
            self._work_ended(attempt)
            self._remark("", outcome)
            attempt.parts.update({part.file.rank: part for part in outcome.parts})
            if attempt.finished:
                self._clean(order)
            elif outcome.reason or order.coordinates:
                self._parts_done(attempt, outcome.reason)
            else:
                self._send_to_coordinator(attempt)

        self._to_disk(attempt, WorkItem(write, Outcome.failed, done, name=order.attempt))

    def _send_to_coordinator(self, attempt: WriteAttempt) -> None:
        """Send the descriptions of our parts to the coordinator."""
        order = attempt.order
        place = Endpoint(order.coordinator_host, order.coordinator_port)
        parts = dict(attempt.parts)

        def send_parts(stop: Event) -> str:
            for rank, part in parts.items():
                put = partial(transfer.put, place, self._secret, order.attempt, rank, part.encode())
                retry(put, stop, PUT_LIMIT)
            return ""

        def failed(error: BaseException) -> str:
            return f"the coordinator's saver at {place} did not accept a part: {reason_of(error)}"

        def done(reason: str) -> None:
            attempt.running = None
            if not attempt.finished:
                self._parts_done(attempt, reason)

        attempt.running = WorkItem(send_parts, failed, done, name=order.attempt)
        self._puts.add(attempt.running)

    def _parts_done(self, attempt: WriteAttempt, reason: str) -> None:
        name = attempt.order.attempt
        ours = {part.rank for part in attempt.order.parts}
        nbytes = sum(part.file.size for rank, part in attempt.parts.items() if rank in ours)
        seconds = time.monotonic() - attempt.began
        attempt.wrote = m.PartsDone(name, not reason, reason, 0 if reason else nbytes, seconds)
        self._send(attempt.wrote)
        self._drop_old_attempts()

    # ------------------------------------------------------------ the coordinator

    def receive_part(self, put: transfer.Put, part: PartWritten | None) -> transfer.Answer:
        """Answer another node's Put: whether the part is expected; with `part`, record it."""
        attempt = self._attempts.get(put.attempt)
        if attempt is None:
            return transfer.Refusal("that attempt is not known here yet", again=True)
        if attempt.finished or not attempt.order.coordinates:
            return transfer.Refusal("that attempt is over, or coordinated elsewhere", again=False)
        if not 0 <= put.rank < attempt.order.world_size:
            return transfer.Refusal(f"there is no rank {put.rank} in that attempt", again=False)
        if part is None:
            return transfer.GoOn()
        if part.file.rank != put.rank:
            return transfer.Refusal("the part belongs to another rank than announced", again=False)
        if not attempt.committing:
            attempt.parts[put.rank] = part
        return transfer.Taken()

    def commit(self, order: m.CommitNow) -> None:
        """Start to write manifest and marker; answered by CommitDone, and followed by a sweep."""
        attempt = self._attempts.get(order.attempt)
        if attempt is not None and attempt.committed is not None:
            self._send(attempt.committed)
        elif attempt is None or attempt.finished:
            reason = "this saver does not know that attempt, or it is over"
            self._send(m.CommitDone(order.attempt, False, reason))
        elif attempt.committing:
            return
        elif len(attempt.parts) != order.writers or attempt.wrote is None:
            reason = f"{len(attempt.parts)} of {order.writers} parts have arrived"
            self._send(m.CommitDone(order.attempt, False, reason))
        else:
            self._commit(attempt)

    def _commit(self, attempt: WriteAttempt) -> None:
        order = attempt.order
        parts = [attempt.parts[rank] for rank in sorted(attempt.parts)]

        def done(outcome: Outcome) -> None:
            self._work_ended(attempt)
            self._remark("", outcome)
            if attempt.finished and outcome.reason:
                self._clean(order)
            elif attempt.finished:
                about = f"the checkpoint of step {order.step}"
                self._send(m.Remark(f"{about} was committed although it had been given up"))
            else:
                reason = outcome.reason
                attempt.committed = m.CommitDone(order.attempt, not reason, reason)
                self._send(attempt.committed)
                if not reason:
                    attempt.finished = True
                    self._drop_old_attempts()
                    self._remove_old(order, lambda: work.sweep(order))

        def write(stop: Event) -> Outcome:
            return work.commit(order, parts, stop.is_set)

        attempt.committing = True
        self._to_disk(attempt, WorkItem(write, Outcome.failed, done, name=order.attempt))

    def _remove_old(self, order: m.PersistParts, how: Callable[[], Outcome]) -> None:
        """Queue the removal of old checkpoints; it runs when there is nothing else to do."""
        what = f"{order.folder} did not finish removing old checkpoints"
        self._remove(how, "older checkpoints were not removed", (what, SWEEP_LIMIT, None))

    def _remove(
        self,
        how: Callable[[], Outcome],
        trouble: str,
        watch: tuple[str, float, None],
        *,
        first: bool = False,
    ) -> None:
        def done(outcome: Outcome) -> None:
            self._watched.pop(piece, None)
            self._remark(trouble, outcome)

        piece = WorkItem(lambda stop: how(), Outcome.failed, done, urgent=first)
        self._watched[piece] = watch
        self._disk.add(piece, first=first)

    # ------------------------------------------------------------ the end of an attempt

    def give_up(self, name: str, now: float) -> None:
        """Give up an attempt: answer its pending order at once, then remove its files. A committed
        checkpoint stays."""
        attempt = self._attempts.get(name)
        if attempt is None or attempt.finished:
            return
        if attempt.wrote is None:
            self._send(m.PartsDone(name, False, "it was given up", 0, 0.0))
        elif attempt.committing and attempt.committed is None:
            self._send(m.CommitDone(name, False, "it was given up while its marker was written"))
        piece = attempt.running
        attempt.finished = True
        self._drop_old_attempts()
        if piece is None or self._disk.drop(name) or self._puts.drop(name):
            attempt.running = None
            self._clean(attempt.order)
            return
        piece.stop.set()
        if attempt.on_disk:
            limit = CLEAN_LIMIT if attempt.committing else STOP_LIMIT
            what = f"{attempt.order.folder} did not stop writing an attempt"
            self._watched[piece] = (what, limit, now)
        else:
            self._clean(attempt.order)  # the connection to the coordinator ends by itself

    def _to_disk(self, attempt: WriteAttempt, piece: WorkItem[Any]) -> None:
        attempt.running, attempt.on_disk = piece, True
        self._disk.add(piece)

    def _work_ended(self, attempt: WriteAttempt) -> None:
        if attempt.running is not None:
            self._watched.pop(attempt.running, None)
        attempt.running, attempt.on_disk = None, False

    def _drop_old_attempts(self) -> None:
        """Keep only the answers of the last MAX_OVER finished attempts."""
        idle = [name for name, each in self._attempts.items() if not each.is_under_way]
        for name in idle[:-MAX_OVER]:
            del self._attempts[name]
        for name in idle[-MAX_OVER:]:
            if self._attempts[name].committed is not None:
                self._attempts[name].parts.clear()

    def _clean(self, order: m.PersistParts) -> None:
        """Queue the removal of a failed attempt's files, ahead of all waiting work, because the
        next attempt may need the space."""
        what = f"{order.folder} did not finish removing the files of an attempt"
        trouble = f"files of a cancelled attempt stay in {order.folder}"
        self._remove(
            lambda: work.remove_attempt(order), trouble, (what, CLEAN_LIMIT, None), first=True
        )
        if order.coordinates:
            self._remove_old(order, lambda: work.remove_unfinished(order))

    def _remark(self, what: str, outcome: Outcome) -> None:
        for remark in outcome.remarks:
            self._send(m.Remark(remark))
        if what and outcome.reason:
            self._send(m.Remark(f"{what}: {outcome.reason}"))
