"""torchrun 2.13's defects, one class each: what torchrun does, and that we do right.

`test_torchrun` runs it live where that takes less than 20 s; where it takes longer or is a matter
of luck, the docstring gives the figure that was seen. A live record that begins to fail says that
torch has mended the defect: then it moves into the contract's tables.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.compat.live import agents, allreduce, finish, job, new_ranks
from tests.further import TORCHRUN as ALONE, cases, further
from tests.harness import (
    ELASTICRUN,
    PATIENT,
    SCRIPTS,
    TORCHRUN,
    Launched,
    Peer,
    World,
    agent_of,
    await_exit,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.slow

BOTH = cases((TORCHRUN, ELASTICRUN), soaked=[TORCHRUN])

QUICK = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=60"
SILENT = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=10"
"""For nodes that are lost while all ranks are idle: silence alone tells of it, and a stall that is
shorter than this is none."""


def three(world: World, *flags: str) -> tuple[list[Launched], list[Peer], list[Peer]]:
    """Agents of a job of two or three nodes, its ranks, and whoever was a rank until now: two nodes
    may have begun without the third."""
    jobs = agents(world, ELASTICRUN, 3, "2:3", free_port(), *flags)
    peers = world.hub.ranks(3, world_size=3)
    return jobs, peers, list(world.hub.peers)


class TestStaleStore:
    """One store over all restarts, without a prefix: of 18 restarts 9 failed, 3 of them after a
    hang of 100 s."""

    script = str(SCRIPTS / "store_key.py")

    def lives(self, world: World, launcher: str) -> list[Peer]:
        launched = world.launch(launcher, "--max-restarts=1", self.script, env=PATIENT)
        assert launched.wait() == 0, launched.stderr
        first = world.hub.ranks(1, restart=0)
        return first + world.hub.ranks(1, restart=1)

    @further(why=ALONE)
    def test_torchrun(self, torchrun_world: World) -> None:
        first, second = self.lives(torchrun_world, TORCHRUN)
        assert (first.stale, second.stale) == (False, True)
        assert first.master_port == second.master_port

    @further("TestStaleStore::test_ours_restarts_again_and_again")
    def test_ours(self, world: World) -> None:
        first, second = self.lives(world, ELASTICRUN)
        assert (first.stale, second.stale) == (False, False)

    def test_ours_restarts_again_and_again(self, world: World) -> None:
        """Every life gets its all_reduce, and no restart is wasted."""
        launched = world.launch(
            ELASTICRUN,
            *("--nproc-per-node=2", "--max-restarts=4", "--restart-backoff=0"),
            *(str(SCRIPTS / "crash_cycles.py"), "4"),
            env=PATIENT,
        )
        assert launched.wait() == 0, launched.stderr
        for life in range(5):
            for peer in world.hub.ranks(2, restart=life):
                assert world.hub.word(peer, "sum")["value"] == 2, (life, peer.rank)


class TestScaleUp:
    """2 to 3 agents, 3 to 4, and a replacement: all agents exit 1 (after read_timeout, 60 s)."""

    @further(why=ALONE)
    def test_torchrun(self, torchrun_world: World) -> None:
        world, port = torchrun_world, free_port()
        conf = "--rdzv-conf=last_call_timeout=1,read_timeout=3"
        jobs = agents(world, TORCHRUN, 1, "1:2", port, conf)
        world.hub.ranks(1, world_size=1)
        jobs += agents(world, TORCHRUN, 1, "1:2", port, conf)
        assert [j.wait() for j in jobs] == [1, 1]  # its own time limits, one after the other

    @further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
    def test_ours(self, world: World) -> None:
        port = free_port()
        jobs = agents(world, ELASTICRUN, 1, "1:2", port, QUICK, "--grow=now")
        (alone,) = world.hub.ranks(1, world_size=1)
        assert allreduce(world, [alone]) == [1]
        jobs += agents(world, ELASTICRUN, 1, "1:2", port, QUICK, "--grow=now")
        peers = world.hub.ranks(2, world_size=2)
        assert allreduce(world, peers) == [2, 2]
        assert peers[0].restart == 0  # a change of membership costs no budget
        finish(peers)
        assert [j.wait() for j in jobs] == [0, 0]


class TestReplacement:
    """nnodes=2, a node is lost, another comes 3 s later: all agents exit 1 after 60 s [recorded].
    The survivor's rank is idle: only the master can tell it."""

    @further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
    def test_ours(self, world: World) -> None:
        port = free_port()
        jobs = agents(world, ELASTICRUN, 2, "2", port, SILENT, "--max-restarts=1")
        peers = world.hub.ranks(2)
        host = agent_of(peers[0], jobs)
        lost = next(j for j in jobs if j is not host)
        lost.process.kill()
        lost.wait()
        world.hub.lost(peers)  # the survivor's rank too: its world is gone
        jobs += agents(world, ELASTICRUN, 1, "2", port, SILENT, "--max-restarts=1")
        again = world.hub.ranks(2, pid=lambda pid: pid not in {p.pid for p in peers})
        assert allreduce(world, again) == [2, 2]
        finish(again)
        assert [j.wait() for j in jobs if j is not lost] == [0, 0]


