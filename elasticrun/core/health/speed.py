"""Who is slow: by the figures of the network check, and by the step times while training.

*Against the others.* A figure is judged against the others' median, and the median of their
absolute deviations from it (MAD). A rule over all figures together cannot work for two or three
nodes, where the one to be judged moves the median itself: of 1 s and 10 s neither is above twice
their median. Two bounds must be passed. `ratio` times the median says that the difference matters
(2 % never do); SPREADS deviations above it say that it is not what the others differ by among
themselves. A MAD times 1.4826 estimates a standard deviation where figures are spread normally,
whatever less than half of them do.

*Before training* (`Paces`) each phase is judged by itself: a slow all_reduce says nothing about a
GPU. Figures that good nodes have from earlier checks count among the others. A single measure
convicts nobody of being slow: the second is what counts. But no two passes are alike: in the second
fewer nodes are measured, and what they share (a host, a switch, its power) is shared by fewer. A
matmul of the second pass beside those of the first would make the change between the passes a
spread of the nodes, behind which a slow one can hide. So good nodes are measured again at the same
time, and every figure of that pass is compared after it has been divided by their *drift*: what
their matmul takes now, as a multiple of what it took. That goes for a good node too whose earlier
figure is from another check.

All nodes of a group see the same all_reduce; who begins to time it last has waited for nobody, so
that the least of their figures is that of all. So after one pass groups are compared with groups;
the nodes of a slow one are measured again, each with a good partner, and then each is judged by
itself, by its best: with another partner where both measures may have been the partner's. Groups of
different sizes are made comparable by what each link carries: 2(n-1)/n of the buffer for n ranks.
Not decidable: a slow link of two or three nodes, which are one group; and slow nodes that are as
many as the others.

*While training* (`Stragglers`) ranks that train together all take as long for a step as the slowest
of them. What tells a slow node is its *own part*: a step without the waiting for others, which the
slow node has least of. A node is slow while its own part is an outlier beside those of the others
and costs the job something; it is suspected when that was so for `slow_for` seconds without a
break. What must convict nobody: one long step (a checkpoint that one node writes, an evaluation)
shows in one report, and the median of a node's last WINDOW reports does not know of it; a pause of
all is a break; a node that is silent, or whose own part is not known, is neither judged nor
compared with.
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
from elasticrun.core.words import names, some
from elasticrun.wire.messages import CheckSpec, Steps

SPREADS = 5.0
"""So many estimated standard deviations above the median of the others; raise it and nodes that
differ much among themselves hide a slow one."""

MAD_TO_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""

CRUDE_RATIO = 2.0
"""dlrover-run's rule, told beside ours: above twice the median of all, the judged one included."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A figure that stands out; all in the unit of the figures."""

    value: float
    median: float  # of the others
    limit: float  # the larger of the two bounds
    others: int  # how many they are
    crude: bool  # whether CRUDE_RATIO times the median of all would say so too


def outliers(values: Sequence[float], ratio: float) -> dict[int, Outlier]:
    """By index, each of `values` that is larger than the others allow. None of fewer than two."""
    if len(values) < 2:
        return {}
    order = sorted(values)
    crude = CRUDE_RATIO * _median(order, None)
    deviations: dict[float, list[float]] = {}  # by the median they are taken from: three at most
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
    """Of a sorted sequence, if need be without the entry at this place."""
    count = len(order) - (without is not None)

    def at(place: int) -> float:
        return order[place if without is None or place < without else place + 1]

    half = count // 2
    return at(half) if count % 2 else (at(half - 1) + at(half)) / 2


