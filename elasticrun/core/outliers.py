"""Which of a few figures stands out from the others, and by how much.

A figure is judged against the *others*: their median, and the median of their absolute deviations
from it (MAD). A rule over all figures together cannot work for two or three nodes, where the one
to be judged moves the median itself: of 1 s and 10 s neither is above twice their median.

Two bounds must be passed. `ratio` times the median says that the difference matters (2 % never do);
SPREADS deviations above it say that it is not what the others differ by among themselves. A MAD
times 1.4826 estimates a standard deviation where figures are spread normally, whatever less than
half of them do.

O(n log n) for all n figures: what the others' median and MAD are depends only on where in order the
one that is left out stood.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
