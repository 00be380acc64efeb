"""The record: what of this master must outlive it, as `Facts`, and what it makes of another's.

What is not written down is asked of the agents, who say all of it again on every stream: which
round they run, what failed, what has stopped. Beats and joins are no facts.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.config import GROW_YOUNG
from elasticrun.core.context import JobContext
from elasticrun.core.events import Record
from elasticrun.core.nodes.node import Health
from elasticrun.core.persisted import Facts, RoundFacts
from elasticrun.core.reasons import Reason, Said, read, recorded
from elasticrun.core.rounds.rendezvous import Phase, Rendezvous
from elasticrun.core.rounds.round import Round
from elasticrun.core.sight.ledger import SlotLedger
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.core.words import some

RECORD_EVERY = 10.0
"""While the job waits for something, what remains of the wait is recorded so often (seconds), so
that a master which dies again and again neither waits for ever nor gives up at once."""


class Recorder:
    """When the record is made, and of what."""

    def __init__(self, ctx: JobContext, snapshots: Snapshots) -> None:
        self._ctx = ctx
        self._snapshots = snapshots
        self._at = 0.0
        self._is_owed = False  # a fact has changed that no order waits for
        self.ledger: SlotLedger | None = None

    def record(self) -> None:
        """Whatever is told after this waits until it is durable."""
        self._at = self._ctx.now
        self._is_owed = False
        self._ctx.out.append(Record(self._facts()))

    def record_soon(self) -> None:
        """A fact has changed that no order waits for: it is in the record within RECORD_EVERY."""
        self._is_owed = True

    def catch_up(self) -> None:
        """Record at once what would be recorded soon."""
        if self._is_owed:
            self.record()

    def pursue(self, *, waiting: bool) -> float | None:
        """Make the record if it is due although nothing was ordered; when it is due next. That is
        now and then while a wait runs or after a fact has changed, and once when a round is no
        longer young, since the next master asks how old it is."""
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
        ctx, now, saves = self._ctx, self._ctx.now, self._snapshots
        restarts, round_ = ctx.restarts, ctx.round
        here = (Health.ALIVE, Health.SUSPECT)
        keep = {node.id for node in ctx.nodes.values() if node.health in here}
        keep.update(round_.members if round_ else ())
        excuse = restarts.window.excused
        return Facts(
            spec=ctx.spec,
            term=ctx.term,
            number=ctx.number,
            round=_round_facts(round_, ctx.rdzv, excuse, now) if round_ else None,
            order=ctx.nodes.order(keep, others=ctx.spec.max_nodes),
            charges=restarts.budget.ages(now),
            restart_count=restarts.budget.count,
            short_lives=restarts.budget.short_lives,
            left_out=ctx.membership.left_out(now),
            fickle=ctx.flaps.record(now),
            starved=ctx.rdzv.starved(now),
            outcome=ctx.outcome,
            blind=ctx.rdzv.takeover.expected_until is not None,
            blamed=restarts.attribution.record(now),
            excluded=ctx.exclusions.page(now),
            slow_ages=ctx.exclusions.slow_ages(now),
            written=saves.checkpoints.written,
            rejected=saves.points.rejected(),
            rewound_from=saves.points.rewound_from,
            restore_step=saves.points.restore_step,
            incidents=ctx.incidents,
            dumps=ctx.dumps,
            waits=ctx.waits,
            scaled=ctx.scaled,
            ledger=self.ledger.record() if self.ledger is not None else None,
        )

    def load(self, facts: Facts) -> None:
        """Give every machine what the master before this one knew."""
        ctx, now = self._ctx, self._ctx.now
        ctx.number = facts.number
        ctx.incidents = facts.incidents
        ctx.dumps = facts.dumps
        ctx.waits = facts.waits
        ctx.outcome = facts.outcome
        if facts.scaled:
            ctx.scale(facts.spec.min_nodes, facts.spec.max_nodes)
        ctx.nodes.remember(facts.order)
        ctx.restarts.budget.restore(facts.restart_count, facts.charges, facts.short_lives, now)
        ctx.restarts.attribution.restore(facts.blamed, now)
        ctx.membership.remember(facts.left_out, now)
        ctx.flaps.restore(facts.fickle, now)
        ctx.exclusions.restore(facts.excluded, facts.slow_ages, now)
        written = (facts.written, facts.rejected)
        self._snapshots.restore(*written, facts.rewound_from, facts.restore_step)
        if facts.round is not None:
            over = read(facts.round.over, facts.round.over_code)
            ctx.round = Round(facts.round, inherited=True, why_stopped=over)
        if facts.outcome is None and ctx.round is not None:
            self._load_round(ctx.round, facts.starved)
        elif facts.outcome is None:
            ctx.rdzv.restore(None, facts.starved, now, 0.0)
            if facts.blind:
                ctx.rdzv.takeover.expect_round(now)
        ctx.note(_in_words(facts))

    def _load_round(self, round_: Round, starved: float) -> None:
        was = round_.facts
        ctx, now, gone = self._ctx, self._ctx.now, set(was.gone)
        ctx.restarts.new_round(adopted=was.adopted)  # its agents tell its failures again
        ctx.restarts.window.excuse(read(was.excuse, was.excuse_code))
        redial = ctx.membership.redial(len(was.seats))
        ctx.flaps.taken_over(seat.node for seat in was.seats)
        for seat in was.seats:
            if seat.node in gone:
                ctx.membership.recall(seat.node, seat.incarnation, now)
            else:
                ctx.membership.expect(seat.node, seat.incarnation, now, redial=redial)
        ctx.rdzv.restore(was, starved, now, redial)
        seats = round_.seats  # itself: members of an adopted round are seated as they come
        self._snapshots.begin_round(was.name, was.world_size, was.restore, seats)
        self._snapshots.checkpoints.take_over(None if was.suspect else was.restore)
        self._snapshots.points.expect(node for node in seats if node not in gone)


def _round_facts(round_: Round, rdzv: Rendezvous, excuse: Reason | None, now: float) -> RoundFacts:
    last, running = rdzv.last, rdzv.phase is Phase.RUNNING
    over = None if running else round_.why_stopped or Said("it is over")
    lost = last.lost[0] if last.lost else None
    return replace(
        round_.facts,
        age=now - rdzv.formed_at,
        seats=tuple(round_.members.values()),
        **recorded(over=over, lost=lost, excuse=excuse),
        gone=tuple(last.away),
        done=tuple(node for node in last.away if node in last.completed),
        waiting=() if running else tuple(n for n in rdzv.ready if not last.is_member(n)),
        fenced=last.fenced,
        silent=now - last.last_word,
    )


def _in_words(facts: Facts) -> str:
    """What the record says, in a line for the operator."""
    if facts.outcome is not None:
        return f"the record says that the job is over: {facts.outcome.reason}"
    if facts.round is None:
        return "the record says that no round was formed yet"
    what = f"round {facts.round.name} with {some(facts.round.world_size, 'rank')}"
    if facts.round.over:
        return f"the record says that {what} is over: {facts.round.over}"
    return f"the record says that {what} runs"
