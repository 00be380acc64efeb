"""Which nodes probe together in one pass of a network check, and what the answers prove.

*What a failure proves.* A node fails *alone* if its own part went wrong without another node (its
matmul, its process; anything in a probe of one node). Otherwise the *group* fails, and any of its
nodes may be at fault, or a link between two of them. A node is convicted when its failures have no
innocent explanation left. An explanation is innocent if it needs at most one bad link of this node
and one bad link between others. So a node is convicted if both are true:

* it has failed at least twice, counting only failures that its partners do not explain: failures
  alone, and failures with partners that all work with other nodes;
* no single partner took part in all of those (its link to this node would explain them), even
  after setting aside a group of three whose other two nodes have never worked with each other.

So a node with one bad link is never convicted, nor is a good node that happened to be probed with a
bad one. A node with two bad links counts as a bad node.

*Which nodes to probe together.* The first pass pairs the nodes without results, in order of
placement, so that neighbours are tried together; if their number is odd, the last one makes a pair
with a good node, or a group of three. Later passes probe the nodes that the first one did not
clear. A good node is the best partner: the fastest one for the slowest suspect, and never the same
pair twice. Two suspects of a failed group of three share one good node, so a pass also shows
whether those two work with each other. If there are not enough good nodes, nodes that were only
held up by another's failure are paired with each other, and suspects with suspects of other groups:
two good nodes among them will soon meet in a pass. Each remaining node is probed alone, once, to
see whether its own probes show anything. Nodes that were slow are measured a second time, in the
same pass as some good nodes that were not slow, for comparison.

O(n log n) per pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.deadlines import Deadlines
from elasticrun.wire.messages import Probed, ProbePhase


class Standing(StrEnum):
    """What the probes have shown of a node so far."""

    UNKNOWN = "unknown"  # never probed, or reset by a later event
    ALONE = "alone"  # its own probes passed; none of its links has been tried
    GOOD = "good"  # it has worked with another node


class ProbeGroup(Struct, frozen=True):
    """Nodes that are probed together; they meet at the store of one of them."""

    check: str  # unique
    nodes: tuple[str, ...]
    perf: bool = False


class NodeVerdict(Struct, frozen=True):
    """The result of a check for a node that did not simply pass."""

    node: str
    kind: str  # "failed": convicted; "slow": an outlier twice; "unresolved": cannot be decided
    reason: str  # node, partners, phase, the measured figure and the limit, in one sentence


class Rate(Struct, frozen=True):
    """A timed all_reduce and its participants."""

    size: int  # bytes of the reduced buffer
    seconds: float
    ranks: int  # that took part
    partners: tuple[str, ...]  # the other nodes

    @property
    def traffic(self) -> float:
        """Bytes that each rank must send over its link, which makes groups of different sizes
        comparable: size * 2(n-1)/n."""
        return self.size * 2.0 * (self.ranks - 1) / self.ranks

    @property
    def cost(self) -> float:
        """Seconds per byte that a rank sends."""
        return self.seconds / self.traffic

    @property
    def bus_bandwidth(self) -> float:
        """Bus bandwidth, in bytes per second."""
        return self.traffic / self.seconds


def others(nodes: Sequence[str], node: str) -> tuple[str, ...]:
    """The partners of one node of a group."""
    return tuple(one for one in nodes if one != node)


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """One failed probe of a node."""

    partners: tuple[str, ...]  # none: it failed alone
    phase: ProbePhase
    reason: str


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that failed as a whole; until more is known each of its nodes may be at fault."""

    nodes: tuple[str, ...]
    failure: ProbeFailure  # the first one reported


