"""A figure against the others; what the rule says is compared with the plain formula."""

from __future__ import annotations

import random
import statistics
import time

import pytest
from hypothesis import given, strategies as st

from elasticrun.core.health.speed import MAD_TO_DEVIATION, SPREADS, outliers

FIGURES = st.lists(st.sampled_from([1.0, 1.1, 1.3, 2.0, 3.0, 9.0, 40.0]), max_size=12)


@given(FIGURES, st.sampled_from([1.2, 1.5, 2.0]))
def test_it_is_the_rule_of_the_others(values: list[float], ratio: float) -> None:
    found = outliers(values, ratio)
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        if not others:
            assert found == {}
            continue
        median = statistics.median(others)
        mad = statistics.median([abs(one - median) for one in others])
        limit = max(ratio * median, median + SPREADS * MAD_TO_DEVIATION * mad)
        assert (index in found) == (value > limit)
        if index in found:
            outlier = found[index]
            assert (outlier.value, outlier.median, outlier.others) == (value, median, len(others))
            assert outlier.limit == pytest.approx(limit)
            assert outlier.crude == (value > 2 * statistics.median(values))


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ([], []),
        ([10.0], []),
        ([1.0, 10.0], [1]),  # dlrover's rule can never say so of two
        ([1.0, 1.0, 3.0], [2]),
        ([1.0, 1.02], []),  # 2 % is nothing, however alike the others are
        ([1.0] * 99 + [1.02], []),
        ([1.0, 1.5], []),  # the limit itself is allowed
        ([1.0, 2.0, 3.0, 4.0, 5.0], []),  # the others differ as much
        ([1.0, 1.0, 3.0, 3.0], [2, 3]),
        ([1.0, 3.0, 3.0], []),  # who is the odd one out is not said
        ([0.0, 0.0, 1.0], [2]),
    ],
)
def test_small_crowds(values: list[float], slow: list[int]) -> None:
    assert sorted(outliers(values, 1.5)) == slow


def test_two_seconds_and_one_the_crude_rule_says_no() -> None:
    assert not outliers([1.0, 10.0], 1.5)[1].crude
    assert outliers([1.0, 1.0, 10.0], 1.5)[2].crude


def test_twenty_thousand_figures_take_no_time() -> None:
    chance = random.Random(1)
    values = [chance.uniform(0.9, 1.1) * (5 if at % 3 == 0 else 1) for at in range(20_000)]
    began = time.process_time()
    outliers(values, 1.5)
    assert time.process_time() - began < 1.0
