"""The master's brain: tells each event to the machine whose affair it is, and carries their answers
to the agents. It owns no rule: who is there is `membership`, when a round forms is `rendezvous`,
who sits where is `placement`, what failed is `failures`, what it costs is `budget`.

Orders are level-triggered. A stream that attaches is told its node's whole desired state, so an
order lost with a stream is never missed; an order that crosses a report is ignored by its round's
name. Time is `now`, monotonic seconds of the master; nonces come from `mint`.
"""

from __future__ import annotations

from elasticrun.config import EXIT_OK
from elasticrun.core import events as fx
from elasticrun.core.job.attaching import Attaching
from elasticrun.core.job.saving import OF_SNAPSHOTS
from elasticrun.core.nodes.node import Health
from elasticrun.core.rounds.attribution import Cause
from elasticrun.core.rounds.failures import Bill, Ending, code_of
from elasticrun.core.rounds.rendezvous import Decision, Phase, Verb
from elasticrun.core.rounds.round import begin
from elasticrun.core.words import some
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MAX_DECISIONS = 8
"""Decisions that may follow from one event; more would be a loop between two of them."""

ALL_LEFT = "every node has left"

_OF_A_ROUND = m.Running | m.RanksFailed | m.Stopping | m.Stopped | m.Finished | m.Steps


