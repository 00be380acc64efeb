"""One job that bears one harm after another; the other harms have a job each."""

from __future__ import annotations

import signal

import pytest

from elasticrun.testing import processes
from elasticrun.testing.steps import World
from tests.counting import QUICK, Counting, keeps_ranks, rank_on
from tests.harness import LIMIT

pytestmark = pytest.mark.slow

BACK = ("--grow=now", "--restart-backoff=0")


def test_one_job_of_three_bears_one_harm_after_another(counting: Counting) -> None:
    """A rank dies, a node, the node that started the master, an agent alone; an agent stands still,
    a whole node does; the master dies; an agent is told to leave. Whoever was lost comes back. Two
    restarts are charged, for the two ranks, and the third ends the job: membership is free."""
    job = counting.start("1:3", QUICK, *BACK, nodes=3, max_restarts=2)
    world = counting.first(3)
    charged = 0
    assert any(map(processes.is_master, job.nodes[0].pids()))

    def became(size: int, since: float, *, but: tuple[int, ...] = ()) -> World:
        """The next world of all ranks: nodes keep their places, and nothing more is charged."""
        after = job.wait_for_world(size, since=since)
        assert after.restarts == charged
        assert keeps_ranks(world, after)
        assert not {*after.pids.values()} & {*world.pids.values()}, "a rank of the old world"
        assert set(after.nodes.values()) == {0, 1, 2} - set(but)
        return after

    charged = 1
    world = became(3, job.kill_rank(1))

    at = job.kill_node(1)
    world = became(2, at, but=(1,))
    job.restart_node(1)
    world = became(3, world.began)

    at = job.kill_node(0)  # its master outlives it, and its next agent attaches to that
    world = became(2, at, but=(0,))
    job.restart_node(0)
    world = became(3, world.began)

    rank = rank_on(world, 2)
    at = job.kill_agent(2)
    assert not processes.await_end([world.pids[rank]], LIMIT)
    world = became(2, at, but=(2,))
    job.restart_node(2)
    world = became(3, world.began)

    at = job.freeze_node(1, agent_only=True)
    world = became(2, at, but=(1,))
    world = became(3, job.thaw_node(1))

    rank = rank_on(world, 2)
    silent, at = world.pids[rank], job.freeze_node(2)
    world = became(2, at, but=(2,))
    at = job.thaw_node(2)
    assert not processes.await_end([silent], LIMIT)  # its rank of the old round
    world = became(3, at)

    job.kill_master()
    job.wait_for(lambda status: len(status.nodes) == 3, world_size=3)
    counting.goes_on(world, 20)  # the ranks did not notice

    at, leaver = job.signal(1, signal.SIGTERM), job.nodes[1].pid
    world = became(2, at, but=(1,))
    assert not processes.await_end([leaver], LIMIT)
    assert job.nodes[1].exit_code == 1
    job.restart_node(1)
    world = became(3, world.began)

    charged = 2
    world = became(3, job.kill_rank(0))  # known to the second master, too
    job.kill_rank(2)
    assert job.result().exit_codes == (1, 1, 1)
    worlds = counting.check()
    counting.adds_up()
    assert worlds[0].restarts == 0
    assert worlds[-1].restarts == 2
