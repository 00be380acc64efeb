"""Pods of an Indexed Job that come back, come and go: the others go on, and nobody starts again
without need. They are played by hosts: no cluster is needed for what a pod sees of one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elasticrun.testing.hosts import Lab
from tests.compat.live import PUPPET, allreduce, finish
from tests.further import cases, further
from tests.harness import Launched, Peer, World, clean_environment, host_of, own_folders

pytestmark = pytest.mark.slow

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
JOB = "tr"

OWN = 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"'
"""Each pod has a /dev/shm of its own, which goes with it."""

ANY_ADDRESS = "echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind && "
"""There any address can be bound, another pod's too (some routers and load balancers want it)."""


class IndexedJob:
    """What its controller and kubelets do for the pods `tr-0`, `tr-1`, ... in the subdomain `tr`.

    The container's command is `elasticrun` with the given flags and a puppet. Nothing that a pod
    has outlives it but its index and its name: its replacement has another address, and is another
    host with empty disks."""

    def __init__(self, lab: Lab, world: World, *flags: str) -> None:
        self._lab, self._world = lab, world
        self._command = ("elasticrun", *flags, PUPPET)
        self._lives = 0
        self._known: set[int] = set()
        self._addresses: dict[int, str] = {}
        self.pods: dict[int, Launched] = {}

    def start(self, index: int, first: str = "") -> Launched:
        """Make the pod of an index, or its replacement. `first`: shell, what is done there before
        the container starts."""
        self._now()
        host = self._lab.add(_name(index))
        assert self._addresses.get(index) != host.address
        self._addresses[index] = host.address
        self._lives += 1
        env = {
            **clean_environment(),
            "PATH": PATH,
            "LOGLEVEL": "INFO",
            "ELASTICRUN_RDZV_CONF": "heartbeat_timeout=10",  # ranks that have been are counted
            "KUBERNETES_SERVICE_HOST": "192.0.2.250",  # as in every pod
            "JOB_COMPLETION_INDEX": str(index),
            "ELASTICRUN_SHM_DIR": "",  # its own /dev/shm
            **own_folders(self._world.scratch / f"pod-{self._lives}"),
        }
        container = (*self._lab.prefix(_name(index)), "sh", "-c", first + OWN, "sh", *self._command)
        self.pods[index] = self._world.command(container, env=env)
        return self.pods[index]

    def delete(self, index: int) -> None:
        """SIGTERM to process 1 and the wait for its end; then nothing of the pod is left."""
        self.terminate(index)
        self.vanish(index)

    def terminate(self, index: int) -> None:
        """The first half: its process 1 has ended."""
        self._now()
        self.pods[index].signal(signal.SIGTERM)
        self.pods.pop(index).wait()

    def vanish(self, index: int) -> None:
        """The second half: what else ran there has gone, and its address."""
        self._lab.remove(_name(index))

    def index_of(self, peer: Peer) -> int:
        name = host_of(peer, self._lab)
        return next(index for index in self.pods if _name(index) == name)

    def ranks(self, size: int) -> list[Peer]:
        """The ranks of the world that comes after the last pod has come or gone, when all are
        there."""
        old = self._known
        return self._world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)

    def _now(self) -> None:
        self._known = {peer.pid for peer in self._world.hub.peers}


def _name(index: int) -> str:
    return f"{JOB}-{index}.{JOB}"


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
    "test_pods_come_and_go_and_come_back", "core/scripts/empty_master_and_its_host_comes_back.txt"
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


@further(
    "test_pods_come_and_go_and_come_back",
    "e2e/test_surroundings::test_nodes_that_do_not_meet",
)
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
