"""The network check of a job: whom to probe, and whom the probes convict.

A *check* begins when a round could form and some of its nodes have not been shown to work. It is a
series of *passes*: in each one small groups are probed at the same time, and what they answer says
who is probed with whom next, who is at fault (`groups`) and who is slow (`speed`). A pass costs
O(n log n) in all, a node's answer O(1).

How many passes. Where everybody works one is enough. One bad node, or one bad link, of an even
number of nodes from four on is found in two, however many nodes there are; two bad nodes in one
pair take three. The failure of a group of three may also be the affair of the other two, so where
the fault is in such a group it takes three, and up to four for three and five nodes.

What cannot be told. A failure of one or two nodes that is not seen on one machine alone; whatever
happens where no two good nodes with a good link are left. Then the verdict is "unresolved": the
nodes are not good, and not blamed. They are probed again when a node is ready that was not there,
and not before.

Standing outlives a check. A node that is good is a partner for newcomers until something is held
against it (`forget`) or it goes (`lost`). While a round runs newcomers are probed alone, at the
door, so that a bad one stops nobody, and with others when the round has ended. Before the first
round the perf test may follow, an all_reduce over all who will form it; it is a check of its own.

What the caller owes: `proceed` after every answer and loss, and at the time named; the groups it
returns are told to their nodes at once, and a newer one takes the place of an older one that is
under way. `lost` for a node whose agent is another life, or its partner waits for the old one.
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
    convicted,
    doubt,
    first_pass,
    later_pass,
    others,
    overdue,
    strongly_suspect,
    telling,
)
from elasticrun.core.health.speed import Paces
from elasticrun.core.health.words import cut, duration, quoted, size, speed
from elasticrun.core.words import names, some
from elasticrun.wire.messages import CheckSpec, Probed

MAX_PASSES = 8
"""Passes of one check. Two decide nearly every case and five the worst of two faults at once; more
help only where most of the nodes are bad, and each may last as long as a hung probe's limit."""


