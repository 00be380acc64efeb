"""The network check of a job: which nodes to probe, and which ones the probes convict.

A *check* begins when a round could form and some of its nodes have not been shown to work. It is a
series of *passes*. In each pass small groups are probed at the same time; their answers decide
which nodes are probed together next, which are at fault (`groups`) and which are slow (`speed`). A
pass costs O(n log n) in total, a node's answer O(1).

Number of passes. If all nodes work, one is enough. One bad node, or one bad link, among an even
number of nodes from four on is found in two, however many nodes there are; two bad nodes in one
pair take three. The failure of a group of three may be caused by any two of its nodes, so a fault
in such a group takes three passes, and up to four with three or five nodes.

Two cases are undecidable: a failure in a check of one or two nodes that does not show on one
machine alone, and any failure if no two good nodes with a good link are left. Then the verdict is
"unresolved": the nodes are neither good nor convicted. They are probed again only when a node is
ready that was not there before.

A node's standing outlives a check. A good node is a partner for new nodes until something counts
against it (`forget`) or it is lost (`lost`). While a round runs, new nodes are probed alone while
pending, so that a bad one does not stop the round, and with others once the round has ended. Before
the first round the perf test may follow, an all_reduce over all nodes that will form it; it is a
check of its own.

The caller must call `proceed` after every answer and loss, and at the deadline. It must send the
returned groups to their nodes at once; there, a newer probe replaces a running one. It must call
`lost` for a node whose agent is a new incarnation, because its partner waits for the old one
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.deadlines import Deadlines, earliest
from elasticrun.core.health import words
from elasticrun.core.health.groups import (
    FailedGroup,
    Nodes,
    NodeVerdict,
    Pass,
    ProbeFailure,
    ProbeGroup,
    Rate,
    Run,
    Standing,
    Trial,
    first_pass,
    is_convicted,
    later_pass,
    others,
    overdue,
    reset_doubtful,
    strongly_suspect,
    unexplained_failures,
)
from elasticrun.core.health.speed import Paces
from elasticrun.core.health.words import cut, duration, quoted, size, speed
from elasticrun.core.words import names, plural
from elasticrun.wire.messages import CheckSpec, Probed

MAX_PASSES = 8
"""Maximum number of passes of one check. Two decide nearly every case, and five the worst case of
two simultaneous faults. More passes help only if most of the nodes are bad, and each may last as
long as the limit of a hung probe."""


class Check:
    """One check of the ready nodes, some of which must be probed."""

    def __init__(
        self, ready: Mapping[str, bool], ranks: Mapping[str, int], paces: Paces, now: float
    ) -> None:
        """`ready`: nodes in order of placement -> whether already good. `ranks`: number of ranks
        per node; one if missing."""
        self.trials = {
            node: Trial(node, place, good) for place, (node, good) in enumerate(ready.items())
        }
        self.passes = 0
        self.verdicts: list[NodeVerdict] = []
        self._ranks = ranks
        self.paces = paces
        self._began = now
        self._failed: list[FailedGroup] = []  # in all passes
        self._just_failed: list[FailedGroup] = []  # in the last one
        self._proved: set[frozenset[str]] = set()  # pairs that have worked with each other
        self._found: list[tuple[str, str]] = []  # kind of verdict or "lost", and the node

    def plan(self) -> list[Nodes]:
        """The groups of the next pass; empty if the check is over."""
        if self.passes == MAX_PASSES:
            return []
        if self.passes == 0:
            groups = first_pass(self.trials)
        else:
            groups = later_pass(self.trials, self._just_failed, self.paces.again)
        self.passes += bool(groups)
        return groups

    def finish_pass(self, passed: Pass) -> None:
        """Evaluate a pass that is over."""
        self._just_failed = []
        worked = [run.group.nodes for run in passed.runs if self._evaluate(run)]
        self._failed += self._just_failed
        reset_doubtful(self._failed, self.trials)
        for trial in self._open():
            if is_convicted(unexplained_failures(trial, self.trials), self._proved):
                self._convict(trial)
        answers = [answer for run in passed.runs for answer in run.answers.items()]
        computed = {node: answer.compute for node, answer in answers if answer.compute > 0}
        self.paces.judge(self.trials, worked, computed)
        for node, evidence in self.paces.slow.items():
            self.trials[node].is_found_slow = True
            self._add_verdict(
                "slow", node, words.cut(f"{node} is slow, measured twice: {evidence}")
            )

    def conclude(self) -> list[str]:
        """Nothing more can be tried: convict the strongly suspect nodes, and give the others that
        have not passed the verdict "unresolved". Return these; none if the only node left passed
        alone."""
        doubtful = [it for it in self._open() if strongly_suspect(it, self.trials)]
        for trial in doubtful:
            self._convict(trial)
        present = [it for it in self.trials.values() if not it.out]
        left = self._open()
        if len(present) == 1 and present[0].alone:
            return []
        for trial in left:
            self._add_verdict("unresolved", trial.node, words.why_unresolved(trial, self.trials))
        return [trial.node for trial in left]

    def lost(self, node: str) -> None:
        """The node is lost: it is no longer a partner, and gets no verdict."""
        trial = self.trials.get(node)
        if trial is not None and not trial.out:
            trial.out = True
            self._found.append(("lost", node))

    def forget(self, node: str) -> None:
        """The node is in doubt for another reason: it must pass again."""
        trial = self.trials.get(node)
        if trial is not None:
            trial.good = trial.fresh = trial.alone = False

    def summary(self, now: float) -> str:
        """What the check found, as a sentence."""
        took = now - self._began
        return words.describe_outcome(self.trials, self._found, self._failed, self.passes, took)

    # ------------------------------------------------------------ helpers

    def _open(self) -> list[Trial]:
        return [one for one in self.trials.values() if not one.good and not one.out]

    def _evaluate(self, run: Run) -> bool:
        """Evaluate one group's answers; return whether all of it worked."""
        nodes = run.group.nodes
        own: dict[str, Probed] = {}
        joint: dict[str, Probed] = {}
        for node, answer in run.answers.items():
            if answer.compute > 0:
                self.trials[node].compute.append(answer.compute)
            if not answer.ok and (answer.own or len(nodes) == 1):
                own[node] = answer
            elif not answer.ok and not answer.excused:
                joint[node] = answer
            self.trials[node].held_up = answer.reason if answer.excused else ""
        self._record_rates(run)
        for node, answer in own.items():
            self.trials[node].failed(ProbeFailure((), answer.phase, answer.reason))
        if own:
            return False
        if joint and not run.lost:
            self._failed_together(nodes, joint)
            return False
        fine = [node for node, answer in run.answers.items() if answer.ok]
        for node in fine if run.lost or len(fine) == len(nodes) else ():
            self.trials[node].passed(others(nodes, node))
        if len(fine) < len(nodes):
            return False
        self._proved.update(frozenset((a, b)) for a in nodes for b in nodes if a < b)
        return True

    def _failed_together(self, nodes: Nodes, joint: Mapping[str, Probed]) -> None:
        first = next(iter(joint.values()))
        for node in nodes:
            answer = joint.get(node, first)
            self.trials[node].failed(ProbeFailure(others(nodes, node), answer.phase, answer.reason))
        failure = ProbeFailure(nodes, first.phase, first.reason)
        self._just_failed.append(FailedGroup(nodes, failure))

    def _record_rates(self, run: Run) -> None:
        """Record the largest all_reduce of this group, with the shortest time that a node measured:
        the other nodes' times include waiting."""
        nodes = run.group.nodes
        ranks = sum(self._ranks.get(one, 1) for one in nodes)
        timed = {
            node: max(answer.transfers, key=lambda one: one.size)
            for node, answer in run.answers.items()
            if answer.ok and any(one.size > 0 for one in answer.transfers)
        }
        least = min((one.seconds for one in timed.values()), default=0.0)
        if ranks < 2 or least <= 0:
            return
        for node, one in timed.items():
            rate = Rate(one.size, least, ranks, others(nodes, node))
            self.trials[node].last_rate = rate
            if rate.partners:
                self.trials[node].rates.append(rate)

    def _convict(self, trial: Trial) -> None:
        trial.out = True
        self._add_verdict("failed", trial.node, words.why_convicted(trial, self.trials))

    def _add_verdict(self, kind: str, node: str, reason: str) -> None:
        self._found.append((kind, node))
        self.verdicts.append(NodeVerdict(node, kind, reason))


