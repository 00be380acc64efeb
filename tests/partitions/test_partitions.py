"""Networks that fall apart, between hosts of their own (the survival issue's "Partitions").

After every schedule: by the step logs there was one world at most at any time (the fixture looks),
and when the network has healed the job is whole again, or says what would end its wait.

An agent cannot tell a lost master from a partition, nor a master a lost node from one that trains
on. Nothing begins before the old world is known to have ended, or, where nobody can be heard,
before every agent of it has given the master up and stopped its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from elasticrun.config import EXIT_FAILED
from elasticrun.testing.job import ElasticJob
from elasticrun.testing.steps import Step
from tests import counting
from tests.further import cases, further
from tests.harness import SCRIPTS, await_exit

pytestmark = pytest.mark.slow

LIMIT = 240.0
"""Seconds that healing may take on a busy machine, with back-offs of a minute that are not ours."""

Build = Callable[..., ElasticJob]


def times(**seconds: float) -> str:
    """--rdzv-conf with times at which a schedule is over in seconds, but no agent that merely
    stands still for a while on a busy machine is given up; and whatever differs."""
    return counting.times(**{"last_call_timeout": 2.0, "heartbeat_timeout": 8.0, **seconds})


@pytest.fixture
def cluster(elastic_job: Any) -> Iterator[Build]:
    """Makes a job of hosts that sums; after every schedule no two of its worlds overlapped."""
    jobs: list[ElasticJob] = []

    def build(nnodes: str, nodes: int, *, conf: str = times(), **more: Any) -> ElasticJob:
        job: ElasticJob = elastic_job(
            str(SCRIPTS / "sums.py"),
            100_000,
            more.pop("pause", 0.02),
            nnodes=nnodes,
            nodes=nodes,
            hosts=True,
            options=["--grow=now", "--restart-grace=20", conf],
            **more,
        )
        jobs.append(job)
        job.wait_for(step=3, world_size=nodes, timeout=LIMIT)
        return job

    yield build
    for job in jobs:
        job.one_world()


def whole_again(job: ElasticJob, size: int, since: float) -> None:
    """The network has healed: a world of all nodes trains, and none of this cost a restart."""
    job.wait_for(step=3, world_size=size, since=since, timeout=LIMIT)
    assert job.wait_for(world_size=size).restart_count == 0


def test_one_of_three_lost_by_a_cut_cable_and_by_a_kill(cluster: Build) -> None:
    """With --max-restarts=0 the loss of one of three nodes costs nothing, whether its cable is cut
    or all its processes are killed; the node comes back."""
    job = cluster("2:3", 3, max_restarts=0)
    at = job.cut(2)
    job.wait_for(step=3, world_size=2, since=at, timeout=LIMIT)
    assert job.wait_for(world_size=2).restart_count == 0
    whole_again(job, 3, job.mend())
    at = job.kill_node(1)
    job.wait_for(step=3, world_size=2, since=at, timeout=LIMIT)
    job.restart_node(1)
    whole_again(job, 3, at)


@further(
    "partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill",
    "core/nodes/test_membership",
)
def test_half_of_the_cluster_cut_off(cluster: Build) -> None:
    """Two of four hosts see each other and nobody else: the half that has the master goes on, the
    other half's ranks do not complete a step."""
    job = cluster("2:4", 4)
    for far in (2, 3):
        for near in (0, 1):
            at = job.cut(near, far)
    job.wait_for(step=3, world_size=2, since=at, timeout=LIMIT)
    whole_again(job, 4, job.mend())


@further("partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill")
def test_the_masters_host_cut_off_from_one(cluster: Build) -> None:
    """Node 2 and the host of the master lose sight of each other; when that is over, the master's
    host does not hear node 1, which hears it; then node 2 does not hear the master's host. The
    third node sees everybody all the time."""
    job = cluster("2:3", 3)
    for at in (lambda: job.cut(0, 2), lambda: job.one_way(1, 0), lambda: job.one_way(0, 2)):
        job.wait_for(step=3, world_size=2, since=at(), timeout=LIMIT)
        whole_again(job, 3, job.mend())


def rounds_since(job: ElasticJob, began: Step) -> set[int]:
    """Rounds with a step after this one, which is of the world with which the test began: a late
    node's first world may have been without it."""
    return {record.round for record in job.steps() if record.time >= began.time}


@further(
    "core/scripts/mass_silence.txt",
    "faults/test_no_false_deaths::test_one_job_bears_one_stall_after_another",
)
def test_the_master_cut_off_from_all_for_a_while(cluster: Build) -> None:
    """Ranks see each other and train on; when the master is back nothing has happened to them: the
    mass silence was its own."""
    job = cluster("2:3", 3, master=True)
    began = job.steps()[-1]
    job.cut("master")
    job.wait_for(lambda status: {n.state for n in status.nodes} == {"suspect"}, timeout=LIMIT)
    status = job.wait_for(reason="the master itself may be cut off", timeout=LIMIT)
    assert status.world_size == 3
    before = job.steps()[-1]
    assert before.round == began.round
    job.mend()
    job.wait_for(lambda status: {n.state for n in status.nodes} == {"alive"}, timeout=LIMIT)
    job.wait_for(step=before.step + 50, world_size=3)
    assert rounds_since(job, began) == {began.round}, "no step and no rank was lost"


