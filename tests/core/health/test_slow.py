"""Slow nodes in the network check: a figure against the others (the rule is compared with the plain
formula), and that what changes between two passes neither hides nor makes a slow one."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from benchmarks.netcheck_faults import Fault, Machines, Outcome, check, drive, new, restless
from elasticrun.core.health.groups import REFERENCE_NODES, ProbeGroup
from elasticrun.core.health.netcheck import NetCheck
from elasticrun.core.health.speed import MAD_TO_DEVIATION, SPREADS, outliers
from elasticrun.wire.messages import Probed, Transfer

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


def timed(passes: Sequence[Mapping[str, float]], netcheck: NetCheck | None = None) -> Outcome:
    """A check of the nodes of the first pass, whose matmuls take so many milliseconds; of a job
    that has seen nobody, if no other is given."""

    class Timed(Machines):
        def _compute(self, node: str) -> float:
            return passes[outcome.passes - 1][node] / 1e3

    outcome = Outcome()
    return drive(netcheck or new(), list(passes[0]), Timed(()), 0.0, outcome)


class Unequal(Machines):
    """Whose nodes time the very same all_reduce differently, in milliseconds; a pair with n2 takes
    a hundred more."""

    def __init__(self, figures: Mapping[str, float]) -> None:
        super().__init__(())
        self._figures = figures

    def probe(self, group: ProbeGroup) -> dict[str, Probed]:
        more = 100.0 if "n2" in group.nodes else 0.0

        def differing(node: str, said: Probed) -> Probed:
            seconds = (self._figures[node] + more) / 1e3
            return replace(said, transfers=tuple(Transfer(t.size, seconds) for t in said.transfers))

        return {node: differing(node, said) for node, said in super().probe(group).items()}


def test_a_slow_node_cannot_hide_behind_what_has_changed_between_two_passes() -> None:
    """Figures of three agents that share two cores: all are faster in the second pass. n0 of the
    first pass and n1 of the second differ, but not because the nodes do."""
    found = timed([{"n0": 32.2, "n1": 32.1, "n2": 186.1}, {"n0": 15.0, "n1": 14.7, "n2": 43.6}])
    assert found.reasons == {
        "n2": "n2 is slow, measured twice: compute 43.6 ms per matmul, the others 14.8 ms (median "
        "of 2), limit 22.3 ms; 2 x median would agree"
    }
    assert [sorted(group.nodes) for group in found.groups[1]] == [["n1", "n2"], ["n0"]]


def test_what_slows_all_down_in_the_second_pass_makes_nobody_slow() -> None:
    """Nor does what slowed one down in the first and is over."""
    assert not timed([{"n0": 10, "n1": 10, "n2": 30}, {"n0": 40, "n1": 40, "n2": 40}]).slow
    assert not timed([{"n0": 10, "n1": 10, "n2": 30}, {"n0": 2, "n1": 2, "n2": 2}]).slow


def test_a_slow_newcomer_cannot_hide_behind_what_has_changed_since_an_earlier_check() -> None:
    """n0 is known from the check before the newcomer came and is measured in the second pass only,
    when all that share the machine take four times as long."""
    netcheck = new()
    assert not timed([{"n0": 3.4, "n1": 3.3}], netcheck).slow
    found = timed(
        [{"n0": 3.4, "n1": 3.3, "n2": 98.0}, {"n0": 13.6, "n1": 13.2, "n2": 98.0}], netcheck
    )
    assert found.slow == {"n2"}, found.summary
    assert [sorted(group.nodes) for group in found.groups[1]] == [["n1", "n2"], ["n0"]]


def test_a_slow_newcomer_cannot_hide_behind_the_passes_of_an_earlier_check() -> None:
    """n1 was measured last in a second pass, in which all were four times as slow."""
    netcheck = new()
    slow = timed(
        [{"n0": 3.4, "n1": 3.3, "n2": 98.0}, {"n0": 13.6, "n1": 13.2, "n2": 400.0}], netcheck
    )
    assert slow.slow == {"n2"}
    netcheck.lost("n2", "it was left out", 0.0)
    found = timed([{"n0": 3.4, "n1": 3.3, "n3": 20.0}] * 2, netcheck)
    assert found.slow == {"n3"}, found.summary


def test_a_group_has_one_figure_of_its_all_reduce() -> None:
    """Who begins to time it late has the right one: the others have waited. A spread of the
    figures of one group is no spread of the nodes, behind which a slow one could hide."""
    netcheck = new()
    first = drive(netcheck, ["n0", "n1"], Unequal({"n0": 30.0, "n1": 4.0}), 0.0)
    assert not first.slow
    assert all("4 ms" in netcheck.health(node) for node in ("n0", "n1"))
    figures = Unequal({"n0": 30.0, "n1": 4.0, "n2": 0.0})
    found = drive(netcheck, ["n0", "n1", "n2"], figures, 0.0)
    assert found.slow == {"n2"}, found.summary


def test_of_two_nodes_both_are_measured_again() -> None:
    found = timed([{"n0": 30, "n1": 90}, {"n0": 10, "n1": 31}])
    assert found.slow == {"n1"}
    assert [group.nodes for group in found.groups[1]] == [("n1",), ("n0",)]
    assert not timed([{"n0": 30, "n1": 90}, {"n0": 30, "n1": 31}]).slow


def test_beside_a_slow_node_of_many_only_some_are_measured_again() -> None:
    """From the middle: the fastest were so by chance too."""
    first = {f"n{at}": 10.0 + at / 10 for at in range(20)} | {"n20": 40.0}
    found = timed([first, first])
    assert found.slow == {"n20"}
    again = [node for group in found.groups[1] for node in group.nodes]
    assert len(again) == 1 + REFERENCE_NODES
    assert {"n8", "n9", "n10", "n11"} <= set(again)


def test_a_doubted_node_that_was_held_up_is_judged_once_it_works() -> None:
    """Its partner of the first pass fails by itself, so that it could not finish its probe."""
    faults = (Fault("slow-compute", "n2"), Fault("compute", "n3"))
    outcome = check(8, Machines(faults))
    assert (outcome.slow, outcome.failed, outcome.passes) == ({"n2"}, {"n3"}, 2)


def test_restless_machines() -> None:
    """What varies between passes hides few slow nodes, and makes few others slow."""
    for count in (3, 4, 8):
        found, wronged = restless(count, 200)
        assert found >= 190
        assert wronged <= 20