MAX_OWN_FAILURES = 2
"""A node is convicted when its own probes have failed this often."""


@dataclass(slots=True)
class _LoneProbe:
    """The probes of a pending node that is probed alone."""

    group: ProbeGroup
    failures: list[str]
    again: bool = False  # its next probe must be ordered


@dataclass(frozen=True, slots=True)
class PerfResult:
    """The perf test in words; empty if it was not run. A failed one convicts no node."""

    lines: tuple[str, ...] = ()  # one per size
    sentence: str = ""
    failure: str = ""  # why the job must not start: below the required floor; "" if it may


def _perf_result(run: Run, ranks: Mapping[str, int], floor: float) -> PerfResult:
    """The result of a run that every node has answered. `floor`: required bus bandwidth in GB/s
    (1e9) at the largest size, 0.0 for none."""
    nodes = run.group.nodes
    world = sum(ranks.get(node, 1) for node in nodes)
    over = f"over {plural(len(nodes), 'node')}, {plural(world, 'rank')}"
    bad = [(node, answer) for node, answer in run.answers.items() if not answer.ok]
    if bad:
        who = names([node for node, _ in bad])
        cause = next((answer for _, answer in bad if not answer.excused), bad[0][1])
        why = cut(
            f"comm perf test {over} failed on {who} in {cause.phase} ({quoted(cause.reason)})"
        )
        return PerfResult((), why, why if floor > 0 else "")
    slowest = _slowest(run, world)
    if not slowest:
        sentence = f"comm perf test {over}: nothing was measured"
        return PerfResult((), sentence, sentence if floor > 0 and world > 1 else "")
    lines = tuple(f"all_reduce of {_line(rate)}, {over}" for _, rate in slowest)
    node, last = slowest[-1]
    sentence = cut(f"comm perf test {over}: all_reduce of {_line(last)}")
    if floor <= 0 or last.bus_bandwidth >= floor * 1e9:
        return PerfResult(lines, sentence)
    why = f"below the required {floor:g} GB/s (slowest on {node})"
    sentence_below = (
        f"comm perf test {over}: bus bandwidth {speed(last.bus_bandwidth)} "
        f"at {size(last.size)}, {why}"
    )
    return PerfResult(lines, cut(sentence_below), cut(sentence_below))


