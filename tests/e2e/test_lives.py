"""kill -9 of processes, and what the next life is made from; however many there are, no life is
wasted and nothing piles up."""

from __future__ import annotations

import os
import random
import sys
import time

import psutil
import pytest

from elasticrun.testing.processes import is_fork_server
from tests.compat.live import PUPPET, agents, finish, job, summing
from tests.further import cases, further
from tests.harness import (
    ELASTICRUN,
    PATIENT,
    SCRIPTS,
    Launched,
    World,
    await_exit,
    await_true,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.slow

SPEAKER = f"""
import sys
sys.path.append({str(SCRIPTS)!r})
import beside
from stage import Stage

stage = Stage(script="old", module=beside.TEXT)
for order in stage.orders():
    sys.exit(order["code"])
"""


@further("e2e/test_standbys::test_changed_code_is_run")
def test_a_bug_mended_between_two_lives(world: World) -> None:
    """The script and a module beside it are read anew in every life."""
    script, module = world.scratch / "train.py", world.scratch / "beside.py"
    script.write_text(SPEAKER)
    module.write_text("TEXT = 'old'\n")
    launched = world.launch(ELASTICRUN, "--max-restarts=1", str(script), env=PATIENT)
    (first,) = world.hub.ranks(1, restart=0)
    assert (first.script, first.module) == ("old", "old")
    script.write_text(SPEAKER.replace('"old"', '"mended"'))
    module.write_text("TEXT = 'mended'\n")
    first.order("exit", code=1)
    (second,) = world.hub.ranks(1, restart=1)
    assert second.ppid == first.ppid  # forked by the same server
    assert (second.script, second.module) == ("mended", "mended")
    second.order("exit", code=0)
    assert launched.wait() == 0


@pytest.mark.parametrize(
    ("words", "session"),
    [
        pytest.param((PUPPET,), False, id="forked", marks=pytest.mark.soak),
        pytest.param((PUPPET,), True, id="forked, a session", marks=pytest.mark.soak),
        pytest.param(("--launch=exec", PUPPET), True, id="execed", marks=pytest.mark.soak),
        pytest.param(
            ("--no-python", "sh", "-c", '"$0" "$1"; true', sys.executable, PUPPET), True, id="shell"
        ),
    ],
)
def test_no_orphan_of_an_agent_that_is_killed(
    world: World, words: tuple[str, ...], session: bool
) -> None:
    """What ranks have started goes as well; behind a shell the orphan is the trainer itself."""
    launched = world.launch(ELASTICRUN, "--nproc-per-node=2", *words)
    pids = []
    for peer in world.hub.ranks(2):
        peer.order("child", session=session)
        pids += [peer.pid, world.hub.word(peer, "done")["pid"]]
    launched.process.kill()
    launched.wait()
    assert not await_exit(pids)
    world.nothing_left()


@further(
    "agent/test_deaths::test_kill_9_of_the_fork_server_restarts_the_job",
    "core/scripts/spawner_dies.txt",
)
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


@further(
    "compat/test_defects::test_restarts_again_and_again",
    "forkserver/test_server::test_lives_leave_no_descriptor_and_no_process",
)
@pytest.mark.parametrize("cycles", [30, 200])
def test_lives_that_end_with_sigkill(world: World, cycles: int) -> None:
    """So many of one rank, then one that ends well."""
    looks = (cycles // 5, cycles - 1)  # in these lives the job waits until it was looked at
    launched = world.launch(
        ELASTICRUN,
        *("--nproc-per-node=2", f"--max-restarts={cycles}", "--restart-backoff=0"),
        *(str(SCRIPTS / "crash_cycles.py"), *map(str, (cycles, *looks))),
        env=PATIENT,
    )
    first: dict[str, int] = {}
    for life in range(cycles + 1):
        peers = world.hub.ranks(2, restart=life)
        for peer in peers:
            assert world.hub.word(peer, "sum")["value"] == 2, life
        if life == looks[0]:
            first.update(census(world, launched.pid))
        if life == looks[1]:
            await_true(lambda: has_not_grown(first, world, launched.pid), f"less than {first}")
        if life in looks:
            peers[1].order("die")
    assert launched.wait() == 0, launched.stderr
    assert len(world.hub.peers) == 2 * (cycles + 1)  # no life without its all_reduce
    assert not await_exit([p.pid for p in world.survivors()])
    assert not [name for name in os.listdir(world.tmp) if not name.startswith("torchelastic_")]
    left = [p for p in (world.scratch / "run").rglob("*") if p.is_file()]
    assert len(left) <= 1, left  # the lock file of the slot, which is reused


def has_not_grown(first: dict[str, int], world: World, agent: int) -> bool:
    """Whether there is no more than at the first look; what is of the life before may still be on
    its way out."""
    last = census(world, agent)
    # two ranks and two stores more or less: one life is ending, the next one begins
    return (
        last["descriptors"] <= first["descriptors"] + 2
        and last["processes"] <= first["processes"] + 4
    )


def census(world: World, agent: int) -> dict[str, int]:
    return {
        "descriptors": len(os.listdir(f"/proc/{agent}/fd")),
        "processes": len(world.survivors()),
    }
