"""A node is lost, falls silent, comes back: the others go on, and never two worlds at a time."""

from __future__ import annotations

import time

import pytest

from elasticrun.config import HEARTBEAT_TIMEOUT
from elasticrun.testing import processes
from tests.counting import Counting, keeps_ranks, times
from tests.further import further
from tests.harness import LIMIT

pytestmark = pytest.mark.slow


def test_no_world_beside_ranks_that_nobody_can_stop(counting: Counting) -> None:
    """The only node of the round has its agent stopped, and its rank computes on. Another
    node waits, with the reason, until the fork server has ended that rank by itself; that is before
    the wait is over."""
    flags = (
        times(last_call_timeout=1, heartbeat_timeout=10, master_lost_timeout=20),
        "--restart-grace=20",  # which that rank does not need, and the other node waits for
        "--grow=now",
    )
    job = counting.start(
        "1:2", *flags, nodes=1, master=True, master_options=("--nnodes=1:2", *flags)
    )
    first = counting.first(1)
    at = job.freeze_node(0, agent_only=True)
    job.add_node()
    job.wait_for_output(1, "no node of the last round is reachable")
    assert not processes.await_end([first.pids[0]], LIMIT)
    second = job.wait_for_world(1, since=at)
    assert second.nodes == {0: 1}
    both = job.wait_for_world(2, since=job.thaw_node(0))
    assert both.restarts == 0
    counting.finish()
    assert job.master_node is not None
    assert job.master_node.exit_code == 0


@further("core/scripts/below_min_for_too_long.txt")
def test_below_min_ends_with_a_sentence(counting: Counting) -> None:
    """Survivors wait with the reason on screen. The wait ends at once when another node comes; when
    none does within `join_timeout`, with a sentence."""
    conf = times(last_call_timeout=1, join_timeout=40)  # in which both nodes have come
    job = counting.start("2:3", conf, nodes=2)
    first = counting.first(2)
    at = job.kill_node(1)
    job.wait_for_output(0, "1 of 2 nodes (node node1 is dead")
    job.add_node()
    second = job.wait_for_world(2, since=at)
    assert set(second.nodes.values()) == {0, 2}
    assert keeps_ranks(first, second)
    assert second.restarts == 0
    job.kill_node(2)
    job.wait_for_output(0, "1 of 2 nodes (node node2 is dead")
    assert job.result().exit_codes[0] == 1
    assert "only 1 of 2 nodes for 40 s" in job.output(0)
    assert len(counting.check()) == 2


@further(
    "core/scripts/spare_replaces_the_lost.txt",
    "snapshots/test_replicas::test_a_spare_takes_over_what_the_lost_node_had",
)
def test_a_spare_takes_the_place_of_a_lost_node_at_once(counting: Counting) -> None:
    job = counting.start("2", max_restarts=1)
    first = counting.first(2)
    assert set(first.nodes.values()) == {0, 1}
    job.add_node()
    job.wait_for_output(2, "spare: the round is full, with 2 nodes")
    at = job.kill_node(1)
    second = job.wait_for_world(2, since=at)
    assert set(second.nodes.values()) == {0, 2}
    assert keeps_ranks(first, second)
    assert second.restarts == 0
    counting.finish()


@further("core/rounds/test_round")
def test_worlds_are_multiples_of_the_node_unit(counting: Counting) -> None:
    """One of four is lost, in units of two: two train and one is a spare, until a fourth comes."""
    job = counting.start("2:4", "--node-unit=2", "--grow=now", nodes=4)
    counting.first(4)
    second = job.wait_for_world(2, since=job.kill_node(1))
    assert second.restarts == 0
    (spare,) = {0, 2, 3} - set(second.nodes.values())
    job.wait_for_output(spare, "spare: nodes join 2 at a time")
    job.add_node()
    third = job.wait_for_world(4, since=second.began)
    assert keeps_ranks(second, third)
    assert [world.world_size for world in counting.finish()] == [4, 2, 4]


@further("core/rounds/test_round")
def test_node_ranks_that_the_user_gives_are_respected(counting: Counting) -> None:
    """Over a loss and a return as well."""
    job = counting.start("2:3", "--grow=now", nodes=0, master=True)
    for rank in (2, 0, 1):
        job.add_node(options=[f"--node-rank={rank}"])
    first = counting.first(3)
    assert first.nodes == {0: 1, 1: 2, 2: 0}
    second = job.wait_for_world(2, since=job.kill_node(2))  # node rank 1
    assert second.nodes == {0: 1, 1: 0}
    job.restart_node(2)
    third = job.wait_for_world(3, since=second.began)
    assert third.nodes == first.nodes
    counting.finish()


@further("core/scripts/fixed_nodes_no_restarts_loses_one.txt")
def test_a_fixed_job_without_restarts_ends_at_once(counting: Counting) -> None:
    """`--nnodes=3 --max-restarts=0`: as under torchrun, there is nothing to wait for."""
    job = counting.start("3", times(join_timeout=600))
    counting.first(3)
    began = time.monotonic()
    job.kill_node(1)
    result = job.result()
    assert [result.exit_codes[0], result.exit_codes[2]] == [1, 1]
    assert time.monotonic() - began < 600  # it did not wait for a replacement
    for survivor in (0, 2):
        assert "node1" in job.output(survivor)


USUAL = times(heartbeat_timeout=HEARTBEAT_TIMEOUT)
"""A node of several would be given up by then."""


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
def test_an_agent_that_was_stopped_goes_on(counting: Counting) -> None:
    """Ctrl-Z, and `fg` later: the ranks, which nobody stopped here, are the same, and so is the
    round."""
    job = counting.start("1", USUAL)
    world = counting.first(1)
    job.freeze_node(0, agent_only=True)
    job.wait_for(lambda status: [node.state for node in status.nodes] == ["suspect"])
    counting.goes_on(world, 300)  # six seconds at least: a node of several has five left
    assert [node.state for node in job.status().nodes] == ["suspect"]
    job.thaw_node(0)
    job.wait_for(lambda status: [node.state for node in status.nodes] == ["alive"])
    (only,) = counting.finish()
    assert only.pids == world.pids