@dataclass(slots=True)
class Trial:
    """One node in one check."""

    node: str
    place: int  # in the order of placement
    good: bool  # it has worked with another node, in this check or before
    fresh: bool = False  # good because of this check
    alone: bool = False  # its own probes passed, in a group of one
    broken: bool = False  # its last result is a failure alone
    out: bool = False  # it is lost or convicted
    is_found_slow: bool = False
    held_up: str = ""  # why its last probe could not finish, if another node failed
    failures: list[ProbeFailure] = field(default_factory=list)
    met: set[str] = field(default_factory=set)  # partners of a pair whose probe gave a result
    seen: set[str] = field(default_factory=set)  # partners of a group whose probe gave a result
    compute: list[float] = field(default_factory=list)  # seconds of a matmul, one per pass
    rates: list[Rate] = field(default_factory=list)  # one per pass with others
    last_rate: Rate | None = None  # of the last all_reduce, even if only among its own ranks

    @property
    def is_suspect(self) -> bool:
        """Whether it failed, alone or in a group, and has not been cleared since."""
        return not self.good and (self.broken or any(one.partners for one in self.failures))

    @property
    def pace(self) -> float:
        """Its best matmul in seconds; infinite if none was timed."""
        return min(self.compute, default=float("inf"))

    @property
    def rate(self) -> Rate | None:
        """Its best all_reduce."""
        return min(self.rates, key=lambda one: one.cost, default=None)

    def passed(self, partners: Sequence[str]) -> None:
        """A probe with these partners worked; without partners: a probe of this node alone."""
        self.broken = False
        if not partners:
            self.alone = True
            return
        self.good = self.fresh = True
        self.failures = [one for one in self.failures if not one.partners]
        self._add_partners(partners)

    def failed(self, failure: ProbeFailure) -> None:
        """Add a failure, alone or in a group."""
        self.failures.append(failure)
        if not failure.partners:
            self.good = self.fresh = self.alone = False
            self.broken = True
        self._add_partners(failure.partners)

    def _add_partners(self, partners: Sequence[str]) -> None:
        self.seen.update(partners)
        if len(partners) == 1:
            self.met.add(partners[0])


def unexplained_failures(trial: Trial, trials: Mapping[str, Trial]) -> list[ProbeFailure]:
    """The failures of a node that no partner explains, because all partners work with others."""
    return [one for one in trial.failures if all(trials[it].good for it in one.partners)]


def is_convicted(failures: Sequence[ProbeFailure], proved: Collection[frozenset[str]]) -> bool:
    """Whether these failures, none of them explained by a partner, leave no innocent explanation.
    `proved`: pairs of nodes that have worked with each other."""
    return len(failures) > 1 and not _is_explained(
        [frozenset(f.partners) for f in failures], proved
    )


def strongly_suspect(trial: Trial, trials: Mapping[str, Trial]) -> bool:
    """For when nothing more can be tried: whether no partner took part in all failures of a node,
    and in one of these failures all partners work with others."""
    sets = [frozenset(one.partners) for one in trial.failures]
    works = any(one.partners for one in unexplained_failures(trial, trials))
    return works and len(sets) > 1 and not frozenset.intersection(*sets)


def _is_explained(sets: list[frozenset[str]], proved: Collection[frozenset[str]]) -> bool:
    """Whether one bad link of the node and one between two others explain all these failures."""
    for partner in ("", *frozenset[str]().union(*sets)):
        rest = {one for one in sets if partner not in one}
        if not rest or (len(rest) == 1 and len(one := rest.pop()) == 2 and one not in proved):
            return True
    return False


def reset_doubtful(groups: Iterable[FailedGroup], trials: Mapping[str, Trial]) -> None:
    """Reset nodes that were good before this check, but failed in it with others that have since
    been shown to work."""
    for group in groups:
        for node in group.nodes:
            trial = trials[node]
            if trial.good and not trial.fresh:
                trial.good = not all(trials[other].fresh for other in group.nodes if other != node)


Nodes = tuple[str, ...]

REFERENCE_NODES = 5
"""Number of good nodes that are measured in the same pass as those whose matmul was slow: their
median shows how the pass differs from the previous one. With fewer, chance affects which node
counts as slow. More cost no time either, because they wait anyway, but help little."""


def first_pass(trials: dict[str, Trial]) -> list[Nodes]:
    """Groups of the nodes that are not good yet. A good node is in one only as a partner."""
    new = [one.node for one in trials.values() if not one.good]
    good = _fastest_first(one for one in trials.values() if one.good)
    groups: list[Nodes] = [(new[at], new[at + 1]) for at in range(0, len(new) - 1, 2)]
    if len(new) % 2:
        if good:
            groups.append((good[0].node, new[-1]))
        elif groups:
            groups[-1] = (*groups[-1], new[-1])
        else:
            groups.append((new[-1],))
    return groups


