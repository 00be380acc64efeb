"""The pods of a manifest played by hosts: their command, arguments and variables are the
container's, their names those that the Service gives them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elasticrun.testing import processes
from elasticrun.testing.hosts import Lab
from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import LIMIT, Launched, Peer, World, clean_environment
from tests.jobs.render.rendered import Printed, expanded, render

pytestmark = pytest.mark.slow

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


class Kubelet:
    """Starts the pods of one manifest, each on a host of its own."""

    def __init__(self, printed: Printed, lab: Lab, world: World) -> None:
        self.container, self.lab, self.world = printed.container, lab, world
        name = printed.one("Job")["metadata"]["name"]
        domain = printed.job["template"]["spec"]["subdomain"]
        self.hosts = [f"{name}-{index}.{domain}" for index in range(printed.job["completions"])]
        for host in self.hosts:
            lab.add(host)

    def start(self, index: int) -> Launched:
        """The pod of an index, as the Job's controller and a kubelet would start it."""
        env = {one["name"]: one["value"] for one in self.container["env"] if "value" in one}
        env |= {"JOB_COMPLETION_INDEX": str(index), "ELASTICRUN_JOB_UID": "0f3a"}
        env["KUBERNETES_SERVICE_HOST"] = "192.0.2.250"  # as in every pod
        words = [*self.container["command"], *expanded(self.container["args"], env)]
        told = {**clean_environment(), "PATH": PATH, "LOGLEVEL": "INFO", **env}
        return self.world.command([*self.lab.prefix(self.hosts[index]), *words], env=told)

    def index_of(self, peer: Peer) -> int:
        """On which pod a rank runs."""
        (found,) = (
            i for i, host in enumerate(self.hosts) if peer.pid in self.lab.hosts[host].pids()
        )
        return found

    def kill(self, index: int) -> None:
        """The pod's node loses its power."""
        processes.kill_all(self.lab.hosts[self.hosts[index]].pids, LIMIT)


@further("pods/test_pods::test_pods_come_and_go_and_come_back")
def test_a_deleted_pod_comes_back_with_its_index_and_gets_its_rank_back(
    lab: Lab, world: World
) -> None:
    printed = render(
        "k8s", "--name", "tr", "--image", "a:1", "--nnodes", "2:3", "--grow=now",
        "--max-restarts", "0", "--", PUPPET,
    )  # fmt: skip
    kubelet = Kubelet(printed, lab, world)
    pods = {index: kubelet.start(index) for index in (2, 1, 0)}  # pod 0 is the last
    peers = world.hub.ranks(3, world_size=3)
    assert [kubelet.index_of(peer) for peer in peers] == [0, 1, 2]
    assert {peer.run_id for peer in peers} == {"tr-0f3a"}
    assert allreduce(world, peers) == [3, 3, 3]

    pods[1].signal(signal.SIGTERM)
    code = pods[1].wait()
    assert code not in (0, 2, 75, 93, 99), "counted as one failed pod, and no more than that"
    assert [kubelet.index_of(peer) for peer in world.hub.ranks(2, world_size=2)] == [0, 2]

    pods[1] = kubelet.start(1)
    again = world.hub.ranks(3, world_size=3, pid=lambda pid: pid not in {p.pid for p in peers})
    assert [kubelet.index_of(peer) for peer in again] == [0, 1, 2]
    finish(again)
    assert [pods[index].wait() for index in (0, 1, 2)] == [0, 0, 0]


@further("core/scripts/empty_master_and_its_host_comes_back.txt")
def test_the_pod_with_the_master_is_replaced(lab: Lab, world: World) -> None:
    """The others wait for it, and all go on together; it costs no restart. (A master without a
    record waits 15 s for nodes of the last round that it has not heard.)"""
    printed = render(
        "k8s", "--name", "tr", "--image", "a:1", "--nnodes", "2", "--max-restarts", "0", "--",
        PUPPET,
    )  # fmt: skip
    kubelet = Kubelet(printed, lab, world)
    pods = [kubelet.start(index) for index in (0, 1)]
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]
    kubelet.kill(0)
    pods[0].wait()
    pods[0] = kubelet.start(0)
    finish([peers[1]], code=1)  # as a collective does that its peer has left
    known = {peer.pid for peer in peers}
    again = world.hub.ranks(2, world_size=2, pid=lambda pid: pid not in known)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [pod.wait() for pod in pods] == [0, 0]
