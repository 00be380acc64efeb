"""What status says of nodes that wait, or that others wait for. Most reasons stand in scripts/."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.core.events import Tick
from elasticrun.wire.messages import JobSpec, JobStatus, Wait
from tests.simulator.node import NodeSetup
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

SPEC = replace(DEFAULT_SPEC, min_nodes=1, max_nodes=3, grow_cooldown=300.0)


def world_of(*names: str, spec: JobSpec = SPEC, ping_timeout: float = 5.0) -> World:
    world = World(beats=True, ping_timeout=ping_timeout)
    world.start_master(spec)
    for name in names:
        world.start_node(NodeSetup(name, spec))
    world.run_until(5.0)
    return world


def status(world: World, when: float) -> JobStatus:
    world.run_until(when)
    world.master.step(Tick())
    return world.master.job.status()


def reason_of(world: World, name: str, when: float) -> str:
    return next(node.reason for node in status(world, when).nodes if node.node == name)


def test_an_agent_that_says_nothing_is_shown_as_sluggish_and_given_up_a_minute_later() -> None:
    world = world_of("a", "b", ping_timeout=1e6)  # its C threads answer the pings
    world.nodes["b"].freeze()
    assert reason_of(world, "b", 8.0) == ""
    assert reason_of(world, "b", 20.0) == (
        "sluggish: it is connected, but its agent has sent nothing for 15 s (given up after 60 s)"
    )
    assert reason_of(world, "a", 20.0) == ""
    assert len(world.worlds.stepping) == 1, "its ranks and the others' train on"
    world.nodes["b"].thaw()
    assert reason_of(world, "b", 32.0) == ""
    world.nodes["b"].freeze()
    assert "its agent sent nothing for 60 s" in reason_of(world, "b", 100.0)


def test_ranks_that_are_not_started_are_shown() -> None:
    world = World(beats=True)
    world.start_master(SPEC)
    world.start_node(NodeSetup("a", SPEC, spawn=60.0))
    assert reason_of(world, "a", 5.0) == ""
    began = world.master.job.status()  # type: ignore[union-attr]
    assert began.phase == "running"
    assert reason_of(world, "a", 32.0).startswith("its ranks have not all been started yet, 3")


def test_who_waits_at_the_door_is_told_for_how_long() -> None:
    world = world_of("a")
    world.run_until(100.0)
    world.start_node(NodeSetup("b", SPEC))
    first, later = status(world, 110.0), status(world, 200.0)
    assert first.reason.endswith("(1 ready, 1 needed, 3 at most; at most 191 s more)")
    assert later.reason.endswith("at most 101 s more)")
    assert reason_of(world, "b", 210.0).endswith("or when a node is lost; at most 91 s more")


def test_a_spare_waits_without_end_and_says_what_for() -> None:
    world = world_of("a", "b", "c")
    world.start_node(NodeSetup("d", SPEC))
    assert reason_of(world, "d", 20.0) == (
        "spare: the round is full, with 3 nodes; replaces a lost node"
    )


def test_the_end_of_somebody_elses_bar_is_not_the_end_of_this_wait() -> None:
    """A node is barred for two minutes while a spare waits for ever."""
    spec = replace(SPEC, min_nodes=2, max_nodes=2, max_restarts=9, restart_backoff=0.0)
    world = world_of("a", "b", spec=spec)
    for name in ("c", "d"):
        world.start_node(NodeSetup(name, spec))
    for when in (10.0, 15.0, 20.0):
        world.run_until(when)
        node = world.nodes["b"]
        node.end_rank(node.ranks[0], 1, "boom")
    seen = status(world, 30.0)
    assert [node.activity for node in seen.nodes] == [
        "running",
        "at-the-door",
        "running",
        "at-the-door",
    ]
    assert "more" not in seen.reason
    assert "may rejoin in" in reason_of(world, "b", 30.0)


@pytest.mark.parametrize(
    ("needed", "counts"), [(64, list(range(1, 64))), (65, [1, 2, 6, 14, 30, 62, 64])]
)
def test_who_joins_is_counted_at_once_in_a_small_job_and_now_and_then_in_a_large_one(
    needed: int, counts: list[int]
) -> None:
    """Else n nodes would be sent n sentences each. Where a node comes every second, the first one
    of a large job hears of it after 2 s, after 4 more, and so on; of the last one too, within a
    minute."""
    spec = replace(SPEC, min_nodes=needed, max_nodes=needed)
    told: list[str] = []
    world = World(beats=True)
    world.on_order = lambda node, order: (
        told.append(order.reason) if node.name == "n0" and isinstance(order, Wait) else None
    )
    world.start_master(spec)
    for index in range(needed - 1):  # the last one stays away
        world.run_until(100.0 + index)
        world.start_node(NodeSetup(f"n{index}", spec))
    world.run_until(100.0 + needed + 60.0)
    assert told == [f"waiting for nodes: {count} of {needed} nodes" for count in counts]