@dataclass(slots=True)
class Paces:
    """What the probes of a check say of the speed of its nodes."""

    ratio: float
    compute: dict[str, float]  # seconds of a matmul: the first of this check, or of an earlier one
    rates: Mapping[str, Rate]  # from earlier checks
    again: dict[str, bool] = field(default_factory=dict)  # to be measured again; if alone will do
    slow: dict[str, str] = field(default_factory=dict)  # slow twice, with the evidence
    _doubted: dict[str, bool] = field(default_factory=dict)  # matmul stood out, once until now

    def judge(
        self,
        trials: Mapping[str, Trial],
        passed: Sequence[Sequence[str]],
        computed: Mapping[str, float],
    ) -> None:
        """Fill `again` and `slow` anew after a pass; `passed`: the groups that worked in it,
        `computed`: seconds of a matmul, of each node that timed any in it."""
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
        for trial, found in _standing_out(trials, self.compute, self.ratio):
            if trial.node in settled:
                self._tell(trial, f"compute {_compared(found, drift)}")
            elif len(trial.compute) == 1:  # who was held up too, and is judged once it works
                self._doubted[trial.node] = True
        self.again |= {node: True for node in self._doubted if _usable(trials[node])}

    def _drift(self, trials: Mapping[str, Trial], computed: Mapping[str, float]) -> float:
        """What a matmul of this pass takes, as a multiple of what it took when it was timed first:
        the median over good nodes that are not doubted; 1.0 where there is none."""
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
        for trial, found in _standing_out(trials, best, self.ratio):
            rate = trial.rate if _usable(trial) else None
            # no one partner, who may be the slow one, had a part in all of its measures
            if rate and not frozenset.intersection(*(frozenset(r.partners) for r in trial.rates)):
                told = _compared(found, rate.traffic, "")
                with_whom = names(rate.partners)
                self._tell(trial, f"all_reduce of {size(rate.size)} with {with_whom} {told}")
            elif rate is not None:
                self.again.setdefault(trial.node, False)

    def _judge_groups(self, trials: Mapping[str, Trial], passed: Sequence[Sequence[str]]) -> None:
        """Compare whole groups of the last pass with each other, and with what is known from
        earlier checks."""
        timed = [nodes for nodes in passed if trials[nodes[0]].rates and len(nodes) > 1]
        costs = [trials[nodes[0]].rates[-1].cost for nodes in timed]
        known = [rate.cost for rate in self.rates.values()]
        for index in outliers([*costs, *known], self.ratio):
            for node in timed[index] if index < len(timed) else ():
                if len(trials[node].rates) == 1 and _usable(trials[node]):
                    self.again[node] = False

    def _tell(self, trial: Trial, evidence: str) -> None:
        before = self.slow.get(trial.node)
        self.slow[trial.node] = f"{before}; {evidence}" if before else evidence


def _standing_out(
    trials: Mapping[str, Trial], figures: Mapping[str, float], ratio: float
) -> list[tuple[Trial, Outlier]]:
    """Those of this check whose figure is larger than the others allow."""
    whose = list(figures)
    found = outliers(list(figures.values()), ratio)
    mine = [(trials.get(whose[index]), it) for index, it in found.items()]
    return [(trial, it) for trial, it in mine if trial is not None]


def _usable(trial: Trial) -> bool:
    """Whether it may yet be called slow: it works, and has not been called so in this check."""
    return trial.good and not trial.out and not trial.told_slow


def _compared(found: Outlier, scale: float = 1.0, unit: str = " per matmul") -> str:
    """The evidence in words; a figure times `scale` is seconds."""
    crude = f"{CRUDE_RATIO:g} x median would {'say slow too' if found.crude else 'not say so'}"
    return (
        f"{duration(found.value * scale)}{unit}, the others {duration(found.median * scale)} "
        f"(median of {found.others}), limit {duration(found.limit * scale)}; {crude}"
    )


WINDOW = 5
"""Reports whose median is a node's own part; raise it and longer disturbances are overlooked, and a
slow node is found later."""

WARM = 3
"""Reports that a node must have given in a row before it is compared: first steps are like no
other (compilation, first touches of memory)."""

JUDGE_EVERY = 1.0
"""Seconds between two judgements at the least."""

JUDGEMENTS = 3
"""A suspicion needs that many judgements in a row, however short `slow_for` is."""

PATIENCE = 5.0
"""Nodes that say nothing for so many seconds after another has reported, or for twice as long as
its report covers if that is longer, are not waited for; they are silent."""

