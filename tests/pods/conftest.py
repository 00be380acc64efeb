"""Pods of an Indexed Job, played by hosts: no cluster is needed for what a pod sees of one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from elasticrun.testing.hosts import Lab
from tests.compat.live import PUPPET
from tests.harness import Launched, Peer, World, clean_environment

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
        disk = self._world.scratch / f"pod-{self._lives}"
        for folder in ("tmp", "run"):
            (disk / folder).mkdir(mode=0o700, parents=True)
        env = {
            **clean_environment(),
            "PATH": PATH,
            "LOGLEVEL": "INFO",
            "ELASTICRUN_RDZV_CONF": "heartbeat_timeout=10",  # ranks that have been are counted
            "KUBERNETES_SERVICE_HOST": "192.0.2.250",  # as in every pod
            "JOB_COMPLETION_INDEX": str(index),
            "TMPDIR": str(disk / "tmp"),
            "XDG_RUNTIME_DIR": str(disk / "run"),
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
        """On which pod a rank runs."""
        names = ((index, self._lab.hosts[_name(index)]) for index in self.pods)
        (found,) = (index for index, host in names if peer.pid in host.pids())
        return found

    def ranks(self, size: int) -> list[Peer]:
        """The ranks of the world that comes after the last pod has come or gone, when all are
        there."""
        old = self._known
        return self._world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)

    def _now(self) -> None:
        self._known = {peer.pid for peer in self._world.hub.peers}


def _name(index: int) -> str:
    return f"{JOB}-{index}.{JOB}"
