"""This node's share of checkpoints in progress: each attempt from its order to its end.

During an attempt its snapshots are pinned. They are compared with their hashes, then the saver
writes them. The result goes to the master, and again to a master that may have missed it. This node
gives an attempt up after its time limit, even without an order.

`Comparing` has the saver hash what local ranks have in common with their replicas, for the master
to compare.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from elasticrun.agent.claims.folder_claim import FolderClaim, NotOurs
from elasticrun.agent.runtime import Tasks, Timer
from elasticrun.agent.snapshots.fetching import MAX_REASON, Shards
from elasticrun.agent.snapshots.inventory import SnapshotStore
from elasticrun.agent.snapshots.saver import SaverGone
from elasticrun.agent.snapshots.segments import Held
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.segment import Snapshot
from elasticrun.wire.messages import (
    CommitCheckpoint,
    CompareReplicas,
    Digests,
    KeepStep,
    Persist,
    Persisted,
    PersistOver,
    RankDigests,
)
from elasticrun.wire.snapshots import PartOf, PersistParts


class CannotPersist(Exception):
    """This node's share cannot be written."""


@dataclass(eq=False)
class _Attempt:
    order: Persist
    timer: Timer = field(default_factory=Timer)
    tasks: Tasks = field(default_factory=lambda: Tasks(logger.error))
    results: list[Persisted] = field(default_factory=list)
    committing: bool = False

    @property
    def name(self) -> str:
        """The name under which slots are pinned."""
        return f"attempt {self.order.attempt}"

    def failure_report(self, reason: str) -> Persisted:
        """The report that the attempt, or its marker, has failed."""
        return Persisted(self.order.attempt, False, self.committing, reason, 0, 0.0)


