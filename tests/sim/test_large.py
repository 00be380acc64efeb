"""A thousand nodes: what deaths and returns cost in rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from elasticrun.wire.messages import CheckSpec, Order, Probe
from tests.further import cases
from tests.simulator.node import NodeSetup
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

pytestmark = pytest.mark.slow

NODES = 1000
LOST = 17


def setup(index: int) -> NodeSetup:
    spec = structs.replace(DEFAULT_SPEC, min_nodes=NODES * 9 // 10, max_nodes=NODES)
    return NodeSetup(f"n{index:04}", spec)


def spread(world: World, over: float, what: Callable[[int], object]) -> None:
    """Do something to LOST nodes, evenly over so many seconds."""
    for index in range(LOST):
        world.clock.after(over * index / (LOST - 1), lambda index=index: what(index * 31))


@pytest.mark.parametrize("returns_over", cases([0.0, 8.0, 120.0], soaked=[0.0, 120.0]))
def test_seventeen_deaths_and_returns(returns_over: float) -> None:
    world = World(beats=True, beat_interval=10.0)
    world.start_master(setup(0).spec)
    for index in range(NODES):
        world.start_node(setup(index))
    world.run_until(10.0)
    assert len(world.worlds.began) == 1
    spread(world, 0.3, lambda index: world.nodes[f"n{index:04}"].kill())
    world.run_until(40.0)
    after_deaths = len(world.worlds.began)
    assert after_deaths <= 3
    assert master_says(world) == (NODES - LOST, 0)
    spread(world, returns_over, lambda index: world.start_node(setup(index)))
    world.run_until(240.0)
    assert len(world.worlds.began) - after_deaths <= 2
    assert master_says(world) == (NODES, 0)
    assert not world.worlds.faults
    assert len(world.worlds.stepping) == 1


def test_two_bad_nodes_of_a_thousand_are_found_and_the_others_train() -> None:
    """Two passes; and no message that grows with the job, nor more than a few for a node."""
    checks = CheckSpec(network=True)
    told: list[tuple[str, Order]] = []
    world = World(beats=True, beat_interval=10.0, traced=False)
    world.on_order = lambda node, order: told.append((node.name, order))
    spec = structs.replace(setup(0).spec, checks=checks)
    world.start_master(spec)
    world.bench.plant("n0100", "compute")
    world.bench.plant("n0501", "comm")
    for index in range(NODES):
        world.start_node(replace(setup(index), spec=spec))
    world.run_until(15.0)
    status = world.master.job.status()
    assert {one.node for one in status.excluded} == {"n0100", "n0501"}
    assert (status.world_size, len(world.worlds.began)) == (NODES - 2, 1)
    probes = [order for _, order in told if isinstance(order, Probe)]
    assert len(probes) <= NODES + 2 * 4, "the second pass is for those in doubt"
    assert max(order.group_world_size for order in probes) == 2
    assert len(told) <= 9 * NODES


def master_says(world: World) -> tuple[int, int]:
    status = world.master.job.status()
    return status.world_size, status.restart_count


def test_agents_are_told_their_own_place_and_no_counts() -> None:
    """A rendezvous of n nodes costs O(n) messages in all."""
    world = World()
    told: list[object] = []
    world.on_order = lambda node, order: told.append(order)
    world.start_master(setup(0).spec)
    for index in range(NODES):
        world.start_node(setup(index))
    world.run_until(10.0)
    assert NODES <= len(told) <= 5 * NODES  # Welcome, two or three sentences, Start
