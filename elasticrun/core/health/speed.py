"""Which nodes are slow, according to the measurements of the network check and to the step times
in training.

*Compared with the others.* A figure is compared with the others' median, and with the median of
their absolute deviations from it (MAD). A rule over all figures together cannot work for two or
three nodes, where the judged one moves the median itself: of 1 s and 10 s neither is above twice
their median. A figure must exceed two bounds. `ratio` times the median means that the difference
matters (2 % never does); SPREADS deviations above it mean that it exceeds the differences among the
others. A MAD times 1.4826 estimates the standard deviation of normally distributed figures, as long
as fewer than half of them are abnormal.

*Before training* (`Paces`) each phase is judged separately: a slow all_reduce says nothing about a
GPU. Figures of good nodes from earlier checks count among the others. A single measurement never
makes a node slow: the second one decides. But no two passes are alike: in the second, fewer nodes
are measured, and fewer nodes share a host, a switch, or its power. If a matmul of the second pass
were compared with those of the first, the change between the passes would look like a spread of the
nodes and could hide a slow one. So good nodes are measured again at the same time, and every figure
of that pass is divided by their *drift* before it is compared: the time their matmul takes now, as
a multiple of what it took. The same applies to a good node whose earlier figure is from another
check.

All nodes of a group take part in the same all_reduce; the node that starts its timer last has
waited for no other, so the smallest of their figures applies to all. After one pass groups are
compared with groups. The nodes of a slow one are measured again, each with a good partner, and then
each is judged by its own best figure: with another partner if the same partner may explain both
measurements. Groups of different sizes are made comparable by what each link carries: 2(n-1)/n of
the buffer for n ranks. Two cases are undecidable: a slow link among two or three nodes, which form
one group, and as many slow nodes as others.

*In training* (`Stragglers`) all ranks that train together take as long for a step as the slowest of
them. A slow node shows in its *own part*: the step without the time that it waits for others. The
slow node waits least. A node is slow while its own part is an outlier among those of the others and
costs the job something; it is suspected after `slow_for` seconds of that without interruption.
Several things must not convict a node. One long step (a checkpoint that one node writes, an
evaluation) shows in one report, and does not move the median of a node's last WINDOW reports. A
pause of all nodes is an interruption. A node that is silent, or whose own part is unknown, is
neither judged nor compared with.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elasticrun.core.health.groups import Rate, Trial
from elasticrun.core.health.words import duration, size
from elasticrun.core.words import names, plural
from elasticrun.wire.messages import CheckSpec, Steps

SPREADS = 5.0
"""A figure must exceed the others' median by this many estimated standard deviations. If this is
raised, nodes that differ much among themselves hide a slow one."""

MAD_TO_DEVIATION = 1.4826
"""Factor by which a median absolute deviation estimates a standard deviation."""

CRUDE_RATIO = 2.0
"""dlrover-run's rule, reported with ours: above twice the median of all, including the judged
one."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A figure that is an outlier; all values in the unit of the figures."""

    value: float
    median: float  # of the others
    limit: float  # the larger of the two bounds
    others: int  # their number
    crude: bool  # whether CRUDE_RATIO times the median of all would agree


def outliers(values: Sequence[float], ratio: float) -> dict[int, Outlier]:
    """The outliers of `values`, by index; empty for fewer than two values."""
    if len(values) < 2:
        return {}
    order = sorted(values)
    crude = CRUDE_RATIO * _median(order, None)
    deviations: dict[float, list[float]] = {}  # by the median they refer to: at most three
    found: dict[int, Outlier] = {}
    for index, value in enumerate(values):
        place = bisect_left(order, value)
        median = _median(order, place)
        if value <= ratio * median:
            continue
        if median not in deviations:
            deviations[median] = sorted(abs(one - median) for one in order)
        spread = deviations[median]
        mad = _median(spread, bisect_left(spread, abs(value - median)))
        limit = max(ratio * median, median + SPREADS * MAD_TO_DEVIATION * mad)
        if value > limit:
            found[index] = Outlier(value, median, limit, len(values) - 1, value > crude)
    return found