class Persisting:
    """All attempts in progress."""

    def __init__(self, store: SnapshotStore, shards: Shards, claim: FolderClaim) -> None:
        self._store = store
        self._shards = shards
        self._claim = claim
        self._attempts: dict[str, _Attempt] = {}

    def pins(self) -> set[str]:
        """Names of the attempts that pin slots."""
        return {attempt.name for attempt in self._attempts.values()}

    # ------------------------------------------------------------ orders

    def start(self, order: Persist) -> None:
        """Write this node's share of a checkpoint; a repeated order gets the same answer again."""
        known = self._attempts.get(order.attempt)
        if known is not None:
            self._resend(known)
            return
        attempt = self._attempts[order.attempt] = _Attempt(order)
        attempt.timer.after(order.limit, self._on_limit, attempt)
        attempt.tasks.start(self._write(attempt), attempt.name)

    def commit(self, order: CommitCheckpoint) -> None:
        """Have the saver write the marker, because all parts are written."""
        attempt = self._attempts.get(order.attempt)
        if attempt is None:
            why = "this node no longer knows that attempt"
            self._store.link.send(Persisted(order.attempt, False, True, why, 0, 0.0))
        elif not attempt.committing:
            attempt.committing = True
            attempt.tasks.start(self._commit(attempt), attempt.name)
        else:
            self._resend(attempt, committed=True)

    def end(self, order: PersistOver) -> None:
        """Close an attempt that was committed or given up."""
        attempt = self._attempts.get(order.attempt)
        if attempt is not None:
            self._close(attempt, ok=order.ok)
            if order.ok and attempt.order.coordinates:
                logger.info("the checkpoint of step %d is written", order.step)

    def resend(self) -> None:
        """Repeat all results for a master that may have missed them."""
        for attempt in self._attempts.values():
            self._resend(attempt)

    def close(self) -> None:
        """Close all attempts, because the agent ends."""
        for attempt in list(self._attempts.values()):
            self._close(attempt, ok=True)

    # ------------------------------------------------------------ one attempt

    async def _write(self, attempt: _Attempt) -> None:
        order = attempt.order
        try:
            found = self._find(order)
            for held, snapshot, _ in found:
                held.pin(snapshot.slot, attempt.name)
            await self._compare(order, found)
            parts = self._parts(order, found)
            done = await self._store.savers.persist(parts, [held for held, _, _ in found])
        except (CannotPersist, SaverGone) as error:
            self._report(attempt, Persisted(order.attempt, False, False, str(error), 0, 0.0))
            return
        result = (done.reason, done.nbytes, done.seconds)
        self._report(attempt, Persisted(order.attempt, done.ok, False, *result))

    async def _commit(self, attempt: _Attempt) -> None:
        order = attempt.order
        try:
            present = self._store.inventory.present
            if present is not None and present.folder:
                await self._claim.verify(present.folder)
            done = await self._store.savers.commit(order.attempt, order.writers)
        except (SaverGone, NotOurs) as error:
            self._report(attempt, attempt.failure_report(str(error)))
            return
        self._report(attempt, Persisted(order.attempt, done.ok, True, done.reason, 0, 0.0))

    def _find(self, order: Persist) -> list[tuple[Held, Snapshot, int]]:
        found = []
        for rank in order.ranks:
            mine = self._store.inventory.find(order.round, order.step, rank)
            if mine is None:
                raise CannotPersist(f"step {order.step} of rank {rank} is no longer in memory here")
            found.append((*mine, rank))
        return found

    async def _compare(self, order: Persist, found: list[tuple[Held, Snapshot, int]]) -> None:
        """Compare the snapshots with the hashes from their commit. Withdraws a corrupt one and
        raises CannotPersist."""
        answers = await asyncio.gather(*(self._store.savers.check(h, s) for h, s, _ in found))
        for answer, (_, _, rank) in zip(answers, found, strict=True):
            if not answer.ok:
                self._shards.report_bad(order.round, order.step, rank, answer.reason)
                raise CannotPersist(f"step {order.step} of rank {rank}: {answer.reason}")

    def _parts(self, order: Persist, found: list[tuple[Held, Snapshot, int]]) -> PersistParts:
        local_round = self._store.inventory.local_round(order.round)
        if local_round is None or not local_round.folder:
            raise CannotPersist("no rank has reported its checkpoint folder")
        where = order.coordinator
        last, in_use = self._keep(order, local_round.keep_last)
        return PersistParts(
            attempt=order.attempt,
            round=order.round,
            step=order.step,
            folder=local_round.folder,
            world_size=order.world_size,
            parts=tuple(
                PartOf(held.key, snapshot.slot, snapshot.sequence, rank, rank in order.shared)
                for held, snapshot, rank in found
            ),
            coordinates=order.coordinates,
            coordinator_host="" if order.coordinates or where is None else where.host,
            coordinator_port=0 if order.coordinates or where is None else where.port,
            reason=order.reason,
            keep_last=last,
            keep_every=local_round.keep_every,
            rewound_from=order.rewound_from,
            in_use=in_use,
            base=local_round.base,
            used=order.used,
        )

    def _keep(self, order: Persist, last: int) -> tuple[int, tuple[int, ...]]:
        """How many checkpoints to keep (0: all), and which others to keep as well. A rank may still
        be reading the checkpoint that it restores from, unless every rank has taken a snapshot
        since."""
        present, reading = self._store.inventory.present, self._store.inventory.reading
        is_present = present is not None and present.name == order.round
        if is_present and order.writers >= order.world_size:
            return last, ()
        if reading is None:
            return 0, ()
        return last, (reading,) if reading >= 0 else ()

    # ------------------------------------------------------------ reports

    def _resend(self, attempt: _Attempt, *, committed: bool = False) -> None:
        """Send the results of this attempt again; with `committed`, only those of its marker."""
        for report in attempt.results:
            if report.committed or not committed:
                self._store.link.send(report)

    def _report(self, attempt: _Attempt, report: Persisted) -> None:
        if not report.ok:  # the master logs the warning, with its consequence
            logger.info("checkpoint of step %d failed: %s", attempt.order.step, report.reason)
        report = structs.replace(report, reason=report.reason[:MAX_REASON])
        attempt.results.append(report)
        self._store.link.send(report)

    def _on_limit(self, attempt: _Attempt) -> None:
        """Give an attempt up: its time limit has passed, and no master has ended it."""
        in_storage = any(report.ok and report.committed for report in attempt.results)
        self._close(attempt, ok=in_storage)
        if not in_storage:
            why = f"it was not written within {attempt.order.limit:g} s"
            if any(report.ok for report in attempt.results):
                why = f"no master has ended it within {attempt.order.limit:g} s"
            self._report(attempt, attempt.failure_report(why))

    def _close(self, attempt: _Attempt, *, ok: bool) -> None:
        self._attempts.pop(attempt.order.attempt, None)
        attempt.timer.cancel()
        attempt.tasks.close()
        if not ok:
            self._store.savers.give_up(attempt.order.attempt)
        for held in self._store.segments.held:
            held.unpin(attempt.name)
        self._store.router.tidy()


