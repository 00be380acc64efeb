"""How this node leaves: after a death signal, or after a checkpoint that it is still writing.

A death signal means that this node leaves. If its ranks have a Checkpointer it first *departs*: it
reports to the master, which names a step that all ranks of the round save; the ranks here keep
running until that step is in storage. Then, or when `departure_grace` is over, or at a second death
signal, the node leaves: its ranks are stopped, and the master receives `Leaving`. If no rank can
save now but earlier ones have left snapshots here, the node leaves at once. Its agent stays only
until these are written, if this node has the only copy of something; between two rounds that is all
there is to save. None of this is charged as a restart. At a time limit and at preemption, Slurm
sends SIGTERM twice within milliseconds: that counts as one signal.

A scheduler may signal every process at once. Then ranks exit by themselves once they have saved.
The node waits nevertheless until the master has begun to write that step, at most WAIT_FOR_SAVED;
from then on HOLDING applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.reasons import (
    Departs,
    Leaves,
    NoMaster,
    Reason,
    Said,
    text,
)
from elasticrun.core.rounds.failures import Ending, code_for
from elasticrun.core.worker.context import GroupContext
from elasticrun.core.worker.ranks import SIGTERM
from elasticrun.core.worker.states import ENDINGS, ExitNow, FinishRanks, GroupWish, LeaveNode, State
from elasticrun.wire import messages as m
from elasticrun.wire.types import REPEAT_WITHIN

MAX_PERSISTS = 16
"""Maximum number of tracked attempts; the master runs one at a time, and begins the next when that
one is over."""

AttemptName = str

RESCUE: AttemptName = "rescue"
"""Placeholder for an attempt to persist that the master may begin when a node leaves without having
saved a step."""

RESCUE_WITHIN = 2.0
"""Seconds within which the master begins such an attempt."""

WAIT_FOR_SAVED = 6.0
"""When ranks saved a step before they exited, the master must begin to write it within this many
seconds; a little more than `snapshots/checkpoints.WAIT_FOR_ALL`."""


MASTER_BACK_WITHIN = 20.0
"""Seconds without a master after which a node that stays only for a checkpoint gives up: only a
master can order the marker."""


@dataclass(frozen=True, slots=True)
class Write:
    """An attempt to persist, and when it is abandoned. `order`: None for RESCUE."""

    until: float
    order: m.Persist | None = None


def ending(
    code: int, why: Reason | None, failures: tuple[m.Failure, ...] = (), saved: int = -1
) -> fx.Exit:
    """The exit of an agent for this reason."""
    typed = None if isinstance(why, Said) else why
    return fx.Exit(code, text(why), failures, 0, saved, typed)


def why_of(outcome: fx.Exit) -> Reason:
    """The reason of an exit."""
    return outcome.why or Said(outcome.reason)


class Draining:
    """Handles how a worker group leaves, and its pending writes; the group's table defines when
    each method applies."""

    def __init__(self, ctx: GroupContext, grace: float) -> None:
        """`grace`: seconds from a death signal until the node leaves, if ranks can save."""
        self._ctx = ctx
        self._grace = grace
        self._repeats = (0, 0.0)  # a signal, and until when it counts as a repetition
        self._requested = -1  # the step that the ranks must save; -1: none
        self._written = -1  # the newest step of the current round that is in storage
        self._held_step: int | None = None
        """The newest step here, if the node was signalled before its ranks could save."""
        self._cut_short = False  # a rank of this round exited early
        self.cause: fx.Signalled | None = None
        """The signal that arrived while ranks could save, until this node leaves."""
        self.writes: dict[AttemptName, Write] = {}
        """The persist attempts in which this node takes part. The agent must not exit during one,
        because it may hold the only copy of a shard. One begins with Persist. It ends with
        PersistOver, at the time limit of the order, or when another master takes over."""
        self._no_master_since: float | None = None

    def new_round(self) -> None:
        self._cut_short = False
        self._requested = self._written = -1

    # ------------------------------------------------------------ pending writes

    def persist(self, order: m.Persist, now: float) -> None:
        """An attempt begins; a repetition of the order grants no more time."""
        self.writes.pop(RESCUE, None)
        self._forget_late(now)
        if order.attempt not in self.writes and len(self.writes) >= MAX_PERSISTS:
            late = f"attempt {order.attempt} is one too many at a time: left out"
            self._ctx.note(late, "warning")
            return
        self.writes.setdefault(order.attempt, Write(now + order.limit, order))
        self._rearm()
        self._obey(order)

    def persist_over(self, order: m.PersistOver, now: float) -> GroupWish | None:
        """An attempt has ended, successfully or not; or a step was abandoned before one began."""
        ctx, cause, present = self._ctx, self.cause, self._ctx.is_current_round(order.round)
        if order.ok and (present or self._held_step is not None):
            self._written = max(self._written, order.step)
            if self.has_saved():
                self.mark_outcome_saved(self._written)
        start = ctx.start
        if order.ok and start is not None:
            ctx.start = replace(start, info=start.info.committed(order.step))
        self._obey(order)
        self.writes.pop(order.attempt, None)
        self._forget_late(now)
        self._rearm()
        settled = order.ok or not order.attempt  # else another attempt may follow
        if cause is None or not present or not settled or ctx.state is not State.RUNNING:
            return self._exit_if_free()
        if 0 <= self._requested <= order.step:
            return self._leave(cause, now) if order.ok else self.leave_unsaved(cause, now)
        return None

    def _obey(self, order: m.Order) -> None:
        """Pass on an order about snapshots that has also changed state here."""
        self._ctx.out.append(fx.Obey(order))

    def master_lost(self, now: float) -> None:
        """No master is reachable that could order the marker of what is written here."""
        if self._no_master_since is None:
            self._no_master_since = now
        self._rearm()

    def master_answers(self, now: float, *, is_new: bool) -> None:
        """A master is reachable. `is_new`: not the previous one. Nobody would finish the attempts
        of the previous master, so they are abandoned here. The snapshots are still wanted: the new
        master begins another attempt."""
        self._no_master_since = None
        orders = [one.order for one in self.writes.values() if one.order and is_new]
        for order in orders:
            del self.writes[order.attempt]
            why = "the master that had ordered it is gone"
            self._obey(m.PersistOver(order.attempt, order.round, order.step, False, why))
        if orders and self._ctx.state in ENDINGS:
            self.writes[RESCUE] = Write(now + WAIT_FOR_SAVED)
        self._rearm()

    def _forget_late(self, now: float) -> None:
        for attempt in [name for name, one in self.writes.items() if one.until <= now]:
            del self.writes[attempt]

    def hold(self) -> None:
        """Set the deadline of HOLDING."""
        until = max(one.until for one in self.writes.values())
        if self._no_master_since is not None:
            until = min(until, self._no_master_since + MASTER_BACK_WITHIN)
        self._ctx.deadlines.arm("holding", until)

    def _rearm(self) -> None:
        if self._ctx.state is State.HOLDING and self.writes:
            self.hold()

    def _exit_if_free(self) -> ExitNow | None:
        free = self._ctx.state is State.HOLDING and not self.writes
        return ExitNow() if free else None

    def signalled_holding(self, event: fx.Signalled, now: float) -> GroupWish | None:
        """HOLDING: another death signal ends the wait; a repetition of the first does not."""
        if event.death and not self._is_repeated(event, now):
            does = "this node does not wait any longer"
            self._ctx.note(f"received {event.name}: {does}", "warning")
            self.writes.clear()
            return ExitNow()
        return None

    def saver_lost(self, event: fx.SpawnerLost, now: float) -> None:
        """HOLDING: the writing process died with its spawner. The runtime reports that to the
        master, which ends the attempt or begins another one."""
        self._ctx.stores.lose_spawner()

    def held_long_enough(self) -> GroupWish | None:
        """The time for HOLDING is over, no matter what was written. Logs nothing after a mere
        RESCUE."""
        if self._no_master_since is not None:
            why = "no master answers that could finish the checkpoint"
            line = f"{why}: this node goes without"
            self._ctx.note(line, "warning", NoMaster("no checkpoint without one"))
        elif self.writes.keys() != {RESCUE}:
            late = "the checkpoint was not saved in its time; this node goes"
            self._ctx.note(late, "warning")
        self.writes.clear()
        return self._exit_if_free()

    # ------------------------------------------------------------ signals and departures

    def signalled(self, event: fx.Signalled, now: float) -> GroupWish | None:
        """Any state except HOLDING and OVER: forward a signal, depart, or leave."""
        ctx = self._ctx
        may_wait = self.cause is None and self._grace > 0
        ctx.ranks.signalled(event.signum, now)
        if not event.death or ctx.state in (State.ENDING, State.CLEARING):
            if ctx.ranks.live:
                ctx.signal(event.signum)
        elif ctx.state is State.RUNNING and event.step >= 0 and may_wait:
            self._depart(event, now)
        elif self._is_repeated(event, now):
            pass
        elif event.held >= 0 and may_wait and ctx.state is not State.FINISHED:
            self._expect_repeat(event, now)
            if ctx.state is not State.RUNNING or event.fresh:
                self._held_step = event.held
            return self.leave_unsaved(event, now)
        else:
            return self._leave(event, now)  # at once, also after a second signal
        return None

    def _expect_repeat(self, event: fx.Signalled, now: float) -> None:
        if event.signum == SIGTERM:
            self._repeats = (SIGTERM, now + REPEAT_WITHIN)

    def _is_repeated(self, event: fx.Signalled, now: float) -> bool:
        """Whether this is a repetition of the signal because of which this node leaves."""
        signum, until = self._repeats
        return event.signum == signum and now < until

    def _depart(self, event: fx.Signalled, now: float) -> None:
        ctx = self._ctx
        self.cause = event
        self._expect_repeat(event, now)
        if self._requested <= self._written:  # for an earlier departure; else it serves both
            self._requested = -1
        ctx.deadlines.arm("departing", now + self._grace)
        ctx.reason = Departs(event.name)
        limit = f"in {self._grace:g} s at most"
        ctx.note(f"{text(ctx.reason)}, {limit}; a second signal ends it at once")
        self.report_departure()

    def report_departure(self) -> None:
        """Report the departure to the master (also to a new one), which chooses the step."""
        if (cause := self.cause) is not None:
            at = (cause.step, cause.margin, self._requested)
            self._ctx.report(m.Departing, f"received {cause.name}", cause.signum, *at)

    def _leave(self, event: fx.Signalled, now: float) -> GroupWish:
        ctx, reason, saved = self._ctx, f"received {event.name}", self.has_saved()
        why = f"step {self._written} is saved" if saved else reason
        ctx.note(f"{why}: the ranks are told, and this node leaves")
        ctx.send(m.Leaving(reason, event.signum))
        code = code_for(ctx.failures(), Ending.SAVED if saved else Ending.LEFT)
        left = ending(code, Leaves(reason, event.signum), saved=self._written if saved else -1)
        outcome = replace(left, signum=event.signum)
        return LeaveNode(outcome, event.signum)

    def leave_unsaved(self, event: fx.Signalled, now: float) -> GroupWish:
        """Leave, but stay until earlier snapshots of the ranks are written, if this node has the
        only copy."""
        if not self.writes:
            self.writes[RESCUE] = Write(now + RESCUE_WITHIN)
        return self._leave(event, now)

    def save_at(self, order: m.SaveAt, now: float) -> None:
        if self._ctx.is_current_round(order.round):
            self._requested = order.step
            self._obey(order)

    def has_saved(self) -> bool:
        """Whether the step that the ranks must save before they leave is in storage. If the signal
        arrived between two rounds or while the ranks started: whether the newest step held here
        is."""
        step = self._requested if self._held_step is None else self._held_step
        return 0 <= step <= self._written

    def mark_outcome_saved(self, step: int) -> None:
        """`step` is in storage: if this node leaves because of a signal, its exit code says so."""
        ctx = self._ctx
        if ctx.outcome is not None and ctx.outcome.signum:
            code = code_for(ctx.failures(), Ending.SAVED)
            saved = max(step, ctx.outcome.saved)
            ctx.outcome = replace(ctx.outcome, code=code, saved=saved)

    def exited(self, event: fx.RankExited, cause: fx.Signalled, now: float) -> GroupWish | None:
        """A rank has exited while this node departs."""
        ctx = self._ctx
        ctx.ranks.signalled(cause.signum, now)  # ranks may have delayed it
        if event.code == 0 and event.failure is None:
            if not ctx.ranks.live and not self._cut_short:
                return FinishRanks()
        else:
            failure = ctx.ranks.failed(event, now)
            self._cut_short = True
            if failure.kind is not m.FailureKind.STOPPED:
                ctx.failed(event.local_rank, failure)
                return self.leave_unsaved(cause, now)
        if not ctx.ranks.live:
            due = ctx.deadlines.when("departing")
            soon = now + WAIT_FOR_SAVED if self._requested >= 0 else now
            ctx.deadlines.arm("departing", soon if due is None else min(due, soon))
        return None

    def due(self, now: float) -> GroupWish | None:
        """The time for a departure is over: leave."""
        if self.cause is None:
            return None
        if self._ctx.ranks.live:
            waited = f"no step was saved within {self._grace:g} s"
            self._ctx.note(f"{waited}: this node leaves without", "warning")
        return self.leave_unsaved(self.cause, now)
