"""Agent connections: attach, detach, exclude.

Orders are level-triggered: an agent that attaches receives its node's whole desired state, so no
order is lost with a stream or with a master that died before sending it. If an agent runs a round
that this master has no record of, it reports the round, and the master adopts it.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun import __version__
from elasticrun.core import events as fx
from elasticrun.core.context import JobContext
from elasticrun.core.health.policy import HealthPolicy
from elasticrun.core.job.record import Recorder
from elasticrun.core.nodes.membership import Admission
from elasticrun.core.nodes.node import Health, differences
from elasticrun.core.reasons import (
    Banned,
    CutOff,
    Dead,
    Excluded,
    GivenUp,
    Leaves,
    OtherRound,
    Reason,
    Replaced,
    code,
    how_to_include,
    text,
)
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.core.rounds.rendezvous import SURVIVOR_SLACK, Phase
from elasticrun.core.rounds.round import adopt, adopted_seat
from elasticrun.core.snapshots.policy import SnapshotPolicy
from elasticrun.core.words import plural
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName


class Streams:
    """Handles the streams of all agents."""

    def __init__(
        self, ctx: JobContext, recorder: Recorder, saving: SnapshotPolicy, recorded_term: int
    ) -> None:
        """`recorded_term`: term of the master whose record this one continues; 0 without a
        record."""
        self._ctx = ctx
        self._recorder = recorder
        self._saving = saving
        self._recorded_term = recorded_term
        self._is_over_reported = False
        self._membership, self._rdzv, self._nodes = ctx.membership, ctx.rdzv, ctx.nodes
        self.health = HealthPolicy(ctx, self.exclude)
        self.hold_reason: CutOff | None = None
        """Why silent nodes are not declared dead at present; None: they are."""

    # ------------------------------------------------------------ attached

    def attached(self, session: int, hello: m.Hello) -> None:
        ctx, rdzv, node, now = self._ctx, self._rdzv, hello.node, self._ctx.now
        if self._refuse_excluded(session, hello):
            return
        suspect = node in self._membership.suspects
        admission = self._admit(session, hello)
        if admission is None:
            return
        self._replace_incarnation(node, admission)
        unseen = node in rdzv.last.unseen
        if rdzv.reconnected(node, now):
            ctx.note("every node of the round is reachable again")
        if admission.returned or (suspect and not unseen and not admission.newer):
            ctx.note(f"node {node} is reachable again")
        expecting = rdzv.takeover.expected_until
        if hello.last_term > self._recorded_term and hello.last_term != ctx.term:
            rdzv.takeover.expect_round(now)
        if rdzv.takeover.expected_until != expecting:
            self._recorder.record()  # otherwise the next master would assume that no round runs
        ctx.send(session, self._welcome())
        if hello.last_term and node not in rdzv.last.stages:
            rdzv.takeover.elsewhere[node] = hello.local_world_size
        self._warn_about_mismatches(hello)
        if ctx.outcome is not None:
            ctx.send(session, ctx.outcome)
            self.report_over(ctx.outcome)
            return
        if hello.attached is not None:
            self._reattached(session, hello, hello.attached)
        elif rdzv.last.is_member(node):
            self._repeat_start(session, node)
        else:
            rdzv.returned(node, now, within=ctx.spec.last_call_timeout)
        self.health.probe_again(session, node)
        self._saving.attached(node)

    def _admit(self, session: int, hello: m.Hello) -> Admission | None:
        """Attach the stream to its node and close an older stream; None if refused."""
        admission = self._membership.attach(session, hello, self._ctx.now)
        if admission.refusal:
            self._ctx.send(session, refused(admission.refusal, Ending.REFUSED))
            self._ctx.hang_up(session)
            return None
        if admission.old_session is not None:
            self._ctx.hang_up(admission.old_session)
        return admission

    def _replace_incarnation(self, node: str, admission: Admission) -> None:
        if admission.newer:
            fate = Replaced()
            if admission.superseded:
                self._end_stay(node, admission.silent_since)
                self._rdzv.node_gone(node, fate, last_heard=self._ctx.now, replaced=True)
            else:  # no rank of the earlier incarnation is alive
                last = self._rdzv.last
                last.fenced = last.fenced or node in last.away
            self.health.node_gone(node, text(fate))
            self._saving.node_gone(node, text(fate), replaced=True)
            self.health.doubt(node)
        if admission.forgotten:
            self.health.doubt(admission.forgotten)

    def _warn_about_mismatches(self, hello: m.Hello) -> None:
        node, spec = hello.node, self._ctx.spec
        if self._ctx.scaled:  # no node can have been started with the new numbers
            size = hello.spec.min_nodes, hello.spec.max_nodes
            spec = replace(spec, min_nodes=size[0], max_nodes=size[1])
        if hello.spec != spec:
            otherwise = ", ".join(differences(hello.spec, spec))
            self._ctx.note(
                f"node {node} was started with different settings: {otherwise}", "warning"
            )
        if namesake := self._nodes.namesake(hello):
            both = f"nodes {namesake} and {node} are both on a host named {hello.host}"
            self._ctx.note(
                f"{both}, with different addresses: give the hosts different names", "warning"
            )

    def _welcome(self) -> m.Welcome:
        spec = self._ctx.spec
        return m.Welcome(
            protocol=m.PROTOCOL_VERSION,
            version=__version__,
            job_id=spec.job_id,
            term=self._ctx.term,
            beat_interval=self._membership.beat_interval(),
            master_lost_timeout=spec.master_lost_timeout,
            status_url="",  # filled in when it is sent
        )

    def _reattached(self, session: int, hello: m.Hello, start: m.Start) -> None:
        """The agent reports a round: the current one, one to adopt, or one that is over."""
        ctx, rdzv, node, now = self._ctx, self._rdzv, hello.node, self._ctx.now
        current = ctx.round
        ctx.number = max(ctx.number, start.round.number)
        if current is None or (current.is_inherited and current.is_older_than(start.round)):
            self._adopt(hello, start)
        elif start.round == current.name:
            if not rdzv.last.is_member(node) and not rdzv.is_whole:
                self._adopt_member(hello, start)
            if not rdzv.last.is_member(node):
                ctx.send(session, stop(start.round, GivenUp(later=False)))
                rdzv.returned(node, now, within=ctx.spec.restart_grace + SURVIVOR_SLACK)
            elif rdzv.phase is Phase.GATHERING:
                ctx.send(session, stop(start.round, current.why_stopped))
        elif rdzv.last.is_member(node):
            self._repeat_start(session, node)
        else:
            ctx.send(session, stop(start.round, GivenUp(later=True)))
            rdzv.announce(node, now)

    def _repeat_start(self, session: int, node: str) -> None:
        """The node has a place in our round but has not received it: its Start was lost, or the
        previous master died between the record of the round and the order. Send Start again. If
        the round has ended, note instead that no rank of it runs there."""
        round_ = self._ctx.round
        assert round_ is not None
        start = None if round_.is_adopted else round_.start(node)  # an adopted one runs already
        if self._rdzv.phase is Phase.RUNNING and start is not None:
            if round_.is_inherited:
                self._rdzv.begins_now(self._ctx.now)
            self._ctx.send(session, start)
        else:
            self._rdzv.stopped(node, self._ctx.now)

    def _adopt(self, hello: m.Hello, start: m.Start) -> None:
        ctx, old, members = self._ctx, self._ctx.round, tuple(self._rdzv.last.stages)
        ctx.round = adopt(start)
        ctx.restarts.budget.adopt(start.info.restart_count)
        ctx.restarts.new_round(adopted=True)
        self._saving.round_adopted(ctx.round)
        self._rdzv.adopt(ctx.round, ctx.now)
        size = plural(start.info.world_size, "rank")
        ctx.note(f"adopted round {start.round} with {size}, which is already running")
        self._adopt_member(hello, start)
        self._recorder.record()
        if old is not None:
            ctx.broadcast(members, stop(old.name, OtherRound(str(start.round), begun=False)))

    def _adopt_member(self, hello: m.Hello, start: m.Start) -> None:
        ctx = self._ctx
        self.health.trust(hello.node)
        self._rdzv.adopt_member(adopted_seat(hello, start), ctx.now)
        if self._rdzv.is_whole:
            self._recorder.record_soon()

    # ------------------------------------------------------------ detached, dead

    def detached(self, event: fx.Detached) -> None:
        ctx, now = self._ctx, self._ctx.now
        member = self._membership.sessions.get(event.session)
        if member is None:
            return
        node, window = member.id, ctx.restarts.window
        seen = self._rdzv.last.is_concerned(node) and window.reported_by_another(node)
        self._membership.detached(event, now, corroborated=seen)
        if member.health is Health.LEFT:
            why = text(member.reason)
            how = member.reason if isinstance(member.reason, Leaves | Excluded) else Leaves(why)
            self._rdzv.node_gone(node, how, last_heard=now)
            self.health.node_gone(node, why)
            self._saving.node_gone(node, f"has left: {why}")
            self._recorder.record_soon()
        elif ctx.outcome is None:
            ctx.note(f"node {node} is suspect: {text(member.reason)}")
            self._saving.lost_contact(node)
            self._rdzv.lost_contact(node, now, ctx.spec.heartbeat_timeout + 1.0)

    def declare_deaths(self) -> None:
        """Declare dead the nodes whose deadline has passed."""
        ctx, rdzv, now = self._ctx, self._rdzv, self._ctx.now
        if members := len(rdzv.last.stages):
            deaths = self._membership.due(now, rdzv.last.is_member, members)
        else:
            deaths = self._membership.due(now, lambda _: True, len(self._membership.present))
        for death in deaths:
            node, how = death.node, Dead(death.how)
            reason = text(how)
            # if a round needed the node, every agent logs it itself (Start.why, Wait)
            needed = rdzv.last.is_concerned(node)
            ctx.note(f"node {node} {reason}", "error" if needed else "warning", on_nodes=needed)
            last_heard = self._nodes[node].last_heard
            self._end_stay(node, death.since)
            rdzv.node_gone(node, how, last_heard=last_heard)
            self.health.node_gone(node, reason)
            self._saving.node_gone(node, reason)
            self._recorder.record_soon()
            if death.session is not None:
                ctx.hang_up(death.session)
        if bool(self.hold_reason) != (self._membership.mass_silence.until is not None):
            self.hold_reason = hold = self._membership.mass_silence.reason()
            ctx.note(text(hold) or "nodes are reachable again", "warning" if hold else "info")

    def _end_stay(self, node: str, at: float) -> None:
        """The incarnation of this node ended at `at`. It is a loss if the round still needed it."""
        if self._rdzv.last.is_concerned(node):
            self._ctx.flaps.lost(node, at, self._ctx.now)
        else:
            self._ctx.flaps.over(node)

    def report_over(self, outcome: m.End) -> None:
        """Emit JobOver once, after the outcome has been sent to the attached agents."""
        if not self._is_over_reported:
            self._is_over_reported = True
            self._ctx.out.append(
                fx.JobOver(outcome.exit_code, outcome.reason, outcome.saved, outcome.code)
            )

    # ------------------------------------------------------------ excluded

    def exclude(self, verdicts: list[tuple[str, Excluded]]) -> None:
        """Exclude these nodes for `exclude_for` seconds: record that first, then order them to
        leave."""
        ctx, now, seconds = self._ctx, self._ctx.now, self._ctx.spec.checks.exclude_for
        for node, how in verdicts:
            ctx.exclusions.add(node, self._nodes[node].host, how, seconds=seconds, now=now)
            said = f"node {node} is excluded for {seconds:g} s: {how.verdict}"
            ctx.note(f"{said}; {how_to_include(node)}", "warning")
        self._saving.nodes_leave(node for node, _ in verdicts)
        sessions = [(self._nodes[node].session, how) for node, how in verdicts]
        for node, how in verdicts:
            self._membership.left(node, how)
            ctx.flaps.over(node)
            self._rdzv.excluded(node, now, how)
            self.health.node_gone(node, "it is excluded")
            self.health.doubt(node)
        self._recorder.record()
        for session, how in sessions:
            if session is not None:
                ctx.send(session, refused(Banned(how, seconds), Ending.EXCLUDED))

    def _refuse_excluded(self, session: int, hello: m.Hello) -> bool:
        """Refuse this stream if its node is excluded. Return whether it is."""
        ctx = self._ctx
        refusal = ctx.exclusions.refusal(hello.node, hello.host, ctx.now)
        if refusal is None:
            return False
        ctx.send(session, refused(refusal, Ending.EXCLUDED))
        ctx.hang_up(session)
        return True


def stop(round_: RoundName, why: Reason | None) -> m.Stop:
    """The order to stop the ranks of this round."""
    return m.Stop(round_, text(why), code(why))


def refused(why: Reason, ending: Ending) -> m.Refused:
    """The order that makes an agent exit with this ending."""
    return m.Refused(text(why), code_of(ending), code(why))
