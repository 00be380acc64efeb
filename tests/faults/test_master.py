"""kill -9 of the master: training does not stop, no step is lost, and what fails meanwhile is
handled when it is back."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from elasticrun.testing.processes import is_master
from tests.counting import QUICK, tell, times
from tests.faults.team import Team
from tests.further import further
from tests.harness import World, await_exit, await_true

pytestmark = pytest.mark.slow


def gaps(team: Team) -> float:
    """The longest time between two steps of rank 0 of the only world, in seconds."""
    life = team.log.last
    done = sorted(step.done for step in life.steps if step.rank == 0)
    return max(after - before for before, after in itertools.pairwise(done))


def another_master(team: Team, dead: int) -> int:
    """Wait until agents are attached to a master that is not `dead`; its pid."""
    host = next(node for node in team.nodes if node.name == "n0")
    host.agent.until_text("a new one is started")
    found: list[int] = []

    def another() -> bool:
        found[:] = [p for p in masters(team) if p != dead]
        return bool(found)

    await_true(another, "master after the one that was killed")
    (pid,) = found
    return pid


def masters(team: Team) -> list[int]:
    """Pids of all masters of this test that live."""
    return [p.pid for p in team.world.survivors() if is_master(p.pid)]


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "master/test_return::test_three_times_in_a_row_while_it_trains",
)
def test_while_the_ranks_run(world: World, request: pytest.FixtureRequest) -> None:
    """Killed twice. The same world goes on to the end, and its ranks did not even wait."""
    team = Team(world, "2:3")
    first = team.start(3)
    for _ in range(2):
        dead = team.master_process()
        dead.kill()
        another_master(team, dead.pid)
        team.log.goes_on(first, 50)
    lives = team.finish()
    assert [life.world for life in lives] == [first.world]
    tell(request, "longest time between two steps", gaps(team))


@further("master/test_return::test_while_nodes_gather")
def test_while_nodes_gather(world: World) -> None:
    """One of two has joined. It attaches to the new master and joins there; the second comes."""
    team = Team(world, "2")
    team.add().agent.until_text("waiting for nodes: 1 of 2 nodes")
    dead = team.master_process()
    dead.kill()
    another_master(team, dead.pid)
    team.add()
    first = team.log.world_of(2)
    assert first.restart == 0
    assert len(team.finish()) == 1


def test_while_ranks_are_restarted(world: World) -> None:
    """A rank has died and the others are being stopped, which one of them takes its time for; the
    master dies in between. The restart is made, and charged once."""
    team = Team(world, "2:3", "--max-restarts=2", "--restart-grace=120")
    first = team.start(3)
    slow, done = team.rank(first, 2), world.scratch / "done"
    slow.order("slow", seconds=0, until=str(done))
    world.hub.word(slow, "done", what="slow")
    dead = team.master_process()
    team.rank(first, 1).order("die")
    waiting = next(node for node in team.nodes if node.name != first.nodes[2])
    waiting.agent.until_text("waiting for the other nodes of the last round")
    dead.kill()
    done.touch()
    second = team.log.world_of(3, after=first)
    assert second.restart == 1
    assert second.nodes == first.nodes
    team.rank(second, 0).order("die")  # the budget knows the first one
    third = team.log.world_of(3, after=second)
    assert third.restart == 2
    team.rank(third, 0).order("die")
    assert [node.agent.wait() for node in team.nodes] == [1, 1, 1]
    assert [life.restart for life in team.check()] == [0, 1, 2]


@further("master/test_return::test_a_failure_while_there_is_no_master")
def test_a_rank_dies_while_the_master_is_away(world: World) -> None:
    """Both at one moment, as when a host runs out of memory: the agents tell the new master."""
    team = Team(world, "2:3", "--max-restarts=1")
    first = team.start(3)
    dead = team.master_process()
    dead.suspend()  # nobody is served from here on
    os.kill(first.pids[2], signal.SIGKILL)
    assert not await_exit([first.pids[2]])
    dead.kill()
    second = team.log.world_of(3, after=first)
    assert second.restart == 1
    assert second.nodes == first.nodes
    assert len(team.finish()) == 2


@further("master/test_return::test_a_failure_while_there_is_no_master", "sim/test_chaos")
def test_a_node_dies_while_the_master_is_away(world: World) -> None:
    """The new master misses it and goes on with the others, at no cost: it had a record."""
    team = Team(world, "1:3", QUICK)
    first = team.start(3)
    dead = team.master_process()
    dead.suspend()
    team.nodes[2].kill()
    dead.kill()
    second = team.log.world_of(2, after=first)
    assert second.restart == 0
    assert set(second.nodes.values()) == {"n0", "n1"}
    assert len(team.finish(but=(team.nodes[2],))) == 2


@further("test_the_masters_host_comes_back")
def test_the_master_and_its_agent_at_one_moment(world: World) -> None:
    """The whole host is gone: without a record elsewhere nobody decides any more. What the README
    says comes true: the others train on while they can, and end with a code of their own. A fresh
    agent on that host would have brought a master back: see the next test."""
    lost = {"last_call_timeout": 1, "master_lost_timeout": 12}
    team = Team(world, "1:2")
    host = team.add(times(**lost))
    host.agent.until_text("the job's page")
    other = team.add(times(**lost, is_host=0))
    first = team.all_there(2)
    master = team.master_process()
    master.suspend()
    host.kill()
    master.kill()
    assert other.agent.wait() == 1
    assert "no master" in other.agent.stderr
    assert not await_exit(first.pids.values())
    assert [life.world for life in team.check()] == [first.world]


def test_the_masters_host_comes_back(world: World) -> None:
    """Master and agent of its host die together, and the agent is started again: its master adopts
    the round that the others report, and the node gets its place back."""
    team = Team(world, "2", "--max-restarts=1")
    first = team.start(2)
    host = team.nodes[0]
    master = team.master_process()
    master.suspend()
    host.kill()
    master.kill()
    team.add(name="n0")
    second = team.log.world_of(2, after=first)
    assert set(second.nodes.values()) == {"n0", "n1"}
    assert second.restart == 0
    assert len(team.finish(but=(host,))) == 2


@further("master/test_return::test_a_master_that_outlives_its_agent_takes_its_record_with_it")
def test_the_agent_that_started_the_master_comes_back(world: World) -> None:
    """kill -9 of that agent and its rank alone. The master lives on; the agent that is started in
    its place finds the port taken and attaches to it. From then on it looks after the master: when
    that one is killed, it starts the next."""
    team = Team(world, "2", "--max-restarts=1")
    first = team.start(2)
    master = team.master_process().pid
    host = team.nodes[0]
    host.kill()
    team.add(name="n0")
    second = team.log.world_of(2, after=first)
    assert second.nodes == first.nodes
    assert second.restart == 0
    assert masters(team) == [master]
    os.kill(master, signal.SIGKILL)
    await_true(lambda: set(masters(team)) - {master}, "master in the place of the one killed")
    team.rank(second, 1).order("die")
    third = team.log.world_of(2, after=second)
    assert third.restart == 1
    assert len(team.finish(but=(host,))) == 3
