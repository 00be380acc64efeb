"""A node is lost, falls silent, comes back: the others go on, and never two worlds at a time."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.steps import Life
from tests.faults.team import QUICK, Team, frozen, tell
from tests.harness import World, await_exit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_kill_9_of_an_agent_and_its_ranks(
    world: World, request: pytest.FixtureRequest, lost: int
) -> None:
    """Each node in turn, the one that started the master too: the master outlives it. No restart
    is left, and none is needed (COORDINATION 11 and 12)."""
    team = Team(world, "1:3")
    first = team.start(3)
    victim = team.nodes[lost]
    assert team.nodes[0].hosts_master()
    began = victim.kill()
    second = team.log.world_of(2, after=first)
    tell(request, "kill -9 to the survivors' first step", second.first - began)
    assert second.restart == 0
    assert set(second.nodes.values()) == {node.name for node in team.nodes} - {victim.name}
    assert len(team.finish(but=(victim,))) == 2


def test_kill_9_of_an_agent_alone(world: World) -> None:
    """Its ranks are gone with it within moments, and they were the fence (law 9)."""
    team = Team(world, "1:2")
    first = team.start(2)
    victim = team.nodes[1]
    victim.agent.signal(signal.SIGKILL)
    assert not await_exit([first.pids[1]], 10)
    second = team.log.world_of(1, after=first)
    assert second.restart == 0
    team.finish(but=(victim,))


def test_a_silent_node(world: World, request: pytest.FixtureRequest) -> None:
    """Every process of a node stands still: no FIN, no answer, and the default times. The others
    go on without it. When it wakes, its ranks of the old round end, and it joins anew."""
    team = Team(world, "2:3", "--grow=now")
    first = team.start(3)
    silent = team.node_of(first, 2)
    with frozen(team, silent) as began:
        second = team.log.world_of(2, after=first)
        tell(request, "silence to the survivors' first step", second.first - began)
        assert second.restart == 0
        assert keeps_ranks(first, second)
    assert not await_exit([first.pids[2]])
    third = team.log.world_of(3, after=second)
    assert third.restart == 0
    assert keeps_ranks(second, third)
    assert third.nodes[2] == silent.name
    assert len(team.finish()) == 3


def test_an_agent_that_is_stopped_while_its_ranks_run(world: World) -> None:
    """SIGSTOP of the agent alone: nobody hears it, so the node is lost, although its ranks
    compute on until their peers go. It comes back when it is woken."""
    team = Team(world, "1:2", QUICK, "--grow=now")
    first = team.start(2)
    stopped = team.nodes[1]
    team.freeze_agent(stopped)
    second = team.log.world_of(1, after=first)
    assert second.nodes[0] == team.nodes[0].name
    assert second.restart == 0
    stopped.agent.signal(signal.SIGCONT)
    third = team.log.world_of(2, after=second)
    assert keeps_ranks(second, third)
    team.finish()


def test_no_world_beside_ranks_that_nobody_can_stop(world: World) -> None:
    """COORDINATION 1 (c): the only node of the round has its agent stopped, and its rank computes
    on. Another node waits, with the reason, until the fork server has ended that rank by itself;
    that is before the wait is over."""
    conf = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2,master_lost_timeout=3"
    team = Team(world, "1:2", f"{conf},is_host=0", "--restart-grace=1", "--grow=now")
    master = team.master(conf, "--restart-grace=1", "--grow=now")
    alone = team.add()
    first = team.log.world_of(1)
    alone.agent.signal(signal.SIGSTOP)
    other = team.add()
    other.agent.until_text("no node of the last round can be heard")
    assert not await_exit([first.pids[0]])
    second = team.log.world_of(1, after=first)
    assert second.nodes[0] == other.name
    alone.agent.signal(signal.SIGCONT)
    both = team.log.world_of(2, after=second)
    assert both.restart == 0
    team.finish()
    assert master.wait() == 0


def test_below_min_ends_with_a_code_of_its_own(world: World) -> None:
    """Survivors wait with the reason on screen until `join_timeout`, and end with a sentence."""
    team = Team(world, "2:3", "--rdzv-conf=last_call_timeout=1,join_timeout=15")
    team.start(2)
    team.nodes[1].kill()
    survivor = team.nodes[0].agent
    survivor.until_text("waiting for nodes: 2 must join, because node n1 is dead")
    assert survivor.wait() == 76
    assert "fewer than 2 nodes for 15 s" in survivor.stderr
    assert len(team.check()) == 1


def test_a_replacement_for_a_node_below_min(world: World) -> None:
    """The wait is on screen, and ends at once when another node comes."""
    team = Team(world, "2", "--max-restarts=1", "--rdzv-conf=last_call_timeout=1")
    first = team.start(2)
    team.nodes[1].kill()
    team.nodes[0].agent.until_text("waiting for nodes: 2 must join")
    newcomer = team.add()
    second = team.log.world_of(2, after=first)
    assert second.nodes == {0: "n0", 1: newcomer.name}
    assert second.restart == 0
    team.finish(but=(team.nodes[1],))


def test_a_spare_takes_the_place_of_a_lost_node_at_once(
    world: World, request: pytest.FixtureRequest
) -> None:
    team = Team(world, "2", "--max-restarts=1")
    first = team.start(2)
    spare = team.add()
    spare.agent.until_text("spare: the round is full, with 2 nodes")
    began = team.nodes[1].kill()
    second = team.log.world_of(2, after=first)
    tell(request, "kill -9 to the first step with the spare", second.first - began)
    assert second.nodes == {0: "n0", 1: spare.name}
    assert second.restart == 0
    team.finish(but=(team.nodes[1],))


def test_worlds_are_multiples_of_the_node_unit(world: World) -> None:
    """One of four is lost, in units of two: two train and one is a spare, until a fourth comes."""
    team = Team(world, "2:4", "--node-unit=2", "--grow=now")
    first = team.start(4)
    team.nodes[1].kill()
    second = team.log.world_of(2, after=first)
    assert second.restart == 0
    (spare,) = {"n0", "n2", "n3"} - set(second.nodes.values())
    next(node for node in team.nodes if node.name == spare).agent.until_text("spare: nodes are")
    team.add()
    third = team.log.world_of(4, after=second)
    assert keeps_ranks(second, third)
    sizes = [life.size for life in team.finish(but=(team.nodes[1],))]
    assert sizes == [4, 2, 4]


def test_node_ranks_that_the_user_gives_are_respected(world: World) -> None:
    """Over a loss and a return as well."""
    team = Team(world, "2:3", "--grow=now")
    for rank in (2, 0, 1):
        team.add(f"--node-rank={rank}")
    first = team.log.world_of(3)
    assert first.nodes == {0: "n1", 1: "n2", 2: "n0"}
    team.nodes[2].kill()  # node rank 1
    second = team.log.world_of(2, after=first)
    assert second.nodes == {0: "n1", 1: "n0"}
    team.add("--node-rank=1", name="n2")
    third = team.log.world_of(3, after=second)
    assert third.nodes == first.nodes
    team.finish(but=(team.nodes[2],))


def test_a_fixed_job_without_restarts_ends_at_once(world: World) -> None:
    """`--nnodes=3 --max-restarts=0`: as under torchrun, there is nothing to wait for."""
    team = Team(world, "3", "--rdzv-conf=join_timeout=600")
    team.start(3)
    began = team.nodes[1].kill()
    assert [team.nodes[0].agent.wait(), team.nodes[2].agent.wait()] == [1, 1]
    assert time.monotonic() - began < 600  # it did not wait for a replacement
    for node in (team.nodes[0], team.nodes[2]):
        assert "n1" in node.agent.stderr


def keeps_ranks(before: Life, after: Life) -> bool:
    """Whether every node that is in both worlds has the same group rank in both, where the later
    one has that rank at all."""
    places = {name: rank for rank, name in before.nodes.items() if rank < len(after.nodes)}
    return all(places.get(name, rank) == rank for rank, name in after.nodes.items())
