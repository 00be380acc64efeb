"""The health of nodes: turns the results of network checks and of slow-node detection into orders.

`netcheck` decides which nodes to probe together and which of them are at fault, `speed` which are
slow in training, `nodes.admission` which are refused until when. The policy acts on that:

* If a round could form and some of its nodes must be probed, the check comes first. Nodes that join
  meanwhile are accepted, and probed by the check that follows.
* A new node is probed alone while a round runs, and joins once it has passed, so a bad node never
  stops a round. Its links are tried when the next round gathers.
* A node that may or may not be at fault is kept out until another node joins or leaves. If one node
  is enough for a round, one of those whose own probes passed may form it.
* A convicted node is excluded: recorded first, then ordered to leave. So is one whose agent reports
  that no rank may run there. A slow one is excluded only if the user asked for it, the others
  suffice, and not too many were excluded for that lately.

`netcheck` measures time only while the master is listening, so no answer becomes late while the
master is away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from elasticrun.core.context import JobContext
from elasticrun.core.events import FoundSlow
from elasticrun.core.health.groups import NodeVerdict, ProbeGroup, Standing
from elasticrun.core.health.netcheck import NetCheck
from elasticrun.core.health.speed import Slowness, Stragglers
from elasticrun.core.nodes.admission import FAILED, SLOW, UNHEALTHY
from elasticrun.core.nodes.node import Node
from elasticrun.core.reasons import Checking, Excluded, Pending, Unfit
from elasticrun.core.rounds.failures import Ending
from elasticrun.core.rounds.rendezvous import Decision, Phase, Verb
from elasticrun.core.rounds.round import lay_out, store_host
from elasticrun.core.wishes import EndJob, Wish
from elasticrun.core.words import plural
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MAX_TURNS = 64
"""Maximum number of passes that one event may cause; more means that the check never ends."""

DOUBTED = "the network check is inconclusive for this node; it is probed with another one"

Verdicts = list[tuple[str, Excluded]]
"""Nodes to exclude, and why."""


class HealthPolicy:
    """Runs the network check, if the job has enabled it, and the detection of slow nodes, if a
    script reports its steps."""

    def __init__(self, ctx: JobContext, exclude: Callable[[Verdicts], None]) -> None:
        """`exclude` excludes the nodes that it is passed."""
        self._ctx = ctx
        self._exclude = exclude
        self._membership, self._nodes, self._rdzv = ctx.membership, ctx.nodes, ctx.rdzv
        self._netcheck: NetCheck | None = None
        self._stragglers: Stragglers | None = None
        self._answered: list[str] = []  # nodes probed alone that have answered, not yet processed
        self._has_changed = False  # the check has changed in this step
        self._unresolved: dict[str, str] = {}  # nodes whose fault cannot be decided, and why
        self._examined: RoundName | None = None  # the last round whose cause was doubted
        self._watched: RoundName | None = None  # the round whose steps are compared
        self._is_checking = False  # a check has begun and its result is not logged yet
        self._is_perf_logged = False
        self._checks = checks = ctx.spec.checks
        round_ = ctx.round
        perf = checks.perf and round_ is None  # the perf test precedes the first round
        if checks.network or perf:
            self._netcheck = NetCheck(replace(checks, perf=perf), ctx.mint)
            self._netcheck.trust(tuple(round_.members) if round_ is not None else ())

    def next_deadline(self) -> float | None:
        """When an answer to a probe is overdue, on the clock of `ctx.now`; None if none is
        expected."""
        due = self._netcheck.next_deadline() if self._netcheck is not None else None
        return None if due is None else due + self._ctx.away

    def summary(self) -> str:
        """What the check has found, for the status page; "" without one."""
        return self._netcheck.summary() if self._netcheck is not None else ""

    def health(self, node: str) -> str:
        """What the probes and steps of a node have shown, for the status page."""
        parts = (
            self._nodes[node].slow,
            self._netcheck.health(node) if self._netcheck else "",
            self._stragglers.health(node) if self._stragglers else "",
        )
        return "; ".join(part for part in parts if part)

    def trust(self, node: str) -> None:
        """Treat a node as good: it belongs to a round that is being adopted."""
        if self._netcheck is not None:
            self._netcheck.trust((node,))

    def _time(self) -> float:
        """The clock of `netcheck`: seconds in which the master was listening."""
        return self._ctx.now - self._ctx.away

    # ------------------------------------------------------------ before a round

    def hold(self) -> Decision | None:
        """A round could form. If nodes must be probed first, start a check, unless one is running,
        and return the wait; else None."""
        check = self._netcheck
        if check is None:
            return None
        if not check.is_busy:
            self._doubt_the_cause()
            ready = self._in_order()
            if not check.needs_probing(ready):
                return None
            ranks = {node: self._nodes[node].hello.local_world_size for node in ready}
            self._is_checking = True
            for node in ready:
                if check.standing(node) is not Standing.GOOD:
                    self._nodes[node].slow = ""
            self._send_probes(check.start(ready, self._time(), ranks=ranks))
        return Decision(Verb.WAIT, Checking(check.reason()), self.next_deadline())

    def _in_order(self) -> list[str]:
        """The ready nodes in the order of placement, so that neighbours are probed together."""
        ready = [self._nodes[node] for node in self._rdzv.ready]
        round_ = self._ctx.round
        return [one.id for one in lay_out(ready, round_.seats if round_ else {})]

    def _doubt_the_cause(self) -> None:
        """Require a new probe of the node whose rank failed first in the last round; once per
        round."""
        cause, round_ = self._ctx.restarts.window.cause, self._ctx.round
        if round_ is None or round_.name == self._examined or self._rdzv.loss:
            return
        self._examined = round_.name
        if cause is not None:
            self.doubt(cause.node)

    def doubt(self, node: str) -> None:
        """Require a probe of this node before it is in a round again."""
        if self._netcheck is not None:
            self._netcheck.forget(node)

    def keep_out_doubted(self) -> bool:
        """Keep out the ready nodes that have not passed, now that no further probe would help.
        Return whether there are any."""
        check, spec = self._netcheck, self._ctx.spec
        if check is None or not self._checks.network:
            return False
        ready = self._in_order()
        doubted = [node for node in ready if check.standing(node) is not Standing.GOOD]
        if len(doubted) == len(ready) and max(spec.min_nodes, spec.node_unit) == 1:
            alone = [node for node in ready if check.standing(node) is Standing.ALONE]
            doubted = [node for node in doubted if node not in alone[:1]]
        for node in ready:
            if check.standing(node) is Standing.GOOD:
                self._unresolved.pop(node, None)
        for node in doubted:
            self._rdzv.keep_out(node, Checking(self._unresolved.setdefault(node, DOUBTED)))
            self._send_wait_reason(node)
        return bool(doubted)

    def readmit_doubted(self) -> None:
        """Another node has joined or left, or a round has ended: let undecided nodes try again, if
        the job is gathering."""
        if self._rdzv.phase is Phase.GATHERING:
            for node in tuple(self._unresolved):
                if self._rdzv.admit(node):
                    self._rdzv.join(node, self._ctx.now, not_before=self._ctx.now)

    def _send_wait_reason(self, node: str) -> None:
        """Send this node the reason why it waits, if it is a new one; the other nodes may wait for
        something else."""
        one, why = self._nodes[node], self._rdzv.reason_of(node, self._ctx.now)
        if one.session is not None and one.sent_reason != why:
            one.sent_reason = why
            self._ctx.send(one.session, m.Wait(why))

    # ------------------------------------------------------------ probing pending nodes

    def _probe_before_joining(self, node: str) -> bool:
        """A node has joined. If it would stop the running round and has not passed, keep it out,
        and probe it alone if it has not been probed. Return whether it is kept out."""
        check, rdzv = self._netcheck, self._rdzv
        if check is None or not self._checks.network or rdzv.phase is not Phase.RUNNING:
            return False
        if rdzv.last.is_member(node):
            return False
        if node in self._unresolved:
            rdzv.keep_out(node, Checking(self._unresolved[node]))
        elif check.standing(node) is Standing.UNKNOWN:
            rdzv.keep_out(node, Pending("probed"))
            self._probe_pending(check, node)
        else:
            return False
        self._send_wait_reason(node)
        return True

    def probe_backed_off(self) -> None:
        """A round has formed without the nodes in backoff. Probe them meanwhile, so that none stops
        this round when its backoff ends and then fails."""
        check = self._netcheck
        if check is None or not self._checks.network:
            return
        for node in self._rdzv.backing_off:
            if check.standing(node) is Standing.UNKNOWN:
                self._probe_pending(check, node)

    def _probe_pending(self, check: NetCheck, node: str) -> None:
        if not self._nodes[node].is_probed_alone:
            self._nodes[node].is_probed_alone = True
            self._send_probes((check.probe_pending(node, self._time()),))

    def _admit_probed(self) -> None:
        """Let nodes join that were probed alone and have passed."""
        check, answered = self._netcheck, self._answered
        self._answered = []
        for node in answered:
            if check is not None and check.standing(node) is not Standing.UNKNOWN:
                self._nodes[node].is_probed_alone = False
                if self._rdzv.admit(node):
                    self._joined(node)

    def on_report(self, node: str, report: m.Join | m.Probed | m.NodeHealth) -> bool:
        """A node without ranks is ready, has been probed, or reports on its machine. A node that
        must be probed first does not join yet."""
        if isinstance(report, m.NodeHealth):
            self._node_reported(node, report)
        elif isinstance(report, m.Probed):
            self._answer(node, report)
        elif not self._probe_before_joining(node):
            self._joined(node)
        return True

    def _joined(self, node: str) -> None:
        ctx, now = self._ctx, self._ctx.now
        until, why = max(
            (max(now, self._nodes[node].silences.backoff_until), "it fell silent too often"),
            (ctx.restarts.attribution.backoff_until(node, now), "its ranks kept failing"),
            (ctx.flaps.backoff_until(node, now), "its agent died soon after each start"),
        )
        self._rdzv.join(node, now, not_before=until, why=why)
        self.readmit_doubted()

    # ------------------------------------------------------------ a running check

    def _answer(self, node: str, answer: m.Probed) -> None:
        if self._netcheck is not None:
            self._netcheck.answered(node, answer, self._time())
            self._has_changed = True
            if self._nodes[node].is_probed_alone:
                self._answered.append(node)

    def pursue(self) -> tuple[Wish, ...]:
        """If the check has changed: order the probes of its next pass, act on its verdicts, and
        report its result. If the perf test missed the required floor, end the job."""
        if (check := self._netcheck) is None:
            return ()
        due = self.next_deadline()
        late = due is not None and self._ctx.now >= due
        if not (self._has_changed or late):
            return ()
        time = self._time()
        if late:  # `away` is added and subtracted, which may lose precision
            time = max(time, check.next_deadline() or time)
        for _ in range(MAX_TURNS):
            self._has_changed = False
            groups = check.proceed(time)
            failure = check.perf.failure
            self._send_probes(groups)
            self._judge(check.take_verdicts())
            if not groups and not self._has_changed:
                break
        else:
            raise RuntimeError("the network check does not settle")
        self._admit_probed()
        if self._is_checking and not check.is_busy:
            self._is_checking = False
            # a warning, because a user who enabled it by a flag should see the result
            for line in check.perf.lines[:-1] if not self._is_perf_logged else ():
                self._is_perf_logged = True  # the last and largest is in the summary
                self._ctx.note(line, "warning")
            self._ctx.note(check.take_news(), "warning")
        return (EndJob(Ending.BELOW_FLOOR, Unfit(failure)),) if failure else ()

    def _send_probes(self, groups: tuple[ProbeGroup, ...]) -> None:
        for group in groups:
            for one, probe in self._probes(group):
                one.probe = probe
                if one.session is not None:  # else it is sent when it attaches
                    self._ctx.send(one.session, probe)

    def probe_again(self, session: int, node: str) -> None:
        """An agent has attached: send it again the probe whose answer is expected."""
        group = self._netcheck.group_of(node) if self._netcheck is not None else None
        order = self._nodes[node].probe
        if group is not None and order is not None and order.check == group.check:
            self._ctx.send(session, order)

    def _probes(self, group: ProbeGroup) -> Iterator[tuple[Node, m.Probe]]:
        """The nodes of a group, each with its order; O(nodes)."""
        places = [self._nodes[node] for node in group.nodes]
        world_size = sum(one.hello.local_world_size for one in places)
        store = store_host(places).store
        first_rank = 0
        for at, one in enumerate(places):
            yield (
                one,
                m.Probe(
                    check=group.check,
                    perf=group.perf,
                    partners=_partners(group.nodes, at),
                    group_rank=at,
                    group_world_size=len(places),
                    first_rank=first_rank,
                    world_size=world_size,
                    store=store,
                    limit=self._checks.probe_limit,
                ),
            )
            first_rank += one.hello.local_world_size

    def node_gone(self, node: str, reason: str) -> None:
        """The node has left, or its current incarnation has died."""
        self._unresolved.pop(node, None)
        one = self._nodes[node]
        one.probe, one.is_probed_alone, one.slow, one.pace = None, False, "", None
        one.notices, one.standby = (), ""
        if self._stragglers is not None:
            self._stragglers.node_gone(node)
        if self._netcheck is not None:
            self._netcheck.lost(node, reason, self._time())
            self._has_changed = True
            self.readmit_doubted()

    # ------------------------------------------------------------ verdicts

    def _judge(self, verdicts: tuple[NodeVerdict, ...]) -> None:
        failed: Verdicts = []
        logged: set[str] = set()
        for verdict in verdicts:
            if verdict.kind == "failed":
                failed.append((verdict.node, Excluded(FAILED, verdict.reason)))
            elif verdict.kind == "unresolved":
                if verdict.reason not in logged:  # the nodes of a pair have the same reason
                    logged.add(verdict.reason)
                    self._ctx.note(verdict.reason, "warning")
                self._unresolved[verdict.node] = verdict.reason
        if failed:
            self._exclude(failed)
        for verdict in verdicts:
            if verdict.kind == "slow":
                self._found_slow(verdict.node, verdict.reason)

    def _found_slow(self, node: str, reason: str) -> None:
        """Handle a node that is slow because of `reason`: exclude it if the user wants that and the
        job can spare it; otherwise log it, once."""
        why_not = ""
        if not self._checks.exclude_stragglers:
            why_not = "it stays (--exclude-straggler would exclude it)"
        elif not self._rdzv.is_enough_without(node):
            why_not = "it stays, because the job has no spare node"
        elif not self._ctx.exclusions.may_be_slow(self._ctx.now):
            why_not = "it stays, because enough slow nodes were excluded within the last hour"
        if not why_not:
            self._exclude([(node, Excluded(SLOW, reason))])
            return
        if not self._nodes[node].slow:  # else it was reported before
            self._ctx.note(f"{reason}; {why_not}", "warning")
            self._ctx.out.append(FoundSlow(node, reason))
        self._nodes[node].slow = reason

    # ------------------------------------------------------------ in training

    def _node_reported(self, node: str, report: m.NodeHealth) -> None:
        """The agent has found a fault of its machine, or problems that people should see. A node
        with a fault is excluded at any time, even below `min`: its ranks would fail or compute
        wrong results."""
        for notice in report.notices:
            if notice not in self._nodes[node].notices:
                self._ctx.note(f"node {node}: {notice}", "warning")
        self._nodes[node].notices, self._nodes[node].standby = report.notices, report.standby
        if report.fault:
            self._exclude([(node, Excluded(UNHEALTHY, report.fault))])

    def stepped(self, node: str, report: m.Steps) -> Slowness | None:
        """Process the steps of a member of the running round; return the node that they show to be
        slow, if any."""
        round_ = self._ctx.round
        if round_ is None or self._rdzv.phase is not Phase.RUNNING:
            return None
        if self._stragglers is None:
            self._stragglers = Stragglers(self._checks)
        if self._watched != round_.name:
            self._watched = round_.name
            for one in self._nodes.values():
                one.slow, one.pace = "", None
            self._stragglers.new_round(tuple(round_.members))
        self._nodes[node].pace = report
        slow = self._stragglers.on_steps(node, report, self._ctx.now)
        if slow is None:
            return None
        if not self._nodes[slow.node].slow:  # probe it again before the next round
            self.doubt(slow.node)
        self._found_slow(slow.node, f"node {slow.node} is slow in training: {slow.evidence}")
        return slow


def _partners(nodes: tuple[str, ...], at: int) -> str:
    """The other nodes of a group, in words of limited length."""
    if len(nodes) > 3:
        return plural(len(nodes) - 1, "other node")
    return " and ".join(nodes[:at] + nodes[at + 1 :])