def _median(order: Sequence[float], without: int | None) -> float:
    """The median of a sorted sequence, optionally without the entry at index `without`."""
    count = len(order) - (without is not None)

    def at(place: int) -> float:
        return order[place if without is None or place < without else place + 1]

    half = count // 2
    return at(half) if count % 2 else (at(half - 1) + at(half)) / 2


@dataclass(slots=True)
class Paces:
    """What the probes of a check say about the speed of its nodes."""

    ratio: float
    compute: dict[str, float]  # seconds of a matmul: the first of this check, or of an earlier one
    rates: Mapping[str, Rate]  # from earlier checks
    again: dict[str, bool] = field(default_factory=dict)  # to measure again; True: alone suffices
    slow: dict[str, str] = field(default_factory=dict)  # slow twice, with the evidence
    _doubted: dict[str, bool] = field(default_factory=dict)  # matmul was an outlier once

    def judge(
        self,
        trials: Mapping[str, Trial],
        passed: Sequence[Sequence[str]],
        computed: Mapping[str, float],
    ) -> None:
        """Recompute `again` and `slow` after a pass. `passed`: the groups that worked in it;
        `computed`: seconds of a matmul, for each node that timed one in it."""
        self.again, self.slow = {}, {}
        self._judge_groups(trials, passed)
        self._judge_rates(trials)
        self._judge_compute(trials, computed)
        for node in self.slow:
            self.again.pop(node, None)

    def _judge_compute(self, trials: Mapping[str, Trial], computed: Mapping[str, float]) -> None:
        first = all(len(trials[node].compute) == 1 for node in computed)
        drift = 1.0 if first else self._drift(trials, computed)
        settled = {node for node in self._doubted if node in computed and _usable(trials[node])}
        for node, seconds in computed.items():
            if node in settled or len(trials[node].compute) == 1:
                self.compute[node] = seconds / drift
        for node in settled:
            del self._doubted[node]
        for trial, found in _outlying_trials(trials, self.compute, self.ratio):
            if trial.node in settled:
                self._add_evidence(trial, f"compute {_compared(found, drift)}")
            elif len(trial.compute) == 1:  # a held-up node too, which is judged once it works
                self._doubted[trial.node] = True
        self.again |= {node: True for node in self._doubted if _usable(trials[node])}

    def _drift(self, trials: Mapping[str, Trial], computed: Mapping[str, float]) -> float:
        """The time of a matmul in this pass as a multiple of its first measurement: the median over
        good nodes that are not doubted; 1.0 if there are none."""
        ratios = [
            seconds / self.compute[node]
            for node, seconds in computed.items()
            if node in self.compute and node not in self._doubted and _usable(trials[node])
        ]
        return median(ratios) if ratios else 1.0

    def _judge_rates(self, trials: Mapping[str, Trial]) -> None:
        best = {node: rate.cost for node, rate in self.rates.items()}
        for trial in trials.values():
            rate = trial.rate
            if rate is not None:
                best[trial.node] = min(rate.cost, best.get(trial.node, rate.cost))
        for trial, found in _outlying_trials(trials, best, self.ratio):
            rate = trial.rate if _usable(trial) else None
            # no single partner, which may be the slow one, took part in all of its measurements
            if rate and not frozenset.intersection(*(frozenset(r.partners) for r in trial.rates)):
                evidence = _compared(found, rate.traffic, "")
                with_whom = names(rate.partners)
                self._add_evidence(
                    trial, f"all_reduce of {size(rate.size)} with {with_whom} {evidence}"
                )
            elif rate is not None:
                self.again.setdefault(trial.node, False)

    def _judge_groups(self, trials: Mapping[str, Trial], passed: Sequence[Sequence[str]]) -> None:
        """Compare the groups of the last pass with each other, and with figures from earlier
        checks."""
        timed = [nodes for nodes in passed if trials[nodes[0]].rates and len(nodes) > 1]
        costs = [trials[nodes[0]].rates[-1].cost for nodes in timed]
        known = [rate.cost for rate in self.rates.values()]
        for index in outliers([*costs, *known], self.ratio):
            for node in timed[index] if index < len(timed) else ():
                if len(trials[node].rates) == 1 and _usable(trials[node]):
                    self.again[node] = False

    def _add_evidence(self, trial: Trial, evidence: str) -> None:
        before = self.slow.get(trial.node)
        self.slow[trial.node] = f"{before}; {evidence}" if before else evidence


