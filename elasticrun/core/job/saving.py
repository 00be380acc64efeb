"""Snapshots and checkpoints: what `core/snapshots` decides is carried out, and it is told what
happens to nodes and rounds.

It owns no rule but two. A round whose snapshot turns out to be unusable is reopened, and nobody is
charged for it. A job that ends waits until its last snapshot is written out: where ranks have
failed and --save-at-breakpoint was given that is the newest whole one, once their nodes have
stopped; else what was under way or asked for, so that a script's last checkpoint is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticrun.config import EXIT_OK
from elasticrun.core import events as fx
from elasticrun.core.job.base import JobBase
from elasticrun.core.rounds.rendezvous import SURVIVOR_SLACK, Decision, Phase, Verb
from elasticrun.core.rounds.round import Round
from elasticrun.core.snapshots.choice import Choice
from elasticrun.core.snapshots.types import key_of, order_of
from elasticrun.wire import messages as m

OF_SNAPSHOTS = m.Holdings | m.WhereIs | m.ShardBad | m.Persisted | m.NotReplicated
"""Reports about snapshots."""


class Saving(JobBase):
    """See the module's head."""

    # ------------------------------------------------------------ nodes

    def _heard_of_snapshots(
        self,
        node: str,
        report: m.Holdings | m.WhereIs | m.ShardBad | m.Persisted | m.NotReplicated,
    ) -> None:
        now, saves = self._now, self._saves
        if isinstance(report, m.Holdings):
            saves.heard(node, report, now)
        elif isinstance(report, m.WhereIs):
            saves.points.where(node, report)
        elif isinstance(report, m.Persisted):
            before = saves.checkpoints.written
            saves.persisted(node, report, now)
            self._stale = self._stale or saves.checkpoints.written != before
        elif isinstance(report, m.NotReplicated):
            saves.not_replicated(node, report, now)
        elif saves.points.bad(node, report):
            self._bad_snapshot = f"the snapshot of step {report.step} cannot be used"
        self._tell_saves()

    def _saves_again(self, node: str) -> None:
        """An agent has attached: what it may not have been told."""
        self._saves.attached(node, self._now, member=self._rdzv.last.is_member(node))
        self._tell_saves()

    def _are_going(self, nodes: Iterable[str], *, signalled: bool = False) -> None:
        """These nodes say that they go (of a death signal), or are told so next. What the ranks of
        one that departs could not save, or have left in its memory, is written out as after a
        failure."""
        self._saves.going(nodes, self._now, signalled=signalled)
        self._tell_saves()

    def _depart(self, node: str, report: m.Departing | m.Missed) -> None:
        """A node is to leave, or a rank cannot save the step that was named."""
        round_ = self._round
        if round_ is None or self._rdzv.phase is not Phase.RUNNING:
            return  # it is told to stop anyway
        members = tuple(one for one in self._rdzv.last.stages if self._rdzv.last.is_member(one))
        self._saves.departing(node, report, round_.name, members)
        self._tell_saves()

    def _holds_no_more(self, node: str, reason: str) -> None:
        """The node has gone, as `reason` says in a clause."""
        self._saves.forget(node, self._now, gone=reason)
        self._tell_saves()

    # ------------------------------------------------------------ rounds

    def _choose_snapshot(self, trouble: str) -> Choice:
        """What the round that forms now goes on from. `trouble`: which member has gone."""
        saves = self._saves
        if self._settlement.window.failed_by_itself and not trouble:
            saves.points.failed_by_itself()
        choice = saves.points.choose()
        self._tell_saves()
        if choice.why:
            self._note(choice.why, "warning")
        if choice.restore_step >= 0:
            where = "memory" if choice.restore is not None else "storage"
            self._note(f"ranks go on from step {choice.restore_step} in {where}: --restore-step")
        elif choice.suspect:
            assert choice.restore is not None
            step = choice.restore.step
            else_ = f"unless storage has a checkpoint below step {saves.points.rewound_from}"
            self._note(f"ranks try step {step} in memory again, {else_}", "warning")
        elif choice.restore is not None:
            step, newest = choice.restore.step, self._newest_step
            told = f"; step {newest} was the newest that was told of" if newest > step else ""
            left = ", as agents before these have left it" if saves.points.looks_back else ""
            self._note(f"ranks go on from step {step} in memory{left}{told}")
        elif (round_ := self._round) and (saves.points.watermark >= 0 or round_.restore):
            nothing = "nothing in memory can be restored: ranks load the newest checkpoint"
            self._note(nothing, "warning")
        self._newest_step = -1
        return choice

    def _round_begins(self, round_: Round) -> None:
        """Its nodes are about to be told: what is over by that must be told before."""
        self._bad_snapshot = ""
        self._saves.begin_round(round_.name, round_.world_size, round_.restore, round_.seats)
        self._tell_saves()

    def _save_at_breakpoint(self, round_: Round) -> None:
        """A failure has ended the round before this one, whose nodes have been told."""
        if self.spec.saves.at_breakpoint and round_.restore is not None and not round_.suspect:
            self._saves.checkpoints.save(round_.restore, self._now)
            self._tell_saves()

    def _pursue_saves(self) -> None:
        """Begin what is due, end what is late."""
        self._saves.proceed(self._now)
        self._tell_saves()

    # ------------------------------------------------------------ the end

    def _is_to_be_saved(self, exit_code: int) -> bool:
        """Whether the newest whole snapshot is to be written out because the job ends."""
        if exit_code == EXIT_OK or not self.spec.saves.at_breakpoint:
            return False
        newest = self._saves.points.choose().restore
        return newest is not None and newest != self._saves.checkpoints.written

    def _look_what_is_left(self) -> None:
        """A node leaves: what the next round would go on from if it stayed."""
        newest = self._saves.points.choose().restore
        if newest is not None:
            key = key_of(newest)
            self._left_behind = max(self._left_behind or key, key, key=order_of)

    def _is_left_in_storage(self) -> bool:
        """Whether another run would go on from there, or from a later step."""
        left = self._left_behind
        return left is not None and self._saves.checkpoints.is_in_storage(left)

    def _hold_for_saves(self, exit_code: int, now: float) -> Decision | None:
        """The job is to end: what that waits for, None if for nothing (any more)."""
        saves = self._saves.checkpoints
        if self._sentenced_at is None:
            self._sentenced_at = now
            saves.hurry(now)
            self._tell_saves()
        stopped = self._sentenced_at + self.spec.restart_grace + SURVIVOR_SLACK
        if self._is_to_be_saved(exit_code) and not self._is_last_saved:
            if self._rdzv.is_waiting_for_survivors() and now < stopped:
                reason = "ranks are stopped, so that their last snapshot can be saved"
                return Decision(Verb.WAIT, f"{reason} before the job ends", stopped)
            self._is_last_saved = True
            self._save_by = now + self.spec.saves.limit
            newest = self._saves.points.choose().restore
            assert newest is not None
            saves.save(newest, now)
            self._tell_saves()
        until = self._save_by or self._sentenced_at + self.spec.saves.limit
        if saves.busy and now < until:
            return Decision(Verb.WAIT, f"{saves.busy} before the job ends", until)
        saves.abandon("it was not written before the job had to end")
        self._tell_saves()
        return None

    # ------------------------------------------------------------ small change

    def _tell_saves(self) -> None:
        """Pass on what came of it."""
        outbox = self._saves.outbox
        news, outbox.news = outbox.news, []
        orders, outbox.orders = outbox.orders, []
        for text, level in news:
            self._note(text, level)
        for nodes, order in orders:
            found = (self._membership.session_of(node) for node in nodes)
            sessions = tuple(session for session in found if session is not None)
            if sessions:
                self._out.append(fx.Tell(sessions, order))