@further(
    "testing/test_hosts::test_loss_and_delay",
    "faults/test_no_false_deaths::test_one_job_bears_one_stall_after_another",
)
def test_delay_and_loss(cluster: Build) -> None:
    """While every host loses 30 % of what it receives the ranks go on, or a next world is formed;
    nothing is charged. How long a step takes, or its ranks to connect, is TCP's affair, which waits
    twice as long after each loss in a row (from its last idea of a round trip on, so that a delay
    comes afterwards): nobody waits for much before the loss is over. 200 ms more in each direction
    of one cable cost nobody a round."""
    job = cluster("2:3", 3, conf=times(heartbeat_timeout=30))
    for host in (0, 1, 2):
        job.loss(host, 30)
    last = job.steps()[-1]
    job.wait_for(
        lambda status: status.round.number > last.round or job.steps()[-1].step >= last.step + 2,
        timeout=LIMIT,
    )
    mended = job.mend()

    def all_train() -> bool:
        newest = job.steps()[-1]
        return newest.time > mended and newest.world_size == 3 and newest.step >= 3

    job.wait_for(lambda _: all_train(), timeout=LIMIT)
    status = job.wait_for(
        lambda status: {n.state for n in status.nodes} == {"alive"}, timeout=LIMIT
    )
    assert status.restart_count == 0
    began = job.steps()[-1]
    job.delay(1, 200)
    job.wait_for(step=began.step + 20, world_size=3, timeout=LIMIT)
    assert rounds_since(job, began) == {began.round}


@further("faults/test_no_false_deaths::test_one_job_bears_one_stall_after_another")
def test_a_link_that_flaps_faster_than_a_node_is_given_up(cluster: Build) -> None:
    """2 s out of every 4 the link of one node is down: nobody is lost, and the ranks go on in
    between."""
    job = cluster("2:3", 3, conf=times(heartbeat_timeout=30))
    began = job.steps()[-1]
    job.flap(2, down=2.0, up=2.0)
    job.wait_for(step=began.step + 150, world_size=3, timeout=LIMIT)
    job.mend()
    seen = [record.time for record in job.steps() if record.rank == 0]
    pauses = sum(later - sooner > 1.0 for sooner, later in pairwise(seen))
    assert pauses >= 2, "the link was down more than once meanwhile"
    assert rounds_since(job, began) == {began.round}


@further("partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill")
def test_a_link_that_flaps_slowly(cluster: Build) -> None:
    """Each time the node is lost and lets the others go on without it. From the second time on it
    waits at the door, since every return costs all nodes a round, and says so."""
    job = cluster("2:3", 3, conf=times(heartbeat_timeout=2))
    at = job.flap(2, down=9.0, up=9.0)
    job.wait_for(step=0, world_size=2, since=at, timeout=LIMIT)
    status = job.wait_for(reason="it fell silent too often", timeout=LIMIT)
    assert status.restart_count == 0
    began = job.steps()[-1]
    job.mend()
    job.wait_for(step=began.step + 20, world_size=2)


LOST = 10.0
"""master_lost_timeout of these jobs, seconds; ranks are ended, too, where an agent stands still for
so long."""

BARRED = (
    "no node of the last round is reachable, so its ranks may still run; the next round waits "
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


@further(
    "core/scripts/partitioned_node_runs_on.txt",
    "core/scripts/both_cut_from_the_master.txt",
    "test_one_of_three_lost_by_a_cut_cable_and_by_a_kill",
)
@pytest.mark.parametrize("size", cases([1, 2], kept=[1]))
def test_nodes_that_are_cut_off_train_on_alone(cluster: Build, size: int) -> None:
    """1:4 with a master outside; the links of its nodes to that are cut, of two not those to each
    other, and one more stands at the door."""
    job = cluster("1:4", size, master=True, conf=times(master_lost_timeout=LOST))
    at = job.cut(0) if size == 1 else job.cut(0, "master")
    if size == 2:
        job.cut(1, "master")
    job.add_node()
    fence(job, at, newcomer=size)
    heal(job, *range(size), whole=size + 1)


def heal(job: ElasticJob, *given_up: int, whole: int) -> None:
    """These agents have ended with the code for it; started again, they make the job whole."""
    at = job.mend()
    for number in given_up:
        assert not await_exit([job.nodes[number].pid])
        assert job.nodes[number].exit_code == EXIT_FAILED
        assert f"no master answered for {LOST:g} s" in job.output(number)
        job.restart_node(number)
    whole_again(job, whole, at)


@further("core/scripts/partitioned_node_runs_on.txt")
def test_a_word_of_one_member_is_enough(cluster: Build) -> None:
    """A collective needs every rank, so once one member of a world has stopped, the others need not
    wait for a node that is cut off: with the default of 600 s nobody does."""
    job = cluster("1:4", 2, master=True, conf=times(master_lost_timeout=600))
    at = job.cut(1)
    job.wait_for(step=0, world_size=1, since=at, timeout=LIMIT)
    whole_again(job, 2, job.mend())
