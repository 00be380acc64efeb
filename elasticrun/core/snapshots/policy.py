"""Connects the snapshots to the job: passes on events of nodes and rounds, and sends the resulting
orders.

It has only two rules of its own. A round whose snapshot turns out to be unusable is reopened,
without charging a restart. A job that ends waits until its last snapshot is written. If an operator
stops the job, and with --save-at-breakpoint after a failure, that is the newest whole one, once the
nodes have stopped; otherwise it is what was being written or was requested, so a script's last
checkpoint is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticrun.config import EXIT_OK
from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.nodes.admission import DIFFERS
from elasticrun.core.parts import FactsRecorder
from elasticrun.core.reasons import (
    Excluded,
    LastSave,
    Reason,
    ReplicasDiffer,
    SnapshotUnusable,
    WorkUnknown,
    is_by_operator,
    text,
)
from elasticrun.core.rounds.rendezvous import SURVIVOR_SLACK, Decision, Phase, Verb
from elasticrun.core.rounds.round import Round
from elasticrun.core.snapshots.agreement import Difference
from elasticrun.core.snapshots.choice import Choice
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.core.snapshots.types import Key, key_of, sort_key
from elasticrun.core.wishes import Exclude, Mention, RecordSoon, Reopen, Wish
from elasticrun.core.work.work import WorkNews
from elasticrun.wire import messages as m
from elasticrun.wire.types import write_ranges

MAX_RETURNS = 3
"""Maximum number of rounds of a job that end because replicas differ without excluding a node."""

MAX_SIDES = 4
MAX_PLACES = 4
"""Maximum number of groups of equal ranks, and of ranks with their places, in a sentence."""


class SnapshotPolicy:
    """Runs `Snapshots` for the job."""

    def __init__(self, ctx: JobContext, snapshots: Snapshots, recorder: FactsRecorder) -> None:
        self._ctx = ctx
        self._recorder = recorder
        self._rdzv = ctx.rdzv
        self._snapshots = snapshots
        self.newest_step = -1
        """The newest step reported by ranks of the current round."""
        self._left_behind: Key | None = None  # the newest snapshot that nodes had when they left
        self._ends_since: float | None = None  # since when the job is ending
        self._is_last_saved = False  # the write of the last snapshot has started
        self._save_by = 0.0  # when that write is abandoned
        self._wishes: list[Wish] = []  # from reports of this step
        self.has_changed = True
        """Whether something has changed since `pursue` last ran."""
        self._due: float | None = None  # when `pursue` is due without a report

    # ------------------------------------------------------------ nodes

    def on_report(self, node: str, report: m.SaveReport) -> bool:
        """Process a report. Returns True, because `pursue` decides what follows, unless it was only
        a request for work."""
        if isinstance(report, m.WorkBase | m.WorkState):
            return self._on_work(node, report)
        now, snapshots = self._ctx.now, self._snapshots
        if isinstance(report, m.Holdings):
            if report.worked:
                name = None if self._ctx.round is None else self._ctx.round.name
                self._react(snapshots.work.note_use(name))
            snapshots.on_holdings(node, report, now)
        elif isinstance(report, m.WhereIs):
            snapshots.points.locate(node, report)
        elif isinstance(report, m.Persisted):
            before = snapshots.checkpoints.written
            snapshots.persisted(node, report, now)
            if snapshots.checkpoints.written != before:
                self._wishes.append(RecordSoon())
        elif isinstance(report, m.Digests):
            round_ = self._ctx.round if self._rdzv.phase is Phase.RUNNING else None
            if round_ is not None and report.round == round_.name:
                self._judge(snapshots.agreement.on_digests(node, report, now))
        elif isinstance(report, m.NotReplicated):
            snapshots.not_replicated(node, report, now)
        elif isinstance(report, m.Departing | m.Missed):
            self._departing(node, report)
        elif snapshots.points.shard_bad(node, report):
            self._wishes.append(Reopen(SnapshotUnusable(report.step)))
        self._send()
        return True

    def _on_work(self, node: str, report: m.WorkBase | m.WorkState) -> bool:
        """Process a report about work that is handed out. Marks count after the round's end too."""
        round_, work = self._ctx.round, self._snapshots.work
        seat = None if round_ is None else round_.members.get(node)
        if round_ is None or seat is None:
            return False
        if isinstance(report, m.WorkBase):
            outcome = work.on_base(report, round_.info, inherited=round_.is_inherited)
        elif seat.first_rank <= report.rank < seat.first_rank + seat.ranks:
            outcome = work.on_state(node, report, round_.info, inherited=round_.is_inherited)
        else:
            return False
        self._react(outcome)
        before = self.has_changed
        self._send()
        self.has_changed = before or outcome is not WorkNews.NOTHING
        return outcome is not WorkNews.NOTHING

    def _react(self, news: WorkNews) -> None:
        if news is WorkNews.UNKNOWN:
            self._wishes.append(Reopen(WorkUnknown()))

    def _listen_for_work(self) -> None:
        """Let ranks of a round of another master take work once every member has reported what its
        ranks have. If one is gone before that, nobody knows."""
        last, away = self._rdzv.last, self._snapshots.points.away
        work = self._snapshots.work
        if any(work.needs(done=node in last.completed) for node in last.away):
            self._react(work.lose())
        elif self._rdzv.is_whole and not last.unseen and not any(map(last.is_member, away)):
            work.heard_all()

    def attached(self, node: str) -> None:
        """An agent has attached: send what it may have missed."""
        self._snapshots.attached(node, self._ctx.now, member=self._rdzv.last.is_member(node))
        self._send()

    def nodes_leave(self, nodes: Iterable[str], *, signalled: bool = False) -> None:
        """These nodes announce that they leave (`signalled`: on a death signal), or are about to be
        ordered to. What only they hold may be written first: see `Snapshots.nodes_leave`."""
        self._snapshots.nodes_leave(nodes, self._ctx.now, signalled=signalled)
        self._send()

    def _departing(self, node: str, report: m.Departing | m.Missed) -> None:
        """A node is leaving, or a rank cannot save the requested step."""
        round_ = self._ctx.round
        if round_ is None or self._rdzv.phase is not Phase.RUNNING:
            return  # the ranks are stopped anyway
        members = tuple(one for one in self._rdzv.last.stages if self._rdzv.last.is_member(one))
        self._snapshots.departing(node, report, round_.name, members)

    def lost_contact(self, node: str) -> None:
        """Handle a broken stream: the node's snapshots do not count until it reports them again."""
        self._snapshots.forget(node, self._ctx.now)
        self.has_changed = True

    def node_gone(self, node: str, reason: str, *, replaced: bool = False) -> None:
        """The node is lost, because of `reason` (a clause). `replaced`: a newer incarnation of it
        has attached."""
        self._snapshots.forget(node, self._ctx.now, gone_because=reason, replaced=replaced)
        self._send()

    # ------------------------------------------------------------ rounds

    def choose(self, trouble: Reason | None) -> Choice:
        """Choose and log what the round that forms now restores. `trouble`: which member is
        lost."""
        snapshots, note = self._snapshots, self._ctx.note
        if self._ctx.restarts.window.failed_by_itself and not trouble:
            snapshots.points.failed_by_itself()
        choice = snapshots.points.choose()
        self._send()
        if choice.why:
            note(choice.why, "warning")
        if choice.skip.all_but >= 0:
            where = "memory" if choice.restore is not None else "storage"
            note(f"ranks resume from step {choice.skip.all_but} in {where}: --restore-step")
        elif choice.skip.memory and choice.restore is not None:
            step = choice.restore.step
            else_ = f"unless storage has a checkpoint below step {snapshots.points.rewound_from}"
            note(f"ranks try step {step} in memory again, {else_}", "warning")
        elif choice.restore is not None:
            step, newest = choice.restore.step, self.newest_step
            also = f"; step {newest} was the newest reported" if newest > step else ""
            left = ", left by earlier agents" if snapshots.points.knows_round_from_agents else ""
            note(f"ranks resume from step {step} in memory{left}{also}")
        elif (round_ := self._ctx.round) and (
            snapshots.points.watermark >= 0 or round_.info.restore
        ):
            nothing = "nothing in memory can be restored: ranks load the newest checkpoint"
            note(nothing, "warning")
        self.newest_step = -1
        return choice

    def round_begins(self, round_: Round) -> None:
        """The round's nodes are about to get their orders; first, tell them which writes are
        over."""
        self._left_behind = None
        self._snapshots.begin_round(round_.info, round_.seats)
        self._send()

    def round_adopted(self, round_: Round) -> None:
        """An agent runs a round that this master did not know of."""
        points = self._snapshots.points
        self.has_changed = True
        points.rewound_from, points.restore_step = round_.info.skip.storage_from, -1
        self._snapshots.begin_round(round_.info, round_.seats)

    def save_at_breakpoint(self, round_: Round) -> None:
        """A failure has ended the previous round; the nodes have the orders for the next. With
        --save-at-breakpoint, write the snapshot that is restored."""
        restore, skip = round_.info.restore, round_.info.skip
        if self._ctx.spec.saves.at_breakpoint and restore is not None and not skip.memory:
            self._snapshots.checkpoints.save(restore, self._ctx.now)
            self._send()

    def pursue(self) -> tuple[Wish, ...]:
        """Start what is due, end what is late, and return the wishes that reports have caused."""
        now, outbox = self._ctx.now, self._snapshots.outbox
        late = self._due is not None and now >= self._due
        if not self._snapshots.work.has_heard_all:
            self._listen_for_work()
        if self.has_changed or late or outbox.orders:
            self.has_changed = False
            self._snapshots.proceed(now)
            compares = self._rdzv.phase is Phase.RUNNING and self._snapshots.points.watermark >= 0
            if compares:
                self._judge(self._snapshots.compare(now))
            if outbox.orders or outbox.notes:  # sending sets `has_changed`
                self._send()
            self._due = self._snapshots.next_deadline()
            if compares:
                self._due = earliest(self._due, self._snapshots.agreement.next_deadline())
        wishes, self._wishes = self._wishes, []
        return tuple(wishes)

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest; None if nothing is due."""
        return self._snapshots.next_deadline() if self.has_changed else self._due

    def overslept(self, by: float) -> None:
        """The master was not listening for `by` seconds: every deadline moves by that much."""
        self._snapshots.overslept(by)
        self.has_changed = True

    # ------------------------------------------------------------ replicas that differ

    def _judge(self, differences: Iterable[Difference]) -> None:
        """Replicas differ: do what the user has asked for (--on-corruption)."""
        for one in differences:
            reason = self._reason_of(one)
            if one.majority:
                self._snapshots.points.distrust(one.ranks, one.agreed + 1)
            wish, then = self._consequence(one, reason)
            self._ctx.note(f"{text(reason)}; {then}", "warning")
            if not isinstance(wish, Mention):
                agreement = self._snapshots.agreement
                self._snapshots.points.go_back(one.agreed, agreement.first)
            self._wishes += (wish, RecordSoon())

    def _consequence(self, one: Difference, reason: ReplicasDiffer) -> tuple[Wish, str]:
        """What follows from a difference, and the clause about it."""
        mode, agreement = self._ctx.spec.saves.on_corruption, self._snapshots.agreement
        nodes = {*one.nodes}
        culprit = nodes.pop() if one.majority and len(nodes) == 1 else ""
        again = agreement.accuse(culprit) if culprit else False
        own = "what it saved since then is not restored" if one.majority else "training continues"
        if mode == "tell":
            return Mention(reason), f"{own} (--on-corruption=tell)"
        if culprit and (again or mode == "exclude") and self._rdzv.is_enough_without(culprit):
            return Exclude(culprit, Excluded(DIFFERS, text(reason))), "its node is excluded"
        if agreement.returns >= MAX_RETURNS:
            most = f"{MAX_RETURNS} rounds have ended for such a reason, which is the limit"
            return Mention(reason), f"{own}: {most}"
        agreement.returns += 1
        return Reopen(reason), "training returns to the last step at which all were equal"

    def _reason_of(self, one: Difference) -> ReplicasDiffer:
        sides = tuple(write_ranges(side, pairs=True) for side in one.sides[:MAX_SIDES])
        places = []
        found = zip(one.ranks, one.nodes, one.devices, strict=True)
        for rank, node, device in list(found)[:MAX_PLACES]:
            where = f"node {node}" + (f", {device}" if device else "")
            places.append(where if len(one.ranks) == 1 else f"rank {rank}: {where}")
        right = bool(one.majority)
        return ReplicasDiffer(one.step, sides, right, tuple(places), one.tensor, one.agreed)

    # ------------------------------------------------------------ the end

    def only_in_memory(self) -> int:
        """The newest whole step, if it is in memory and not in storage; else -1."""
        newest = self._snapshots.points.choose().restore
        if newest is None or self._snapshots.checkpoints.is_in_storage(key_of(newest)):
            return -1
        return newest.step

    def is_to_be_saved(self, exit_code: int, reason: Reason) -> bool:
        """Whether the newest whole snapshot must be written before the job ends with this exit
        code, for this reason."""
        if exit_code == EXIT_OK:
            return False
        saves = self._ctx.spec.saves.at_breakpoint or is_by_operator(reason)
        return saves and self.only_in_memory() >= 0

    def lost_with_memory(self) -> str:
        """A sentence about the step that is lost because the job ends; "" if none is."""
        step, written = self.only_in_memory(), self._snapshots.checkpoints.written
        if step < 0:
            return ""
        has = "no checkpoint" if written is None else f"step {written.step}"
        return (
            f"step {step} was only in memory, which is freed now; storage has {has} "
            "(save_now at the end of a script writes its last step)"
        )

    def note_left_behind(self) -> None:
        """A node leaves: remember what the next round would restore if the node stayed."""
        newest = self._snapshots.points.choose().restore
        if newest is not None:
            key = key_of(newest)
            self._left_behind = max(self._left_behind or key, key, key=sort_key)

    def has_unsaved_progress(self) -> bool:
        """Whether ranks of the current round may be past the newest whole step, or were ordered to
        save."""
        newest = self._snapshots.points.choose().restore
        requested = self._snapshots.departures.requested is not None
        return requested or newest is None or self.newest_step > newest.step

    def is_left_in_storage(self) -> bool:
        """Whether storage has the newest step that departed nodes had in memory, or a later one."""
        left = self._left_behind
        return left is not None and self._snapshots.checkpoints.is_in_storage(left)

    def hold(self, exit_code: int, reason: Reason) -> Decision | None:
        """The job is ending: start the last write if there is one. Return what to wait for; None if
        the job can end now, after abandoning an unfinished write."""
        checkpoints, now = self._snapshots.checkpoints, self._ctx.now
        if self._ends_since is None:
            self._ends_since = now
            checkpoints.retry_now(now)
            self._snapshots.points.failed_saves.flush()
            self._send()
        stopped = self._ends_since + self._ctx.spec.restart_grace + SURVIVOR_SLACK
        if self.is_to_be_saved(exit_code, reason) and not self._is_last_saved:
            if self._rdzv.awaits_survivors and now < stopped:
                return Decision(Verb.WAIT, LastSave(), stopped)
            self._is_last_saved = True
            self._save_by = now + self._ctx.spec.saves.limit
            newest = self._snapshots.points.choose().restore
            assert newest is not None
            checkpoints.save(newest, now)
            self._send()
        until = self._save_by or self._ends_since + self._ctx.spec.saves.limit
        if checkpoints.activity and now < until:
            return Decision(Verb.WAIT, LastSave(checkpoints.activity), until)
        checkpoints.abandon("it was not written before the job had to end")
        self._send()
        return None

    # ------------------------------------------------------------ helpers

    def _send(self) -> None:
        """Send the orders and log lines that have accumulated."""
        self.has_changed = True
        outbox = self._snapshots.outbox
        notes, outbox.notes = outbox.notes, []
        orders, outbox.orders = outbox.orders, []
        for line, level in notes:
            self._ctx.note(line, level)
        for nodes, order in orders:
            if order is None:
                self._recorder.record()
            else:
                self._ctx.broadcast(nodes, order)