class TestLossOfRankZero:
    """The survivors went on with different MASTER_PORTs (46007 and 46487) [recorded]."""

    @further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
    def test_ours(self, world: World) -> None:
        jobs, peers, before = three(world, QUICK, "--max-restarts=3")
        assert allreduce(world, peers) == [3, 3, 3]
        lost = agent_of(peers[0], jobs)
        lost.process.kill()
        lost.wait()
        for peer in peers[1:]:
            peer.order("allreduce")  # they lose their peer, so that nobody waits for silence
        again = new_ranks(world, before, 2)
        assert len({(p.master_addr, p.master_port) for p in again}) == 1
        assert again[0].master_port not in {p.master_port for p in peers}
        assert allreduce(world, again) == [2, 2]
        finish(again)
        assert [j.wait() for j in jobs if j is not lost] == [0, 0]


class TestNodeLossWithIdleRanks:
    """3 agents, one killed, healthy idle ranks: no reaction in 40 s [recorded]."""

    @further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
    def test_ours(self, world: World) -> None:
        jobs, peers, before = three(world, SILENT)
        lost = agent_of(peers[2], jobs)
        lost.process.kill()
        again = new_ranks(world, before, 2)
        assert [p.rank for p in again] == [0, 1]
        assert [p.restart for p in again] == [0, 0]  # free, even with --max-restarts=0
        finish(again)
        assert [j.wait() for j in jobs if j is not lost] == [0, 0]


class TestFixedSizeWithoutBudget:
    """With `--nnodes=2` and no restarts a lost node ends the job at once, as under
    torchrun, so that the scheduler can requeue it."""

    @pytest.mark.parametrize("launcher", BOTH)
    def test_both(self, theirs_or_ours: World, launcher: str) -> None:
        world = theirs_or_ours
        jobs = agents(world, launcher, 2, "2", free_port())
        peers = world.hub.ranks(2)
        allreduce(world, peers)
        lost = agent_of(peers[1], jobs)
        lost.process.kill()
        if is_alive(peers[1].pid) and launcher == TORCHRUN:
            os.kill(peers[1].pid, signal.SIGKILL)
        peers[0].order("allreduce")
        (survivor,) = (j for j in jobs if j is not lost)
        assert survivor.wait() == 1


class TestGraceOnRestarts:
    """`--shutdown-timeout 2` was ignored: a rank that ignores SIGTERM took 30.0 s [recorded]."""

    def test_ours(self, world: World) -> None:
        launched = job(
            world, ELASTICRUN, "--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=1"
        )
        stubborn, other = world.hub.ranks(2)
        stubborn.order("trap", signums=[int(signal.SIGTERM)], how="ignore")
        world.hub.word(stubborn, "done")
        other.order("exit", code=3)
        finish(world.hub.ranks(2, restart=1))
        assert launched.wait() == 0


