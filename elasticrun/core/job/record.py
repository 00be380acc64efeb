"""The record: the `Facts` that outlive this master, and how a new master restores them. Each
component gives its own facts and restores them.

Agents report everything else again on every new stream: which round they run, what failed, what has
stopped. Beats and joins are not facts.
"""

from __future__ import annotations

from elasticrun.config import GROW_YOUNG
from elasticrun.core.context import JobContext
from elasticrun.core.events import Record
from elasticrun.core.nodes.node import Health
from elasticrun.core.parts import PartFacts, Recorded
from elasticrun.core.persisted import Facts, RendezvousFacts
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.rounds.round import Round, Stage, restored
from elasticrun.core.sight.ledger import SlotLedger
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.core.words import plural

RECORD_EVERY = 10.0
"""Seconds between records of the remaining time while the job waits, so a job whose masters keep
crashing neither waits for ever nor gives up at once."""


class Recorder:
    """Decides when to record, and collects the facts."""

    def __init__(self, ctx: JobContext, snapshots: Snapshots, ledger: SlotLedger) -> None:
        self._ctx = ctx
        self._snapshots = snapshots
        self._ledger = ledger
        self._at = 0.0
        self._is_owed = False  # a fact changed that no order depends on

    def record(self) -> None:
        """Record now. Later effects wait until the record is durable."""
        self._at = self._ctx.now
        self._is_owed = False
        self._ctx.out.append(Record(self._facts()))

    def record_soon(self) -> None:
        """Record within RECORD_EVERY: a fact changed that no order depends on."""
        self._is_owed = True

    def catch_up(self) -> None:
        """Record now what `record_soon` has postponed."""
        if self._is_owed:
            self.record()

    def pursue(self, *, waiting: bool) -> float | None:
        """Record if it is due without an order; return when it is due next.

        It is due periodically during a wait or after a fact has changed, and once when a round is
        no longer young, because the next master needs its age.
        """
        due = self._due(waiting=waiting)
        if due is not None and self._ctx.now >= due:
            self.record()
            due = self._due(waiting=waiting)
        return due

    def _due(self, *, waiting: bool) -> float | None:
        if waiting or self._is_owed:
            return self._at + RECORD_EVERY
        old = self._ctx.rdzv.formed_at + GROW_YOUNG
        if self._ctx.rdzv.phase is Phase.RUNNING and self._at < old:
            return old
        return None

    def _facts(self) -> Facts:
        """O(nodes)."""
        ctx, now, round_ = self._ctx, self._ctx.now, self._ctx.round
        present = (Health.ALIVE, Health.SUSPECT)
        keep = {node.id for node in ctx.nodes.values() if node.health in present}
        keep.update(round_.members if round_ else ())
        return Facts(
            spec=ctx.spec,
            term=ctx.term,
            number=ctx.number,
            scaled=ctx.scaled,
            outcome=ctx.outcome,
            incidents=ctx.incidents,
            dumps=ctx.dumps,
            waits=ctx.waits,
            order=ctx.nodes.order(keep, others=ctx.spec.max_nodes),
            rendezvous=ctx.rdzv.facts(now),
            membership=ctx.membership.facts(now),
            flaps=ctx.flaps.facts(now),
            exclusions=ctx.exclusions.facts(now),
            restarts=ctx.restarts.facts(now),
            snapshots=self._snapshots.facts(now),
            ledger=self._ledger.facts(now),
        )


def load(facts: Facts, ctx: JobContext, snapshots: Snapshots) -> None:
    """Restore what the previous master knew into every component."""
    at = ctx.now - facts.age
    ctx.number = facts.number
    ctx.outcome = facts.outcome
    ctx.incidents, ctx.dumps, ctx.waits = facts.incidents, facts.dumps, facts.waits
    if facts.scaled:
        ctx.scale(facts.spec.min_nodes, facts.spec.max_nodes)
    ctx.nodes.remember(facts.order)
    ctx.round = restored(facts.rendezvous)
    if ctx.round is not None:
        ctx.rdzv.last = ctx.round
        if facts.outcome is not None:
            ctx.round.stages = dict.fromkeys(ctx.round.members, Stage.STOPPING)
        ctx.restarts.new_round(adopted=ctx.round.is_adopted)  # its agents report its failures again
    _restore(ctx.restarts, facts.restarts, at)
    _restore(ctx.membership, facts.membership, at)
    _restore(ctx.flaps, facts.flaps, at)
    _restore(ctx.exclusions, facts.exclusions, at)
    _restore(snapshots, facts.snapshots, at)
    if facts.outcome is None and ctx.round is not None:
        _load_round(ctx.round, facts.rendezvous, ctx, snapshots, at)
    if facts.outcome is None:
        ctx.rdzv.restore(facts.rendezvous, ctx.now)
    ctx.note(_in_words(facts))


def _restore(part: Recorded[PartFacts], facts: PartFacts, at: float) -> None:
    part.restore(facts, at)


def _load_round(
    round_: Round, facts: RendezvousFacts, ctx: JobContext, snapshots: Snapshots, at: float
) -> None:
    """Restore the round that the previous master left."""
    now, absent = ctx.now, set(facts.gone)
    redial = ctx.membership.redial_time(len(facts.seats))
    ctx.flaps.taken_over(seat.node for seat in facts.seats)
    for seat in facts.seats:
        if seat.node in absent:
            ctx.membership.recall(seat.node, seat.incarnation, now)
        else:
            ctx.membership.expect(seat.node, seat.incarnation, now, redial=redial)
    ctx.rdzv.restore_round(round_, facts, at, now, redial)
    seats = round_.seats  # the live dict: members of an adopted round are added as they attach
    info = round_.info
    snapshots.begin_round(info, seats)
    snapshots.checkpoints.take_over(None if info.skip.memory else info.restore)
    snapshots.points.expect(node for node in seats if node not in absent)


def _in_words(facts: Facts) -> str:
    """What the record says, as a line for the operator."""
    if facts.outcome is not None:
        return f"the record says that the job is over: {facts.outcome.reason}"
    rdzv = facts.rendezvous
    if rdzv.round is None:
        return "the record says that no round was formed yet"
    what = f"round {rdzv.round.name} with {plural(rdzv.round.world_size, 'rank')}"
    if rdzv.over:
        return f"the record says that {what} is over: {rdzv.over}"
    return f"the record says that {what} runs"