COMPARED: Final = "compared"
AGREED: Final = "agreed"
"""The pin reasons of a snapshot that is being hashed, and of the one to which the job may
return."""

RANKS_AT_ONCE: Final = 16
"""Maximum number of ranks in one report; one if it names tensors, whose names are long."""

Found = tuple[Held, Snapshot, int]
"""A snapshot of a rank."""


class Comparing:
    """Answers CompareReplicas. A snapshot is pinned while it is hashed."""

    def __init__(self, store: SnapshotStore, *, keeps: bool) -> None:
        """`keeps`: the step at which all replicas were equal is kept, so its pin must not be
        removed before the order to do so arrives."""
        self._store = store
        self._keeps = keeps
        self._tasks = Tasks(logger.error)
        self.kept: KeepStep | None = None  # for a master that does not know it
        self._order: CompareReplicas | None = None  # for snapshots that ranks will take
        self._hashed: dict[int, Found] = {}  # by rank: what was hashed last
        self._hashing: set[int] = set()  # ranks whose hash is awaited
        self._made: dict[int, list[tuple[RankDigests, float]]] = {}  # by step: not reported yet

    def obey(self, order: CompareReplicas | KeepStep) -> None:
        """Carry out an order of the master."""
        if isinstance(order, KeepStep):
            self.kept = order
            self._unpin(AGREED)
            for held, snapshot, _ in self._store.inventory.all_of(order.round, order.step):
                held.pin(snapshot.slot, AGREED)
            self._unpin(COMPARED)
            self._store.router.tidy()
        elif order.last:
            for rank in order.ranks:
                if rank in self._hashed:
                    self._start(order, rank)
        else:
            self._unpin(COMPARED)
            self._clear()
            self._order = order
            for held, snapshot, local_round, rank in list(self._store.inventory.everything()):
                if held.replica < 0 and local_round.name == order.round:
                    self.committed(held, snapshot, rank)

    def committed(self, held: Held, snapshot: Snapshot, rank: int) -> None:
        """A rank of the current round has taken a snapshot: hash it, if that was ordered."""
        order = self._order
        if order is not None and snapshot.step > order.step and rank not in self._hashed:
            self._hashed[rank] = (held, snapshot, rank)
            held.pin(snapshot.slot, COMPARED)
            self._start(order, rank)

    def stop(self) -> None:
        """Stop, because the ranks' round is over."""
        self._order = None
        self._clear()

    def close(self) -> None:
        self._tasks.close()

    def _clear(self) -> None:
        self._tasks.close()
        self._hashed.clear()
        self._hashing.clear()
        self._made.clear()

    def _start(self, order: CompareReplicas, rank: int) -> None:
        self._hashing.add(rank)
        self._tasks.start(self._answer(order, rank), "comparing replicas")

    async def _answer(self, order: CompareReplicas, rank: int) -> None:
        held, snapshot, _ = self._hashed[rank]
        made, seconds = RankDigests(rank), 0.0
        with contextlib.suppress(SaverGone):
            done = await self._store.savers.digest(held, snapshot, order)
            seconds = done.seconds
            made = RankDigests(rank, done.count, done.digests, done.names, held.device)
        if not self._keeps:
            held.unpin(COMPARED)
            self._store.router.tidy()
        self._made.setdefault(snapshot.step, []).append((made, seconds))
        self._hashing.discard(rank)
        if not self._hashing:  # ranks that are hashed together are reported together
            self._report(order)

    def _report(self, order: CompareReplicas) -> None:
        made, self._made = self._made, {}
        size = 1 if order.last else RANKS_AT_ONCE
        for step, answers in made.items():
            seconds = sum(spent for _, spent in answers)
            for at in range(0, len(answers), size):
                ranks = tuple(one for one, _ in answers[at : at + size])
                report = Digests(order.round, step, order.number, ranks, seconds)
                self._store.link.send(report)

    def _unpin(self, reason: str) -> None:
        for held in self._store.segments.held:
            held.unpin(reason)
