"""Who is slow before training begins, by the figures of the network check.

Each phase is judged by itself (a slow all_reduce says nothing about a GPU), against the other nodes
(`outliers`). Figures that good nodes have from earlier checks count among the others.

A single measure convicts nobody of being slow: the second is what counts. But no two passes are
alike: in the second fewer nodes are measured, and what they share (a host, a switch, its power) is
shared by fewer. A matmul of the second pass beside those of the first would make the change between
the passes a spread of the nodes, behind which a slow one can hide. So good nodes are measured again
at the same time, and every figure of that pass is compared after it has been divided by their
*drift*: what their matmul takes now, as a multiple of what it took. That goes for a good node too
whose earlier figure is from another check.

All nodes of a group see the same all_reduce; who begins to time it last has waited for nobody, so
that the least of their figures is that of all (`netcheck_check`). So after one pass groups are
compared with groups; the nodes of a slow one are measured again, each with a good partner, and then
each is judged by itself, by its best: with another partner where both measures may have been the
partner's. Groups of different sizes are made comparable by what each link carries: 2(n-1)/n of the
buffer for n ranks.

Not decidable: a slow link of two or three nodes, which are one group; and slow nodes that are as
many as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elasticrun.core.netcheck_terms import Rate, duration, size
from elasticrun.core.netcheck_trials import Trial
from elasticrun.core.outliers import CRUDE_RATIO, Outlier, outliers
from elasticrun.core.wording import names


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
            if rate is not None and _with_different(trial):
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


def _with_different(trial: Trial) -> bool:
    """Whether no one partner, who may be the slow one, had a part in all of its measures."""
    return not frozenset.intersection(*(frozenset(one.partners) for one in trial.rates))


def _compared(found: Outlier, scale: float = 1.0, unit: str = " per matmul") -> str:
    """The evidence in words; a figure times `scale` is seconds."""
    crude = f"{CRUDE_RATIO:g} x median would {'say slow too' if found.crude else 'not say so'}"
    return (
        f"{duration(found.value * scale)}{unit}, the others {duration(found.median * scale)} "
        f"(median of {found.others}), limit {duration(found.limit * scale)}; {crude}"
    )
