"""Who is slow while training: by hand, second by second, and by rules that hold for any pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from elasticrun.core.health.speed import PATIENCE, WARM, Slowness, Stragglers
from elasticrun.wire.messages import CheckSpec, Steps
from elasticrun.wire.types import RoundName
from tests.further import examples

ROUND = RoundName(1, 1, "n")
SPEC = CheckSpec(slow_for=30.0)

Own = Callable[[float], float | None]
"""The own part of a step at a time; None: nothing is reported then."""


def steps(own: float, seconds: float, number: int = 0, *, waited: float | None = None) -> Steps:
    """A report that covers about a second."""
    count = max(1, round(1.0 / seconds))
    rest = max(0.0, seconds - own) if waited is None else waited
    return Steps(ROUND, number, count, seconds, own, rest)


class Training:
    """A round whose nodes report in turn, and what came of it: (time, suspicion)."""

    def __init__(self, nodes: Iterable[str], spec: CheckSpec = SPEC) -> None:
        self.watch = Stragglers(spec)
        self.nodes = tuple(nodes)
        self.watch.new_round(self.nodes)
        self.now = 0.0
        self.found: list[tuple[float, Slowness]] = []

    def report(self, node: str, said: Steps) -> None:
        slowness = self.watch.on_steps(node, said, self.now)
        if slowness is not None:
            self.found.append((self.now, slowness))

    def run(self, until: float, owns: Mapping[str, Own | float], every: float = 1.0) -> None:
        """Every node reports each `every` seconds; a step takes as long as the slowest node's own
        part and 0.01 s of transfer."""
        while self.now < until:
            values = {node: own(self.now) if callable(own) else own for node, own in owns.items()}
            told = {node: own for node, own in values.items() if own is not None}
            seconds = max(told.values(), default=0.0) + 0.01
            for place, (node, own) in enumerate(told.items()):
                self.now += 0.001 * place
                self.report(node, steps(own, seconds, int(self.now)))
            self.now += every

    @property
    def names(self) -> list[str]:
        """Who was suspected, each node once."""
        return list(dict.fromkeys(slowness.node for _, slowness in self.found))


def test_a_node_that_stays_slow_is_suspected_again_and_again() -> None:
    """Whether it can be spared may have changed meanwhile."""
    training = Training(("n0", "n1", "n2", "n3"))
    training.run(140.0, {"n0": 0.1, "n1": 0.1, "n2": 0.31, "n3": 0.11})
    whens = [when for when, _ in training.found]
    assert len(whens) == 4
    assert all(30.0 <= later - sooner <= 32.0 for sooner, later in pairwise(whens))
    assert training.names == ["n2"]


def writer(now: float) -> float:
    """The step in which this node writes a checkpoint for a minute is its own part alone."""
    return 6.0 if int(now) % 10 == 0 else 0.1


@pytest.mark.parametrize(
    ("owns", "until", "slow", "spec"),
    [
        ([0.1, 0.3], 60.0, [1], SPEC),
        ([0.1, 0.3, 0.1], 60.0, [1], SPEC),
        ([0.1, 0.3, 0.1, 0.1, 0.35, 0.1], 60.0, [1, 4], SPEC),
        ([5.0], 100.0, [], SPEC),
        ([5.0, None, None], 100.0, [], SPEC),
        ([0.1, 0.102, 0.1], 200.0, [], SPEC),
        ([0.1, 0.12, 0.1], 200.0, [], SPEC),
        ([0.1, 0.145, 0.1], 200.0, [], SPEC),
        ([0.05, 0.1, 0.15, 0.2, 0.25], 200.0, [], SPEC),  # the spread of the others counts
        ([writer, 0.1, 0.1], 400.0, [], SPEC),
        ([0.1, 0.3, 0.1], 60.0, [], CheckSpec(slow_ratio=4.0)),
        ([0.1, 0.13, 0.1], 60.0, [1], CheckSpec(slow_ratio=1.1)),
        # the command line allows no ratio below 1; the wire does
        ([0.1, 0.3], 20.0, [1], CheckSpec(slow_ratio=0.0, slow_for=1.0)),
    ],
    ids=[
        *("two", "three", "two-of-six", "alone", "only-one-reports", "2%", "20%", "45%"),
        *("stages-of-a-pipeline", "writes-checkpoints", "ratio-4", "ratio-1.1", "ratio-0"),
    ],
)
def test_who_is_slow(
    owns: list[Own | float | None], until: float, slow: list[int], spec: CheckSpec
) -> None:
    training = Training((f"n{at}" for at in range(len(owns))), spec)
    told = {f"n{at}": own for at, own in enumerate(owns) if own is not None}
    training.run(until, told)
    assert training.names == [f"n{at}" for at in slow]


def test_long_steps_are_judged_by_the_report() -> None:
    """Steps of 40 s: a suspicion takes JUDGEMENTS reports after those of the warm-up."""
    training = Training(("n0", "n1", "n2"))
    training.run(40.0 * 10, {"n0": 12.0, "n1": 39.0, "n2": 12.0}, every=40.0)
    when, slowness = training.found[0]
    assert slowness.node == "n1"
    assert when <= 40.0 * 6


def test_of_two_nodes_the_evidence_names_the_other_in_the_singular() -> None:
    training = Training(("n0", "n1"))
    training.run(60.0, {"n0": 0.3, "n1": 0.1})
    assert "the other's 0.1 s, for " in training.found[0][1].evidence


def test_a_break_begins_the_count_anew() -> None:
    def fickle(now: float) -> float:
        return 0.1 if 20.0 <= now < 26.0 else 0.3

    training = Training(("n0", "n1", "n2"))
    training.run(50.0, {"n0": 0.1, "n1": fickle, "n2": 0.1})
    assert training.found == []
    training.run(70.0, {"n0": 0.1, "n1": fickle, "n2": 0.1})
    assert training.names == ["n1"]
    assert training.found[0][0] > 55.0


def test_a_pause_of_all_convicts_nobody() -> None:
    """All are silent for ten minutes; the first reports after it come with the pause in them."""
    training = Training(("n0", "n1", "n2"))
    training.run(20.0, {"n0": 0.1, "n1": 0.1, "n2": 0.1})
    training.now += 600.0
    for node in training.nodes:
        training.report(node, Steps(ROUND, 21, 2, 300.0, 299.9, 0.1))
        training.now += 0.5
    training.run(training.now + 60.0, {"n0": 0.1, "n1": 0.1, "n2": 0.1})
    assert training.found == []


def test_a_pause_is_no_part_of_the_time_for_which_a_node_was_slow() -> None:
    training = Training(("n0", "n1", "n2"))
    owns = {"n0": 0.1, "n1": 0.3, "n2": 0.1}
    training.run(20.0, owns)
    training.now += 60.0
    resumed = training.now
    training.run(resumed + 25.0, owns)
    assert training.found == []
    training.run(resumed + 40.0, owns)
    assert training.names == ["n1"]


def test_a_node_that_stops_reporting_hinders_nobody_and_is_not_convicted() -> None:
    def silent(now: float) -> float | None:
        return 0.3 if now < 20.0 else None

    training = Training(("n0", "n1", "n2", "n3"))
    training.run(120.0, {"n0": 0.1, "n1": silent, "n2": 0.1, "n3": 0.1})
    assert training.found == []
    training.run(240.0, {"n0": 0.1, "n1": silent, "n2": 0.3, "n3": 0.1})
    assert training.names == ["n2"]


def test_an_unknown_own_part_never_convicts_and_is_no_measure_for_others() -> None:
    training = Training(("n0", "n1", "n2"))
    while training.now < 100.0:
        training.now += 1.0
        training.report("n0", steps(0.1, 0.3))
        training.report("n1", Steps(ROUND, 1, 3, 0.3, 0.0, 0.0))
        training.report("n2", steps(0.11, 0.3))
    assert training.found == []
    assert training.watch.health("n1") == "step 1: 0.3 s a step"


def test_a_small_own_part_of_a_step_that_is_all_network_costs_nothing() -> None:
    """Twice the own part of the others, and a step of which 5 % is own: nothing would be won."""
    training = Training(("n0", "n1", "n2"))
    while training.now < 100.0:
        training.now += 1.0
        for node, own in (("n0", 0.02), ("n1", 0.04), ("n2", 0.02)):
            training.report(node, steps(own, 0.5))
    assert training.found == []


def test_a_new_round_forgets_and_may_suspect_anew() -> None:
    training = Training(("n0", "n1"))
    training.run(25.0, {"n0": 0.1, "n1": 0.3})
    training.watch.new_round(training.nodes)
    assert training.watch.health("n1") == ""
    training.run(50.0, {"n0": 0.1, "n1": 0.3})
    assert training.found == []
    training.run(70.0, {"n0": 0.1, "n1": 0.3})
    training.watch.new_round(training.nodes)
    training.run(120.0, {"n0": 0.1, "n1": 0.3})
    assert [slowness.node for _, slowness in training.found] == ["n1", "n1"]


def test_who_has_gone_is_neither_told_of_nor_waited_for() -> None:
    training = Training(("n0", "n1", "n2"))
    training.run(20.0, {"n0": 0.1, "n1": 0.3, "n2": 0.1})
    training.watch.node_gone("n1")
    training.report("n1", steps(0.3, 0.31))
    assert training.watch.health("n1") == ""
    training.run(100.0, {"n0": 0.1, "n2": 0.3})
    assert training.names == ["n2"]


def test_what_the_status_page_says() -> None:
    training = Training(("n0", "n1"))
    assert training.watch.health("n0") == ""
    assert training.watch.health("stranger") == ""
    training.now = 7.0
    training.report("n0", Steps(ROUND, 120, 3, 0.3, 0.1, 0.18))
    assert training.watch.health("n0") == (
        "step 120: 0.3 s a step, of which 0.1 s own work, waits 60%"
    )


def test_a_short_slow_for_still_needs_several_judgements() -> None:
    training = Training(("n0", "n1"), CheckSpec(slow_for=0.1))
    training.run(20.0, {"n0": 0.1, "n1": 0.3})
    assert training.names == ["n1"]
    assert training.found[0][0] >= WARM - 1 + 2


def test_reports_that_come_spread_over_a_long_beat_are_all_compared() -> None:
    """A large job beats every 10 s, and each node at another moment of it."""
    training = Training(f"n{number}" for number in range(20))
    said = {node: Steps(ROUND, 1, 25, 0.4, 0.1, 0.3) for node in training.nodes}
    said["n7"] = Steps(ROUND, 1, 25, 0.4, 0.38, 0.02)
    while training.now < 200.0:
        for node in training.nodes:
            training.now += 0.5
            training.report(node, said[node])
    assert training.names == ["n7"]


@pytest.mark.slow
def test_ten_thousand_nodes_cost_little() -> None:
    training = Training(f"n{number}" for number in range(10_000))
    began = time.process_time()
    for _ in range(6):
        for node in training.nodes:
            training.now += 0.001
            training.report(node, Steps(ROUND, 1, 25, 0.4, 0.1, 0.3))
    spent = time.process_time() - began
    assert spent < 10.0, f"60,000 reports took {spent:.1f} s of CPU"


Noise = st.floats(min_value=0.8, max_value=1.2)


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(2, 8), st.data())
def test_noise_of_a_fifth_convicts_nobody(count: int, data: st.DataObject) -> None:
    training = Training((f"n{number}" for number in range(count)), CheckSpec(slow_for=5.0))
    for _ in range(25):
        training.now += 1.0
        for node in training.nodes:
            own = 0.2 * data.draw(Noise)
            training.report(node, steps(own, 0.3))
    assert training.found == []


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n0", "n1", "n2", "n3", "stranger"]),
            st.sampled_from(["report", "unknown", "gone"]),
            st.floats(0.001, 100.0),  # own part
            st.floats(0.0, 100.0),  # waiting
            st.floats(0.0, 2.0 * PATIENCE),  # time that passes
        ),
        max_size=120,
    )
)
def test_whatever_is_reported_only_members_are_suspected_and_not_too_often(
    events: list[tuple[str, str, float, float, float]],
) -> None:
    training = Training(("n0", "n1", "n2", "n3"), CheckSpec(slow_for=1.0))
    gone: set[str] = set()
    for node, what, own, waited, passed in events:
        training.now += passed
        before = len(training.found)
        if what == "gone":
            training.watch.node_gone(node)
            gone.add(node)
        else:
            known = own if what == "report" else 0.0
            training.report(node, Steps(ROUND, 1, 1, own + waited, known, waited))
        for _, slowness in training.found[before:]:
            assert slowness.node not in gone
            assert slowness.node in training.nodes
    last: dict[str, float] = {}
    for when, slowness in training.found:
        assert when - last.get(slowness.node, -1.0) >= 1.0, "once in a slow_for"
        last[slowness.node] = when
