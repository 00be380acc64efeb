"""Streams come and go: what an agent is told when it attaches, what its loss means.

Orders are level-triggered: whoever attaches is told its node's whole desired state, so an order
lost with a stream is never missed, nor one that the master did not live to send. An agent that runs
a round of which this master has no record tells it of that round, and the round is adopted.
"""

from __future__ import annotations

from elasticrun import __version__
from elasticrun.core import events as fx
from elasticrun.core.job.checking import Checking
from elasticrun.core.nodes.node import Health, differences
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.rounds.rendezvous import SURVIVOR_SLACK, Phase
from elasticrun.core.rounds.round import adopt, adopted_seat
from elasticrun.core.words import some
from elasticrun.wire import messages as m


class Attaching(Checking):
    """See the module's head."""

    def _attached(self, session: int, hello: m.Hello, now: float) -> None:
        node = hello.node
        if self._refuse_excluded(session, hello, now):
            return
        suspect = self._membership.is_suspect(node)
        admission = self._membership.attach(
            node=node, host=hello.host, incarnation=hello.incarnation, session=session, now=now
        )
        if admission.refusal:
            self._tell(session, m.Refused(admission.refusal, code_of(Ending.REFUSED)))
            self._out.append(fx.Hangup(session))
            return
        if admission.old_session is not None:
            self._out.append(fx.Hangup(admission.old_session))
        if admission.superseded:
            self._end_stay(node, admission.silent_since, now)
            self._rdzv.gone(node, "was replaced by a newer agent", last_word=now, reborn=True)
        elif admission.newer:
            self._rdzv.reborn(node)
        if admission.newer:
            self._unprobed(node, "was replaced by a newer agent", now)
            self._holds_no_more(node, "was replaced by a newer agent")
            self._doubt(node)
        if admission.forgotten:
            self._roster.forget(admission.forgotten)
            self._doubt(admission.forgotten)
        self._roster.enter(hello)
        unseen = node in self._rdzv.takeover.unseen
        if self._rdzv.back(node, now):
            self._note("every node of the round is heard again")
        if admission.returned or (suspect and not unseen and not admission.newer):
            self._note(f"node {node} is heard again")
        expecting = self._rdzv.takeover.expected_until
        if hello.last_term > self._recorded_term and hello.last_term != self._term:
            self._rdzv.takeover.expect_round(now)
        if self._rdzv.takeover.expected_until != expecting:
            self._record()  # or our own successor would believe that no round runs
        self._tell(session, self._welcome())
        if hello.last_term and node not in self._rdzv.last.stages:
            self._rdzv.takeover.elsewhere[node] = hello.local_world_size
        if hello.spec != self.spec:
            otherwise = ", ".join(differences(hello.spec, self.spec))
            self._note(f"node {node} was started otherwise: {otherwise}", "warning")
        namesake = self._roster.namesake(hello)
        if namesake:
            both = f"nodes {namesake} and {node} are both on a host named {hello.host}"
            self._note(f"{both}, with different addresses: name the hosts apart", "warning")
        if self._outcome is not None:
            self._tell(session, self._outcome)
            self._say_over(self._outcome)
        elif hello.attached is not None:
            self._reattached(session, node, hello, hello.attached, now)
        elif self._rdzv.last.is_member(node):
            self._repeat_start(session, node, now)
        else:
            self._rdzv.returned(node, now, within=self.spec.last_call_timeout)
        if self._outcome is None:
            self._probe_again(session, node)
            self._saves_again(node)

    def _refuse_excluded(self, session: int, hello: m.Hello, now: float) -> bool:
        """Whether this stream is an excluded node's: it has been refused, or is parked."""
        node, host, quarantine = hello.node, hello.host, self.spec.checks.quarantine
        refusal = self._exclusions.refusal(node, host, now)
        if not refusal:
            return False
        if quarantine and self._outcome is not None:
            self._tell(session, self._welcome())
            self._tell(session, self._outcome)
        elif self._may_park(node):
            admission = self._membership.attach(
                node=node, host=host, incarnation=hello.incarnation, session=session, now=now
            )
            if admission.refusal:
                self._tell(session, m.Refused(admission.refusal, code_of(Ending.REFUSED)))
                self._out.append(fx.Hangup(session))
                return True
            if admission.old_session is not None:
                self._out.append(fx.Hangup(admission.old_session))
            self._roster.enter(hello)
            self._tell(session, self._welcome())
            self._park(session, node, refusal, self._exclusions.remaining(node, host, now))
        else:
            self._tell(session, m.Refused(refusal, code_of(Ending.EXCLUDED)))
            self._out.append(fx.Hangup(session))
        return True

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
        if current is None or (current.inherited and current.is_older_than(report.round)):
            self._adopt(node, hello, report, now)
        elif report.round == current.name:
            if not self._rdzv.last.is_member(node) and not self._rdzv.is_whole:
                self._adopt_member(node, hello, report)
            if not self._rdzv.last.is_member(node):
                self._tell(session, m.Stop(report.round, "this node had been given up"))
                self._rdzv.returned(node, now, within=self.spec.restart_grace + SURVIVOR_SLACK)
            elif self._rdzv.phase is Phase.GATHERING:
                self._tell(session, m.Stop(report.round, current.why_stopped))
        elif self._rdzv.last.is_member(node):
            self._repeat_start(session, node, now)
        else:
            self._tell(session, m.Stop(report.round, "the job has gone on without this node"))
            self._rdzv.announce(node, now)

    def _repeat_start(self, session: int, node: str, now: float) -> None:
        """The node has a place in our round and does not know: its m.Start was lost, or the master
        before this one died between the record of the round and the order."""
        assert self._round is not None
        start = self._round.start(node)
        if self._rdzv.phase is Phase.RUNNING and start is not None:
            if self._round.inherited:
                self._rdzv.begins_now(now)
            self._tell(session, start)
        else:
            self._rdzv.stopped(node, now)

    def _adopt(self, node: str, hello: m.Hello, report: m.RoundReport, now: float) -> None:
        old, members = self._round, tuple(self._rdzv.last.stages)
        self._round = adopt(report)
        self._settlement.budget.adopt(report.restart_count)
        self._settlement.new_round(adopted=True)
        self._bad_snapshot = ""
        points = self._saves.points
        points.rewound_from, points.restore_step = report.rewound_from, -1
        seats = self._round.seats
        self._saves.begin_round(report.round, report.world_size, report.restore, seats)
        self._rdzv.adopt(report.world_size, now)
        size = some(report.world_size, "rank")
        self._note(f"round {report.round} with {size} runs already: adopted")
        self._adopt_member(node, hello, report)
        self._record()
        if old is not None:
            self._broadcast(members, m.Stop(old.name, f"round {report.round} is newer"))

    def _adopt_member(self, node: str, hello: m.Hello, report: m.RoundReport) -> None:
        assert self._round is not None
        self._round.seat(adopted_seat(hello, report))
        if self._netcheck is not None:
            self._netcheck.trust((node,))
        self._rdzv.adopt_member(node, hello.local_world_size, self._now)
        self._stale = self._stale or self._rdzv.is_whole

    def _detached(self, event: fx.Detached, now: float) -> None:
        node = self._membership.node_of(event.session)
        if node is None:
            return
        seen = self._rdzv.last.is_concerned(node) and self._settlement.window.reported_by_another(
            node
        )
        self._membership.detached(
            event.session,
            now,
            corroborated=seen,
            clean=event.clean,
            silent=event.silent,
            quiet=event.quiet,
        )
        member = self._membership.member(node)
        if member.health is Health.PARKED:
            self._membership.left(node, "it is excluded, and was parked")
            self._note(f"node {node} is parked no longer: its agent has gone")
        if member.health is Health.LEFT:
            self._rdzv.gone(node, member.reason, last_word=now)
            self._unprobed(node, member.reason, now)
            self._holds_no_more(node, f"has gone: {member.reason}")
            self._stale = True
        elif self._outcome is None:
            self._note(f"node {node} is suspect: {member.reason}")
            self._saves.forget(node, now)
            self._rdzv.lost_contact(node, now, self.spec.heartbeat_timeout + 1.0)

    def _bury(self, now: float) -> None:
        """Nodes whose time is up are dead."""
        rdzv = self._rdzv
        if members := len(rdzv.last.stages):
            deaths = self._membership.due(now, rdzv.last.is_member, members)
        else:
            deaths = self._membership.due(now, lambda _: True, self._membership.present())
        for death in deaths:
            # where a round needed it, every agent says so itself (Start.why, Wait)
            level = "info" if rdzv.last.is_concerned(death.node) else "warning"
            self._note(f"node {death.node} is dead: {death.reason}", level)
            last_heard = self._membership.member(death.node).last_heard
            self._end_stay(death.node, death.since, now)
            rdzv.gone(death.node, f"is dead: {death.reason}", last_word=last_heard)
            self._unprobed(death.node, f"is dead: {death.reason}", now)
            self._holds_no_more(death.node, f"is dead: {death.reason}")
            self._stale = True
            if death.session is not None:
                self._out.append(fx.Hangup(death.session))
        hold = self._membership.hold_reason()
        if hold != self._hold_reason:
            self._hold_reason = hold
            self._note(hold or "nodes are heard again", "warning" if hold else "info")

    def _end_stay(self, node: str, at: float, now: float) -> None:
        """A life of this node is over since `at`: a loss, if the round still needed it."""
        if self._rdzv.last.is_concerned(node):
            self._stays.lost(node, at, now)
        else:
            self._stays.over(node)

    def _say_over(self, outcome: m.End) -> None:
        """Tell the shell, once: the job is over and somebody was told."""
        if not self._is_over_told:
            self._is_over_told = True
            self._out.append(fx.JobOver(outcome.exit_code, outcome.reason))
