"""Machines of a job lose power: with `--no-kill` Slurm lets the others be, and they go on long
before Slurm knows."""

from __future__ import annotations

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import Peer
from tests.slurm import page
from tests.slurm.conftest import Slurm

pytestmark = pytest.mark.slow

QUICK = "--rdzv-conf=heartbeat_timeout=10,last_call_timeout=1"
"""A node that stands still for a shorter while has not lost its power."""


def next_world(slurm: Slurm, size: int, old: set[int]) -> list[Peer]:
    """The ranks of the world that comes after these processes, which sums."""
    peers = slurm.world.hub.ranks(size, world_size=size, pid=lambda pid: pid not in old)
    assert allreduce(slurm.world, peers) == [size] * size
    return peers


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill",
)
def test_nodes_lose_power_one_after_the_other(slurm: Slurm) -> None:
    """2:3 on four nodes. The spare takes the place of the first that is lost; without another, the
    two that are left go on. No restart is charged, and Slurm has noticed nothing. When it does,
    that disturbs nobody."""
    here = {"train.py": f"{QUICK} {PUPPET}"}
    step = slurm.types(*page.command("srun -N4 --no-kill", here))
    peers = next_world(slurm, 3, set())
    busy = [slurm.host_of(peer) for peer in peers]
    (spare,) = set(slurm.cluster.nodes) - set(busy)
    lost = []
    for size in (3, 2):
        lost.append(next(name for name in reversed(busy) if name != "n1"))
        # a late node's first world may have been one of two: those have gone
        known = {peer.pid for peer in slurm.world.hub.peers}
        slurm.cluster.power_off(lost[-1])
        peers = next_world(slurm, size, known)
        busy = [slurm.host_of(peer) for peer in peers]
        assert lost[-1] not in busy
        assert (spare in busy) is (size == 3) or spare not in lost
    assert all("down" not in slurm.cluster.state(name) for name in lost)
    for name in lost:
        slurm.cluster.run("scontrol", "update", f"nodename={name}", "state=down", "reason=power")
    assert allreduce(slurm.world, peers) == [2, 2]
    finish(peers, step)
    assert "(no restart used)" in step.stderr
