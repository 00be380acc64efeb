"""kill -9 of every kind of process, in every state: what dies with it and what goes on."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

from elasticrun.testing.processes import is_fork_server, is_master, kill_all
from tests.compat.live import agents, allreduce, finish, job, new_ranks
from tests.further import cases, further
from tests.harness import (
    ELASTICRUN,
    LIMIT,
    Launched,
    World,
    agent_of,
    await_exit,
    await_true,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.slow


def master_of(world: World) -> psutil.Process:
    """The job's master; it is in a session of its own, so no parent leads to it for sure. Of two
    agents that start at one moment each starts one, and one of the two ends."""

    def found() -> list[psutil.Process]:
        return [process for process in world.survivors() if is_master(process.pid)]

    await_true(lambda: len(found()) == 1, "end of the master that found the port taken")
    return found()[0]


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "compat/test_environment::test_counting_restarts",
)
def test_a_rank(world: World) -> None:
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--max-restarts=1")
    peers = world.hub.ranks(2)
    os.kill(peers[1].pid, signal.SIGKILL)
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert launched.wait() == 0


@further("agent/test_deaths::test_kill_9_of_the_fork_server_restarts_the_job")
def test_the_fork_server(world: World) -> None:
    """Its ranks and all below them are gone; the agent starts another, and the job goes on."""
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--max-restarts=1")
    peers = world.hub.ranks(2)
    pids = [p.pid for p in peers]
    for peer in peers:
        peer.order("child", session=True)
        pids.append(world.hub.word(peer, "done")["pid"])
    os.kill(peers[0].ppid, signal.SIGKILL)
    assert not await_exit(pids)
    again = new_ranks(world, peers, 2)
    assert again[0].ppid != peers[0].ppid
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert launched.wait() == 0


def test_the_fork_server_when_idle_ends_no_job(world: World) -> None:
    """Killed while the node waits for its peer: the node is still there when the peer comes."""
    port = free_port()
    (first,) = agents(world, ELASTICRUN, 1, "2", port)
    first.until_text("wait")
    await_true(lambda: fork_servers(first), "fork server")
    (server,) = fork_servers(first)
    server.kill()
    (second,) = agents(world, ELASTICRUN, 1, "2", port)
    peers = world.hub.ranks(2)
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert [first.wait(), second.wait()] == [0, 0]


def fork_servers(launched: Launched) -> list[psutil.Process]:
    """Those of an agent, told by their command lines; what a server forks has the same one."""
    return [process for process in launched.children() if is_fork_server(process.pid)]


@further("agent/test_deaths::test_kill_9_of_the_master_is_not_felt_by_the_ranks")
def test_the_master(world: World) -> None:
    """The ranks train on and finish as if nothing had happened."""
    jobs = agents(world, ELASTICRUN, 2, "2", free_port())
    peers = world.hub.ranks(2)
    assert allreduce(world, peers) == [2, 2]
    master_of(world).kill()
    for _ in range(3):
        assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0]
    assert len(world.hub.peers) == 2


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "master/test_return::test_a_master_that_outlives_its_agent_takes_its_record_with_it",
)
@pytest.mark.parametrize("which", [0, 1])
def test_an_agent_of_two(world: World, which: int) -> None:
    """Every rank of that node is gone at once; with a replacement the job goes on, whichever of
    the two it was (the master outlives the agent that started it)."""
    port = free_port()
    jobs = agents(world, ELASTICRUN, 1, "2", port, "--max-restarts=1")
    jobs[0].until_text("wait")  # so that the first agent is the one with the master
    jobs += agents(world, ELASTICRUN, 1, "2", port, "--max-restarts=1")
    peers = world.hub.ranks(2)
    mine = next(p for p in peers if agent_of(p, jobs) is jobs[which])
    jobs[which].process.kill()
    jobs[which].wait()
    assert not await_exit([mine.pid])
    jobs += agents(world, ELASTICRUN, 1, "2", port, "--max-restarts=1")
    again = new_ranks(world, peers, 2)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [j.wait() for j in jobs if j is not jobs[which]] == [0, 0]


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
def test_all_of_a_node_of_three_costs_nothing(world: World) -> None:
    """Every process of one of three nodes is killed at the same moment, and no restarts are left:
    the lost node is the cause, so the others go on, and no budget was charged."""
    conf = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=60"
    jobs = agents(world, ELASTICRUN, 3, "2:3", free_port(), conf)
    peers = world.hub.ranks(3, world_size=3)  # two of them may have begun without the third
    assert allreduce(world, peers) == [3, 3, 3]
    before = list(world.hub.peers)
    lost = agent_of(peers[2], jobs)
    assert lost.process.poll() is None
    everything = [lost.pid, *(process.pid for process in lost.below())]
    node = [pid for pid in everything if not is_master(pid)]
    assert not kill_all(lambda: node, LIMIT)
    for peer in peers[:2]:
        peer.order("allreduce")  # they notice by the broken connection and fail
    again = new_ranks(world, before, 2)
    assert [p.restart for p in again] == [0, 0]
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [j.wait() for j in jobs if j is not lost] == [0, 0]


@pytest.mark.parametrize("seed", cases(range(3), kept=[0]))
def test_an_agent_at_any_moment(world: World, seed: int) -> None:
    """Between its first millisecond and the ranks' training: nothing of it is left."""
    chance = random.Random(seed)
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--standalone")
    time.sleep(chance.uniform(0.0, 2.5))  # the moment is what is tested, not an event
    launched.process.kill()
    launched.wait()
    world.nothing_left()


@pytest.mark.parametrize("trap", cases([False, True], kept=[True]))
def test_descendants_of_a_dead_rank(world: World, trap: bool) -> None:
    """What shares its group goes at once; what made a session of its own gets SIGTERM and time to
    write its last rows. The next life starts when all have gone."""
    launched = job(world, ELASTICRUN, "--max-restarts=1")
    (peer,) = world.hub.ranks(1)
    note = world.scratch / "flushed"
    peer.order("child", session=False)
    near = world.hub.word(peer, "done")["pid"]
    peer.order("child", session=True, trap=trap, note=str(note))
    far = world.hub.until(lambda: [m["pid"] for m in peer.said[2:] if "pid" in m], "a pid")[0]
    peer.order("die")
    (again,) = world.hub.ranks(1, restart=1)
    assert (is_alive(near), is_alive(far)) == (False, False)
    assert note.exists() == trap
    finish([again])
    assert launched.wait() == 0


@further("forkserver/test_ranks::test_two_ranks_and_two_lives_draw_different_numbers")
def test_random_numbers_of_every_life(world: World) -> None:
    """Unseeded ranks and lives draw different numbers, from every generator."""
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--max-restarts=1")
    drawn = []
    for life in range(2):
        peers = world.hub.ranks(2, restart=life)
        for peer in peers:
            peer.order("random")
            words = dict(world.hub.word(peer, "done"))
            drawn.append(
                {k: str(words[k]) for k in ("random", "numpy", "torch", "layer", "loader")}
            )
        if life == 0:
            peers[0].order("exit", code=1)
        else:
            finish(peers)
    assert launched.wait() == 0
    for source in drawn[0]:
        assert len({draw[source] for draw in drawn}) == 4, source
