"""Bare hosts and ssh: what docs/bare-hosts.md says."""

from __future__ import annotations

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.harness import World
from tests.ssh.conftest import Town

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MEET = "--rdzv-backend=c10d --rdzv-endpoint=h1:29400 --rdzv-id=tr"


def test_a_loop_over_hosts_trains(town: Town, world: World) -> None:
    """The same command on each; the loop knows how every host has ended."""
    loop = town.types(f"""
        for host in h1 h2 h3; do
            ssh -n $host elasticrun --nnodes=3 {MEET} {PUPPET} &
        done
        code=0; for started in $(jobs -p); do wait $started || code=$?; done; exit $code
    """)
    peers = world.hub.ranks(3, world_size=3)
    assert sorted(town.host_of(peer) for peer in peers) == ["h1", "h2", "h3"]
    assert allreduce(world, peers) == [3, 3, 3]
    finish(peers)
    assert loop.wait() == 0, loop.stderr
    town.until_nothing_runs("h1", "h2", "h3")


def test_a_connection_that_is_cut(town: Town, world: World) -> None:
    """Without a terminal the agent does not notice and goes on; with one (`-tt`) it is hung up on,
    leaves, and the others go on. Nobody stays behind its job."""
    start = f"elasticrun --nnodes=1:2 --max-restarts=0 {MEET} {PUPPET}"
    town.types(f"ssh -n h1 {start}")
    town.types(f"ssh -n -tt h2 {start}")
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]

    town.hang_up("h1")
    assert allreduce(world, peers) == [2, 2]

    known = {peer.pid for peer in world.hub.peers}
    town.hang_up("h2")
    again = world.hub.ranks(1, world_size=1, pid=lambda pid: pid not in known)
    town.until_nothing_runs("h2")
    assert [town.host_of(peer) for peer in again] == ["h1"]
    finish(again)
    town.until_nothing_runs("h1")
