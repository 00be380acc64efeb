"""Nodes that freeze, that are there twice, that are a container, and a master of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.compat.live import PUPPET, agents, allreduce, finish, job
from tests.e2e.test_kills import agent_of
from tests.harness import COMMANDS, ELASTICRUN, Launched, World, free_port

pytestmark = pytest.mark.slow


@contextmanager
def frozen(launched: Launched) -> Iterator[None]:
    """Every process of a node but the job's master stands still, as behind a link that is cut."""
    processes = [psutil.Process(launched.pid), *launched.below()]
    mine = [p for p in processes if "elasticrun.master" not in " ".join(p.cmdline())]
    for process in mine:
        process.suspend()
    try:
        yield
    finally:
        for process in mine:
            process.resume()


def test_a_frozen_node_costs_nothing_and_comes_back(world: World) -> None:
    """COORDINATION 11 and 13: one of three falls silent, with `--max-restarts=0`: the others go
    on, nothing is charged. When it thaws its ranks of the old round end, and it joins anew."""
    conf = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2"
    jobs = agents(world, ELASTICRUN, 3, "2:3", free_port(), conf, "--grow=now")
    peers = world.hub.ranks(3)
    assert allreduce(world, peers) == [3, 3, 3]
    with frozen(agent_of(peers[2], jobs)):
        others = world.hub.ranks(2, world_size=2)
        assert [p.restart for p in others] == [0, 0]
        assert allreduce(world, others) == [2, 2]
        assert not peers[2].gone
    world.hub.lost([peers[2]])
    known = {p.pid for p in [*peers, *others]}
    again = world.hub.ranks(3, world_size=3, pid=lambda pid: pid not in known)
    assert [p.restart for p in again] == [0, 0, 0]
    assert allreduce(world, again) == [3, 3, 3]
    finish(again)
    assert [j.wait() for j in jobs] == [0, 0, 0]


def test_a_node_that_is_there_twice(world: World) -> None:
    """COORDINATION 13 (d): two pods that are one node do not fight. In a static job the node rank
    says who a node is, else `--node-id`: the later one is told and ends. One of another id is a
    spare, which ends well with the job."""
    port = free_port()
    jobs = agents(world, ELASTICRUN, 2, "2", port, static=True)
    peers = world.hub.ranks(2)
    (twin,) = agents(world, ELASTICRUN, 1, "2", port, first=1, static=True)
    jobs += agents(world, ELASTICRUN, 1, "2", port, "--node-id=pod-2", first=1, static=True)
    assert twin.wait() == 78
    assert "node rank-1 is held by another agent" in twin.stderr
    assert "Traceback" not in twin.stderr
    jobs[-1].until_text("spare")
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0, 0]
    assert len(world.hub.peers) == 2  # no other round


def test_a_master_by_hand_and_a_quiet_console(world: World) -> None:
    """`elasticrun master` serves agents that host nothing, and ends with their job. While ranks
    train, nothing changes and nobody writes a line."""
    port = free_port()
    words = ("master", f"--port={port}", "--nnodes=2", "--rdzv-id=agents")
    master = world.launch(ELASTICRUN, *words, env={"LOGLEVEL": "INFO"})
    master.until_text(str(port))
    jobs = agents(world, ELASTICRUN, 2, "2", port, "--rdzv-conf=is_host=0")
    peers = world.hub.ranks(2)
    assert allreduce(world, peers) == [2, 2]
    everybody = [master, *jobs]
    master.until_text("round 1 begins")
    before = [launched.stderr for launched in everybody]
    for peer in peers:
        peer.order("steps", count=300)  # 3 s at least, several beats
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    assert [launched.stderr for launched in everybody] == before
    finish(peers)
    assert [launched.wait() for launched in everybody] == [0, 0, 0]


def may_unshare() -> bool:
    """Whether this host lets us make a PID namespace."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False)
    return tried.returncode == 0


def test_an_agent_that_is_pid_1(world: World) -> None:
    """COORDINATION 7: a container's entry point. Nobody's parent-death check takes the agent for
    a dead one, orphans are reaped, the job restarts, and SIGTERM is obeyed."""
    if not may_unshare():
        pytest.skip("no PID namespaces here")
    container = ("unshare", "--pid", "--fork", "--mount-proc")
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    launched = world.command((*container, *COMMANDS[ELASTICRUN], *flags, PUPPET))
    first = world.hub.ranks(2)
    agent = next(p for p in launched.below() if p.ppid() == launched.pid)
    first[0].order("child", session=True)
    world.hub.word(first[0], "done")
    first[1].order("die")
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    assert not [p for p in launched.below() if p.status() == psutil.STATUS_ZOMBIE]
    for peer in again:
        peer.order("trap", signums=[int(signal.SIGTERM)])
        world.hub.word(peer, "done", what="trap")
    agent.terminate()
    for peer in again:
        world.hub.word(peer, "signal", signum=int(signal.SIGTERM))
    finish(again)
    assert launched.wait() == 1


def test_a_rank_that_cannot_be_reaped(world: World) -> None:
    """torchrun ends with 0 when a rank hangs in the kernel; here it is 75 and a sentence. What a
    disk does to a process a tracer can do too: while one holds it, nobody can reap it."""
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=1")
    launched = job(world, ELASTICRUN, *flags)
    held, failing = world.hub.ranks(2)
    if not seize(held.pid):
        finish([held, failing])
        launched.wait()
        pytest.skip("this host does not let us trace")
    try:
        failing.order("exit", code=3)
        assert launched.wait(120) == 75, launched.stderr
    finally:
        os.waitpid(held.pid, 0x40000000)  # __WALL: the tracer lets go
    assert str(held.pid) in launched.stderr
    assert "Traceback" not in launched.stderr


def seize(pid: int) -> bool:
    """Become the tracer of a process without stopping it."""
    import ctypes

    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    ptrace.restype = ctypes.c_long
    return bool(ptrace(0x4206, pid, None, None) == 0)  # PTRACE_SEIZE
