"""The master's brain: tells each event to the machine whose affair it is, and carries their answers
to the agents. It owns no rule: who is there is `membership`, when a round forms is `rendezvous`,
who sits where is `placement`, what failed is `failures`, what it costs is `budget`.

Orders are level-triggered. A stream that attaches is told its node's whole desired state, so an
order lost with a stream is never missed; an order that crosses a report is ignored by its round's
name. Time is `now`, monotonic seconds of the master; nonces come from `mint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticrun import __version__
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from elasticrun.core import effects as fx
from elasticrun.core.crew import SURVIVOR_SLACK, Phase
from elasticrun.core.failures import Bill
from elasticrun.core.job_status import nothing_yet, picture
from elasticrun.core.membership import Health, Membership
from elasticrun.core.rendezvous import Decision, Rendezvous, Verb
from elasticrun.core.roster import Roster, differences
from elasticrun.core.rounds import Round, adopt, begin
from elasticrun.core.settlement import Settlement
from elasticrun.wire import messages as m
from elasticrun.wire.ids import RoundName

MAX_DECISIONS = 8
"""Decisions that may follow from one event; more would be a loop between two of them."""


class Job:
    """The brain of one job's master; see the module's head."""

    def __init__(self, spec: m.JobSpec | None, term: int, mint: Callable[[], str]) -> None:
        """`spec`: None takes the first m.Hello's. `term` must be higher than that of any master of
        this job before; `mint` gives a nonce for every round."""
        self._term = term
        self._mint = mint
        self._given_spec = spec
        self._spec: m.JobSpec | None = None
        self._now = 0.0
        self._number = 0
        self._round: Round | None = None
        self._outcome: m.End | None = None
        self._reason = ""
        self._until: float | None = None
        self._all_left = False
        self._last_failure = ""
        self._hold_reason = ""
        self._roster = Roster()
        self._out: list[fx.JobEffect] = []
        self._membership: Membership
        self._rdzv: Rendezvous
        self._settlement: Settlement

    # ------------------------------------------------------------ the shape of a brain

    def step(self, event: fx.JobEvent, now: float) -> list[fx.JobEffect]:
        """Take in one event at monotonic time `now`; what is to be done, in order."""
        self._now = now
        self._out = []
        if isinstance(event, fx.Attached):
            self._found(event.hello.spec, now)
            self._attached(event.session, event.hello, now)
        elif self._spec is None:
            return []
        elif isinstance(event, fx.Heard):
            node = self._membership.heard(event.session, now)
            if node is None or isinstance(event.report, m.Beat):
                return []
            if self._outcome is None:
                self._heard(node, event.report, now)
        elif isinstance(event, fx.Detached):
            self._detached(event, now)
        elif isinstance(event, fx.Overslept):
            beat = self._membership.beat_interval()
            self._membership.overslept(event.by, beat)
            self._rdzv.overslept(event.by + beat)
            self._settlement.window.overslept(event.by + beat)
            self._note(f"the master was away for {event.by:.1f} s; no silence counts", "warning")
        if self._outcome is None:
            self._bury(now)
            self._advance(now)
            if isinstance(event, fx.Heard) and isinstance(event.report, m.Join):
                self._tell_to_wait(self._membership.node_of(event.session))
        return self._out

    def next_deadline(self) -> float | None:
        """When `step(Tick(), now)` is due at the latest."""
        if self._spec is None or self._outcome is not None:
            return None
        deadlines = (self._membership.next_deadline(), self._until)
        return min((when for when in deadlines if when is not None), default=None)

    def status(self) -> m.JobStatus:
        """The job as one page; O(nodes)."""
        if self._spec is None:
            return nothing_yet(self._given_spec)
        return picture(
            spec=self._spec,
            rdzv=self._rdzv,
            membership=self._membership,
            roster=self._roster,
            round_=self._round,
            budget=self._settlement.budget,
            now=self._now,
            reason=self._hold_reason or self._reason,
            last_failure=self._last_failure,
            outcome=self._outcome.reason if self._outcome else "",
        )

    @property
    def spec(self) -> m.JobSpec:
        """What the job has agreed on; there is none before the first agent."""
        assert self._spec is not None
        return self._spec

    def _found(self, first_spec: m.JobSpec, now: float) -> None:
        """The first agent is there: the job begins."""
        if self._spec is not None:
            return
        spec = self._spec = self._given_spec or first_spec
        self._membership = Membership(heartbeat_timeout=spec.heartbeat_timeout)
        self._rdzv = Rendezvous(spec, now)
        self._settlement = Settlement(spec)

    # ------------------------------------------------------------ streams

    def _attached(self, session: int, hello: m.Hello, now: float) -> None:
        node = hello.node
        suspect = self._membership.is_suspect(node)
        admission = self._membership.attach(
            node=node, host=hello.host, incarnation=hello.incarnation, session=session, now=now
        )
        if admission.refusal:
            self._tell(session, m.Refused(admission.refusal, EXIT_REFUSED))
            self._out.append(fx.Hangup(session))
            return
        if admission.old_session is not None:
            self._out.append(fx.Hangup(admission.old_session))
        if admission.superseded:
            self._rdzv.gone(node, "was replaced by a newer agent", last_word=now, reborn=True)
        elif admission.newer:
            self._rdzv.reborn(node)
        if admission.forgotten:
            self._roster.forget(admission.forgotten)
        self._roster.enter(hello)
        self._rdzv.back(node)
        if admission.returned or (suspect and not admission.newer):
            self._note(f"node {node} is heard again")
        self._tell(session, self._welcome())
        if hello.spec != self.spec:
            otherwise = ", ".join(differences(hello.spec, self.spec))
            self._note(f"node {node} was started otherwise: {otherwise}", "warning")
        if hello.last_term not in (0, self._term):
            self._rdzv.succeed_another(now)
        if self._outcome is not None:
            self._tell(session, self._outcome)
        elif hello.attached is not None:
            self._reattached(session, node, hello, hello.attached, now)
        elif self._rdzv.is_member(node):
            self._repeat_start(session, node, now)
        else:
            self._rdzv.returned(node, now, within=self.spec.last_call_timeout)

    def _welcome(self) -> m.Welcome:
        return m.Welcome(
            protocol=m.PROTOCOL_VERSION,
            version=__version__,
            job_id=self.spec.job_id,
            term=self._term,
            beat_interval=self._membership.beat_interval(),
            master_lost_timeout=self.spec.master_lost_timeout,
            status_url="",  # the shell knows it
        )

    def _reattached(
        self, session: int, node: str, hello: m.Hello, report: m.RoundReport, now: float
    ) -> None:
        """The agent knows a round. Is it ours, is it one to adopt, or is it over?"""
        current = self._round
        self._number = max(self._number, report.round.number)
        if current is None or (current.adopted and current.is_older_than(report.round)):
            self._adopt(report, now)
            self._adopt_member(node, hello, report)
        elif report.round == current.name:
            if not self._rdzv.is_member(node) and self._rdzv.is_adopting(now):
                self._adopt_member(node, hello, report)
            if not self._rdzv.is_member(node):
                self._tell(session, m.Stop(report.round, "this node had been given up"))
                self._rdzv.returned(node, now, within=self.spec.restart_grace + SURVIVOR_SLACK)
            elif self._rdzv.phase is Phase.GATHERING:
                self._tell(session, m.Stop(report.round, current.why_stopped))
        elif self._rdzv.is_member(node):
            self._repeat_start(session, node, now)
        else:
            self._tell(session, m.Stop(report.round, "the job has gone on without this node"))
            self._rdzv.announce(node)

    def _repeat_start(self, session: int, node: str, now: float) -> None:
        """The node has a place in our round and does not know: its m.Start was lost."""
        assert self._round is not None
        start = self._round.starts.get(node)
        if self._rdzv.phase is Phase.RUNNING and start is not None:
            self._tell(session, start)
        else:
            self._rdzv.stopped(node, now)

    def _adopt(self, report: m.RoundReport, now: float) -> None:
        old = self._round
        if old is not None:
            over = m.Stop(old.name, f"round {report.round} is newer")
            self._broadcast(self._rdzv.stages, over)
        self._round = adopt(report)
        self._settlement.budget.adopt(report.restart_count)
        self._settlement.new_round(adopted=True)
        self._rdzv.adopt(report.world_size, now)
        self._note(f"round {report.round} with {report.world_size} ranks runs already: adopted")

    def _adopt_member(self, node: str, hello: m.Hello, report: m.RoundReport) -> None:
        assert self._round is not None
        self._round.seats[node] = report.group_rank
        self._rdzv.adopt_member(node, hello.local_world_size, self._now)

    def _detached(self, event: fx.Detached, now: float) -> None:
        node = self._membership.node_of(event.session)
        if node is None:
            return
        seen = self._rdzv.is_concerned(node) and self._settlement.window.reported_by_another(node)
        self._membership.detached(event.session, now, corroborated=seen, clean=event.clean)
        member = self._membership.member(node)
        if member.health is Health.LEFT:
            self._rdzv.gone(node, member.reason, last_word=now)
        elif self._outcome is None:
            self._note(f"node {node} is suspect: {member.reason}")
            self._rdzv.lost_contact(node, now, self.spec.heartbeat_timeout + 1.0)

    def _bury(self, now: float) -> None:
        """Nodes whose time is up are dead."""
        rdzv = self._rdzv
        if rdzv.size:
            deaths = self._membership.due(now, rdzv.is_member, rdzv.size)
        else:
            deaths = self._membership.due(now, lambda _: True, self._membership.present())
        for death in deaths:
            self._note(f"node {death.node} is dead: {death.reason}", "warning")
            last_heard = self._membership.member(death.node).last_heard
            rdzv.gone(death.node, f"is dead: {death.reason}", last_word=last_heard)
            if death.session is not None:
                self._out.append(fx.Hangup(death.session))
        hold = self._membership.hold_reason()
        if hold != self._hold_reason:
            self._hold_reason = hold
            self._note(hold or "nodes are heard again", "warning" if hold else "info")

    # ------------------------------------------------------------ reports

    def _heard(self, node: str, report: m.Report, now: float) -> None:
        rdzv = self._rdzv
        if isinstance(report, m.Join):
            self._roster.joined(node, report.store)
            rdzv.join(node, now, not_before=self._membership.barred_until(node, now))
        elif isinstance(report, m.Leaving):
            self._membership.left(node, report.reason)
            rdzv.leaving(node, now, report.reason)
            self._all_left = self._membership.present() == 0
            self._note(f"node {node} leaves: {report.reason}")
        elif isinstance(report, m.Running | m.RanksFailed | m.Stopping | m.Stopped | m.Finished):
            if self._round is None or report.round != self._round.name:
                return  # of a round that is over
            if isinstance(report, m.Running):
                self._roster[node].pids = report.pids
                rdzv.running(node)
            elif isinstance(report, m.RanksFailed):
                self._ranks_failed(node, report, now)
            elif isinstance(report, m.Stopping):
                rdzv.stopping(node, report.remaining, now)
            elif isinstance(report, m.Stopped):
                rdzv.stopped(node, now)
            else:
                rdzv.finished(node)

    def _ranks_failed(self, node: str, report: m.RanksFailed, now: float) -> None:
        if not self._settlement.add(node, report.failures, now):
            return
        self._membership.corroborate(node, self._rdzv.is_concerned, now)
        if self._rdzv.phase is Phase.RUNNING and self._rdzv.is_member(node):
            verdict = self._settlement.verdict(self._trouble(), now)
            self._last_failure = verdict.reason
            if verdict.bill is not Bill.HOPELESS:
                self._reopen(verdict.reason, now)

    # ------------------------------------------------------------ decisions

    def _advance(self, now: float) -> None:
        """Ask what is to be done until it is nothing."""
        for _ in range(MAX_DECISIONS):
            if self._all_left and self._membership.present() == 0 and not self._rdzv.succeeded:
                self._end(EXIT_FAILED, "every node has left")
                return
            gate = self._settlement.judge(self._trouble(), self._rdzv.formed_at, now)
            if gate is not None and gate.end:
                self._end(EXIT_FAILED, gate.end)
                return
            decision = self._rdzv.decide(now)
            if decision.verb is Verb.FORM and gate is not None:
                decision = Decision(Verb.WAIT, gate.reason, gate.until)
            if decision.verb is Verb.WAIT:
                self._wait(decision, None if gate is None else gate.until)
                return
            if decision.verb is Verb.FORM:
                self._form(decision.nodes, now)
            elif decision.verb is Verb.REOPEN:
                self._settlement.window.excuse(decision.reason)
                self._reopen(decision.reason, now)
            else:
                self._end(decision.exit_code, decision.reason)
                return
        raise RuntimeError("the rendezvous does not come to rest")

    def _trouble(self) -> str:
        """Which member has gone or may have gone, in words; empty if all are well."""
        if self._rdzv.loss:
            return self._rdzv.loss
        suspects = (n for n in self._membership.suspects() if self._rdzv.is_concerned(n))
        return next((f"node {node} is suspect" for node in suspects), "")

    def _wait(self, decision: Decision, gate: float | None) -> None:
        self._until = min((t for t in (decision.until, gate) if t is not None), default=None)
        if decision.reason != self._reason:
            self._reason = decision.reason
            if decision.reason:
                self._note(decision.reason)
                self._tell_to_wait()

    def _tell_to_wait(self, only: str | None = None) -> None:
        """Tell ready nodes, or the one named, why they wait, each once per sentence."""
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
            self._out.append(fx.Tell(tuple(sessions), m.Wait(self._reason)))

    def _reopen(self, reason: str, now: float) -> None:
        """The round is over: its members stop their ranks."""
        assert self._round is not None
        self._round.why_stopped = reason
        members = self._rdzv.reopen(now)
        self._note(f"round {self._round.name.number} is over: {reason}")
        self._broadcast(members, m.Stop(self._round.name, reason))

    def _form(self, limit: int, now: float) -> None:
        """Settle what the last round costs, and give every member its place in the next."""
        note = self._settlement.settle(self._trouble(), self._rdzv.formed_at, now)
        if note:
            self._note(note)
        self._number += 1
        name = RoundName(self._term, self._number, self._mint())
        ready = [self._roster.candidate(node) for node in self._rdzv.ready]
        round_ = begin(name, ready, limit, self._round, self._settlement.budget.count)
        self._round = round_
        for node in round_.seats:
            self._roster[node].told = ""
        self._rdzv.formed(round_.seats, now)
        self._settlement.new_round()
        self._reason = ""
        ranks = f"{round_.world_size} ranks on {len(round_.seats)} nodes"
        self._note(f"round {name.number} begins: {ranks}")
        for node, start in round_.starts.items():
            self._broadcast((node,), start)

    def _end(self, exit_code: int, reason: str) -> None:
        failures = () if exit_code == EXIT_OK else self._settlement.failures
        self._outcome = m.End(exit_code, reason, failures)
        self._until = None
        self._note(f"the job is over: {reason}")
        self._out.append(fx.Tell(self._membership.sessions(), self._outcome))
        self._out.append(fx.JobOver(exit_code, reason))

    # ------------------------------------------------------------ small change

    def _tell(self, session: int, order: m.Order) -> None:
        self._out.append(fx.Tell((session,), order))

    def _broadcast(self, nodes: Iterable[str], order: m.Start | m.Stop) -> None:
        found = (self._membership.session_of(node) for node in nodes)
        sessions = tuple(session for session in found if session is not None)
        if sessions:
            self._out.append(fx.Tell(sessions, order))

    def _note(self, text: str, level: str = "info") -> None:
        self._out.append(fx.Note(text, level))
