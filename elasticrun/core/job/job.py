"""The master's state machine: dispatches each event to its components and returns the effects.

It has no rules of its own: `membership` decides which nodes are alive, `rendezvous` when a round
forms, `round` the rank assignment, `failures` what failed, `budget` what a failure costs.

Orders are level-triggered. A stream that attaches receives its node's whole desired state, so a
broken stream loses no order. A report that was sent before an order arrived is recognised by the
name of its round. Time is `now`, monotonic seconds of the master; nonces come from `mint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from msgspec.structs import replace

from elasticrun.config import EXIT_OK, EXIT_SAVED
from elasticrun.core import events as fx
from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.job.record import Recorder, load
from elasticrun.core.job.requests import OperatorRequests
from elasticrun.core.job.streams import Streams
from elasticrun.core.job.views import job_status, nothing_yet
from elasticrun.core.nodes.node import Health
from elasticrun.core.parts import Part
from elasticrun.core.persisted import Facts
from elasticrun.core.reasons import (
    AllLeft,
    BackedOff,
    FirstToFail,
    HasLeft,
    Leaves,
    NoAgentYet,
    NodeLost,
    NotSaved,
    Reason,
    Saved,
    Spare,
    Spares,
    Suspect,
    is_by_operator,
    text,
    text_and_code,
)
from elasticrun.core.rounds.attribution import Cause
from elasticrun.core.rounds.budget import Cost, Judgement
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.rounds.rendezvous import Decision, Phase, Verb
from elasticrun.core.rounds.round import Stage, form_round
from elasticrun.core.sight.picture import Goodput, Picture
from elasticrun.core.sight.sight import Sight
from elasticrun.core.snapshots.policy import SnapshotPolicy
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.core.wishes import EndJob, Exclude, Fail, Mention, RecordSoon, Reopen, Wish
from elasticrun.core.words import plural
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MAX_DECISIONS = 8
"""Maximum number of decisions per event; more than that is a livelock."""

_RoundReport = m.Running | m.RanksFailed | m.Stopping | m.Stopped | m.Finished | m.Steps

_AFTER_HOLDINGS = m.Join | m.Running | m.Stopped | m.Finished
"""Before an agent sends one of these, it has reported which snapshots it holds."""


class Job:
    """The state machine of one job. Its components are created when the first agent attaches, or in
    the first step if there are facts."""

    def __init__(
        self,
        spec: m.JobSpec | None,
        term: int,
        mint: Callable[[], str],
        facts: Facts | None = None,
    ) -> None:
        """`spec`: None takes the spec of the facts, or of the first Hello. `facts`: the newest
        facts that the previous master recorded, None if there is no record. `term` must be higher
        than that of any earlier master missing from the facts. `mint` returns a nonce for every
        round."""
        self.term = term if facts is None else max(term, facts.term + 1)
        """This master's term: higher than that of every master in its record."""
        self._mint = mint
        self._given_spec = spec if spec is not None or facts is None else facts.spec
        self._facts = facts
        self._has_components = False
        self._ctx: JobContext
        self._snapshots: Snapshots
        self._recorder: Recorder
        self._saving: SnapshotPolicy
        self._streams: Streams
        self._sight: Sight
        self._requests: OperatorRequests
        self._parts: tuple[
            Part[m.Join | m.Probed | m.NodeHealth], Part[m.SaveReport], Part[m.SightReport]
        ]  # the components that return wishes

        self._due: float | None = None if facts is None else 0.0  # the value of next_deadline()
        self._parts_due: float | None = None  # the same without membership
        self._record_due: float | None = None  # when a record is due that no order needs
        self._is_calm = False  # a report without news changes no decision
        self._reason: Reason | None = None  # what the job waits for
        self._wait_text: tuple[str, m.ReasonCode | None] = ("", None)  # sent to nodes
        self._ends: float | None = None  # when that wait ends at the latest
        self._until: float | None = None  # when the wait is reconsidered
        self._all_left = False
        self._left_a_round = True  # a member left; see `_leaving`. True until a round forms
        self._last_failure: Reason | None = None
        self._end_wish: EndJob | None = None  # requested by a component
        self._conclusion: tuple[int, Reason] | None = None  # how the job ends: exit code and reason

    @property
    def spec(self) -> m.JobSpec:
        """The spec of the job. Call this only after the first agent has attached."""
        return self._ctx.spec

    def next_deadline(self) -> float | None:
        """When `step(Tick(), now)` is due at the latest, as of the last step; 0.0 (long past)
        before the first step of a master with facts."""
        return self._due

    def status(self) -> m.JobStatus:
        """The job's status; O(nodes)."""
        if not self._has_components:
            return nothing_yet(self._given_spec)
        hold = self._streams.hold_reason
        return job_status(
            self._ctx,
            self._streams.health,
            reason=hold or self._reason,
            ends=None if hold else self._ends,
            last_failure=self._last_failure,
            snapshot=self._snapshots.status(),
            watch=self._sight.watch,
            goodput=self._sight.goodput(),
        )

    def goodput(self) -> Goodput | None:
        """How the time of all slots was spent, as of the last event; None if no agent has attached
        or no round has formed."""
        return self._sight.goodput() if self._has_components else None

    def slow_nodes(self) -> int:
        """Number of nodes that are found slow but stay."""
        return sum(1 for one in self._ctx.nodes.values() if one.slow) if self._has_components else 0

    def quiet(self) -> float:
        """Seconds since a collective or a step of any rank made progress; 0.0 while they do, and
        while a rank declares a long operation."""
        verdict = self._sight.watch.verdict() if self._has_components else None
        is_declared = verdict is not None and verdict.says
        return self._sight.watch.quiet() if self._has_components and not is_declared else 0.0

    def picture(self) -> Picture:
        """Everything known about the job; O(ranks)."""
        return self._sight.picture() if self._has_components else Picture(self.status())

    def step(self, event: fx.JobEvent, now: float) -> list[fx.JobEffect]:
        """Process one event at monotonic time `now`; return the effects in order. A report without
        news causes no decisions unless something is due, and does not update `next_deadline`: it
        only moves its node's deadline later, and the next beat updates it."""
        out: list[fx.JobEffect] = []
        if not self._has_components and not self._create_components(event, now, out):
            if isinstance(event, fx.Requested):
                out.append(fx.Replied(event.number, m.Reply(False, text(NoAgentYet()))))
            if self._has_components:
                self._record_due = self._recorder.pursue(waiting=False)
                self._compute_deadlines()
            return out
        ctx, streams = self._ctx, self._streams
        ctx.now, ctx.out = now, out
        joined = node = reply = None
        ended = ctx.outcome is not None
        match event:
            case fx.Attached():
                streams.attached(event.session, event.hello)
            case fx.Heard():
                node = ctx.membership.on_message(event.session, now)
                if node is None:
                    return out
                if isinstance(event.report, m.Beat):
                    if ctx.outcome is None:
                        self._due = earliest(ctx.membership.next_deadline(), self._parts_due)
                    return out
                if ctx.outcome is None:
                    is_news = self._on_report(node, event.report)
                    if self._is_calm and not is_news and (self._due is None or now < self._due):
                        return out
                    joined = node if isinstance(event.report, m.Join) else None
                elif isinstance(event.report, m.LastLines):  # of the rank that ended the job
                    self._sight.on_report(node, event.report)
            case fx.Detached():
                streams.detached(event)
            case fx.Overslept():
                self._overslept(event.by)
            case fx.Requested():
                if event.request.verb in ("picture", "stacks"):
                    self._sight.on_request(event.number, event.request)
                else:
                    reply = fx.Replied(event.number, self._operate(event.request))
        self._is_calm = False  # remains so if this step raises
        if ctx.outcome is None:
            streams.declare_deaths()
            for wish in [wish for part in self._parts for wish in part.pursue()]:
                self._grant(wish)
            self._advance()
            if joined is not None:
                self._send_wait_reason(joined)
            self._record_due = self._recorder.pursue(waiting=self._until is not None)
        self._sight.settle(node)
        if ctx.outcome is not None and not ended:  # after the incidents, which end with the job
            streams.report_over(ctx.outcome)
        if reply is not None:  # after the record of what was done
            out.append(reply)
        self._compute_deadlines()
        return out

    def _compute_deadlines(self) -> None:
        """Compute when the next step is due."""
        if self._ctx.outcome is not None:
            self._due = None
            return
        self._parts_due = earliest(
            self._until,
            self._record_due,
            *[part.next_deadline() for part in self._parts],
        )
        self._due = earliest(self._ctx.membership.next_deadline(), self._parts_due)
        # while silence is ignored or snapshots have changed, any report may change a decision
        self._is_calm = not (self._streams.hold_reason or self._saving.has_changed)

    def _create_components(self, event: fx.JobEvent, now: float, out: list[fx.JobEffect]) -> bool:
        """Create the components, from the record or from the first agent's spec. Return whether
        `event` still has to be processed. This master's term is its first fact, recorded before any
        order."""
        facts, self._facts = self._facts, None
        if facts is not None:
            spec = self._given_spec or facts.spec
        elif isinstance(event, fx.Attached):
            spec = self._given_spec or event.hello.spec
        else:
            return False
        self._has_components = True
        self._ctx = ctx = JobContext(spec, self.term, self._mint, now)
        ctx.out = out
        self._snapshots = Snapshots(spec.saves, self._mint, self.term)
        if facts is not None:
            load(facts, ctx, self._snapshots)
        self._sight = Sight(ctx, self.status)
        if facts is not None:  # booked from the state of the other components
            self._sight.ledger.restore(facts.ledger, now - facts.age)
        self._recorder = Recorder(ctx, self._snapshots, self._sight.ledger)
        self._saving = SnapshotPolicy(ctx, self._snapshots, self._recorder)
        recorded_term = 0 if facts is None else facts.term
        self._streams = Streams(ctx, self._recorder, self._saving, recorded_term)
        self._requests = OperatorRequests(ctx, self._streams, self._saving)
        self._parts = (self._streams.health, self._saving, self._sight)
        self._recorder.record()
        return facts is None or not isinstance(event, fx.Overslept)  # a new master was not away

    def _overslept(self, by: float) -> None:
        ctx = self._ctx
        beat = ctx.membership.beat_interval()
        ctx.membership.overslept(by, beat)
        ctx.rdzv.overslept(by + beat)
        ctx.restarts.window.overslept(by + beat)
        self._saving.overslept(by + beat)
        ctx.away += by
        ctx.note(
            f"the master was away for {by:.1f} s; heartbeats missed in that time do not count",
            "warning",
        )

    # ------------------------------------------------------------ reports

    def _on_report(self, node: str, report: m.Report) -> bool:
        """Process a report; return whether it may change a decision."""
        is_news = node in self._snapshots.points.away and isinstance(report, _AFTER_HOLDINGS)
        if is_news:
            self._snapshots.points.stop_expecting(node)
        health = self._ctx.nodes[node].health
        of_present = m.Join | m.Probed | m.Steps | m.NodeHealth
        if health is Health.LEFT and isinstance(report, of_present):
            return True  # an excluded node that has not processed its exclusion yet
        if isinstance(report, _RoundReport):
            return self._on_round_report(node, report) or is_news
        match report:
            case m.Join():
                self._ctx.nodes.joined(node, report.store)
                return self._streams.health.on_report(node, report)
            case m.Probed() | m.NodeHealth():
                return self._streams.health.on_report(node, report)
            case m.Leaving():
                self._leaving(node, report)
        if isinstance(report, m.SaveReport):
            return self._saving.on_report(node, report)
        if isinstance(report, m.SightReport):
            return self._sight.on_report(node, report) or is_news
        return True

    def _leaving(self, node: str, report: m.Leaving) -> None:
        ctx, rdzv = self._ctx, self._ctx.rdzv
        ran = rdzv.phase is Phase.RUNNING and self._saving.has_unsaved_progress()
        if rdzv.last.is_member(node) and (ran or not report.signal):
            self._left_a_round = True
        self._saving.note_left_behind()
        self._saving.nodes_leave((node,), signalled=report.signal != 0)
        leaves = Leaves(report.reason, report.signal)
        ctx.membership.left(node, leaves)
        ctx.flaps.over(node)
        rdzv.leaving(node, ctx.now, leaves)
        self._streams.health.node_gone(node, text(HasLeft(leaves)))
        self._all_left = not ctx.membership.present
        ctx.note(f"node {node} leaves: {report.reason}")

    def _on_round_report(self, node: str, report: _RoundReport) -> bool:
        """Process a report about the current round; ignore those of earlier ones. Return whether it
        is news."""
        ctx, rdzv, now = self._ctx, self._ctx.rdzv, self._ctx.now
        if ctx.round is None or report.round != ctx.round.name:
            return False
        if isinstance(report, m.RanksFailed | m.Stopped):
            ctx.newest = max(ctx.newest, report.newest)
        match report:
            case m.Running():
                ctx.nodes[node].pids = report.pids
                if rdzv.last.stages.get(node) is not Stage.STARTING:
                    return False
                if rdzv.last.is_member(node):
                    rdzv.last.stages[node] = Stage.RUNNING
            case m.RanksFailed():
                self._ranks_failed(node, report)
            case m.Stopping():
                self._ended_early(node, report.ended)
                rdzv.stopping(node, report.remaining, now)
            case m.Stopped():
                rdzv.stopped(node, now)
            case m.Steps():
                self._sight.ledger.on_report(node, report)
                self._sight.incidents.on_round_report(node, report)
                self._saving.newest_step = max(self._saving.newest_step, report.step)
                slow = self._streams.health.stepped(node, report)
                if slow is not None:
                    self._sight.ledger.found_slow(slow.node, slow.usual)
                return slow is not None
            case m.Finished():
                rdzv.last.finished(node)
                if node in rdzv.last.completed:
                    self._ended_early(node, range(ctx.round.members[node].ranks))
        self._sight.incidents.on_round_report(node, report)
        return True

    def _ended_early(self, node: str, local_ranks: Iterable[int]) -> None:
        """Note that these ranks exited with 0 before they were stopped."""
        round_ = self._ctx.round
        if round_ is not None and (seat := round_.members.get(node)) is not None:
            ranks = [seat.first_rank + one for one in local_ranks if one < seat.ranks]
            self._ctx.restarts.window.ended(node, ranks)

    def _ranks_failed(self, node: str, report: m.RanksFailed, *, innocent: bool = False) -> None:
        ctx, rdzv, now = self._ctx, self._ctx.rdzv, self._ctx.now
        stopped = rdzv.last.stages.get(node) in (Stage.STOPPING, Stage.STOPPED)
        window, failures = ctx.restarts.window, report.failures
        if not window.add(node, failures, now, stopped=stopped, innocent=innocent):
            return
        ctx.membership.corroborate(node, rdzv.last.is_concerned, now)
        if rdzv.phase is Phase.RUNNING and rdzv.last.is_member(node):
            verdict = ctx.restarts.verdict(self._member_problem(), now)
            reason = verdict.reason
            if verdict.cost is Cost.NOTHING and rdzv.is_incomplete(now):
                # until all nodes have redialled, only what failed is known, not who is to blame
                reason = ctx.restarts.verdict(None, now).reason
            self._last_failure = reason
            if verdict.cost not in (Cost.HOPELESS, Cost.FINAL) and reason is not None:
                self._reopen(reason)

    def _operate(self, request: m.Request) -> m.Reply:
        """Carry out an operator's request."""
        reply, wishes = self._requests.handle(request)
        for wish in wishes:
            self._grant(wish)
        self._recorder.catch_up()
        return reply

    def _grant(self, wish: Wish) -> None:
        """Carry out a component's wish. A wish that comes too late, because the round ended or the
        job ends, is dropped."""
        round_ = self._ctx.round if self._ctx.rdzv.phase is Phase.RUNNING else None
        match wish:
            case RecordSoon():
                self._recorder.record_soon()
            case EndJob():
                if self._end_wish is None and not self._is_deserted():
                    self._end_wish = wish
            case Reopen():
                ends = self._conclusion is not None or self._end_wish is not None
                if round_ is not None and not ends:
                    self._reopen_free_of_charge(wish.reason)
            case Fail():
                if round_ is not None:
                    report = m.RanksFailed(round_.name, (wish.failure,))
                    self._ranks_failed(wish.node, report, innocent=not wish.is_blamed)
            case Exclude():
                if round_ is not None and self._conclusion is None:
                    self._streams.exclude([(wish.node, wish.how)])
            case Mention():
                self._sight.incidents.mention(wish.reason)
            case _:
                assert_never(wish)

    # ------------------------------------------------------------ decisions

    def _advance(self) -> None:
        """Decide and act until the decision is to wait or the job ends."""
        ctx, restarts, health = self._ctx, self._ctx.restarts, self._streams.health
        for _ in range(MAX_DECISIONS):
            if (end := self._end_now()) is not None:
                self._conclude(*end)
                return
            gate, has_failed = None, restarts.window.opened_at is not None
            if has_failed:
                gate = restarts.judge(self._member_problem(), ctx.rdzv.formed_at, ctx.now)
            if gate is not None and gate.end is not None:
                self._conclude(gate.code, gate.end)
                return
            decision = ctx.rdzv.decide(ctx.now)
            if decision.verb is Verb.FORM and gate is not None:
                decision = Decision(Verb.WAIT, gate.reason, gate.until)
            if decision.verb is Verb.FORM:
                if has_failed and self._attribute_failure():
                    continue
                held = health.hold()
                if held is None:
                    if not health.keep_out_doubted():
                        self._form_round(decision.nodes)
                    continue
                decision, gate = held, None
            if decision.verb is Verb.WAIT:
                self._wait(decision, gate)
                return
            assert decision.reason is not None
            if decision.verb is not Verb.REOPEN:
                done = decision.verb is Verb.SUCCEED
                self._conclude(EXIT_OK if done else self._code_of_loss(), decision.reason)
                return
            self._reopen_free_of_charge(decision.reason)
        raise RuntimeError("the rendezvous does not settle")

    def _end_now(self) -> tuple[int, Reason] | None:
        """Exit code and reason if the job ends now regardless of rounds."""
        if self._conclusion is not None:
            code, reason = self._conclusion
            may_be_saved = isinstance(reason, AllLeft)
            return (self._code_of_loss() if may_be_saved else code, reason)
        if self._end_wish is not None:
            return (code_of(self._end_wish.ending), self._end_wish.reason)
        if self._all_left and self._is_deserted():
            return (self._code_of_loss(), self._all_have_left())
        return None

    def _all_have_left(self) -> AllLeft:
        reasons = [node.reason for node in self._ctx.nodes.values()]
        signals = [one.signal for one in reasons if isinstance(one, Leaves) and one.signal]
        return AllLeft(signals[-1] if signals else 0)

    def _is_deserted(self) -> bool:
        """Whether all nodes left before the ranks were done."""
        ctx = self._ctx
        return self._all_left and not ctx.membership.present and not ctx.rdzv.succeeded

    def _code_of_loss(self) -> int:
        """The exit code of a job that ends because nodes left, without a rank at fault."""
        round_ = self._ctx.round
        saved = round_ is not None and self._snapshots.departures.has_saved(round_.name)
        if self._all_left and not self._left_a_round:
            saved = saved or self._saving.is_left_in_storage()
        return code_of(Ending.SAVED if saved else Ending.TOO_FEW)

    def _member_problem(self) -> Reason | None:
        """Which member is lost, suspect or about to be put in backoff; None if there is none."""
        rdzv, restarts = self._ctx.rdzv, self._ctx.restarts
        if loss := rdzv.loss:
            return loss
        for node in self._ctx.membership.suspects:
            if rdzv.last.is_concerned(node):
                return NodeLost(node, Suspect())
        if restarts.window.opened_at is None:
            return None
        found = self._suspect_cause()
        return NodeLost(found[0].node, BackedOff(found[1])) if found else None

    def _suspect_cause(self) -> tuple[Cause, FirstToFail] | None:
        """The cause of the round's end and why its node is put in backoff; None if it is not."""
        restarts = self._ctx.restarts
        cause = restarts.window.cause
        if cause is None:
            return None
        why = restarts.attribution.why_suspect(cause, self._ctx.now)
        rdzv = self._ctx.rdzv
        staying = rdzv.last.is_member(cause.node) and cause.node not in rdzv.last.leaving
        if why is None or not staying or not rdzv.is_enough_without(cause.node):
            return None
        return cause, why

    def _attribute_failure(self) -> bool:
        """A round could form after a failed one. Put the node at fault in backoff, or clear an
        innocent one. Return whether to decide again because of that."""
        ctx, rdzv, now = self._ctx, self._ctx.rdzv, self._ctx.now
        attribution = ctx.restarts.attribution
        if rdzv.loss:
            return False
        found = self._suspect_cause()
        if found is not None:
            cause, why = found
            wait = attribution.back_off(cause, now)
            self._recorder.record_soon()
            rdzv.back_off(cause.node, now + wait, BackedOff(why))
            self._streams.health.doubt(cause.node)
            ctx.note(f"node {cause.node} is in backoff for {wait:g} s: {text(why)}", "warning")
            self._send_wait_reason(cause.node)
            return True
        last = ctx.restarts.window.cause
        innocent = attribution.clear_node(last, now) if last and not self._member_problem() else ""
        if last is not None and innocent:
            if innocent in rdzv.backing_off:
                rdzv.backing_off.put(innocent, now, "acquitted")
            ctx.note(f"rank {last.rank} also fails on node {last.node}: {innocent} may join again")
        return bool(innocent)

    def _wait(self, decision: Decision, gate: Judgement | None) -> None:
        self._until = earliest(decision.until, decision.wake, gate.until if gate else None)
        self._ends = decision.until
        if decision.reason != self._reason:
            self._reason = decision.reason
            if (reason := decision.reason) is not None:
                spares = tuple(self._ctx.rdzv.ready) if isinstance(reason, Spare) else ()
                known = Spares(spares, reason) if isinstance(reason, Spare) and spares else reason
                self._wait_text = text_and_code(reason)
                self._ctx.note(self._wait_text[0] if known is reason else text(known))
                self._send_wait_reason()

    def _send_wait_reason(self, only: str | None = None) -> None:
        """Send ready nodes, or only `only`, the reason why they wait; each reason once."""
        ctx, rdzv = self._ctx, self._ctx.rdzv
        if ctx.outcome is not None:
            return
        if only is not None and rdzv.is_held_back(only):
            one, why = ctx.nodes[only], rdzv.reason_of(only, ctx.now)
            if one.session is not None and one.sent_reason != why:
                ctx.send(one.session, m.Wait(why))
        if self._reason is None:
            return
        sessions, (why, code) = [], self._wait_text
        for node in rdzv.ready if only is None else (only,):
            one = ctx.nodes[node]
            if node in rdzv.ready and one.session is not None and one.sent_reason != why:
                one.sent_reason = why
                sessions.append(one.session)
        if sessions:
            left = 0.0 if self._ends is None else max(0.0, self._ends - ctx.now)
            ctx.out.append(fx.Send(tuple(sessions), m.Wait(why, left, code)))

    def _reopen_free_of_charge(self, reason: Reason) -> None:
        self._ctx.restarts.window.excuse(reason)
        self._reopen(reason)

    def _reopen(self, reason: Reason) -> None:
        """End the round: its members stop their ranks."""
        ctx, round_ = self._ctx, self._ctx.round
        assert round_ is not None
        round_.why_stopped = reason
        members = ctx.rdzv.reopen(ctx.now)
        failed = self._sight.round_over(reason)
        self._streams.health.readmit_doubted()
        self._last_failure = reason if failed else self._last_failure
        why, code = text_and_code(reason)
        over = f"round {round_.name.number} is over: {why}"
        ctx.note(over, "error" if failed else "info", on_nodes=True)
        self._recorder.record()
        ctx.broadcast(members, m.Stop(round_.name, why, code))

    def _form_round(self, limit: int) -> None:
        """Charge the cost of the last round, give every member its place in the next, and start
        it."""
        ctx, rdzv, restarts, now = self._ctx, self._ctx.rdzv, self._ctx.restarts, self._ctx.now
        trouble, points, last = self._member_problem(), self._snapshots.points, self._ctx.round
        has_failed = restarts.window.opened_at is not None
        to_save = (
            has_failed or trouble is not None or points.knows_round_from_agents
        )  # how an earlier round ended is unknown
        to_save = to_save or (last is not None and limit < len(last.seats))  # spare nodes may leave
        choice = self._saving.choose(trouble)
        why, cost = trouble, ""
        if has_failed:
            why = trouble or restarts.verdict(None, now).reason
            cost = restarts.settle(trouble, rdzv.formed_at, now)
            ctx.note(cost)
            # what was reported first may have been the loss of a peer
            self._last_failure = why or self._last_failure
        self._sight.incidents.decided(why, cost)
        ctx.number += 1
        name = RoundName(ctx.term, ctx.number, ctx.mint())
        ready = [ctx.nodes[node] for node in rdzv.ready]
        count = restarts.budget.count
        ended = why or (last.why_stopped if last is not None else None)
        because = () if ended is None else text_and_code(ended)
        info = m.RoundInfo(name, len(ready), count, choice.restore, choice.skip, *because)
        if points.has_distrusted:
            info = replace(info, distrusted=points.distrusted(choice.restore))
        ctx.round = round_ = form_round(info, ready, limit, last)
        for node in round_.seats:
            ctx.nodes[node].sent_reason = ""
        self._left_a_round = False
        rdzv.formed(round_, now)
        ctx.flaps.formed(round_.seats, now)
        restarts.new_round(nodes=len(round_.seats))
        self._reason, self._ends = None, None
        size = f"{plural(round_.info.world_size, 'rank')} on {plural(len(round_.seats), 'node')}"
        ctx.note(f"round {name.number} begins: {size}")
        self._recorder.record()
        self._saving.round_begins(round_)
        self._sight.round_begins()
        ctx.newest = -1
        for node in round_.members:
            start, session = round_.start(node), ctx.nodes[node].session
            assert start is not None
            if session is not None:
                ctx.out.append(fx.Send((session,), start))
        if to_save:
            self._saving.save_at_breakpoint(round_)
        self._streams.health.probe_backed_off()

    # ------------------------------------------------------------ the end

    def _conclude(self, exit_code: int, reason: Reason) -> None:
        """End the job. If a last snapshot must be written, wait for it first. Once `outcome` is
        set, no decision follows."""
        ctx = self._ctx
        if self._conclusion is None:
            self._conclusion = (exit_code, reason)
            to_save = self._saving.is_to_be_saved(exit_code, reason)
            if to_save and ctx.rdzv.phase is Phase.RUNNING:
                self._reopen(reason)
        held = self._saving.hold(exit_code, reason)
        if held is not None:
            self._wait(held, None)
            return
        stopped = is_by_operator(reason)
        if owed := self._snapshots.checkpoints.why_missing:
            ctx.note(owed, "error")
            if exit_code == EXIT_OK or stopped:
                exit_code = exit_code or code_of(Ending.UNSAVED)
                reason = NotSaved(reason, owed)
        elif exit_code == EXIT_OK and (lost := self._saving.lost_with_memory()):
            ctx.note(lost, "warning", on_nodes=True)
        failures = () if exit_code == EXIT_OK else ctx.restarts.window.failures
        written = self._snapshots.checkpoints.written
        saved = -1 if written is None else written.step
        if exit_code == EXIT_SAVED or (stopped and saved >= 0 and not owed):
            reason = Saved(reason, saved)
        why, code = text_and_code(reason)
        ctx.outcome = m.End(exit_code, why, failures, saved=saved, code=code)
        self._until = None
        fine = exit_code in (EXIT_OK, EXIT_SAVED) or stopped
        ctx.note(f"the job is over: {why}", "info" if fine else "error", on_nodes=True)
        self._recorder.record()
        end = replace(ctx.outcome, goodput=self._sight.last_line())
        ctx.out.append(fx.Send(tuple(ctx.membership.sessions), end))
