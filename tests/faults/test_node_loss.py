"""A node is lost, falls silent, comes back: the others go on, and never two worlds at a time."""

from __future__ import annotations

import time

import pytest

from elasticrun.testing import processes
from tests.counting import QUICK, Counting, keeps_ranks, tell, times
from tests.further import cases, further
from tests.harness import LIMIT

pytestmark = pytest.mark.slow


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
@pytest.mark.parametrize("lost", cases([0, 1, 2], soaked=[2]))
def test_kill_9_of_an_agent_and_its_ranks(
    counting: Counting, request: pytest.FixtureRequest, lost: int
) -> None:
    """Each node in turn, the one that started the master too: the master outlives it. No restart
    is left, and none is needed: a node that is lost costs none."""
    job = counting.start("1:3", nodes=3)
    counting.first(3)
    assert any(map(processes.is_master, job.nodes[0].pids()))
    at = job.kill_node(lost)
    second = job.wait_for_world(2, since=at)
    tell(request, "kill -9 to the survivors' first step", second.began - at)
    assert second.restarts == 0
    assert set(second.nodes.values()) == {0, 1, 2} - {lost}
    assert len(counting.finish()) == 2


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "agent/test_deaths::test_kill_9_of_the_agent_while_its_fork_server_is_stopped_leaves_nothing",
)
def test_kill_9_of_an_agent_alone(counting: Counting) -> None:
    """Its ranks are gone with it within moments, and they were the fence."""
    job = counting.start("1:2", nodes=2)
    first = counting.first(2)
    (rank,) = (rank for rank, node in first.nodes.items() if node == 1)
    at = job.kill_agent(1)
    assert not processes.await_end([first.pids[rank]], 240)
    second = job.wait_for_world(1, since=at)
    assert second.restarts == 0
    counting.finish()


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
def test_a_silent_node(counting: Counting, request: pytest.FixtureRequest) -> None:
    """Every process of a node stands still: no FIN, no answer. The others go on without it. When it
    wakes, its ranks of the old round end, and it joins anew."""
    job = counting.start("2:3", QUICK, "--grow=now", nodes=3)
    first = counting.first(3)
    silent = first.nodes[2]
    at = job.freeze_node(silent)
    second = job.wait_for_world(2, since=at)
    tell(request, "silence to the survivors' first step", second.began - at)
    assert second.restarts == 0
    assert keeps_ranks(first, second)
    at = job.thaw_node(silent)
    assert not processes.await_end([first.pids[2]], LIMIT)
    third = job.wait_for_world(3, since=at)
    assert third.restarts == 0
    assert keeps_ranks(second, third)
    assert third.nodes[2] == silent
    assert len(counting.finish()) == 3


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
def test_an_agent_that_is_stopped_while_its_ranks_run(counting: Counting) -> None:
    """SIGSTOP of the agent alone: nobody hears it, so the node is lost, although its ranks
    compute on until their peers go. It comes back when it is woken."""
    job = counting.start("1:2", QUICK, "--grow=now", nodes=2)
    counting.first(2)
    at = job.freeze_node(1, agent_only=True)
    second = job.wait_for_world(1, since=at)
    assert second.nodes == {0: 0}
    assert second.restarts == 0
    third = job.wait_for_world(2, since=job.thaw_node(1))
    assert keeps_ranks(second, third)
    counting.finish()


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
    job.wait_for_output(1, "no node of the last round can be heard")
    assert not processes.await_end([first.pids[0]], LIMIT)
    second = job.wait_for_world(1, since=at)
    assert second.nodes == {0: 1}
    both = job.wait_for_world(2, since=job.thaw_node(0))
    assert both.restarts == 0
    counting.finish()
    assert job.master_node is not None
    assert job.master_node.exit_code == 0


def test_below_min_ends_with_a_sentence(counting: Counting) -> None:
    """Survivors wait with the reason on screen until `join_timeout`, and end with a sentence."""
    conf = times(last_call_timeout=1, join_timeout=40)  # in which both nodes have come
    job = counting.start("2:3", conf, nodes=2)
    counting.first(2)
    job.kill_node(1)
    job.wait_for_output(0, "1 of 2 nodes (node node1 is dead")
    assert job.result().exit_codes[0] == 1
    assert "only 1 of 2 nodes for 40 s" in job.output(0)
    assert len(counting.check()) == 1


@further(
    "test_below_min_ends_with_a_sentence",
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
)
def test_a_replacement_for_a_node_below_min(counting: Counting) -> None:
    """The wait is on screen, and ends at once when another node comes."""
    job = counting.start("2", times(last_call_timeout=1), max_restarts=1)
    first = counting.first(2)
    at = job.kill_node(1)
    job.wait_for_output(0, "1 of 2 nodes (node node1 is dead")
    job.add_node()
    second = job.wait_for_world(2, since=at)
    assert set(second.nodes.values()) == {0, 2}
    assert keeps_ranks(first, second)
    assert second.restarts == 0
    counting.finish()


def test_a_spare_takes_the_place_of_a_lost_node_at_once(
    counting: Counting, request: pytest.FixtureRequest
) -> None:
    job = counting.start("2", max_restarts=1)
    first = counting.first(2)
    assert set(first.nodes.values()) == {0, 1}
    job.add_node()
    job.wait_for_output(2, "spare: the round is full, with 2 nodes")
    at = job.kill_node(1)
    second = job.wait_for_world(2, since=at)
    tell(request, "kill -9 to the first step with the spare", second.began - at)
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
    job.wait_for_output(spare, "spare: nodes are")
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


@further("compat/test_defects::TestFixedSizeWithoutBudget::test_both")
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
