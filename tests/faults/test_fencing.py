"""Ranks and agents of the past meet nobody of the present."""

from __future__ import annotations

import errno
import os
import signal
import socket

import pytest

from tests.counting import QUICK, times
from tests.faults.team import Team, frozen
from tests.further import further
from tests.harness import World, await_exit, await_true, is_alive

pytestmark = pytest.mark.slow


def test_the_store_of_an_old_round(world: World) -> None:
    """A zombie that dials the address it knows meets nobody, and no other store is ever given that
    port while it may dial it: the agent keeps it bound, without listening."""
    team = Team(world, "1:3", QUICK)
    first = team.start(3)
    old = first.steps[0].store
    host, _, port = old.rpartition(":")
    zombie = first.pids[2]  # not of the node that serves the store
    stood_still = next(node for node in team.nodes if node.name == first.nodes[2])
    with frozen(team, stood_still):
        second = team.log.world_of(2, after=first)
        assert is_alive(zombie)  # a zombie of the old round, and it has not been reaped
        assert second.steps[0].store != old
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
    team.add(name="n1")
    second = team.log.world_of(2, after=first)
    assert second.nodes == first.nodes
    assert second.restart == 0
    assert not await_exit([first.pid_of("n1")])
    assert len(team.finish(but=(old,))) == 2


def test_an_agent_that_was_replaced_while_it_stood_still(world: World) -> None:
    """Its successor holds the node's place; when it wakes it is told so, stops its ranks and ends
    with a code of its own, instead of fighting. While it was awake, a twin was told who holds it,
    and the job went on."""
    team = Team(world, "2", QUICK, "--max-restarts=1")
    first = team.start(2)
    old = team.nodes[1]
    twin = team.add(name="n1")
    assert twin.agent.wait() == 1
    assert "node n1 is held by another agent" in twin.agent.stderr
    assert len(twin.agent.stderr.strip().splitlines()) < 10
    team.log.goes_on(first)
    with frozen(team, old):
        team.nodes[0].agent.until_text("(node n1 is dead")
        team.add(name="n1")
        second = team.log.world_of(2, after=first)
        assert second.nodes == first.nodes
    assert old.agent.wait() == 1
    assert "a newer agent has taken the place of this one as node n1" in old.agent.stderr
    assert not await_exit([first.pid_of("n1")])
    team.log.goes_on(second)
    assert len(team.finish(but=(old, twin))) == 2


@further("faults/test_master::test_while_ranks_are_restarted")
def test_a_survivor_that_takes_its_time_to_stop(world: World) -> None:
    """Its rank needs longer than any last call to obey SIGTERM. It keeps its place: one round, not
    two."""
    team = Team(world, "1:3", "--max-restarts=1", times(last_call_timeout=1), "--restart-grace=60")
    first = team.start(3)
    slow = team.rank(first, 2)
    slow.order("slow", seconds=6)
    world.hub.word(slow, "done", what="slow")
    team.rank(first, 0).order("die")
    second = team.log.world_of(3, after=first)
    assert second.nodes == first.nodes
    assert second.restart == 1
    assert len(team.finish()) == 2


@further("compat/test_defects::TestGraceOnRestarts::test_ours")
def test_a_survivor_that_ignores_sigterm(world: World) -> None:
    """It is killed when its grace is over, and its node keeps its place."""
    team = Team(world, "1:3", "--max-restarts=1", times(last_call_timeout=1), "--restart-grace=4")
    first = team.start(3)
    deaf = team.rank(first, 2)
    deaf.order("ignore")
    world.hub.word(deaf, "done", what="ignore")
    team.rank(first, 0).order("die")
    second = team.log.world_of(3, after=first)
    assert second.nodes == first.nodes
    assert not is_alive(first.pids[2])
    assert len(team.finish()) == 2


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "agent/test_deaths::test_kill_9_of_the_agent_while_its_fork_server_is_stopped_leaves_nothing",
)
def test_nothing_of_a_node_is_left(world: World) -> None:
    """A node that leaves in good order: no process, port, or shared memory of it stays."""
    team = Team(world, "1:2")
    first = team.start(2)
    leaver = team.nodes[1]
    pids = [process.pid for process in leaver.processes()]
    leaver.agent.signal(signal.SIGTERM)
    leaver.agent.wait()
    second = team.log.world_of(1, after=first)
    assert second.restart == 0
    assert not await_exit(pids)
    # whoever has become their parent buries them in its own time
    await_true(lambda: not [p for p in pids if os.path.exists(f"/proc/{p}/fd")], "burial of all")
    team.finish(but=(leaver,))
