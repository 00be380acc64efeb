"""Nodes come: together, late, spread over time, again and again."""

from __future__ import annotations

import re
import threading
import time

import pytest

from tests.faults.team import Team, let_pass, tell
from tests.faults.test_node_loss import keeps_ranks
from tests.harness import LIMIT, World, until_file

pytestmark = pytest.mark.slow


def test_nodes_that_start_together_make_one_world(
    world: World, request: pytest.FixtureRequest
) -> None:
    """2 agents of 1:4: nobody waits for nodes that do not exist, and nobody begins alone."""
    team = Team(world, "1:4")
    began = time.monotonic()
    team.add()
    team.add()
    first = team.log.world_of(2)
    tell(request, "start of 2 agents to the first step of both", first.first - began)
    assert len(team.finish()) == 1


@pytest.mark.parametrize("flags", [(), ("--grow=now",)], ids=["young", "grow-now"])
def test_a_node_joins(world: World, request: pytest.FixtureRequest, flags: tuple[str, ...]) -> None:
    """A young round, or any with `--grow=now`: in at once, the survivors' ranks unchanged, and no
    restart is charged."""
    team = Team(world, "1:3", *flags)
    first = team.start(2)
    began = time.monotonic()
    late = team.add()
    second = team.log.world_of(3, after=first)
    tell(request, "start of a late agent to the first step of 3", second.first - began)
    assert second.restart == 0
    assert keeps_ranks(first, second)
    assert second.nodes[2] == late.name
    assert len(team.finish()) == 2


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_node_that_finds_an_old_round_waits(world: World) -> None:
    """After its first minute a round is not given up for a newcomer before the cool-down is over;
    who waits is told why, and status says until when."""
    team = Team(world, "1:2", "--rdzv-conf=grow_cooldown=90")
    first = team.start(1)
    began = time.monotonic()
    let_pass(62)  # it is not young any more
    late = team.add()
    late.agent.until_text("at the door: let in 90 s after the round began")
    page = team.status()
    assert "at the door" in page["reason"]
    assert page["reason"] or page["detail"]
    team.log.goes_on(first)
    second = team.log.world_of(2, after=first)
    assert second.first - began > 80
    assert keeps_ranks(first, second)
    assert len(team.finish()) == 2


def eight_agents(world: World, request: pytest.FixtureRequest, spread: float) -> None:
    """8 agents of 2:8, one after another: at most two worlds."""
    team = Team(world, "2:8")
    began = time.monotonic()
    for number in range(8):
        let_pass(began + number * spread / 7 - time.monotonic())
        team.add()
    whole = team.log.world_of(8, limit=2 * LIMIT)
    tell(request, "first start to the first step of 8", whole.first - began)
    assert whole.restart == 0
    assert len(team.finish()) <= 2


def test_eight_agents_started_over_ten_seconds(
    world: World, request: pytest.FixtureRequest
) -> None:
    eight_agents(world, request, 10.0)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_eight_agents_started_over_forty_seconds(
    world: World, request: pytest.FixtureRequest
) -> None:
    eight_agents(world, request, 40.0)


def test_a_newcomer_that_comes_and_dies_again_and_again(world: World) -> None:
    """COORDINATION 6: each of its joins could begin last call anew. It cannot keep two others from
    their world, and when it stays away they go on undisturbed."""
    team = Team(world, "2:8", "--rdzv-conf=last_call_timeout=2")
    over, adding = threading.Event(), threading.Lock()

    def come_and_go() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with adding:
                newcomer = team.add(name=f"loop-{number}")
                console = world.scratch / f"console-{len(world.jobs) - 1}.err"
            # it has joined, and is told what it waits for or that it has a place
            until_file(console, lambda text: re.search("last call|at the door|ranks start", text))
            newcomer.kill()

    team.add().agent.until_text("the job's page")
    loop = threading.Thread(target=come_and_go)
    loop.start()
    try:
        with adding:
            team.add(name="n1")
        team.log.until(
            lambda: [life for life in team.log.lives() if {"n0", "n1"} <= set(life.nodes.values())],
            "world with both nodes that stay",
        )
    finally:
        over.set()
        loop.join()
    stay = team.log.world_of(2)
    assert set(stay.nodes.values()) == {"n0", "n1"}
    assert stay.restart == 0
    team.log.goes_on(stay)
    team.finish()