def later_pass(
    trials: dict[str, Trial], failed: Iterable[FailedGroup], slow: dict[str, bool]
) -> list[Nodes]:
    """Groups of the nodes that must be probed again; empty if nothing more can be learned.
    `failed`: groups that failed in the previous pass. `slow`: nodes to measure again -> whether
    alone is enough."""
    open_ = [one for one in trials.values() if not one.good and not one.out]
    units = _units_to_probe(open_, failed)
    good = [one for one in trials.values() if one.good and not one.out and one.node not in slow]
    free = OrderedDict((one.node, one) for one in _fastest_first(good))
    groups: list[Nodes] = []
    left: list[Trial] = []
    for unit in units:
        partner = _choose_partner(unit, free)
        if partner is None:
            left.extend(unit)
        else:
            del free[partner]
            groups.append((partner, *(one.node for one in unit)))
    groups.extend(_group_without_good(left, helped=bool(good)))
    for node in [node for node, one in free.items() if one.is_found_slow]:
        del free[node]
    for node, alone_will_do in slow.items():
        partner = _choose_partner([trials[node]], free)
        if partner is not None:
            del free[partner]
            groups.append((partner, node))
        elif alone_will_do:
            groups.append((node,))
    if any(slow.values()):
        there = {node for group in groups for node in group}
        needed = REFERENCE_NODES - sum(one.node in there and not one.is_found_slow for one in good)
        groups.extend(_reference_groups(free, trials, max(0, needed)))
    return groups


def _reference_groups(free: Iterable[str], trials: Mapping[str, Trial], count: int) -> list[Nodes]:
    """Groups of one for nodes that are measured only for the comparison: `count` from the middle of
    `free`, which has the fastest first. The fastest of many was partly fast by chance, and would
    seem to have lost speed."""
    idle = [node for node in free if not trials[node].alone]
    first = max(0, len(idle) - count) // 2
    return [(node,) for node in idle[first : first + count]]


def _units_to_probe(open_: Sequence[Trial], failed: Iterable[FailedGroup]) -> list[list[Trial]]:
    """Units of nodes that need a good partner, the most urgent first: suspects, slowest first; then
    nodes held up by another's failure; then nodes that failed alone, for which a probe alone is
    also enough."""
    joint = {one.node: one for one in open_ if one.is_suspect and not one.broken}
    units: list[list[Trial]] = []
    for group in failed:
        if len(group.nodes) == 3 and all(node in joint for node in group.nodes):
            first, *others = (joint.pop(node) for node in group.nodes)
            units += [[first], others]
    units += [[one] for one in joint.values()]
    units.sort(key=lambda unit: -max(one.pace for one in unit))
    units += [[one] for one in open_ if not one.is_suspect]
    units += [[one] for one in open_ if one.broken]
    return units


def _group_without_good(left: Sequence[Trial], *, helped: bool) -> list[Nodes]:
    """Groups of the nodes for which no good partner was left; `helped`: whether a later pass will
    have good partners for them."""
    held_up = [one for one in left if not one.is_suspect]
    joint = sorted(
        (one for one in left if one.is_suspect and not one.broken), key=lambda t: t.place
    )
    pairs = _cross_pairs(held_up) + _cross_pairs(joint)
    paired = {one.node for pair in pairs for one in pair}
    rest = [one for one in (*held_up, *joint) if one.node not in paired]
    if not helped:
        more = _cross_pairs(rest)
        pairs += more
        paired.update(one.node for pair in more for one in pair)
    alone = [one for one in left if one.node not in paired and not one.alone]
    return [(one.node, other.node) for one, other in pairs] + [(one.node,) for one in alone]


