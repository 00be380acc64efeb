"""Real jobs on a node whose NVML is a stand-in, and whose driver is a file that exists."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.config import EXIT_BAD_NODE
from tests.further import further
from tests.harness import PATIENT, SCRIPTS, Launched, Peer, World
from tests.host.accelerators.standins import gpu, nvml

AGENT = """
import sys
from elasticrun.agent.health import devices
from elasticrun.host.accelerators import nvidia
nvidia._DRIVER_FILES = (__file__,)
devices.ANSWER_LIMIT = devices.FREE_LIMIT = 240.0  # a child that stands still does not hang
from elasticrun.__main__ import main
sys.exit(main())
"""


class GpuNode:
    """A job of two ranks on this node, which wait for orders."""

    def __init__(self, world: World, events: int) -> None:
        self._world, self._events = world, events
        self._environ = nvml(world.scratch, gpu(0), gpu(1), fifo=str(world.scratch / "fifo"))
        self.job: Launched

    def start(self, *flags: str) -> list[Peer]:
        """Start the job, and wait until its devices are watched."""
        agent, world = self._world.scratch / "agent.py", self._world
        agent.write_text(AGENT)
        env = {name: self._environ[name] for name in ("PYTHONPATH", "STANDIN_NVML")}
        words = [sys.executable, str(agent), "--nproc-per-node=2", *flags]
        self.job = world.command([*words, str(SCRIPTS / "puppet.py")], env={**PATIENT, **env})
        ranks = world.hub.ranks(2, restart=0)
        self.report(0, 94)
        self.job.until_text("this machine: GPU 0 reports Xid 94 (contained memory error)")
        return ranks

    def report(self, index: int, xid: int) -> None:
        """This GPU reports an Xid."""
        os.write(self._events, f"{index} {xid}\n".encode())

    def hold(self, *held: list[int]) -> None:
        """From now on, these processes hold memory of GPU 0: pid, bytes."""
        described = Path(self._environ["STANDIN_NVML"])
        node: dict[str, Any] = json.loads(described.read_text())
        node["gpus"][0]["held"] = held
        new = described.with_suffix(".new")
        new.write_text(json.dumps(node))
        new.replace(described)


@pytest.fixture
def node(world: World) -> Iterator[GpuNode]:
    fifo = world.scratch / "fifo"
    os.mkfifo(fifo)
    events = os.open(fifo, os.O_RDWR)  # nobody needs to read yet
    yield GpuNode(world, events)
    os.close(events)


@further(
    "core/scripts/unhealthy_only_node.txt",
    "health/test_health_command::test_a_node_turns_bad_while_it_trains",
)
def test_a_fatal_xid_ends_the_only_node(node: GpuNode) -> None:
    node.start("--max-restarts=3")
    node.report(1, 79)
    assert node.job.wait() == EXIT_BAD_NODE, node.job.stderr
    assert "this node is excluded for 3600 s: GPU 1 reports Xid 79" in node.job.stderr
    assert "restart" not in node.job.stderr.partition("is excluded")[2]


def test_a_rank_starts_once_the_memory_of_the_dead_one_is_free(node: GpuNode, world: World) -> None:
    first = node.start("--max-restarts=1", "--restart-backoff=0")
    pid = first[0].hello["pid"]
    node.hold([pid, 70 * 2**30])
    os.kill(pid, signal.SIGKILL)
    node.job.until_text(f"process {pid} holds 70 GiB of GPU 0")
    assert not [peer for peer in world.hub.peers if peer.hello["restart"] == 1]
    node.hold()
    for rank in world.hub.ranks(2, restart=1):
        rank.order("exit")
    assert node.job.wait() == 0, node.job.stderr
    assert "although" not in node.job.stderr