class Job(Attaching):
    """The brain of one job's master; see the module's head."""

    # ------------------------------------------------------------ the shape of a brain

    def step(self, event: fx.JobEvent, now: float) -> list[fx.JobEffect]:
        """Take in one event at monotonic time `now`; what is to be done, in order."""
        self._now = now
        self._out = []
        if self._spec is None and not self._wake(event):
            return self._out
        if isinstance(event, fx.Attached):
            self._attached(event.session, event.hello, now)
        elif isinstance(event, fx.Heard):
            node = self._membership.heard(event.session, now)
            if node is None or isinstance(event.report, m.Beat):
                return self._out
            if self._outcome is None:
                self._heard(node, event.report, now)
        elif isinstance(event, fx.Detached):
            self._detached(event, now)
        elif isinstance(event, fx.Overslept):
            beat = self._membership.beat_interval()
            self._membership.overslept(event.by, beat)
            self._rdzv.overslept(event.by + beat)
            self._settlement.window.overslept(event.by + beat)
            self._saves.overslept(event.by + beat)
            self._unheard_for += event.by
            self._note(f"the master was away for {event.by:.1f} s; no silence counts", "warning")
        if self._outcome is None:
            self._bury(now)
            self._pursue(now)
            self._pursue_saves()
            self._advance(now)
            if isinstance(event, fx.Heard) and isinstance(event.report, m.Join):
                self._tell_to_wait(self._membership.node_of(event.session))
            self._keep_record()
        return self._out

    def _wake(self, event: fx.JobEvent) -> bool:
        """Nothing was there yet. The record, or the first agent, says what the job is; whether
        `event` is still to be looked at."""
        if self._facts is not None:
            self._begin(self._given_spec or self._facts.spec, self._now)
            return not isinstance(event, fx.Overslept)  # it listens only since now
        if isinstance(event, fx.Attached):
            self._begin(self._given_spec or event.hello.spec, self._now)
        return isinstance(event, fx.Attached)

    # ------------------------------------------------------------ reports

    def _heard(self, node: str, report: m.Report, now: float) -> None:
        rdzv = self._rdzv
        if isinstance(report, m.Join | m.Running | m.Stopped | m.Finished):
            self._saves.points.has_said_all(node)
        health = self._membership.member(node).health
        if health is Health.PARKED and isinstance(report, m.Leaving):
            return  # told when its stream ends
        if health in (Health.LEFT, Health.PARKED) and isinstance(
            report, m.Join | m.Probed | m.Steps
        ):
            return  # an excluded node that has not read it yet
        if isinstance(report, m.Join):
            self._roster.joined(node, report.store)
            if not self._is_probed_at_door(node, now):
                self._joined(node, now)
        elif isinstance(report, m.Probed):
            self._probed(node, report, now)
        elif isinstance(report, m.Departing | m.Missed):
            self._depart(node, report)
        elif isinstance(report, OF_SNAPSHOTS):
            self._heard_of_snapshots(node, report)
        elif isinstance(report, m.Leaving):
            if rdzv.last.is_member(node) and (rdzv.phase is Phase.RUNNING or not report.signal):
                self._left_a_round = True
            self._look_what_is_left()
            self._are_going((node,), signalled=report.signal != 0)
            self._membership.left(node, report.reason)
            self._stays.over(node)
            rdzv.leaving(node, now, report.reason)
            self._unprobed(node, f"left: {report.reason}", now)
            self._all_left = self._membership.present() == 0
            self._note(f"node {node} leaves: {report.reason}")
        elif isinstance(report, _OF_A_ROUND):
            if self._round is None or report.round != self._round.name:
                return  # of a round that is over
            if isinstance(report, m.Running):
                self._roster[node].pids = report.pids
                rdzv.last.running(node)
            elif isinstance(report, m.RanksFailed):
                self._ranks_failed(node, report, now)
            elif isinstance(report, m.Stopping):
                rdzv.stopping(node, report.remaining, now)
            elif isinstance(report, m.Stopped):
                rdzv.stopped(node, now)
            elif isinstance(report, m.Steps):
                self._newest_step = max(self._newest_step, report.step)
                self._stepped(node, report, now)
            else:
                rdzv.last.finished(node)

    def _ranks_failed(self, node: str, report: m.RanksFailed, now: float) -> None:
        stopped = self._rdzv.last.is_stopping(node)
        if not self._settlement.add(node, report.failures, now, stopped=stopped):
            return
        self._membership.corroborate(node, self._rdzv.last.is_concerned, now)
        if self._rdzv.phase is Phase.RUNNING and self._rdzv.last.is_member(node):
            verdict = self._settlement.verdict(self._trouble(), now)
            reason = verdict.reason
            if verdict.bill is Bill.NOTHING and self._rdzv.takeover.is_incomplete(now):
                # who is to blame is open until all have dialled again; what has failed is known
                reason = self._settlement.verdict("", now).reason
            self._last_failure = reason
            if verdict.bill not in (Bill.HOPELESS, Bill.FINAL):
                self._reopen(reason, now)

    # ------------------------------------------------------------ decisions

    def _advance(self, now: float) -> None:
        """Ask what is to be done until it is nothing."""
        for _ in range(MAX_DECISIONS):
            if self._sentence is not None:
                code, reason = self._sentence
                code = self._code_of_loss() if reason == ALL_LEFT else code  # it is saved by now?
                self._conclude(code, reason, now)
                return
            if self._all_left and self._membership.present() == 0 and not self._rdzv.succeeded:
                self._conclude(self._code_of_loss(), ALL_LEFT, now)
                return
            unfit = self._perf_failure()
            if unfit:
                self._conclude(code_of(Ending.BELOW_FLOOR), unfit, now)
                return
            gate = self._settlement.judge(self._trouble(), self._rdzv.formed_at, now)
            if gate is not None and gate.end:
                self._conclude(gate.code, gate.end, now)
                return
            if self._bad_snapshot and self._rdzv.phase is Phase.RUNNING:
                self._settlement.window.excuse(self._bad_snapshot)
                self._reopen(self._bad_snapshot, now)
            decision = self._rdzv.decide(now)
            if decision.verb is Verb.FORM and gate is not None:
                decision = Decision(Verb.WAIT, gate.reason, gate.until)
            if decision.verb is Verb.WAIT:
                self._wait(decision, None if gate is None else gate.until)
                return
            if decision.verb is Verb.FORM:
                if self._reconsider(now):
                    continue
                held = self._hold_for_check(now)
                if held is not None:
                    self._wait(held, None)
                    return
                if not self._keep_out_the_doubted():
                    self._form(decision.nodes, now)
            elif decision.verb is Verb.REOPEN:
                self._settlement.window.excuse(decision.reason)
                self._reopen(decision.reason, now)
            else:
                done = decision.verb is Verb.SUCCEED
                code = EXIT_OK if done else self._code_of_loss()
                self._conclude(code, decision.reason, now)
                return
        raise RuntimeError("the rendezvous does not come to rest")

    def _code_of_loss(self) -> int:
        """The exit code of a job that ends because nodes have gone, and no rank is to blame."""
        saved = self._round is not None and self._saves.departures.has_saved(self._round.name)
        if self._all_left and not self._left_a_round:
            saved = saved or self._is_left_in_storage()
        return code_of(Ending.SAVED if saved else Ending.TOO_FEW)

    def _trouble(self) -> str:
        """Which member has gone or may have gone, in words; empty if all are well."""
        if self._rdzv.loss:
            return self._rdzv.loss
        for node in self._membership.suspects():
            if self._rdzv.last.is_concerned(node):
                return f"node {node} is suspect"
        cause, why = self._culprit()
        return f"node {cause.node} is left out: {why}" if cause else ""

    def _culprit(self) -> tuple[Cause | None, str]:
        """The cause of the round's end whose node is to be left out, and why."""
        cause = self._settlement.cause()
        if cause is None:
            return None, ""
        why = self._settlement.blame.culprit(cause, self._now)
        return (cause, why) if why and self._rdzv.can_spare(cause.node) else (None, "")

    def _reconsider(self, now: float) -> bool:
        """A round could form. Whether that has to be asked again, because a node is left out or an
        innocent one let in."""
        if self._rdzv.loss:
            return False
        blame = self._settlement.blame
        cause, why = self._culprit()
        if cause is not None:
            wait = blame.leave_out(cause, now)
            self._stale = True
            self._rdzv.leave_out(cause.node, now + wait, why)
            self._doubt(cause.node)
            self._note(f"node {cause.node} is left out for {wait:g} s: {why}", "warning")
            self._tell_to_wait(cause.node)
            return True
        cause = self._settlement.cause()
        innocent = blame.acquit(cause, now) if cause and not self._trouble() else ""
        if cause is not None and innocent:
            self._rdzv.let_in(innocent, now)
            self._note(f"rank {cause.rank} fails on node {cause.node} too: {innocent} is let in")
        return bool(innocent)

    def _wait(self, decision: Decision, gate: float | None) -> None:
        dues = (decision.until, decision.wake, gate)
        self._until = min((when for when in dues if when is not None), default=None)
        self._ends = decision.until
        if decision.reason != self._reason:
            self._reason = decision.reason
            if decision.reason:
                self._note(decision.reason)
                self._tell_to_wait()

    def _tell_to_wait(self, only: str | None = None) -> None:
        """Tell ready nodes, or the one named, why they wait, each once per sentence."""
        if only is not None and self._rdzv.is_barred(only) and self._outcome is None:
            session, why = self._membership.session_of(only), self._rdzv.reason_of(only, self._now)
            if session is not None and self._roster[only].told != why:
                self._tell(session, m.Wait(why))
        if not self._reason or self._outcome is not None:
            return
        sessions = []
        for node in self._rdzv.ready if only is None else (only,):
            if node not in self._rdzv.ready:
                continue
            entry, session = self._roster[node], self._membership.session_of(node)
            if session is not None and entry.told != self._reason:
                entry.told = self._reason
                sessions.append(session)
        if sessions:
            left = 0.0 if self._ends is None else max(0.0, self._ends - self._now)
            self._out.append(fx.Tell(tuple(sessions), m.Wait(self._reason, left)))

    def _reopen(self, reason: str, now: float) -> None:
        """The round is over: its members stop their ranks."""
        assert self._round is not None
        self._round.why_stopped = reason
        members = self._rdzv.reopen(now)
        self._call_in_the_doubted(now)
        self._note(f"round {self._round.name.number} is over: {reason}")
        self._record()
        self._broadcast(members, m.Stop(self._round.name, reason))

    def _form(self, limit: int, now: float) -> None:
        """Settle what the last round costs, and give every member its place in the next."""
        trouble = self._trouble()
        failed = self._settlement.window.opened_at is not None or bool(trouble)
        failed = failed or self._saves.points.looks_back  # nobody was there to hear of it
        choice = self._choose_snapshot(trouble)
        why = trouble or self._settlement.ended_by(now)
        note = self._settlement.settle(trouble, self._rdzv.formed_at, now)
        if note:
            self._note(note)
            self._last_failure = trouble or self._last_failure  # a suspicion has become a fact
        self._number += 1
        name = RoundName(self._term, self._number, self._mint())
        ready = [self._roster.candidate(node) for node in self._rdzv.ready]
        count = self._settlement.budget.count
        round_ = begin(name, ready, limit, self._round, count, self._roster.life_of, choice.restore)
        round_.rewound_from = self._saves.points.rewound_from
        round_.suspect, round_.restore_step = choice.suspect, choice.restore_step
        round_.why = why or (self._round.why_stopped if self._round is not None else "")
        self._round = round_
        for node in round_.seats:
            self._roster[node].told = ""
        self._left_a_round, self._left_behind = False, None
        self._rdzv.formed(round_.seats, now)
        self._stays.formed(round_.seats, now)
        self._settlement.new_round(nodes=len(round_.seats))
        self._reason, self._ends = "", None
        size = f"{some(round_.world_size, 'rank')} on {some(len(round_.seats), 'node')}"
        self._note(f"round {name.number} begins: {size}")
        self._record()
        self._round_begins(round_)
        for node in round_.members:
            start = round_.start(node)
            assert start is not None
            self._broadcast((node,), start)
        if failed:
            self._save_at_breakpoint(round_)
        self._probe_the_left_out(now)

    def _conclude(self, exit_code: int, reason: str, now: float) -> None:
        """The job is to end, and nothing changes that any more: as soon as its last snapshot is
        written out, where it has one that is to be."""
        if self._sentence is None:
            self._sentence = (exit_code, reason)
            if self._is_to_be_saved(exit_code) and self._rdzv.phase is Phase.RUNNING:
                self._reopen(reason, now)
        held = self._hold_for_saves(exit_code, now)
        if held is not None:
            self._wait(held, None)
            return
        if owed := self._saves.checkpoints.owed:
            self._note(owed, "error")
            if exit_code == EXIT_OK:
                exit_code, reason = code_of(Ending.UNSAVED), f"{reason}, but {owed}"
        self._end(exit_code, reason)

    def _end(self, exit_code: int, reason: str) -> None:
        failures = () if exit_code == EXIT_OK else self._settlement.failures
        self._outcome = m.End(exit_code, reason, failures)
        self._until = None
        self._note(f"the job is over: {reason}")
        self._record()
        self._out.append(fx.Tell(self._membership.sessions(), self._outcome))
        self._say_over(self._outcome)