def _cross_pairs(nodes: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Pairs of nodes that have not been a pair yet, from different groups if possible: neighbours
    were probed together, so each is paired with one half the list away."""
    half = len(nodes) // 2
    free = OrderedDict((one.node, one) for one in nodes[half:])
    pairs: list[tuple[Trial, Trial]] = []
    rest: list[Trial] = []
    for one in nodes[:half]:
        other = _choose_partner([one], free)
        if other is None:
            rest.append(one)
        else:
            pairs.append((one, free.pop(other)))
    rest.extend(free.values())
    while rest:
        one = rest.pop()
        partner = next((other for other in rest if other.node not in one.met), None)
        if partner is not None:
            rest.remove(partner)
            pairs.append((partner, one))
    return pairs


def _choose_partner(unit: Sequence[Trial], free: Collection[str]) -> str | None:
    """The first of `free` that was in no group with any of these; else one that was, but only in a
    group of three. O(passes), because a node meets few others in a pass."""
    seen = {node for one in unit for node in one.seen}
    met = {node for one in unit for node in one.met}
    fresh = next((node for node in free if node not in seen), None)
    return fresh or next((node for node in free if node not in met), None)


def _fastest_first(good: Iterable[Trial]) -> list[Trial]:
    """Good nodes, fastest first; last are those that were good before this check and have failed
    since."""

    def order(one: Trial) -> tuple[bool, bool, float, int]:
        return bool(one.failures) and not one.fresh, one.is_found_slow, one.pace, one.place

    return sorted(good, key=order)


HELD_UP_FOR = 2.0
"""Seconds that the partners of a node that failed alone may still take to answer. Usually they
report at once that they cannot continue. If the probe of that node died before it could notify
them, they wait in vain until their limit; their next probe ends that wait. If this is raised, such
a death costs more time."""


@dataclass(slots=True)
class Run:
    """The probe of one group, as far as its nodes have answered."""

    group: ProbeGroup
    answers: dict[str, Probed] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # node -> how it was lost


class Pass:
    """Groups that are probed at the same time."""

    def __init__(self, groups: Sequence[ProbeGroup], now: float, limit: float) -> None:
        """`limit`: seconds that one probe may take; its answer may take a little longer."""
        self.runs = [Run(group) for group in groups]
        self._limit = limit
        self._end = now + limit + PROBE_ANSWER_SLACK
        self._awaited = {node: run for run in self.runs for node in run.group.nodes}
        self._by_first = {run.group.nodes[0]: run for run in self.runs}
        self._held_up: Deadlines[str] = Deadlines()  # by a group's first node

    @property
    def over(self) -> bool:
        """Whether no more answers are expected."""
        return not self._awaited

    def group_of(self, node: str) -> ProbeGroup | None:
        """The group in which this node's answer is still expected; None if none is."""
        run = self._awaited.get(node)
        return None if run is None else run.group

    def answered(self, node: str, answer: Probed, now: float) -> None:
        """Process a node's answer; ignore it if it is not the expected one."""
        run = self._awaited.get(node)
        if run is not None and run.group.check == answer.check:
            run.answers[node] = answer
            del self._awaited[node]
            first, *others = run.group.nodes
            if len(run.answers) == len(run.group.nodes):
                self._held_up.disarm(first)
            elif answer.own and others and not run.group.perf:
                self._held_up.arm(first, now + HELD_UP_FOR)

    def next_deadline(self) -> float:
        """When to call `overdue`."""
        held_up = self._held_up.next()
        return self._end if held_up is None else min(self._end, held_up)

    def lost(self, node: str, reason: str) -> None:
        """The node will not answer. Its partners' results now prove nothing, so they are not waited
        for; their next probe replaces this one."""
        run = self._awaited.pop(node, None)
        if run is not None:
            run.lost[node] = reason
            for other in run.group.nodes:
                self._awaited.pop(other, None)

    def overdue(self, now: float) -> None:
        """End what is overdue: a node that has not answered in time has failed alone, unless it was
        held up by another."""
        for first in self._held_up.pop_due(now):
            for node in self._by_first[first].group.nodes:
                self._awaited.pop(node, None)
        if now >= self._end:
            for node, run in self._awaited.items():
                run.answers[node] = overdue(run.group.check, self._limit)
            self._awaited.clear()


def overdue(check: str, limit: float) -> Probed:
    """The result for a node that did not answer in time: a failure of its own."""
    whole = limit + PROBE_ANSWER_SLACK
    return Probed(
        check=check,
        ok=False,
        phase=ProbePhase.START,
        own=True,
        excused=False,
        reason=f"did not answer within {whole:g} s (the probe's limit is {limit:g} s)",
        compute=0.0,
        flops=0.0,
        transfers=(),
        seconds=whole,
        timed=0.0,
    )