class TestRankThatExitsWellWhenStopped:
    """A rank that ends with 0 because it was told to stop has not finished its work."""

    @pytest.mark.parametrize("launcher", BOTH)
    def test_both(self, theirs_or_ours: World, launcher: str) -> None:
        world = theirs_or_ours
        launched = job(world, launcher, "--nproc-per-node=2", "--max-restarts=1")
        polite, failing = world.hub.ranks(2)
        path = world.scratch / "saved"
        polite.order("trap", signums=[int(signal.SIGTERM)], how="save", path=str(path))
        world.hub.word(polite, "done")
        failing.order("exit", code=3)
        finish(world.hub.ranks(2, restart=1))
        assert launched.wait() == 0
        assert path.read_text().endswith("whole\n")


class TestOrphans:
    """After SIGKILL of the agent its ranks lived on."""

    @further(why=ALONE)
    def test_torchrun(self, torchrun_world: World) -> None:
        launched = job(torchrun_world, TORCHRUN, "--nproc-per-node=2")
        peers = torchrun_world.hub.ranks(2)
        launched.process.kill()
        launched.wait()
        for peer in peers:
            peer.order("print", text="still here")
            torchrun_world.hub.word(peer, "done")

    @pytest.mark.parametrize("session", cases([False, True], kept=[True]))
    def test_ours(self, world: World, session: bool) -> None:
        launched = job(world, ELASTICRUN, "--nproc-per-node=2")
        pids = []
        for peer in world.hub.ranks(2):
            peer.order("child", session=session)
            pids += [peer.pid, world.hub.word(peer, "done")["pid"]]
        launched.process.kill()
        launched.wait()
        assert not await_exit(pids)
        world.nothing_left()


class TestFinishedNodeAndLateFailure:
    """One node done, a peer fails later with budget left: both waited in vain for 60 s, then
    RendezvousTimeoutError [recorded, with join_timeout=10]."""

    def fail_late(self, world: World, *flags: str) -> list[Launched]:
        jobs = agents(world, ELASTICRUN, 2, "2", free_port(), *flags)
        late, done = world.hub.ranks(2)
        done.order("exit", code=0)
        world.hub.lost([done])
        late.order("exit", code=3)
        return jobs

    def test_ours(self, world: World) -> None:
        jobs = self.fail_late(world, "--max-restarts=1")
        finish(world.hub.ranks(2, restart=1))
        assert [j.wait() for j in jobs] == [0, 0]

    @further("TestAnotherNodesFailure::test_ours")
    def test_ours_without_budget(self, world: World) -> None:
        assert [j.wait() for j in self.fail_late(world)] == [1, 1]


class TestStaticPeersAreTold:
    """Static, two nodes: only the crashed node was started again; the counts diverged."""

    def crash(self, world: World, launcher: str) -> tuple[list[Launched], Peer]:
        jobs = agents(world, launcher, 2, "2", free_port(), "--max-restarts=1", static=True)
        first, second = world.hub.ranks(2)
        second.order("exit", code=3)
        world.hub.lost([second])
        return jobs, first

    @further(why=ALONE)
    def test_torchrun(self, torchrun_world: World) -> None:
        world = torchrun_world
        jobs, first = self.crash(world, TORCHRUN)
        (again,) = world.hub.ranks(1, restart=1)
        assert again.rank == 1
        first.order("print", text="nobody told me")
        world.hub.word(first, "done")
        finish([first, again])
        assert [j.wait() for j in jobs] == [0, 0]

    @further("TestFinishedNodeAndLateFailure::test_ours")
    def test_ours(self, world: World) -> None:
        jobs, first = self.crash(world, ELASTICRUN)
        world.hub.lost([first])
        again = world.hub.ranks(2, restart=1)
        assert [p.rank for p in again] == [0, 1]
        assert allreduce(world, again) == [2, 2]
        finish(again)
        assert [j.wait() for j in jobs] == [0, 0]


class TestLogsOfThePreviousWorld:
    """A membership restart has the same count, and its attempt_N was removed first [recorded]."""

    def test_ours(self, world: World) -> None:
        port, logs = free_port(), world.scratch / "logs"
        flags = (QUICK, "--grow=now", "-r3", f"--log-dir={logs}")
        jobs = agents(world, ELASTICRUN, 1, "1:2", port, *flags)
        (alone,) = world.hub.ranks(1, world_size=1)
        alone.order("print", text="the old world")
        world.hub.word(alone, "done")
        jobs += agents(world, ELASTICRUN, 1, "1:2", port, *flags)
        peers = world.hub.ranks(2, world_size=2)
        peers[0].order("print", text="the new world")
        world.hub.word(peers[0], "done")
        finish(peers)
        assert [j.wait() for j in jobs] == [0, 0]
        texts = [p.read_text() for p in logs.rglob("stdout.log")]
        assert sum("the old world" in t for t in texts) == 1
        assert sum("the new world" in t for t in texts) == 1