def _slowest(run: Run, world: int) -> list[tuple[str, Rate]]:
    """For each size that all nodes measured, the slowest node and its rate."""
    if world < 2:
        return []
    found: dict[int, list[tuple[float, str]]] = {}
    for node, answer in run.answers.items():
        for one in answer.transfers:
            if one.size > 0 and one.seconds > 0:
                found.setdefault(one.size, []).append((one.seconds, node))
    whole = {count: max(all_) for count, all_ in found.items() if len(all_) == len(run.answers)}
    return [(node, Rate(count, took, world, ())) for count, (took, node) in sorted(whole.items())]


def _line(rate: Rate) -> str:
    plain = speed(rate.size / rate.seconds)
    return (
        f"{size(rate.size)}: {duration(rate.seconds)}, algorithm bandwidth {plain}, "
        f"bus bandwidth {speed(rate.bus_bandwidth)}"
    )


@dataclass(slots=True)
class _Known:
    """What is known of a node; dropped when it leaves."""

    generation: int  # changes at each `forget`
    standing: Standing = Standing.UNKNOWN
    compute: float = 0.0  # seconds of one matmul, from its last probe
    pace: float = 0.0  # the same, adjusted for comparison as if the check had only one pass
    flops: float = 0.0  # of that matmul
    rate: Rate | None = None  # of its last all_reduce
    trouble: str = ""  # what counted against it in its last probes
    stuck_with: frozenset[int] = frozenset()
    """Generations of the nodes with which its case could not be decided."""
    lone_probe: _LoneProbe | None = None


