"""An agent cannot tell a lost master from a partition, nor a master a lost node from one that
trains on. Nothing begins before the old world is known to have ended, or, where nobody can be
heard, before every agent of it has given the master up and stopped its ranks.
"""

from __future__ import annotations

import pytest

from elasticrun.config import EXIT_FAILED
from elasticrun.testing.job import ElasticJob
from tests.further import further
from tests.harness import await_exit
from tests.partitions.conftest import LIMIT, Build, times, whole_again

pytestmark = pytest.mark.slow

LOST = 10.0
"""master_lost_timeout of these jobs, seconds; ranks are ended, too, where an agent stands still for
so long."""

BARRED = (
    "no node of the last round can be heard, so its ranks may still run; the next round waits "
    "until they have stopped by themselves"
)


def fence(job: ElasticJob, at: float, newcomer: int) -> None:
    """The old world goes on unheard since `at`; the newcomer waits, says for what, and begins only
    when the last rank of the old world has stopped for good."""
    job.wait_for(phase="gathering", reason=BARRED, timeout=LIMIT)
    job.wait_for_output(newcomer, BARRED)  # the waiting agent tells its user
    first = job.wait_for(step=0, since=at, timeout=LIMIT)
    last = max(record.time for record in job.steps() if record.world != first.world)
    assert last - at >= LOST, "the old world trains on until its agents give the master up"
    assert first.time > last
    assert first.world_size == 1


def test_a_node_that_is_cut_off_trains_on_alone(cluster: Build) -> None:
    """(a) 1:4 with a master outside; the link of A is cut, and B stands at the door."""
    job = cluster("1:4", 1, master=True, conf=times(master_lost_timeout=LOST))
    at = job.cut(0)
    job.add_node()
    fence(job, at, newcomer=1)
    heal(job, 0, whole=2)


@further("test_a_node_that_is_cut_off_trains_on_alone")
def test_two_nodes_that_see_each_other_but_not_the_master(cluster: Build) -> None:
    """(b) the same with A and B, both cut off from the master and not from each other."""
    job = cluster("1:4", 2, master=True, conf=times(master_lost_timeout=LOST))
    at = job.cut(0, "master")
    job.cut(1, "master")
    job.add_node()
    fence(job, at, newcomer=2)
    heal(job, 0, 1, whole=3)


def heal(job: ElasticJob, *given_up: int, whole: int) -> None:
    """These agents have ended with the code for it; started again, they make the job whole."""
    at = job.mend()
    for number in given_up:
        assert not await_exit([job.nodes[number].pid])
        assert job.nodes[number].exit_code == EXIT_FAILED
        assert f"no master answered for {LOST:g} s" in job.output(number)
        job.restart_node(number)
    whole_again(job, whole, at)


@further("test_a_node_that_is_cut_off_trains_on_alone")
def test_a_word_of_one_member_is_enough(cluster: Build) -> None:
    """A collective needs every rank, so once one member of a world has stopped, the others need not
    wait for a node that is cut off: with the default of 600 s nobody does."""
    job = cluster("1:4", 2, master=True, conf=times(master_lost_timeout=600))
    at = job.cut(1)
    job.wait_for(step=0, world_size=1, since=at, timeout=LIMIT)
    whole_again(job, 2, job.mend())
