"""kill -9 of the master: training does not stop, no step is lost, and what fails meanwhile is
handled when it is back. (While ranks run: `test_in_a_row`, `master/test_return`.)"""

from __future__ import annotations

import pytest

from tests.counting import QUICK, Counting, rank_on, times
from tests.further import further
from tests.harness import await_exit

pytestmark = pytest.mark.slow


@further(
    "core/scripts/master_dies_between_fact_and_order.txt",
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
)
def test_while_ranks_are_restarted(counting: Counting) -> None:
    """A rank has died and the others are being stopped, which one of them takes its time for; the
    master dies in between. The restart is made, and charged once."""
    job = counting.start("2:3", "--restart-grace=120", nodes=2, max_restarts=2)
    job.add_node(env={"COUNTS_ENDS": "later"})
    first = counting.first(3)
    at = job.kill_rank(rank_on(first, 1))
    job.wait_for_output(0, "waiting for the other nodes of the last round")
    job.kill_master()
    counting.place("may-end").touch()
    second = job.wait_for_world(3, since=at)
    assert second.restarts == 1
    assert second.nodes == first.nodes
    third = job.wait_for_world(3, since=job.kill_rank(0))  # the budget knows the first one
    assert third.restarts == 2
    job.kill_rank(0)
    assert job.result().exit_codes == (1, 1, 1)
    assert [world.restarts for world in counting.check()] == [0, 1, 2]


@further("sim/test_restore::test_killed_at_every_moment", "sim/test_chaos::test_invariants_hold")
def test_a_node_dies_while_the_master_is_away(counting: Counting) -> None:
    """The new master misses it and goes on with the others, at no cost: it had a record."""
    job = counting.start("1:3", QUICK, nodes=3)
    counting.first(3)
    job.freeze_master()  # nobody is served from here on
    at = job.kill_node(2)
    job.kill_master()
    second = job.wait_for_world(2, since=at)
    assert second.restarts == 0
    assert set(second.nodes.values()) == {0, 1}
    assert len(counting.finish()) == 2


@further("core/scripts/empty_master_and_its_host_comes_back.txt")
def test_the_master_and_its_agent_at_one_moment(counting: Counting) -> None:
    """The whole host is gone: without a record elsewhere nobody decides any more. What the README
    says comes true: the others train on while they can, and end with a code of their own. A fresh
    agent on that host would have brought a master back: see the next test."""
    lost = {"last_call_timeout": 1, "master_lost_timeout": 12}
    job = counting.start("1:2", times(**lost), nodes=1)
    other = job.add_node(options=[times(**lost, is_host=0)])
    first = counting.first(2)
    job.freeze_master()
    job.kill_node(0)
    job.kill_master()
    assert not await_exit([other.pid])
    assert other.exit_code == 1
    assert "no master" in other.output()
    assert not await_exit(first.pids.values())
    assert [world.round for world in counting.check()] == [first.round]


@further(
    "core/scripts/empty_master_and_its_host_comes_back.txt",
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
)
def test_the_masters_host_comes_back(counting: Counting) -> None:
    """Master and agent of its host die together, and the agent is started again: its master adopts
    the round that the others report, and the node gets its place back."""
    job = counting.start("2", nodes=2, max_restarts=1)
    counting.first(2)
    job.freeze_master()
    at = job.kill_node(0)
    job.kill_master()
    job.restart_node(0)
    second = job.wait_for_world(2, since=at)
    assert set(second.nodes.values()) == {0, 1}
    assert second.restarts == 0
    assert len(counting.finish()) == 2
