"""Who is slow enough for long enough while training, by the step times that the nodes report.

Ranks that train together all take as long for a step as the slowest of them. What tells a slow
node is its *own part*: a step without the waiting for others, which the slow node has least of. A
node is slow while its own part is an outlier beside those of the others (core/outliers.py) and
costs the job something; it is suspected when that was so for `slow_for` seconds without a break.

What must convict nobody: one long step (a checkpoint that one node writes, an evaluation) shows in
one report, and the median of a node's last WINDOW reports does not know of it; a pause of all is a
break; a node that is silent, or whose own part is not known, is neither judged nor compared with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from elasticrun.core.outliers import outliers
from elasticrun.core.wording import some
from elasticrun.wire.messages import CheckSpec, Steps

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
    """A node that is suspected, and the evidence as a clause for people."""

    node: str
    evidence: str


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

    def well(self) -> None:
        self.judgements = 0

    def silent(self) -> None:
        """What it has reported does not count any more."""
        self.reports.clear()
        self.fresh = False
        self.well()


class Stragglers:
    """The step times of the nodes of one round; see the module's head."""

    def __init__(self, checks: CheckSpec) -> None:
        self._ratio = checks.slow_ratio
        self._slow_for = checks.slow_for
        self.new_round(())

    def new_round(self, nodes: Sequence[str]) -> None:
        """A round begins with these nodes: what was measured in the last one is forgotten."""
        self._paces = {node: _Pace() for node in nodes}
        self._comparable: set[str] = set()  # nodes with reports that tell their own part
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
            self._compare(node, pace, steps, now)
        else:
            self._drop(node, pace)
        covered = steps.steps * steps.seconds
        late = now - self._first_fresh >= max(PATIENCE, 2.0 * covered)
        complete = self._fresh == len(self._comparable)
        if self._fresh and (complete or late) and now - self._judged_at >= JUDGE_EVERY:
            self._judge(now)
        return self._suspects.popleft() if self._suspects else None

    def gone(self, node: str) -> None:
        """It is no member any more."""
        pace = self._paces.pop(node, None)
        if pace is not None:
            self._drop(node, pace)
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

    def _compare(self, node: str, pace: _Pace, steps: Steps, now: float) -> None:
        pace.reports.append(steps)
        self._comparable.add(node)
        if not pace.fresh:
            pace.fresh = True
            if not self._fresh:
                self._first_fresh = now
            self._fresh += 1

    def _drop(self, node: str, pace: _Pace) -> None:
        self._comparable.discard(node)
        self._fresh -= pace.fresh
        pace.silent()

    def _judge(self, now: float) -> None:
        """Compare those that have reported since the last time; the others are silent."""
        gap, self._judged_at = now - self._judged_at, now
        for node in [one for one in self._comparable if not self._paces[one].fresh]:
            self._drop(node, self._paces[node])
        self._fresh = 0
        warm: list[tuple[str, _Pace]] = []
        for node in self._paces:  # in the order of the round, so that a replay says the same
            pace = self._paces[node]
            pace.fresh = False
            if len(pace.reports) >= WARM:
                warm.append((node, pace))
        found = outliers([pace.own() for _, pace in warm], self._ratio)
        for index, (node, pace) in enumerate(warm):
            outlier = found.get(index)
            if outlier is None or not self._costs(pace, outlier.value - outlier.median):
                pace.well()
                continue
            if gap > max(PATIENCE, 2.0 * pace.covered()):
                pace.well()  # a pause: what was before it is no part of this
            if not pace.judgements:
                pace.slow_since = now
            pace.judgements += 1
            long = pace.judgements >= JUDGEMENTS and now - pace.slow_since >= self._slow_for
            if long and now - pace.told_at >= self._slow_for:
                pace.told_at = now
                others = [one for other, one in warm if other != node]
                self._suspects.append(Slowness(node, self._evidence(pace, others, now)))

    def _costs(self, pace: _Pace, excess: float) -> bool:
        """Whether a node that has so much more to do than the others costs the job something."""
        return excess * self._ratio >= WORTH * (self._ratio - 1.0) * pace.seconds()

    @staticmethod
    def _evidence(pace: _Pace, others: Sequence[_Pace], now: float) -> str:
        own = median(one.own() for one in others)
        waiting = median(one.waiting() for one in others)
        theirs = "the other's" if len(others) == 1 else "the others'"
        they = "the other" if len(others) == 1 else "the others"
        return (
            f"its own part of a step takes {pace.own():.3g} s, {theirs} {own:.3g} s (median of "
            f"{some(len(others), 'node')}), for {now - pace.slow_since:.0f} s; it waits "
            f"{pace.waiting():.0%} of its time, {they} {waiting:.0%}"
        )
