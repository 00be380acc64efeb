"""A job on hosts that are named: `elasticrun --hosts h1,h2 train.py` on a host that has none of its
ranks, with real sshds."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.compat.live import PUPPET, allreduce, finish, summing
from tests.harness import World, await_true
from tests.jobs.hosts.town import Town

pytestmark = pytest.mark.slow

SECRET = "the-secret-of-these-hosts-0123456789"


def shown(secret: str) -> list[str]:
    """The processes of this machine whose words or variables have a secret."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if secret.encode() in (process / name).read_bytes():
                    found.append(f"{process}/{name}: {(process / 'cmdline').read_bytes()!r}")
            except OSError:
                pass
    return found


def test_one_line_trains_and_goes_on_when_a_connection_breaks(town: Town, world: World) -> None:
    """Lines have their host in front, none is lost when a host's connection breaks, and the token
    is to be seen nowhere."""
    token = world.scratch / "token"
    token.write_text(SECRET)
    job = town.types_hosts(f"--hosts h1,h2 --token-file {token} {PUPPET}")
    peers = summing(world, 2, world_size=2)
    assert [town.host_of(peer) for peer in peers] == ["h1", "h2"]
    assert not shown(SECRET)
    assert len(town.states()) >= 6
    assert not [path for path in town.states() if SECRET in path.read_text()]

    peers[1].order("print", text="before")
    job.until_text("[h2] before", stream="stdout")
    town.break_off("h2")
    job.until_text("h2 is not connected")
    peers[1].order("print", text="while it is cut")
    assert allreduce(world, peers) == [2, 2]
    job.until_text("h2 is reachable again")
    job.until_text("[h2] while it is cut", stream="stdout")
    peers[0].order("print", text="with an end", stream="stderr")
    job.until_text("[h1] with an end")
    finish(peers, job)
    town.until_nothing_runs("h1", "h2")
    assert job.stdout.splitlines() == ["[h2] before", "[h2] while it is cut"]
    assert town.states() == []


def test_a_host_that_is_not_there_and_one_whose_agent_is_killed(town: Town, world: World) -> None:
    """The others begin without it; a killed agent is started again; Ctrl-C ends all of it."""
    hosts = world.scratch / "hostfile"
    hosts.write_text("# two are enough\nh1 slots=2\nh9\nh2:2\n")
    words = "--rdzv-conf=last_call_timeout=1 --max-restarts=3"
    job = town.types_hosts(f"--hostfile {hosts} --nnodes=2:3 {words} {PUPPET}")
    peers = summing(world, 4, world_size=4)
    assert [town.host_of(peer) for peer in peers] == ["h1", "h1", "h2", "h2"]
    assert "h9 cannot be reached: ssh: Could not resolve hostname h9" in job.stderr

    town.kill_agent("h2")
    job.until_text("the agent on h2 was killed; restarting it")
    known = {peer.pid for peer in peers}
    again = summing(world, 4, world_size=4, pid=lambda pid: pid not in known)
    assert [town.host_of(peer) for peer in again].count("h2") == 2

    job.signal(signal.SIGINT)
    assert job.wait() == 1
    assert re.search(r"^\[h1\] elasticrun\[h1.*\]: ended by SIGINT", job.stderr, re.M)
    town.until_nothing_runs("h1", "h2")


def test_too_few_hosts(town: Town, world: World) -> None:
    """A host that lets nobody in, where all are needed: everything ends."""
    job = town.types_hosts(f"--hosts h1,nobody@h2,h3 {PUPPET}")
    assert job.wait() == 1
    assert "h2 cannot be used: nobody@h2: Permission denied" in job.stderr
    assert "the job needs 3 hosts, so it ends" in job.stderr
    town.until_nothing_runs("h1", "h2", "h3")


def test_a_launcher_that_is_killed_leaves_the_job(town: Town, world: World) -> None:
    job = town.types_hosts(f"--hosts h1,h2 {PUPPET}")
    peers = summing(world, 2, world_size=2)
    job.signal(signal.SIGKILL)
    job.wait()
    await_true(lambda: not town.logged_in("h2"), "end of the connections")
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    town.until_nothing_runs("h1", "h2")