class TestRootCause:
    """Whole seconds, ties by order in a dictionary: a bystander was named."""

    def cause(self, world: World, launcher: str) -> str:
        pipe = world.scratch / "pipe"
        os.mkfifo(pipe)
        launched = world.launch(
            launcher,
            *("--nproc-per-node=2", str(SCRIPTS / "bystander.py"), str(pipe)),
        )
        peers = world.hub.ranks(2)
        if launcher == TORCHRUN:
            launched.signal(signal.SIGSTOP)
        peers[1].order("exit")
        if launcher == TORCHRUN:
            assert not await_exit([peer.pid for peer in peers])
            launched.signal(signal.SIGCONT)
        assert launched.wait() == 1
        text = launched.stderr[launched.stderr.index("Root Cause") :]
        match = re.search(r"rank +: (\d+)", text)
        assert match
        return match[1]

    @further(why=ALONE)
    def test_torchrun(self, torchrun_world: World) -> None:
        """Both deaths fall between two of its looks: it stands still meanwhile."""
        assert self.cause(torchrun_world, TORCHRUN) == "0"

    def test_ours(self, world: World) -> None:
        assert self.cause(world, ELASTICRUN) == "1"


class TestAnotherNodesFailure:
    """The budget is spent on one node: the others saw RendezvousClosedError and no cause."""

    def test_ours(self, world: World) -> None:
        jobs = agents(world, ELASTICRUN, 2, "2", free_port())
        world.hub.ranks(2)[1].order("exit", code=7)
        assert [j.wait() for j in jobs] == [1, 1]
        for launched in jobs:
            text = launched.stderr[launched.stderr.index("Root Cause") :]
            assert re.search(r"rank +: 1 \(local_rank: 0\)", text)
            assert re.search(r"exitcode +: 7 ", text)


class TestSpareAtTheEnd:
    """A node more than max: when the job ends, torchrun's spare ended with 1 (AttributeError)."""

    def test_ours(self, world: World) -> None:
        port = free_port()
        jobs = agents(world, ELASTICRUN, 1, "1:1", port)
        (peer,) = world.hub.ranks(1)
        (spare,) = agents(world, ELASTICRUN, 1, "1:1", port)
        spare.until_text("spare")
        finish([peer])
        assert jobs[0].wait() == 0
        assert spare.wait() == 0, spare.stderr


class TestOneAgentIsTold:
    """SIGTERM to one agent of an elastic job: torchrun told nobody (recorded: no reaction in
    40 s). Here the node leaves and the others go on."""

    @further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
    def test_ours(self, world: World) -> None:
        jobs, peers, before = three(world, QUICK)
        leaving = agent_of(peers[1], jobs)
        leaving.signal(signal.SIGTERM)
        again = new_ranks(world, before, 2)
        assert leaving.wait() == 1
        assert allreduce(world, again) == [2, 2]
        finish(again)
        assert [j.wait() for j in jobs if j is not leaving] == [0, 0]


class TestUnlikeNodes:
    """Nodes with different numbers of ranks, elastic; the reference's documentation denies it."""

    @further("core/rounds/test_round")
    @pytest.mark.parametrize("launcher", BOTH)
    def test_both(self, theirs_or_ours: World, launcher: str) -> None:
        world, port = theirs_or_ours, free_port()
        jobs = agents(world, launcher, 1, "2", port, "--nproc-per-node=1")
        jobs += agents(world, launcher, 1, "2", port, "--nproc-per-node=2")
        peers = world.hub.ranks(3, world_size=3)
        assert [p.rank for p in peers] == [0, 1, 2]
        assert allreduce(world, peers) == [3, 3, 3]
        finish(peers)
        assert [j.wait() for j in jobs] == [0, 0]