def _outlying_trials(
    trials: Mapping[str, Trial], figures: Mapping[str, float], ratio: float
) -> list[tuple[Trial, Outlier]]:
    """The nodes of this check whose figure is an outlier."""
    whose = list(figures)
    found = outliers(list(figures.values()), ratio)
    mine = [(trials.get(whose[index]), it) for index, it in found.items()]
    return [(trial, it) for trial, it in mine if trial is not None]


def _usable(trial: Trial) -> bool:
    """Whether the node may still be found slow: it works, and has not been found slow in this
    check."""
    return trial.good and not trial.out and not trial.is_found_slow


def _compared(found: Outlier, scale: float = 1.0, unit: str = " per matmul") -> str:
    """The evidence in words. `scale`: seconds per unit of the figures."""
    crude = f"{CRUDE_RATIO:g} x median would {'agree' if found.crude else 'disagree'}"
    return (
        f"{duration(found.value * scale)}{unit}, the others {duration(found.median * scale)} "
        f"(median of {found.others}), limit {duration(found.limit * scale)}; {crude}"
    )


WINDOW = 5
"""Number of reports whose median is a node's own part. If this is raised, longer disturbances are
ignored, and a slow node is found later."""

WARM = 3
"""Number of consecutive reports before a node is compared: its first steps are not typical
(compilation, first touches of memory)."""

JUDGE_EVERY = 1.0
"""Minimum number of seconds between two judgements."""

JUDGEMENTS = 3
"""Number of consecutive judgements that a suspicion needs, however short `slow_for` is."""

PATIENCE = 5.0
"""Nodes that report nothing for this many seconds after another has reported, or for twice the time
its report covers if that is longer, are not waited for; they are silent."""

