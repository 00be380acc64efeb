"""Whom to probe with whom, and whom the probes convict.

A *check* begins when a round could form and some of its nodes have not been shown to work. It is a
series of *passes*: in each one small groups are probed at the same time, and what they answer says
who is probed with whom next (`netcheck_pairs`), who is at fault (`netcheck_trials`) and who is slow
(`netcheck_slow`). A pass costs O(n log n) in all, a node's answer O(1).

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
door (`netcheck_door`), and with others when the round has ended. Before the first round the perf
test may follow, over all who will form it (`netcheck_perf`); it is a check of its own.

What the caller owes: `proceed` after every answer and loss, and at the time named; the groups it
returns are told to their nodes at once, and a newer one takes the place of an older one that is
under way. `lost` for a node whose agent is another life, or its partner waits for the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticrun.core import netcheck_words as words
from elasticrun.core.netcheck_check import MAX_PASSES, Check
from elasticrun.core.netcheck_door import Doors
from elasticrun.core.netcheck_pairs import Nodes
from elasticrun.core.netcheck_pass import Pass
from elasticrun.core.netcheck_perf import PerfResult, result
from elasticrun.core.netcheck_slow import Paces
from elasticrun.core.netcheck_terms import Group, Rate, Standing, Verdict, others
from elasticrun.wire.messages import CheckSpec, Probed

__all__ = ["MAX_PASSES", "Group", "NetCheck", "Standing", "Verdict"]


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


class NetCheck:
    """The network check of one job; see the module's head."""

    def __init__(self, checks: CheckSpec, mint: Callable[[], str]) -> None:
        """`mint` gives the unique part of a group's name."""
        self._checks = checks
        self._mint = mint
        self._lives = 0
        self._known: dict[str, _Known] = {}
        self._doors = Doors(checks.probe_limit)
        self._check: Check | None = None
        self._pass: Pass | None = None  # of the check, or of the perf test
        self._ranks: Mapping[str, int] = {}
        self._perf_due = checks.perf
        self._perf: PerfResult | None = None
        self._verdicts: list[Verdict] = []
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
        return not self.busy and (self._to_probe(ready) or self._perf_wanted(ready))

    def health(self, node: str) -> str:
        """What the last probes measured there, in words for the status page; "" if nothing."""
        known = self._known.get(node)
        if known is None:
            return ""
        measured = words.health(known.compute, known.flops, known.rate)
        return "; ".join(part for part in (known.trouble, measured) if part)

    def group_of(self, node: str) -> Group | None:
        """The group whose answer of this node is awaited: told again to an agent that attaches."""
        group = None if self._pass is None else self._pass.group_of(node)
        return group or self._doors.group_of(node)

    # ------------------------------------------------------------ a check

    @property
    def busy(self) -> bool:
        """Whether a check of `begin` is under way (that of a node at the door does not count)."""
        return self._pass is not None

    def begin(
        self, ready: Sequence[str], now: float, ranks: Mapping[str, int] | None = None
    ) -> tuple[Group, ...]:
        """Start a check of those of `ready` (in order of placement) that need one, with the others
        as partners; or the perf test of all of them. The groups of the first pass: at least one if
        `wants` says so. `ranks`: how many each node runs, one where it is not told."""
        if not self.wants(ready):
            return ()
        self._ranks = ranks or {}
        for node in ready:
            self._doors.gone(node)
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

    def at_door(self, node: str, now: float) -> Group:
        """Probe this newcomer by itself while a round runs."""
        under_way = self.group_of(node)
        if under_way is not None:
            return under_way
        self._doors.gone(node)
        group = Group(self._mint(), (node,))
        self._doors.probe(group, now)
        return group

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
        self._known.pop(node, None)
        self._doors.gone(node)
        if self._check is not None:
            self._check.lost(node)
        if self._pass is not None:
            self._pass.lost(node, reason)

    def next_deadline(self) -> float | None:
        """When `proceed` must be called at the latest: an answer is overdue."""
        times = [self._doors.next_deadline(), self._pass.next_deadline() if self._pass else None]
        return min((time for time in times if time is not None), default=None)

    def proceed(self, now: float) -> tuple[Group, ...]:
        """To be called after each of the events above and at the deadline: the groups of the next
        pass if this one is over and the check is not. Empty otherwise."""
        for node, said in self._doors.overdue(now):
            self._at_door(node, said)
        groups = [Group(self._mint(), (node,)) for node in self._doors.take_again()]
        for group in groups:
            self._doors.probe(group, now)
        if self._pass is not None:
            self._pass.overdue(now)
            if self._pass.over:
                groups.extend(self._next(self._pass, now))
        return tuple(groups)

    def verdicts(self) -> tuple[Verdict, ...]:
        """What has been found since the last call, each once; taken by the caller, who excludes."""
        found, self._verdicts = self._verdicts, []
        return tuple(found)

    def reason(self) -> str:
        """Why the round waits, for agents and the status page; does not count answers, so that a
        thousand of them are not a thousand sentences. "" if not busy."""
        return self._reason if self.busy else ""

    def summary(self) -> str:
        """What the last check that ended found, in a sentence; "" if there was none."""
        perf = self._perf.sentence if self._perf else ""
        return "; ".join(part for part in (self._summary, perf) if part)

    def news(self) -> str:
        """The part of the summary that is new since the last call; "" if none is."""
        news, self._news = self._news, ""
        return news

    def perf_lines(self) -> tuple[str, ...]:
        """What the perf test measured, a line for each size; none if it was not run."""
        return self._perf.lines if self._perf else ()

    def perf_failure(self) -> str:
        """Why the job must not start: the perf test was below the wanted floor; "" if it need not
        end."""
        return self._perf.failure if self._perf else ""

    # ------------------------------------------------------------ small change

    def _next(self, over: Pass, now: float) -> tuple[Group, ...]:
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
    ) -> tuple[Group, ...]:
        named = tuple(Group(self._mint(), nodes, perf) for nodes in groups)
        self._pass = Pass(named, now, self._checks.probe_limit)
        if self._check is not None and not perf:
            self._reason = words.waiting(self._check.passes, groups)
        return named

    def _perf_over(self, over: Pass) -> None:
        run = over.runs[0]
        if run.lost:  # it is made anew with those who are left
            who = ", ".join(run.lost)
            sentence = f"the comm perf test was not finished because {who} was lost"
            self._perf = PerfResult((), sentence, "")
        else:
            self._perf_due = False
            self._perf = result(run, self._ranks, self._checks.perf_floor)
        self._news = self._perf.sentence

    def _note(self, check: Check) -> None:
        """Take over what a pass has shown."""
        for verdict in check.verdicts:
            if verdict.kind == "failed":
                self._known.pop(verdict.node, None)
            elif verdict.node in self._known:
                self._known[verdict.node].trouble = verdict.reason
        self._verdicts += check.verdicts
        check.verdicts = []
        for node, trial in check.trials.items():
            if trial.out:
                continue
            known = self._of(node)
            known.rate = check.rates.get(node, known.rate)
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
        found = self._doors.answered(node, said)
        if found is True:
            self._of(node).standing = Standing.ALONE
        elif found:
            self._known.pop(node, None)
            self._verdicts.append(Verdict(node, "failed", words.cut(str(found))))

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

    def _perf_wanted(self, ready: Sequence[str]) -> bool:
        if not self._perf_due or not ready:
            return False
        alone = len(ready) == 1 or not self._checks.network
        return alone or all(self.standing(node) is Standing.GOOD for node in ready)

    def _of(self, node: str) -> _Known:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = _Known(self._new_life())
        return known

    def _new_life(self) -> int:
        self._lives += 1
        return self._lives