class Check:
    """What is found out about the nodes that are ready, some of which must be probed."""

    def __init__(
        self, ready: Mapping[str, bool], ranks: Mapping[str, int], paces: Paces, now: float
    ) -> None:
        """`ready`: in order of placement, and whether it is good already. `ranks`: on each node,
        one where it is not told."""
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
        self._found: list[tuple[str, str]] = []  # kinds of verdict, or "lost", and the nodes

    def plan(self) -> list[Nodes]:
        """The groups of the next pass; none if the check is over."""
        if self.passes == MAX_PASSES:
            return []
        if self.passes == 0:
            groups = first_pass(self.trials)
        else:
            groups = later_pass(self.trials, self._just_failed, self.paces.again)
        self.passes += bool(groups)
        return groups

    def took(self, passed: Pass) -> None:
        """A pass is over: what it proves."""
        self._just_failed = []
        worked = [run.group.nodes for run in passed.runs if self._took(run)]
        self._failed += self._just_failed
        doubt(self._failed, self.trials)
        for trial in self._open():
            if convicted(telling(trial, self.trials), self._proved):
                self._convict(trial)
        said = [answer for run in passed.runs for answer in run.said.items()]
        computed = {node: answer.compute for node, answer in said if answer.compute > 0}
        self.paces.judge(self.trials, worked, computed)
        for node, evidence in self.paces.slow.items():
            self.trials[node].told_slow = True
            self._tell("slow", node, words.cut(f"{node} is slow, measured twice: {evidence}"))

    def end(self) -> list[str]:
        """Nothing more can be tried: who is to blame, or cannot be told from who is. The nodes that
        have not passed."""
        doubtful = [it for it in self._open() if strongly_suspect(it, self.trials)]
        for trial in doubtful:
            self._convict(trial)
        present = [it for it in self.trials.values() if not it.out]
        left = self._open()
        if len(present) == 1 and present[0].alone:
            return []
        for trial in left:
            self._tell("unresolved", trial.node, words.unresolved(trial, self.trials))
        return [trial.node for trial in left]

    def lost(self, node: str) -> None:
        """The node has gone: it is no partner any more, and nothing is said of it."""
        trial = self.trials.get(node)
        if trial is not None and not trial.out:
            trial.out = True
            self._found.append(("lost", node))

    def forget(self, node: str) -> None:
        """It is suspected for some other reason: it must pass once more."""
        trial = self.trials.get(node)
        if trial is not None:
            trial.good = trial.fresh = trial.alone = False

    def summary(self, now: float) -> str:
        """What it found, in a sentence."""
        took = now - self._began
        return words.outcome(self.trials, self._found, self._failed, self.passes, took)

    # ------------------------------------------------------------ small change

    def _open(self) -> list[Trial]:
        return [one for one in self.trials.values() if not one.good and not one.out]

    def _took(self, run: Run) -> bool:
        """One group's answers; whether all of it worked."""
        nodes = run.group.nodes
        own: dict[str, Probed] = {}
        joint: dict[str, Probed] = {}
        for node, said in run.said.items():
            if said.compute > 0:
                self.trials[node].compute.append(said.compute)
            if not said.ok and (said.own or len(nodes) == 1):
                own[node] = said
            elif not said.ok and not said.excused:
                joint[node] = said
            self.trials[node].held_up = said.reason if said.excused else ""
        self._time(run)
        for node, said in own.items():
            self.trials[node].failed(ProbeFailure((), said.phase, said.reason))
        if own:
            return False
        if joint and not run.lost:
            self._failed_together(nodes, joint)
            return False
        fine = [node for node, said in run.said.items() if said.ok]
        for node in fine if run.lost or len(fine) == len(nodes) else ():
            self.trials[node].passed(others(nodes, node))
        if len(fine) < len(nodes):
            return False
        self._proved.update(frozenset((a, b)) for a in nodes for b in nodes if a < b)
        return True

    def _failed_together(self, nodes: Nodes, joint: Mapping[str, Probed]) -> None:
        first = next(iter(joint.values()))
        for node in nodes:
            said = joint.get(node, first)
            self.trials[node].failed(ProbeFailure(others(nodes, node), said.phase, said.reason))
        told = ProbeFailure(nodes, first.phase, first.reason)
        self._just_failed.append(FailedGroup(nodes, told))

    def _time(self, run: Run) -> None:
        """The largest all_reduce of this group, by whoever timed it the shortest: the others have
        waited for that one before it began."""
        nodes = run.group.nodes
        ranks = sum(self._ranks.get(one, 1) for one in nodes)
        timed = {
            node: max(said.transfers, key=lambda one: one.size)
            for node, said in run.said.items()
            if said.ok and any(one.size > 0 for one in said.transfers)
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
        self._tell("failed", trial.node, words.failed(trial, self.trials))

    def _tell(self, kind: str, node: str, reason: str) -> None:
        self._found.append((kind, node))
        self.verdicts.append(NodeVerdict(node, kind, reason))


TRIES = 2
"""A node is convicted when its own probes have failed this often."""


@dataclass(slots=True)
class _Visit:
    """A node at the door, which is probed alone."""

    group: ProbeGroup
    failures: list[str]
    again: bool = False  # its next probe is to be ordered


@dataclass(frozen=True, slots=True)
class PerfResult:
    """The perf test in words; empty if it was not run. A failed one convicts nobody."""

    lines: tuple[str, ...] = ()  # one for each size
    sentence: str = ""
    failure: str = ""  # why the job must not start: it was below the wanted floor; "" if it may


def _perf_result(run: Run, ranks: Mapping[str, int], floor: float) -> PerfResult:
    """Of a run that every node has answered. `floor`: GB/s (1e9) of bus bandwidth wanted at the
    largest size, 0.0 for none."""
    nodes = run.group.nodes
    world = sum(ranks.get(node, 1) for node in nodes)
    over = f"over {some(len(nodes), 'node')}, {some(world, 'rank')}"
    bad = [(node, said) for node, said in run.said.items() if not said.ok]
    if bad:
        who = names([node for node, _ in bad])
        cause = next((said for _, said in bad if not said.excused), bad[0][1])
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
    if floor <= 0 or last.bus >= floor * 1e9:
        return PerfResult(lines, sentence)
    why = f"below the {floor:g} GB/s that are wanted (slowest on {node})"
    told = f"comm perf test {over}: bus bandwidth {speed(last.bus)} at {size(last.size)}, {why}"
    return PerfResult(lines, cut(told), cut(told))


def _slowest(run: Run, world: int) -> list[tuple[str, Rate]]:
    """By size, the node that took longest, and its figure; sizes that all nodes measured."""
    if world < 2:
        return []
    found: dict[int, list[tuple[float, str]]] = {}
    for node, said in run.said.items():
        for one in said.transfers:
            if one.size > 0 and one.seconds > 0:
                found.setdefault(one.size, []).append((one.seconds, node))
    whole = {count: max(all_) for count, all_ in found.items() if len(all_) == len(run.said)}
    return [(node, Rate(count, took, world, ())) for count, (took, node) in sorted(whole.items())]


def _line(rate: Rate) -> str:
    plain = speed(rate.size / rate.seconds)
    return (
        f"{size(rate.size)}: {duration(rate.seconds)}, algorithm bandwidth {plain}, "
        f"bus bandwidth {speed(rate.bus)}"
    )


@dataclass(slots=True)
class _Known:
    """What is known of a node; forgotten when it goes."""

    life: int  # another one after every doubt
    standing: Standing = Standing.UNKNOWN
    compute: float = 0.0  # seconds of one matmul, by its last probe
    pace: float = 0.0  # the same as it is compared: as if the check had had one pass only
    flops: float = 0.0
    rate: Rate | None = None  # of its last all_reduce
    trouble: str = ""  # what its last probes had against it
    stuck_with: frozenset[int] = frozenset()  # lives that could not help to judge it
    visit: _Visit | None = None


class NetCheck:
    """The network check of one job; see the module's head."""

    def __init__(self, checks: CheckSpec, mint: Callable[[], str]) -> None:
        """`mint` gives the unique part of a group's name."""
        self._checks = checks
        self._mint = mint
        self._lives = 0
        self._known: dict[str, _Known] = {}
        self._due: Deadlines[str] = Deadlines()  # of answers of nodes at the door
        self._again: list[str] = []  # of these, who failed once, in order of their answers
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
        """See Standing; UNKNOWN for a node never heard of."""
        known = self._known.get(node)
        return Standing.UNKNOWN if known is None else known.standing

    def trust(self, nodes: Sequence[str]) -> None:
        """These train already (a round that was adopted or restored): GOOD, without a figure. The
        perf test is not for a job that has begun."""
        for node in nodes:
            self._of(node).standing = Standing.GOOD
        self._perf_due = self._perf_due and not nodes

    def forget(self, node: str) -> None:
        """It was reborn, its ranks failed, or it is suspected: it must be probed again. A probe
        that is under way goes on."""
        known = self._known.get(node)
        if known is not None:
            known.standing = Standing.UNKNOWN
            known.stuck_with = frozenset()
            known.life = self._new_life()
        if self._check is not None:
            self._check.forget(node)

    def wants(self, ready: Sequence[str]) -> bool:
        """Whether some of these nodes must be probed before they form a round: a node that is not
        GOOD, or, where there is but one, UNKNOWN; or the perf test is due. False while busy."""
        if self.busy or not ready:
            return False
        if self._to_probe(ready):
            return True
        if not self._perf_due:
            return False
        alone = len(ready) == 1 or not self._checks.network
        return alone or all(self.standing(node) is Standing.GOOD for node in ready)

    def health(self, node: str) -> str:
        """What the last probes measured there, in words for the status page; "" if nothing."""
        known = self._known.get(node)
        if known is None:
            return ""
        measured = words.health(known.compute, known.flops, known.rate)
        return "; ".join(part for part in (known.trouble, measured) if part)

    def group_of(self, node: str) -> ProbeGroup | None:
        """The group whose answer of this node is awaited: told again to an agent that attaches."""
        group = None if self._pass is None else self._pass.group_of(node)
        visit = self._visit(node)
        return group or (None if visit is None or visit.again else visit.group)

    def _visit(self, node: str) -> _Visit | None:
        known = self._known.get(node)
        return None if known is None else known.visit

    # ------------------------------------------------------------ a check

    @property
    def busy(self) -> bool:
        """Whether a check of `begin` is under way (that of a node at the door does not count)."""
        return self._pass is not None

    def begin(
        self, ready: Sequence[str], now: float, ranks: Mapping[str, int] | None = None
    ) -> tuple[ProbeGroup, ...]:
        """Start a check of those of `ready` (in order of placement) that need one, with the others
        as partners; or the perf test of all of them. The groups of the first pass: at least one if
        `wants` says so. `ranks`: how many each node runs, one where it is not told."""
        if not self.wants(ready):
            return ()
        self._ranks = ranks or {}
        for node in ready:
            self._leave_door(node)
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

    def at_door(self, node: str, now: float) -> ProbeGroup:
        """Probe this newcomer by itself while a round runs."""
        under_way = self.group_of(node)
        if under_way is not None:
            return under_way
        self._leave_door(node)
        return self._probe_alone(node, [], now)

    def _probe_alone(self, node: str, failures: list[str], now: float) -> ProbeGroup:
        group = ProbeGroup(self._mint(), (node,))
        self._of(node).visit = _Visit(group, failures)
        self._due.arm(node, now + self._checks.probe_limit + PROBE_ANSWER_SLACK)
        return group

    def _leave_door(self, node: str) -> None:
        """It is not probed there any more."""
        self._due.disarm(node)
        if (known := self._known.get(node)) is not None:
            known.visit = None

    def answered(self, node: str, said: Probed, now: float) -> None:
        """A node's answer. Of a check that is over, or of no group of ours: ignored."""
        group = self.group_of(node)
        if group is None or group.check != said.check:
            return
        if not group.perf:
            self._remember(node, group.nodes, said)
        if self._pass is not None and self._pass.group_of(node) is not None:
            self._pass.answered(node, said, now)
        else:
            self._at_door(node, said)

    def lost(self, node: str, reason: str, now: float) -> None:
        """The node has gone, or its stream is broken for good, or it may not be awaited further.
        All that is known of it is forgotten, and its partners are not awaited either."""
        self._leave_door(node)
        self._known.pop(node, None)
        if self._check is not None:
            self._check.lost(node)
        if self._pass is not None:
            self._pass.lost(node, reason)

    def next_deadline(self) -> float | None:
        """When `proceed` must be called at the latest: an answer is overdue."""
        return earliest(self._due.next(), self._pass.next_deadline() if self._pass else None)

    def proceed(self, now: float) -> tuple[ProbeGroup, ...]:
        """To be called after each of the events above and at the deadline: the groups of the next
        pass if this one is over and the check is not. Empty otherwise."""
        for node in self._due.pop_due(now):
            if (visit := self._visit(node)) is not None:
                self._at_door(node, overdue(visit.group.check, self._checks.probe_limit))
        again, self._again = self._again, []
        groups = []
        for node in again:
            if (visit := self._visit(node)) is not None and visit.again:
                groups.append(self._probe_alone(node, visit.failures, now))
        if self._pass is not None:
            self._pass.overdue(now)
            if self._pass.over:
                groups.extend(self._next(self._pass, now))
        return tuple(groups)

    def verdicts(self) -> tuple[NodeVerdict, ...]:
        """What has been found since the last call, each once; taken by the caller, who excludes."""
        found, self._verdicts = self._verdicts, []
        return tuple(found)

    def reason(self) -> str:
        """Why the round waits, for agents and the status page; does not count answers, so that a
        thousand of them are not a thousand sentences. "" if not busy."""
        return self._reason if self.busy else ""

    def summary(self) -> str:
        """What the last check that ended found, in a sentence; "" if there was none."""
        return "; ".join(filter(None, (self._summary, self.perf.sentence)))

    def news(self) -> str:
        """The part of the summary that is new since the last call; "" if none is."""
        news, self._news = self._news, ""
        return news

    # ------------------------------------------------------------ small change

    def _next(self, over: Pass, now: float) -> tuple[ProbeGroup, ...]:
        self._pass = None
        check = self._check
        if check is None:
            self._perf_over(over)
            return ()
        check.took(over)
        groups = check.plan()
        stuck = [] if groups else check.end()
        self._note(check)
        if groups:
            return self._launch(groups, now)
        present = [self._known[node] for node, it in check.trials.items() if not it.out]
        crew = frozenset(known.life for known in present)
        for node in stuck:
            self._known[node].stuck_with = crew
        self._summary = self._news = check.summary(now)
        self._check = None
        return ()

    def _launch(
        self, groups: Sequence[Nodes], now: float, *, perf: bool = False
    ) -> tuple[ProbeGroup, ...]:
        named = tuple(ProbeGroup(self._mint(), nodes, perf) for nodes in groups)
        self._pass = Pass(named, now, self._checks.probe_limit)
        if self._check is not None and not perf:
            self._reason = words.waiting(self._check.passes, groups)
        return named

    def _perf_over(self, over: Pass) -> None:
        run = over.runs[0]
        if run.lost:  # it is made anew with those who are left
            who = ", ".join(run.lost)
            told = f"the comm perf test was not finished because {who} was lost"
            self.perf = PerfResult(sentence=told)
        else:
            self._perf_due = False
            self.perf = _perf_result(run, self._ranks, self._checks.perf_floor)
        self._news = self.perf.sentence

    def _note(self, check: Check) -> None:
        """Take over what a pass has shown."""
        for verdict in check.verdicts:
            if verdict.kind == "failed":
                self._leave_door(verdict.node)
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
                if not trial.told_slow:  # what it failed with was its partner's, or a link's
                    known.trouble = ""
            elif trial.alone:
                known.standing = Standing.ALONE
            elif trial.suspect or known.standing is Standing.GOOD:
                known.standing = Standing.UNKNOWN

    def _at_door(self, node: str, said: Probed) -> None:
        """The answer of a node that is probed alone; it has passed, or failed TRIES times."""
        known = self._known[node]
        visit = known.visit
        assert visit is not None
        self._due.disarm(node)
        if said.ok:
            known.standing, known.visit = Standing.ALONE, None
            return
        visit.failures.append(f"in {said.phase} ({quoted(said.reason)})")
        if len(visit.failures) < TRIES:
            visit.again = True
            self._again.append(node)
            return
        del self._known[node]
        twice = f"{node} failed its own probes twice: {', and '.join(visit.failures)}"
        self._verdicts.append(NodeVerdict(node, "failed", words.cut(twice)))

    def _remember(self, node: str, nodes: Nodes, said: Probed) -> None:
        known = self._of(node)
        if said.compute > 0:
            known.compute, known.flops = said.compute, said.flops
        known.trouble = "" if said.ok else words.trouble(others(nodes, node), said)

    def _to_probe(self, ready: Sequence[str]) -> bool:
        if not self._checks.network or not ready:
            return False
        if len(ready) == 1:
            return self.standing(ready[0]) is Standing.UNKNOWN
        known = {node: self._known.get(node) for node in ready}
        helped: dict[frozenset[int], bool] = {}  # whether someone is ready who was not there
        for one in known.values():
            if one is None or (one.standing is not Standing.GOOD and not one.stuck_with):
                return True
            crew = one.stuck_with
            if one.standing is not Standing.GOOD and crew not in helped:
                helped[crew] = any(it is None or it.life not in crew for it in known.values())
        return any(helped.values())

    def _of(self, node: str) -> _Known:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = _Known(self._new_life())
        return known

    def _new_life(self) -> int:
        self._lives += 1
        return self._lives