MIN_COST = 0.5
"""A slow node must cost at least this fraction of what a node at exactly the ratio would cost if
steps were all own work. With a ratio of 1.5 that is a sixth of the step. If steps are mostly
waiting for the network, a node whose small own part is twice the others' costs the job nothing."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """A suspected node, and the evidence as a clause. `usual`: seconds that a step would take if
    the node's own part were like the others'."""

    node: str
    evidence: str
    usual: float


@dataclass(slots=True)
class _Pace:
    """What one node has reported in this round; seconds."""

    newest: Steps | None = None
    reports: deque[Steps] = field(default_factory=lambda: deque(maxlen=WINDOW))
    fresh: bool = False  # has reported since the last judgement
    slow_since: float = math.nan
    judgements: int = 0  # consecutive ones that found it slow
    suspected_at: float = -math.inf  # when it was last suspected

    def own(self) -> float:
        return median(one.own for one in self.reports)

    def seconds(self) -> float:
        return median(one.seconds for one in self.reports)

    def waiting(self) -> float:
        """The fraction of its time that it waits."""
        return median(min(1.0, one.waited / max(one.seconds, 1e-9)) for one in self.reports)

    def covered(self) -> float:
        """The usual number of seconds from one report to the next."""
        return median(one.steps * one.seconds for one in self.reports)


class Stragglers:
    """Compares the step times of the nodes of one round."""

    def __init__(self, checks: CheckSpec) -> None:
        self._ratio = checks.slow_ratio
        self._slow_for = checks.slow_for
        self.new_round(())

    def new_round(self, nodes: Sequence[str]) -> None:
        """A round begins with these nodes: discard what was measured in the last one."""
        self._paces = {node: _Pace() for node in nodes}
        self._comparable = 0  # nodes whose reports contain their own part
        self._fresh = 0  # how many of these have reported since the last judgement
        self._first_fresh = 0.0
        self._judged_at = -math.inf
        self._suspects: deque[Slowness] = deque()

    def on_steps(self, node: str, steps: Steps, now: float) -> Slowness | None:
        """Process a node's report; return a suspicion if there is one. A node that stays slow is
        suspected again after each further `slow_for` seconds, because the job may be able to spare
        it only later. O(1) amortised: O(nodes log nodes) at most once per second and per round of
        reports."""
        pace = self._paces.get(node)
        if pace is None:
            return None
        pace.newest = steps
        if steps.own > 0.0:
            self._compare(pace, steps, now)
        else:
            self._drop(pace)
        covered = steps.steps * steps.seconds
        late = now - self._first_fresh >= max(PATIENCE, 2.0 * covered)
        complete = self._fresh == self._comparable
        if self._fresh and (complete or late) and now - self._judged_at >= JUDGE_EVERY:
            self._judge(now)
        return self._suspects.popleft() if self._suspects else None

    def node_gone(self, node: str) -> None:
        """The node is no longer a member."""
        pace = self._paces.pop(node, None)
        if pace is not None:
            self._drop(pace)
        self._suspects = deque(one for one in self._suspects if one.node != node)

    def health(self, node: str) -> str:
        """The step time and waiting of a node, for the status page; "" if it reports none."""
        pace = self._paces.get(node)
        if pace is None or pace.newest is None:
            return ""
        newest = pace.newest
        words = f"step {newest.step}: {newest.seconds:.3g} s a step"
        if newest.own > 0.0:
            share = min(1.0, newest.waited / max(newest.seconds, 1e-9))
            words += f", of which {newest.own:.3g} s own work, waits {share:.0%}"
        return words

    # ------------------------------------------------------------ judging

    def _compare(self, pace: _Pace, steps: Steps, now: float) -> None:
        self._comparable += not pace.reports
        pace.reports.append(steps)
        if not pace.fresh:
            pace.fresh = True
            if not self._fresh:
                self._first_fresh = now
            self._fresh += 1

    def _drop(self, pace: _Pace) -> None:
        """Discard the reports of a node."""
        self._comparable -= bool(pace.reports)
        self._fresh -= pace.fresh
        pace.reports.clear()
        pace.fresh, pace.judgements = False, 0

    def _judge(self, now: float) -> None:
        """Compare the nodes that have reported since the last time; the others are silent."""
        gap, self._judged_at = now - self._judged_at, now
        warm: list[tuple[str, _Pace]] = []
        for node, pace in self._paces.items():  # in a fixed order, for replays
            if pace.reports and not pace.fresh:
                self._drop(pace)
            pace.fresh = False
            if len(pace.reports) >= WARM:
                warm.append((node, pace))
        self._fresh = 0
        found = outliers([pace.own() for _, pace in warm], self._ratio)
        for index, (node, pace) in enumerate(warm):
            outlier = found.get(index)
            if outlier is None or not self._is_costly(pace, outlier.value - outlier.median):
                pace.judgements = 0
                continue
            if gap > max(PATIENCE, 2.0 * pace.covered()):
                pace.judgements = 0  # a pause: what came before it does not count
            if not pace.judgements:
                pace.slow_since = now
            pace.judgements += 1
            long = pace.judgements >= JUDGEMENTS and now - pace.slow_since >= self._slow_for
            if long and now - pace.suspected_at >= self._slow_for:
                pace.suspected_at = now
                others = [one for other, one in warm if other != node]
                usual = max(0.0, pace.seconds() - outlier.value + outlier.median)
                self._suspects.append(Slowness(node, self._evidence(pace, others, now), usual))

    def _is_costly(self, pace: _Pace, excess: float) -> bool:
        """Whether a node with so much more work than the others costs the job something."""
        return excess * self._ratio >= MIN_COST * (self._ratio - 1.0) * pace.seconds()

    @staticmethod
    def _evidence(pace: _Pace, others: Sequence[_Pace], now: float) -> str:
        own = median(one.own() for one in others)
        waiting = median(one.waiting() for one in others)
        theirs = "the other's" if len(others) == 1 else "the others'"
        they = "the other" if len(others) == 1 else "the others"
        of = f" (median of {plural(len(others), 'node')})" if len(others) > 1 else ""
        return (
            f"its own part of a step takes {pace.own():.3g} s, {theirs} {own:.3g} s{of}, "
            f"for {now - pace.slow_since:.0f} s; it waits "
            f"{pace.waiting():.0%} of its time, {they} {waiting:.0%}"
        )
