"""Nodes that freeze, that are there twice, that are a container, and a master of its own."""

from __future__ import annotations

import os

import pytest

from tests.compat.live import agents, allreduce, finish, job
from tests.counting import Counting
from tests.further import further
from tests.harness import ELASTICRUN, World, free_port

pytestmark = pytest.mark.slow

TIMES = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=10"
"""A node that falls silent is lost, and one that a busy machine lets stand for a while is not."""


@further("faults/test_fencing::test_an_agent_that_was_replaced_while_it_stood_still")
def test_a_node_that_is_there_twice(world: World) -> None:
    """Two pods that are one node do not fight. In a static job the node rank says who a node is,
    else `--node-id`: the later one is told and ends. One of another id is a spare, which ends well
    with the job."""
    port = free_port()
    jobs = agents(world, ELASTICRUN, 2, "2", port, static=True)
    peers = world.hub.ranks(2)
    (twin,) = agents(world, ELASTICRUN, 1, "2", port, first=1, static=True)
    jobs += agents(world, ELASTICRUN, 1, "2", port, "--node-id=pod-2", first=1, static=True)
    assert twin.wait() == 1
    assert "node rank-1 is held by another agent" in twin.stderr
    assert "Traceback" not in twin.stderr
    jobs[-1].until_text("spare")
    assert allreduce(world, peers) == [2, 2]
    finish(peers, *jobs)
    assert len(world.hub.peers) == 2  # no other round


def test_a_script_that_says_do_not_try_again(world: World) -> None:
    """A rank of one of two nodes ends with 93: no restart is spent, and both nodes end with it."""
    jobs = agents(world, ELASTICRUN, 2, "2", free_port(), "--max-restarts=3")
    peers = world.hub.ranks(2)
    peers[1].order("exit", code=93)
    assert [j.wait() for j in jobs] == [93, 93]
    assert all("the script says that trying again cannot help" in j.stderr for j in jobs)
    assert len(world.hub.peers) == 2  # no other round


@further(
    "testing/test_job::test_a_master_by_hand_a_signal_and_the_end",
    "master/test_process::test_by_hand_it_ends_on_sigterm_with_a_sentence_for_a_taken_port",
)
def test_a_master_by_hand_and_a_quiet_console(counting: Counting) -> None:
    """`elasticrun master` serves agents that host nothing, and ends with their job. While ranks
    train, nothing changes and nobody writes a line."""
    counted = counting.start(
        "2", "--rdzv-conf=is_host=0,heartbeat_timeout=60", master=True,
        master_options=["--nnodes=2", "--rdzv-conf=heartbeat_timeout=60"],
        env={"COUNTS_PAUSE": "0.01"},
    )  # fmt: skip
    first = counting.first(2)
    counted.wait_for_output("master", "round 1 begins")
    for node in (0, 1):  # the last two that an agent says before its ranks are there
        counted.wait_for_output(node, "the job's page")
        counted.wait_for_output(node, "ranks will be started by")

    def shown() -> list[str]:
        """What is said of this machine comes when it has been looked at, some seconds later."""
        texts = [counted.output(who) for who in ("master", 0, 1)]
        lines = [line for text in texts for line in text.splitlines()]
        return [line for line in lines if "this machine" not in line and "ports" not in line]

    before = shown()
    counting.goes_on(first, 300)  # 3 s at least, several beats
    assert shown() == before
    assert len(counting.finish()) == 1
    assert counted.master_node is not None
    assert counted.master_node.exit_code == 0


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
        assert launched.wait() == 75, launched.stderr
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
