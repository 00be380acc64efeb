"""kill -9 of every kind of process, in every state: what dies with it and what goes on."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from elasticrun.testing.processes import is_fork_server
from tests.compat.live import agents, finish, job, summing
from tests.further import cases
from tests.harness import (
    ELASTICRUN,
    Launched,
    World,
    await_true,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.slow


def test_the_fork_server_when_idle_ends_no_job(world: World) -> None:
    """Killed while the node waits for its peer: the node is still there when the peer comes."""
    port = free_port()
    (first,) = agents(world, ELASTICRUN, 1, "2", port)
    first.until_text("wait")
    await_true(lambda: fork_servers(first), "fork server")
    (server,) = fork_servers(first)
    server.kill()
    (second,) = agents(world, ELASTICRUN, 1, "2", port)
    peers = summing(world, 2)
    finish(peers, first, second)


def fork_servers(launched: Launched) -> list[psutil.Process]:
    """Those of an agent, told by their command lines; what a server forks has the same one."""
    return [process for process in launched.children() if is_fork_server(process.pid)]


@pytest.mark.parametrize("seed", cases(range(3), kept=[0]))
def test_an_agent_at_any_moment(world: World, seed: int) -> None:
    """Between its first millisecond and the ranks' training: nothing of it is left."""
    chance = random.Random(seed)
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--standalone")
    time.sleep(chance.uniform(0.0, 2.5))  # the moment is what is tested, not an event
    launched.process.kill()
    launched.wait()
    world.nothing_left()


@pytest.mark.parametrize("trap", cases([False, True], kept=[True]))
def test_descendants_of_a_dead_rank(world: World, trap: bool) -> None:
    """What shares its group goes at once; what made a session of its own gets SIGTERM and time to
    write its last rows. The next life starts when all have gone."""
    launched = job(world, ELASTICRUN, "--max-restarts=1")
    (peer,) = world.hub.ranks(1)
    note = world.scratch / "flushed"
    peer.order("child", session=False)
    near = world.hub.word(peer, "done")["pid"]
    peer.order("child", session=True, trap=trap, note=str(note))
    far = world.hub.until(lambda: [m["pid"] for m in peer.said[2:] if "pid" in m], "a pid")[0]
    peer.order("die")
    (again,) = world.hub.ranks(1, restart=1)
    assert (is_alive(near), is_alive(far)) == (False, False)
    assert note.exists() == trap
    finish([again], launched)
