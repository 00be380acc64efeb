"""Bare hosts and ssh: what docs/bare-hosts.md says. Each host has an sshd; from `login` somebody
starts things on them."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.detection.environments import BATCH
from tests.compat.live import PUPPET, allreduce, finish, summing
from tests.further import further
from tests.harness import (
    Launched,
    Peer,
    World,
)
from tests.jobs.hosts.town import Town

pytestmark = pytest.mark.slow

MEET = "--rdzv-backend=c10d --rdzv-endpoint=h1:29400 --rdzv-id=tr"


@further("test_a_connection_that_is_cut")
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
    finish(peers, loop)
    town.until_nothing_runs("h1", "h2", "h3")


@further("cli/test_bare")
def test_a_loop_of_a_batch_script_that_takes_its_variables_along(town: Town, world: World) -> None:
    """Each host believes to be the batch script's. A bare command is one node there, as under
    torchrun, and says so; flags make one job of them, and nobody takes itself for node 0."""
    variables = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in BATCH.items())

    def loop(flags: str) -> tuple[Launched, list[Peer]]:
        known = {peer.pid for peer in world.hub.peers}
        started = town.types(f"""
            {variables}
            for host in h1 h2; do
                ssh -n -o SendEnv='SLURM_*' $host elasticrun {flags} {PUPPET} &
            done
            code=0; for started in $(jobs -p); do wait $started || code=$?; done; exit $code
        """)
        return started, world.hub.ranks(2, pid=lambda pid: pid not in known)

    bare, alone = loop("")
    assert [peer.world_size for peer in alone] == [1, 1]
    assert sorted(town.host_of(peer) for peer in alone) == ["h1", "h2"]
    finish(alone, bare)
    assert bare.stderr.count("nothing has been started on the other node, so this is a job") == 2
    assert bare.stderr.count("use --srun for one job on all nodes") == 2

    said, two = loop(f"--nnodes=2 {MEET}")
    assert [peer.world_size for peer in two] == [2, 2]
    assert sorted(town.host_of(peer) for peer in two) == ["h1", "h2"]
    assert allreduce(world, two) == [2, 2]
    finish(two, said)
    town.until_nothing_runs("h1", "h2")


def test_a_connection_that_is_cut(town: Town, world: World) -> None:
    """Without a terminal the agent does not notice and goes on; with one (`-tt`) it is hung up on,
    leaves, and the others go on. Nobody stays behind its job."""
    # a host that is a minute late is let in all the same
    start = f"elasticrun --nnodes=1:2 --max-restarts=0 --grow=now {MEET} {PUPPET}"
    town.types(f"ssh -n h1 {start}")
    town.types(f"ssh -n -tt h2 {start}")
    peers = summing(world, 2, world_size=2)

    town.hang_up("h1")
    assert allreduce(world, peers) == [2, 2]

    known = {peer.pid for peer in world.hub.peers}
    town.hang_up("h2")
    again = world.hub.ranks(1, world_size=1, pid=lambda pid: pid not in known)
    town.until_nothing_runs("h2")
    assert [town.host_of(peer) for peer in again] == ["h1"]
    finish(again)
    town.until_nothing_runs("h1")
