"""Seventeen nodes of a large job die and return: two rounds for the deaths, two for the returns.

The rule is in `core.rounds.join_window`. A sample runs here; all seeds up to 1,000 nodes, and each
spread with 10,000, are in `make soak`.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
from msgspec.structs import replace

from elasticrun.core.rounds import rendezvous
from tests.further import cases, further
from tests.simulator.node import NodeSetup
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

from .storms import SPREADS, strike, strike_and_return

pytestmark = pytest.mark.slow

SAMPLE = {64: 4, 256: 1}
"""Seeds of each spread, by the size of the job."""


@pytest.mark.parametrize(
    ("nodes", "spread"),
    cases(
        product(SAMPLE, SPREADS),
        kept=[(64, 10.0), (64, 120.0), (256, 0.0)],
        several=True,
    ),
)
def test_two_rounds_for_the_deaths_and_two_for_the_returns(nodes: int, spread: float) -> None:
    for seed in range(SAMPLE[nodes]):
        storm = strike(seed, nodes, spread)
        assert storm.whole
        assert storm.deaths <= 2, f"seed {seed}: {storm}"
        assert storm.returns <= 2, f"seed {seed}: {storm}"


@further("sim/test_large::test_seventeen_deaths_and_returns")
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_and_so_for_a_thousand_nodes(spread: float) -> None:
    storm = strike(1, 1000, spread)
    assert storm.whole
    assert max(storm.deaths, storm.returns) <= 2


@pytest.mark.parametrize("spread", cases(SPREADS, kept=[10.0]))
def test_nodes_that_return_while_others_die(spread: float) -> None:
    for seed in range(3):
        storm = strike_and_return(seed, 64, spread)
        assert storm.whole
        assert storm.deaths <= 4, f"seed {seed}: {storm}"


@pytest.mark.parametrize(("name", "value"), [("STORM_NODES", 10_000), ("STORM_QUIET", 5.0)])
def test_the_bar_can_be_missed(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Without the rule each loss costs a round, and a shorter silence misses some."""
    monkeypatch.setattr(rendezvous, name, value)
    assert strike(0, 64, 120.0).deaths > 2


def test_a_storm_is_on_screen_and_says_until_when() -> None:
    spec = replace(DEFAULT_SPEC, min_nodes=8, max_nodes=20)
    world = World()
    world.start_master(spec)
    for index in range(20):
        world.start_node(NodeSetup(f"n{index}", spec))
    world.run_until(10.0)
    world.nodes["n1"].kill()
    world.run_until(15.0)
    assert len(world.worlds.began) == 2
    world.nodes["n2"].kill()
    world.run_until(16.0)
    status = world.master.job.status()
    sentence = "nodes are lost one after another: the next round waits until no more are lost"
    assert status.reason.startswith(sentence)
    assert "s more" in status.reason
    waiting = [node for node in status.nodes if node.state == "alive"]
    assert all(node.reason.startswith(sentence) for node in waiting)
    assert any(line.endswith(f"< Wait: {sentence}") for line in world.lines)


def test_small_jobs_answer_each_loss_at_once() -> None:
    spec = replace(DEFAULT_SPEC, min_nodes=2, max_nodes=8)
    world = World(beats=True)
    world.start_master(spec)
    for index in range(8):
        world.start_node(NodeSetup(f"n{index}", spec))
    for number, when in enumerate((10.0, 15.0, 20.0)):
        world.run_until(when)
        world.nodes[f"n{number}"].kill()
        world.run_until(when + 1.0)
        assert len(world.worlds.began) == number + 2, "the survivors step within a second"


@pytest.mark.parametrize("first", cases([0, 10, 20, 30], kept=[0]))
def test_eight_agents_started_unevenly_over_forty_seconds(first: int) -> None:
    """Two rounds at most: a further one would restart all who train. Seeds say when they start."""
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        spec = replace(DEFAULT_SPEC, min_nodes=2, max_nodes=8)
        world = World(beats=True)
        world.start_master(spec)
        for index, when in enumerate([0.0, 40.0, *(rng.uniform(0.0, 40.0) for _ in range(6))]):
            world.clock.at(when, partial(world.start_node, NodeSetup(f"n{index}", spec)))
        world.run_until(120.0)
        assert world.master.job.status().world_size == 8, f"seed {seed}"
        assert len(world.worlds.began) <= 2, f"seed {seed}"


@further("test_two_rounds_for_the_deaths_and_two_for_the_returns")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("nodes", "seeds"), [(64, 200), (256, 200), (1000, 40)])
def test_every_seed(nodes: int, seeds: int) -> None:
    for seed in range(seeds):
        storm = strike(seed, nodes, SPREADS[seed % len(SPREADS)])
        assert storm.whole
        assert max(storm.deaths, storm.returns) <= 2, f"seed {seed}: {storm}"
        if nodes < 1000:
            assert strike_and_return(seed, nodes, SPREADS[seed % len(SPREADS)]).deaths <= 4


@further("test_two_rounds_for_the_deaths_and_two_for_the_returns")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spread", SPREADS)
def test_every_spread_with_ten_thousand_nodes(spread: float) -> None:
    """One seed of each, which takes a minute: the rule reads no size above STORM_NODES, and the
    seeds are in `test_every_seed`."""
    storm = strike(0, 10_000, spread)
    assert storm.whole
    assert max(storm.deaths, storm.returns) <= 2, storm
