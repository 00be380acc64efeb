"""Ranks and agents of the past meet nobody of the present."""

from __future__ import annotations

import errno
import signal
import socket

import pytest

from elasticrun.testing.steps import World
from tests.counting import QUICK, Counting, rank_on, times
from tests.further import further
from tests.harness import await_exit, is_alive

pytestmark = pytest.mark.slow


def store_of(counting: Counting, world: World) -> str:
    """Where its store is."""
    steps = counting.job.steps()
    return next(step.world for step in steps if step.round == world.round).partition("/")[0]


def test_the_store_of_an_old_round(counting: Counting) -> None:
    """A zombie that dials the address it knows meets nobody, and no other store is ever given that
    port while it may dial it: the agent keeps it bound, without listening."""
    job = counting.start("1:3", QUICK, nodes=3)
    first = counting.first(3)
    old = store_of(counting, first)
    host, _, port = old.rpartition(":")
    zombie, frozen = first.pids[2], first.nodes[2]  # not of the node that serves the store
    second = job.wait_for_world(2, since=job.freeze_node(frozen))
    assert is_alive(zombie)  # a zombie of the old round, and it has not been reaped
    assert store_of(counting, second) != old
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=240).close()
    with socket.socket() as other, pytest.raises(OSError) as refused:
        other.bind((host, int(port)))
    assert refused.value.errno == errno.EADDRINUSE
    job.thaw_node(frozen)
    assert not await_exit([zombie])
    # and ends with the job, as the master says (whose words node 0 passes on); what the agent says
    # itself depends on whether it sees first that its stream has gone or that it was silent
    job.wait_for_output(0, f"node node{frozen} is reachable again")
    counting.finish()


@further("test_an_agent_that_was_replaced_while_it_stood_still")
def test_a_new_agent_of_the_same_node(counting: Counting) -> None:
    """kill -9 of an agent; another of the same node id comes before anybody has missed it. The
    node keeps its rank, and its death costs no restart."""
    job = counting.start("2", max_restarts=1)
    first = counting.first(2)
    at = job.kill_agent(1)
    job.restart_node(1)
    second = job.wait_for_world(2, since=at)
    assert second.nodes == first.nodes
    assert second.restarts == 0
    assert not await_exit([first.pids[rank_on(first, 1)]])
    assert len(counting.finish()) == 2


def test_an_agent_that_was_replaced_while_it_stood_still(counting: Counting) -> None:
    """Its successor holds the node's place; when it wakes it is told so, stops its ranks and ends
    with a code of its own, instead of fighting. While it was awake, a twin was told who holds it,
    and the job went on."""
    job = counting.start("2", QUICK, max_restarts=1)
    first = counting.first(2)
    old, again = job.nodes[1], ("--node-id=node1",)
    twin = job.add_node(options=again)
    assert not await_exit([twin.pid])
    assert twin.exit_code == 1
    assert "node node1 belongs to another agent" in twin.output()
    assert len(twin.output().strip().splitlines()) < 10
    counting.goes_on(first)
    at = job.freeze_node(1)
    job.wait_for_output(0, "(node node1 is dead")
    job.add_node(options=again)
    second = job.wait_for_world(2, since=at)
    assert second.nodes == {rank: 3 if node == 1 else node for rank, node in first.nodes.items()}
    job.thaw_node(1)
    assert not await_exit([old.pid])
    assert "a newer agent has replaced this one as node node1" in old.output()
    assert not await_exit([first.pids[rank_on(first, 1)]])
    counting.goes_on(second)
    assert len(counting.finish(0, 1, 1, 0)) == 2


@further("core/scripts/slow_survivor_keeps_its_place.txt")
@pytest.mark.parametrize(("ends", "grace"), [("6", 60), ("never", 4)], ids=["slow", "deaf"])
def test_a_survivor_that_takes_its_time_to_stop(counting: Counting, ends: str, grace: int) -> None:
    """Its rank needs longer than any last call to obey SIGTERM, or is killed when its grace is
    over. It keeps its place: one round, not two."""
    flags = (times(last_call_timeout=1), f"--restart-grace={grace}")
    job = counting.start("1:3", *flags, nodes=2, max_restarts=1)
    job.add_node(env={"COUNTS_ENDS": ends})
    first = counting.first(3)
    second = job.wait_for_world(3, since=job.kill_rank(rank_on(first, 0), signal.SIGKILL))
    assert second.nodes == first.nodes
    assert second.restarts == 1
    assert not is_alive(first.pids[rank_on(first, 2)])
    assert len(counting.finish()) == 2