WORTH = 0.5
"""A slow node must cost this part of what the ratio alone would cost where steps consist of nothing
but own work. With 1.5 that is a sixth of the step: where steps are mostly waiting for the network,
a node whose small own part is twice the others' costs the job nothing."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """A node that is suspected, and the evidence as a clause for people. `usual`: seconds that a
    step would take if the node's own part were as the others'."""

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
    judgements: int = 0  # in a row that found it slow
    told_at: float = -math.inf  # when it was suspected last

    def own(self) -> float:
        return median(one.own for one in self.reports)

    def seconds(self) -> float:
        return median(one.seconds for one in self.reports)

    def waiting(self) -> float:
        """The share of its time that it waits."""
        return median(min(1.0, one.waited / max(one.seconds, 1e-9)) for one in self.reports)

    def covered(self) -> float:
        """Seconds from one report to the next, as they usually are."""
        return median(one.steps * one.seconds for one in self.reports)


class Stragglers:
    """The step times of the nodes of one round; see the module's head."""

    def __init__(self, checks: CheckSpec) -> None:
        self._ratio = checks.slow_ratio
        self._slow_for = checks.slow_for
        self.new_round(())

    def new_round(self, nodes: Sequence[str]) -> None:
        """A round begins with these nodes: what was measured in the last one is forgotten."""
        self._paces = {node: _Pace() for node in nodes}
        self._comparable = 0  # nodes with reports that tell their own part
        self._fresh = 0  # of these
        self._first_fresh = 0.0
        self._judged_at = -math.inf
        self._suspects: deque[Slowness] = deque()

    def heard(self, node: str, steps: Steps, now: float) -> Slowness | None:
        """A node's report. The suspicion that it completes; a node that stays slow is suspected
        again after each further `slow_for`, since it may be spared only later. O(1) amortised:
        O(nodes log nodes) at most once in a second and in a round of reports."""
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

    def gone(self, node: str) -> None:
        """It is no member any more."""
        pace = self._paces.pop(node, None)
        if pace is not None:
            self._drop(pace)
        self._suspects = deque(one for one in self._suspects if one.node != node)

    def health(self, node: str) -> str:
        """Its step time and waiting, in words for the status page; "" if it reports none."""
        pace = self._paces.get(node)
        if pace is None or pace.newest is None:
            return ""
        newest = pace.newest
        words = f"step {newest.step}: {newest.seconds:.3g} s a step"
        if newest.own > 0.0:
            share = min(1.0, newest.waited / max(newest.seconds, 1e-9))
            words += f", {newest.own:.3g} s of it its own part, waits {share:.0%}"
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
        """What it has reported does not count any more."""
        self._comparable -= bool(pace.reports)
        self._fresh -= pace.fresh
        pace.reports.clear()
        pace.fresh, pace.judgements = False, 0

    def _judge(self, now: float) -> None:
        """Compare those that have reported since the last time; the others are silent."""
        gap, self._judged_at = now - self._judged_at, now
        warm: list[tuple[str, _Pace]] = []
        for node, pace in self._paces.items():  # as in the round, so that a replay says the same
            if pace.reports and not pace.fresh:
                self._drop(pace)
            pace.fresh = False
            if len(pace.reports) >= WARM:
                warm.append((node, pace))
        self._fresh = 0
        found = outliers([pace.own() for _, pace in warm], self._ratio)
        for index, (node, pace) in enumerate(warm):
            outlier = found.get(index)
            if outlier is None or not self._costs(pace, outlier.value - outlier.median):
                pace.judgements = 0
                continue
            if gap > max(PATIENCE, 2.0 * pace.covered()):
                pace.judgements = 0  # a pause: what was before it is no part of this
            if not pace.judgements:
                pace.slow_since = now
            pace.judgements += 1
            long = pace.judgements >= JUDGEMENTS and now - pace.slow_since >= self._slow_for
            if long and now - pace.told_at >= self._slow_for:
                pace.told_at = now
                others = [one for other, one in warm if other != node]
                usual = max(0.0, pace.seconds() - outlier.value + outlier.median)
                self._suspects.append(Slowness(node, self._evidence(pace, others, now), usual))

    def _costs(self, pace: _Pace, excess: float) -> bool:
        """Whether a node that has so much more to do than the others costs the job something."""
        return excess * self._ratio >= WORTH * (self._ratio - 1.0) * pace.seconds()

    @staticmethod
    def _evidence(pace: _Pace, others: Sequence[_Pace], now: float) -> str:
        own = median(one.own() for one in others)
        waiting = median(one.waiting() for one in others)
        theirs = "the other's" if len(others) == 1 else "the others'"
        they = "the other" if len(others) == 1 else "the others"
        of = f" (median of {some(len(others), 'node')})" if len(others) > 1 else ""
        return (
            f"its own part of a step takes {pace.own():.3g} s, {theirs} {own:.3g} s{of}, "
            f"for {now - pace.slow_since:.0f} s; it waits "
            f"{pace.waiting():.0%} of its time, {they} {waiting:.0%}"
        )