class NetCheck:
    """The network check of one job."""

    def __init__(self, checks: CheckSpec, mint: Callable[[], str]) -> None:
        """`mint` returns the unique part of a group's name."""
        self._checks = checks
        self._mint = mint
        self._generations = 0
        self._known: dict[str, _Known] = {}
        self._due: Deadlines[str] = Deadlines()  # of answers of pending nodes
        self._again: list[str] = []  # of these, those that failed once, in order
        self._check: Check | None = None
        self._pass: Pass | None = None  # of the check, or of the perf test
        self._ranks: Mapping[str, int] = {}
        self._perf_due = checks.perf
        self.perf = PerfResult()
        self._verdicts: list[NodeVerdict] = []
        self._reason = ""
        self._summary = self._news = ""

    # ------------------------------------------------------------ what is known

    def standing(self, node: str) -> Standing:
        """The node's Standing; UNKNOWN for an unknown node."""
        known = self._known.get(node)
        return Standing.UNKNOWN if known is None else known.standing

    def trust(self, nodes: Sequence[str]) -> None:
        """These nodes already train (an adopted or restored round): GOOD, without a measurement.
        Cancel the perf test, which is not for a running job."""
        for node in nodes:
            self._of(node).standing = Standing.GOOD
        self._perf_due = self._perf_due and not nodes

    def forget(self, node: str) -> None:
        """The node has a new incarnation, its ranks failed, or it is suspected: it must be probed
        again. A running probe continues."""
        known = self._known.get(node)
        if known is not None:
            known.standing = Standing.UNKNOWN
            known.stuck_with = frozenset()
            known.generation = self._new_generation()
        if self._check is not None:
            self._check.forget(node)

    def needs_probing(self, ready: Sequence[str]) -> bool:
        """Whether some of these nodes must be probed before they form a round: a node that is not
        GOOD (for a single node: UNKNOWN) and not undecidable, or the perf test is due. False while
        busy."""
        if self.is_busy or not ready:
            return False
        if self._to_probe(ready):
            return True
        if not self._perf_due:
            return False
        alone = len(ready) == 1 or not self._checks.network
        return alone or all(self.standing(node) is Standing.GOOD for node in ready)

    def health(self, node: str) -> str:
        """What the last probes of a node measured, for the status page; "" if nothing."""
        known = self._known.get(node)
        if known is None:
            return ""
        measured = words.health(known.compute, known.flops, known.rate)
        return "; ".join(part for part in (known.trouble, measured) if part)

    def group_of(self, node: str) -> ProbeGroup | None:
        """The group in which this node's answer is expected; None if none is."""
        group = None if self._pass is None else self._pass.group_of(node)
        lone_probe = self._lone_probe(node)
        return group or (None if lone_probe is None or lone_probe.again else lone_probe.group)

    def _lone_probe(self, node: str) -> _LoneProbe | None:
        known = self._known.get(node)
        return None if known is None else known.lone_probe

    # ------------------------------------------------------------ a check

    @property
    def is_busy(self) -> bool:
        """Whether a check started by `start` is running (the probe of a pending node does not
        count)."""
        return self._pass is not None

    def start(
        self, ready: Sequence[str], now: float, ranks: Mapping[str, int] | None = None
    ) -> tuple[ProbeGroup, ...]:
        """Start a check of the nodes in `ready` (in order of placement) that need one, with the
        others as partners; or the perf test of all of them. Return the groups of the first pass: at
        least one if `needs_probing` says so. `ranks`: number of ranks per node; one if missing."""
        if not self.needs_probing(ready):
            return ()
        self._ranks = ranks or {}
        for node in ready:
            self._end_lone_probe(node)
        if not self._to_probe(ready):
            self._reason = "the comm perf test measures all nodes together before training starts"
            return self._launch([tuple(ready)], now, perf=True)
        known = {node: self._of(node) for node in ready}
        good = {node: one.standing is Standing.GOOD for node, one in known.items()}
        was_good = {node: one for node, one in known.items() if good[node]}
        compute = {node: one.pace for node, one in was_good.items() if one.pace > 0}
        rates = {node: it.rate for node, it in was_good.items() if it.rate and it.rate.partners}
        self._check = Check(good, self._ranks, Paces(self._checks.slow_ratio, compute, rates), now)
        return self._launch(self._check.plan(), now)

    def probe_pending(self, node: str, now: float) -> ProbeGroup:
        """Start to probe this pending node alone while a round runs; return the group, or the one
        in which its answer is already expected."""
        under_way = self.group_of(node)
        if under_way is not None:
            return under_way
        self._end_lone_probe(node)
        return self._probe_alone(node, [], now)

    def _probe_alone(self, node: str, failures: list[str], now: float) -> ProbeGroup:
        group = ProbeGroup(self._mint(), (node,))
        self._of(node).lone_probe = _LoneProbe(group, failures)
        self._due.arm(node, now + self._checks.probe_limit + PROBE_ANSWER_SLACK)
        return group

    def _end_lone_probe(self, node: str) -> None:
        """Stop probing a node as a pending node."""
        self._due.disarm(node)
        if (known := self._known.get(node)) is not None:
            known.lone_probe = None

    def answered(self, node: str, answer: Probed, now: float) -> None:
        """Process a node's answer; ignore it if it belongs to no current group."""
        group = self.group_of(node)
        if group is None or group.check != answer.check:
            return
        if not group.perf:
            self._remember(node, group.nodes, answer)
        if self._pass is not None and self._pass.group_of(node) is not None:
            self._pass.answered(node, answer, now)
        else:
            self._lone_probe_answered(node, answer)

    def lost(self, node: str, reason: str, now: float) -> None:
        """The node left, its stream is broken for good, or its agent has a new incarnation. Forget
        everything about it, and stop waiting for its partners too."""
        self._end_lone_probe(node)
        self._known.pop(node, None)
        if self._check is not None:
            self._check.lost(node)
        if self._pass is not None:
            self._pass.lost(node, reason)

    def next_deadline(self) -> float | None:
        """When `proceed` must be called at the latest: an answer is overdue."""
        return earliest(self._due.next(), self._pass.next_deadline() if self._pass else None)

    def proceed(self, now: float) -> tuple[ProbeGroup, ...]:
        """Process what is overdue. Return the groups to probe now: those of the next pass if this
        pass is over but the check is not, and repeated probes of pending nodes."""
        for node in self._due.pop_due(now):
            if (lone_probe := self._lone_probe(node)) is not None:
                self._lone_probe_answered(
                    node, overdue(lone_probe.group.check, self._checks.probe_limit)
                )
        again, self._again = self._again, []
        groups = []
        for node in again:
            if (lone_probe := self._lone_probe(node)) is not None and lone_probe.again:
                groups.append(self._probe_alone(node, lone_probe.failures, now))
        if self._pass is not None:
            self._pass.overdue(now)
            if self._pass.over:
                groups.extend(self._next(self._pass, now))
        return tuple(groups)

    def take_verdicts(self) -> tuple[NodeVerdict, ...]:
        """Return and remove the new verdicts; the caller excludes the nodes."""
        found, self._verdicts = self._verdicts, []
        return tuple(found)

    def reason(self) -> str:
        """Why the round waits, for agents and the status page. It does not count answers, so a
        thousand answers are not a thousand messages. "" if not busy."""
        return self._reason if self.is_busy else ""

    def summary(self) -> str:
        """What the last finished check found, as a sentence; "" if there was none."""
        return "; ".join(filter(None, (self._summary, self.perf.sentence)))

    def take_news(self) -> str:
        """Return the part of the summary that is new since the last call; "" if none."""
        news, self._news = self._news, ""
        return news

    # ------------------------------------------------------------ helpers

    def _next(self, over: Pass, now: float) -> tuple[ProbeGroup, ...]:
        self._pass = None
        check = self._check
        if check is None:
            self._perf_over(over)
            return ()
        check.finish_pass(over)
        groups = check.plan()
        stuck = [] if groups else check.conclude()
        self._store_results(check)
        if groups:
            return self._launch(groups, now)
        present = [self._known[node] for node, it in check.trials.items() if not it.out]
        generations = frozenset(known.generation for known in present)
        for node in stuck:
            self._known[node].stuck_with = generations
        self._summary = self._news = check.summary(now)
        self._check = None
        return ()

    def _launch(
        self, groups: Sequence[Nodes], now: float, *, perf: bool = False
    ) -> tuple[ProbeGroup, ...]:
        named = tuple(ProbeGroup(self._mint(), nodes, perf) for nodes in groups)
        self._pass = Pass(named, now, self._checks.probe_limit)
        if self._check is not None and not perf:
            self._reason = words.wait_reason(self._check.passes, groups)
        return named

    def _perf_over(self, over: Pass) -> None:
        run = over.runs[0]
        if run.lost:  # it is repeated with the remaining nodes
            who = ", ".join(run.lost)
            sentence = f"the comm perf test was not finished because {who} was lost"
            self.perf = PerfResult(sentence=sentence)
        else:
            self._perf_due = False
            self.perf = _perf_result(run, self._ranks, self._checks.perf_floor)
        self._news = self.perf.sentence

    def _store_results(self, check: Check) -> None:
        """Store the results of a pass."""
        for verdict in check.verdicts:
            if verdict.kind == "failed":
                self._end_lone_probe(verdict.node)
                self._known.pop(verdict.node, None)
            elif verdict.node in self._known:
                self._known[verdict.node].trouble = verdict.reason
        self._verdicts += check.verdicts
        check.verdicts = []
        for node, trial in check.trials.items():
            if trial.out:
                continue
            known = self._of(node)
            known.rate = trial.last_rate or known.rate
            known.pace = check.paces.compute.get(node, known.pace)
            if trial.good:
                known.standing = Standing.GOOD
                if not trial.is_found_slow:  # its failure was its partner's, or a link's
                    known.trouble = ""
            elif trial.alone:
                known.standing = Standing.ALONE
            elif trial.is_suspect or known.standing is Standing.GOOD:
                known.standing = Standing.UNKNOWN

    def _lone_probe_answered(self, node: str, answer: Probed) -> None:
        """Process the answer of a node that is probed alone: it has passed, must be probed again,
        or has failed MAX_OWN_FAILURES times and is convicted."""
        known = self._known[node]
        lone_probe = known.lone_probe
        assert lone_probe is not None
        self._due.disarm(node)
        if answer.ok:
            known.standing, known.lone_probe = Standing.ALONE, None
            return
        lone_probe.failures.append(f"in {answer.phase} ({quoted(answer.reason)})")
        if len(lone_probe.failures) < MAX_OWN_FAILURES:
            lone_probe.again = True
            self._again.append(node)
            return
        del self._known[node]
        twice = f"{node} failed its own probes twice: {', and '.join(lone_probe.failures)}"
        self._verdicts.append(NodeVerdict(node, "failed", words.cut(twice)))

    def _remember(self, node: str, nodes: Nodes, answer: Probed) -> None:
        known = self._of(node)
        if answer.compute > 0:
            known.compute, known.flops = answer.compute, answer.flops
        known.trouble = "" if answer.ok else words.describe_trouble(others(nodes, node), answer)

    def _to_probe(self, ready: Sequence[str]) -> bool:
        if not self._checks.network or not ready:
            return False
        if len(ready) == 1:
            return self.standing(ready[0]) is Standing.UNKNOWN
        known = {node: self._known.get(node) for node in ready}
        helped: dict[frozenset[int], bool] = {}  # whether a node is ready that was not there before
        for one in known.values():
            if one is None or (one.standing is not Standing.GOOD and not one.stuck_with):
                return True
            generations = one.stuck_with
            if one.standing is not Standing.GOOD and generations not in helped:
                helped[generations] = any(
                    it is None or it.generation not in generations for it in known.values()
                )
        return any(helped.values())

    def _of(self, node: str) -> _Known:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = _Known(self._new_generation())
        return known

    def _new_generation(self) -> int:
        self._generations += 1
        return self._generations
