"""Pods that come back, come and go: the others go on, and nobody starts again without need."""

from __future__ import annotations

import pytest

from elasticrun.testing.hosts import Lab
from tests.compat.live import allreduce, finish
from tests.further import cases, further
from tests.harness import World
from tests.pods.conftest import ANY_ADDRESS, IndexedJob

pytestmark = pytest.mark.slow


def test_pods_come_and_go_and_come_back(lab: Lab, world: World) -> None:
    """A live resize: `completions` and `parallelism` go from 1 to 3, and back. Within MAX ranks
    start again, for they are a new world; a pod beyond that is a spare, of whose coming and going
    they see nothing. A pod that comes back at another address gets its ranks back, for its index is
    its place. The agents of the other pods go on as they were."""
    # a pod that is a minute late is let in all the same
    job = IndexedJob(lab, world, "--nnodes=1:2", "--max-restarts=0", "--grow=now")
    job.start(0)
    job.ranks(1)
    job.start(1)
    two = job.ranks(2)
    assert [job.index_of(peer) for peer in two] == [0, 1]
    assert allreduce(world, two) == [2, 2]

    spare = job.start(2)
    spare.until_text("spare: the round is full")
    job.delete(2)
    assert allreduce(world, two) == [2, 2]

    job.delete(1)
    (alone,) = job.ranks(1)
    assert job.index_of(alone) == 0
    assert len(world.hub.peers) == 4, "nobody else has been started"

    job.start(1)
    again = job.ranks(2)
    assert [job.index_of(peer) for peer in again] == [0, 1]
    assert allreduce(world, again) == [2, 2]
    finish(again, *job.pods.values())


@further(
    "test_pods_come_and_go_and_come_back", "faults/test_master::test_the_masters_host_comes_back"
)
def test_the_pod_with_the_master_comes_back_at_another_address(lab: Lab, world: World) -> None:
    """The others train on without a master, find the next one by its name, and let its pod in at
    once: how old their round is nobody knows (an old one's cool-down would be 600 s)."""
    job = IndexedJob(lab, world, "--nnodes=1:2", "--max-restarts=0")
    job.start(0)
    job.start(1)
    assert allreduce(world, job.ranks(2)) == [2, 2]
    job.terminate(0)
    (alone,) = job.ranks(1)  # they have to have stopped before the master has gone
    job.vanish(0)
    assert job.index_of(alone) == 1
    assert allreduce(world, [alone]) == [1]
    job.start(0)
    again = job.ranks(2)
    assert [job.index_of(peer) for peer in again] == [0, 1]
    assert allreduce(world, again) == [2, 2]
    finish(again, *job.pods.values())


@pytest.mark.parametrize(
    "first", cases(["", ANY_ADDRESS], kept=[""]), ids=["", "any address can be bound"]
)
def test_a_pod_that_starts_before_the_first_one_has_a_name(
    lab: Lab, world: World, first: str
) -> None:
    """Pods are made in any order, and a name is known when its pod has an address: it is asked for
    again, and then they meet. That a pod can bind the address proves nothing: the master is where
    a dial comes out."""
    job = IndexedJob(lab, world, "--nnodes=2")
    early = job.start(1, first)
    early.until_text("the name tr-0.tr does not resolve")
    job.start(0, first).until_text("serving job")
    two = job.ranks(2)
    assert [job.index_of(peer) for peer in two] == [0, 1]
    assert allreduce(world, two) == [2, 2]
    finish(two, *job.pods.values())
    assert "serving job" not in early.stderr
