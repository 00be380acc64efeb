"""Ranks and agents of the past meet nobody of the present."""

from __future__ import annotations

import errno
import signal
import socket

import pytest

from tests.counting import QUICK, times
from tests.faults.team import Team, frozen
from tests.further import further
from tests.harness import World, await_exit, is_alive

pytestmark = pytest.mark.slow


def test_the_store_of_an_old_round(world: World) -> None:
    """A zombie that dials the address it knows meets nobody, and no other store is ever given that
    port while it may dial it: the agent keeps it bound, without listening."""
    team = Team(world, "1:3", QUICK)
    first = team.start(3)
    old = team.store(first)
    host, _, port = old.rpartition(":")
    zombie = first.pids[2]  # not of the node that serves the store
    stood_still = team.node_of(first, 2)
    with frozen(team, stood_still):
        second = team.world_of(2, after=first)
        assert is_alive(zombie)  # a zombie of the old round, and it has not been reaped
        assert team.store(second) != old
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=240).close()
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind((host, int(port)))
        assert refused.value.errno == errno.EADDRINUSE
    assert not await_exit([zombie])
    # and ends with the job, as the master says (whose words n0 passes on); what the agent itself
    # says depends on whether it sees first that its stream has gone or that it was silent
    team.nodes[0].agent.until_text(f"node {stood_still.name} is heard again")
    team.finish()


@further("test_an_agent_that_was_replaced_while_it_stood_still")
def test_a_new_agent_of_the_same_node(world: World) -> None:
    """kill -9 of an agent; another of the same node id comes before anybody has missed it. The
    node keeps its rank, and its death costs no restart."""
    team = Team(world, "2", "--max-restarts=1")
    first = team.start(2)
    old = team.nodes[1]
    old.agent.signal(signal.SIGKILL)
    team.add(number=1)
    second = team.world_of(2, after=first)
    assert second.nodes == first.nodes
    assert second.restarts == 0
    assert not await_exit([team.pid_of(first, 1)])
    assert len(team.finish(but=(old,))) == 2


def test_an_agent_that_was_replaced_while_it_stood_still(world: World) -> None:
    """Its successor holds the node's place; when it wakes it is told so, stops its ranks and ends
    with a code of its own, instead of fighting. While it was awake, a twin was told who holds it,
    and the job went on."""
    team = Team(world, "2", QUICK, "--max-restarts=1")
    first = team.start(2)
    old = team.nodes[1]
    twin = team.add(number=1)
    assert twin.agent.wait() == 1
    assert "node n1 is held by another agent" in twin.agent.stderr
    assert len(twin.agent.stderr.strip().splitlines()) < 10
    team.goes_on(first)
    with frozen(team, old):
        team.nodes[0].agent.until_text("(node n1 is dead")
        team.add(number=1)
        second = team.world_of(2, after=first)
        assert second.nodes == first.nodes
    assert old.agent.wait() == 1
    assert "a newer agent has taken the place of this one as node n1" in old.agent.stderr
    assert not await_exit([team.pid_of(first, 1)])
    team.goes_on(second)
    assert len(team.finish(but=(old, twin))) == 2


@further("faults/test_master::test_while_ranks_are_restarted")
@pytest.mark.parametrize("how", ["slow", "ignore"])
def test_a_survivor_that_takes_its_time_to_stop(world: World, how: str) -> None:
    """Its rank needs longer than any last call to obey SIGTERM, or is killed when its grace is
    over. It keeps its place: one round, not two."""
    grace = {"slow": "--restart-grace=60", "ignore": "--restart-grace=4"}[how]
    team = Team(world, "1:3", "--max-restarts=1", times(last_call_timeout=1), grace)
    first = team.start(3)
    late = team.rank(first, 2)
    late.order(how, **({"seconds": 6} if how == "slow" else {}))
    world.hub.word(late, "done", what=how)
    team.rank(first, 0).order("die")
    second = team.world_of(3, after=first)
    assert second.nodes == first.nodes
    assert second.restarts == 1
    assert not is_alive(first.pids[2])
    assert len(team.finish()) == 2
