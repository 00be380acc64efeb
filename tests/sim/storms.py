"""Events that take seventeen nodes of a large job, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from elasticrun.config import GROW_COOLDOWN
from tests.simulator.node import NodeSetup
from tests.simulator.ranks import Rank, Worlds
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

LOST = 17
SPREADS = (0.0, 1.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds over which the deaths are spread, and the returns."""

BEGIN = 10.0
"""By then the first round runs."""


@dataclass(frozen=True, slots=True)
class Storm:
    deaths: int  # rounds that the deaths made
    returns: int  # rounds that the returns made
    waited: float  # seconds from the last death to the round that the deaths left
    whole: bool  # all nodes are in one round at the end


class Dated(Worlds):
    """`Worlds` that notes when each round began to step."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.whens: list[float] = []

    def born(self, rank: Rank) -> None:
        super().born(rank)
        if len(self.began) > len(self.whens):
            self.whens.append(self._world.clock.now)


def _world(nodes: int) -> World:
    spec = replace(DEFAULT_SPEC, min_nodes=nodes - 2 * LOST, max_nodes=nodes)
    world = World(beats=True, beat_interval=10.0, traced=False)
    world.worlds = Dated(world)
    world.start_master(spec)
    for index in range(nodes):
        world.start_node(NodeSetup(f"n{index}", spec))
    world.run_until(BEGIN)
    assert len(world.worlds.began) == 1
    return world


def _kill(world: World, name: str, *, noticed: bool) -> None:
    node = world.nodes[name]
    node.kill() if noticed else node.vanish()


def _whole(world: World, nodes: int) -> bool:
    assert not world.worlds.faults, world.worlds.faults
    status = world.master.job.status()
    assert status.restart_count == 0, "a change of membership costs none of the budget"
    return status.world_size == nodes and len(world.worlds.stepping) == 1


def strike(seed: int, nodes: int, spread: float) -> Storm:
    rng = random.Random(f"{seed} {nodes} {spread}")
    world = _world(nodes)
    victims = [f"n{index}" for index in rng.sample(range(nodes), LOST)]
    whens = sorted(BEGIN + rng.uniform(0.0, spread) for _ in victims)
    for name, when in zip(victims, whens, strict=True):
        noticed = rng.random() < 0.5
        world.clock.at(when, partial(_kill, world, name, noticed=noticed))
    world.run_until(whens[-1] + 12.0)  # by then the last silence was noticed
    while not world.worlds.stepping or world.clock.now < world.worlds.whens[-1] + 20.0:
        world.run_until(world.clock.now + 5.0)
    deaths = len(world.worlds.began) - 1
    assert _whole(world, nodes - LOST)
    waited = world.worlds.whens[-1] - whens[-1]
    again = world.clock.now
    for name in victims:
        setup = NodeSetup(name, world.nodes[name].setup.spec)
        world.clock.at(again + rng.uniform(0.0, spread), partial(world.start_node, setup))
    world.run_until(again + spread + 90.0)
    if not _whole(world, nodes):  # the last ones met a round that was not young any more
        world.run_until(world.clock.now + GROW_COOLDOWN)
    returns = len(world.worlds.began) - 1 - deaths
    return Storm(deaths, returns, waited, _whole(world, nodes))


def strike_and_return(seed: int, nodes: int, spread: float) -> Storm:
    """Each node comes back by itself while others still die; all rounds count as `deaths`."""
    rng = random.Random(f"mixed {seed} {nodes} {spread}")
    world = _world(nodes)
    for index in rng.sample(range(nodes), LOST):
        name, noticed = f"n{index}", rng.random() < 0.5
        setup = world.nodes[name].setup
        when = BEGIN + rng.uniform(0.0, spread)
        world.clock.at(when, partial(_kill, world, name, noticed=noticed))
        world.clock.at(when + rng.uniform(15.0, 60.0), partial(world.start_node, setup))
    world.run_until(BEGIN + spread + 180.0)
    if not _whole(world, nodes):
        world.run_until(world.clock.now + GROW_COOLDOWN)
    return Storm(len(world.worlds.began) - 1, 0, 0.0, _whole(world, nodes))
