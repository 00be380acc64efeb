"""kill -9 of the master: training does not stop, no step is lost, and what fails meanwhile is
handled when it is back."""

from __future__ import annotations

import pytest

from tests.counting import QUICK, times
from tests.faults.team import Team
from tests.further import further
from tests.harness import World, await_exit

pytestmark = pytest.mark.slow


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
    waiting = next(node for node in team.nodes if node.number != first.nodes[2])
    waiting.agent.until_text("waiting for the other nodes of the last round")
    dead.kill()
    done.touch()
    second = team.world_of(3, after=first)
    assert second.restarts == 1
    assert second.nodes == first.nodes
    team.rank(second, 0).order("die")  # the budget knows the first one
    third = team.world_of(3, after=second)
    assert third.restarts == 2
    team.rank(third, 0).order("die")
    assert [node.agent.wait() for node in team.nodes] == [1, 1, 1]
    assert [world.restarts for world in team.check()] == [0, 1, 2]


@further("master/test_return::test_a_failure_while_there_is_no_master", "sim/test_chaos")
def test_a_node_dies_while_the_master_is_away(world: World) -> None:
    """The new master misses it and goes on with the others, at no cost: it had a record."""
    team = Team(world, "1:3", QUICK)
    first = team.start(3)
    dead = team.master_process()
    dead.suspend()
    team.nodes[2].kill()
    dead.kill()
    second = team.world_of(2, after=first)
    assert second.restarts == 0
    assert set(second.nodes.values()) == {0, 1}
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
    assert [world.round for world in team.check()] == [first.round]


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
    team.add(number=0)
    second = team.world_of(2, after=first)
    assert set(second.nodes.values()) == {0, 1}
    assert second.restarts == 0
    assert len(team.finish(but=(host,))) == 2
