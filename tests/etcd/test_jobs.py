"""Whole jobs whose mastership is in etcd: the master's host dies, freezes, etcd goes away."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from elasticrun.config import EXIT_NOT_LEADING
from elasticrun.testing.processes import is_master, kill_all
from elasticrun.wire.rpc.etcd_place import Keys, LeaderKey, leader_from_bytes
from tests.compat.live import PUPPET, allreduce, finish, job
from tests.etcd.server import EtcdServer, patient_masters
from tests.further import cases, further
from tests.harness import ELASTICRUN, LIMIT, Launched, Peer, World, await_exit, await_true
from tests.hooked import warmed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with warmed(tmp_path_factory.mktemp("warm")):
        yield


JOB = "etcd-job"
TIMES = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=10"
FAST = (TIMES, "--grow=now", "--local-addr=127.0.0.1")


def start(world: World, server: EtcdServer, node: str, nnodes: str, *flags: str) -> Launched:
    meet = (f"--master-store={server.url}", f"--rdzv-id={JOB}", f"--nnodes={nnodes}")
    env = patient_masters()
    return job(world, ELASTICRUN, *meet, f"--node-id={node}", *FAST, *flags, env=env)


def ask(server: EtcdServer, what: str) -> bytes:
    """The value of a key of the job, as etcd's own tool prints it."""
    key = getattr(Keys(JOB), what)
    command = [*server.etcdctl, "get", "--print-value-only", key]
    return subprocess.run(command, check=True, capture_output=True).stdout.rstrip(b"\n")


def leader(server: EtcdServer) -> LeaderKey:
    found = leader_from_bytes(ask(server, "master"))
    assert found is not None
    return found


def masters(world: World) -> list[psutil.Process]:
    found = []
    for process in world.survivors():
        with contextlib.suppress(psutil.Error):
            if is_master(process.pid):
                found.append(process)
    return found


def leading(world: World, server: EtcdServer) -> psutil.Process:
    """The master that leads: another one may just find out that it does not."""
    found: list[psutil.Process] = []

    def there() -> bool:
        leads = leader_from_bytes(ask(server, "master"))
        if leads is not None:
            found[:] = [master for master in masters(world) if listens(master, leads.port)]
        return bool(found)

    await_true(there, "master that leads")
    return found[0]


def listens(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for one in process.net_connections("tcp")
        )
    return False


def host_of(master: psutil.Process, jobs: list[Launched]) -> Launched:
    return next(j for j in jobs if j.pid == master.ppid())


def everything(launched: Launched) -> list[psutil.Process]:
    """The agent, its master, its ranks: a whole host."""
    return [psutil.Process(launched.pid), *launched.below()]


def strike(host: list[psutil.Process], signum: int) -> None:
    for process in host:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def others(world: World, old: list[Peer], count: int, **wanted: object) -> list[Peer]:
    """Ranks of a later life."""
    known = {peer.pid for peer in old}
    return world.hub.ranks(count, pid=lambda pid: pid not in known, **wanted)


def test_the_masters_host_dies(world: World, etcd_server: EtcdServer) -> None:
    """kill -9 of all that runs on it: one of the others takes over, with what was decided, and the
    survivors train on; nothing is charged."""
    jobs = [start(world, etcd_server, f"n{i}", "2:3", "--max-restarts=0") for i in range(3)]
    peers = world.hub.ranks(3, world_size=3)
    assert allreduce(world, peers) == [3, 3, 3]
    first = leading(world, etcd_server)
    host = host_of(first, jobs)
    was = leader(etcd_server)
    for peer in peers:
        peer.order("steps", count=1_000_000)
    before = list(world.hub.peers)  # those of a first round of two, where the third came late
    gone = [process.pid for process in everything(host)]
    began = time.monotonic()
    assert not kill_all(lambda: gone, LIMIT)
    again = others(world, before, 2, world_size=2)
    assert allreduce(world, again) == [2, 2]
    print(f"the survivors' first step came after {time.monotonic() - began:.1f} s")
    assert [p.restart for p in again] == [0, 0]
    now = leader(etcd_server)
    assert now.holder != was.holder
    finish(again)
    assert [j.wait() for j in jobs if j is not host] == [0, 0]


@further(
    "test_the_masters_host_dies",
    "etcd/test_masters::test_one_that_was_stopped_past_its_lease_says_nothing_more",
)
def test_the_masters_host_freezes(world: World, etcd_server: EtcdServer) -> None:
    """It stands still past its lease, with its agent and ranks, and another takes over; thawed, its
    master ends without a decision, its old ranks end, and the node joins anew."""
    jobs = [start(world, etcd_server, f"n{i}", "1:2") for i in range(2)]
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]
    first = leading(world, etcd_server)
    host = host_of(first, jobs)
    (other,) = (j for j in jobs if j is not host)
    known = list(world.hub.peers)  # that of a first round of one, where the other came late
    frozen = everything(host)
    strike(frozen, signal.SIGSTOP)
    try:
        alone = others(world, known, 1, world_size=1)
        assert allreduce(world, alone) == [1]
        assert leader(etcd_server).port != 0
        before = host.stderr
    finally:
        strike(frozen, signal.SIGCONT)
    assert not await_exit([first.pid])
    again = others(world, [*known, *alone], 2, world_size=2)
    assert allreduce(world, again) == [2, 2]
    assert [p.restart for p in again] == [0, 0]
    said = host.stderr.removeprefix(before)
    assert "it sends no more orders" in said
    assert " begins" not in said, "the one that was stopped has formed a round"
    assert other.stderr.count("serving job") == 1
    finish(again)
    assert [j.wait() for j in jobs] == [0, 0]


def test_etcd_goes_away_and_comes_back(world: World, etcd_server: EtcdServer) -> None:
    """Until nobody can lead any more, and then for a while: no rank notices. When it is back so is
    a master, with the record, and what failed meanwhile is dealt with."""
    jobs = [start(world, etcd_server, f"n{i}", "2:2", "--max-restarts=1") for i in range(2)]
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]
    first = leading(world, etcd_server)
    host = host_of(first, jobs)
    etcd_server.kill()
    assert not await_exit([first.pid])
    host.until_text("it sends no more orders")
    for launched in jobs:
        launched.until_text("no master answers")
        launched.until_text("cannot find another master")
    assert allreduce(world, peers) == [2, 2]
    peers[1].order("die")
    world.hub.lost([peers[1]])
    etcd_server.start()
    again = others(world, peers, 2, world_size=2, restart=1)
    assert allreduce(world, again) == [2, 2]
    for launched in jobs:
        launched.until_text("etcd answers again")
    finish(again)
    assert [j.wait() for j in jobs] == [0, 0]


@further("etcd/test_store", "test_etcd_goes_away_and_comes_back")
@pytest.mark.parametrize("history", cases([10, 0], kept=[10]))
def test_etcd_is_wiped(world: World, etcd_server: EtcdServer, history: int) -> None:
    """It counts from 1 again, below the terms that the agents know: that is said, the next master
    has a higher one, and the job goes on."""
    for number in range(history):
        subprocess.run([*etcd_server.etcdctl, "put", "x", str(number)], check=True)
    jobs = [start(world, etcd_server, f"n{i}", "2:2", "--max-restarts=1") for i in range(2)]
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]
    first = leading(world, etcd_server)
    etcd_server.wipe()
    assert not await_exit([first.pid])
    await_true(
        lambda: any("has lost this job's record" in j.stderr for j in jobs),
        "word of the wiped etcd",
    )
    if history:
        await_true(
            lambda: any("restarted its revisions" in j.stderr for j in jobs), "word of the terms"
        )
    for launched in jobs:
        launched.until_text("the master answers again")
    assert allreduce(world, peers) == [2, 2]
    peers[1].order("die")
    again = others(world, peers, 2, world_size=2, restart=1)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [j.wait() for j in jobs] == [0, 0]
    assert len(world.hub.peers) == 4


@further(
    "test_etcd_goes_away_and_comes_back",
    "etcd/test_store::test_nothing_is_done_while_etcd_stands_still",
)
def test_etcd_stands_still(world: World, etcd_server: EtcdServer) -> None:
    """The same without a word: connections stay, and when it goes on the lease is over."""
    launched = start(world, etcd_server, "n0", "1:2")
    peers = world.hub.ranks(1)
    first = leading(world, etcd_server)
    etcd_server.stop()
    try:
        assert not await_exit([first.pid])
        peers[0].order("print", text="still here\n")
        world.hub.word(peers[0], "done", what="print")
    finally:
        etcd_server.go_on()
    launched.until_text("the master answers again")
    assert not peers[0].gone
    assert leading(world, etcd_server).pid != first.pid
    finish(peers)
    assert launched.wait() == 0


@further("etcd/test_store::test_the_same_agents_next_master_waits_for_no_lease")
def test_the_master_alone_is_killed(world: World, etcd_server: EtcdServer) -> None:
    """Its agent starts it again on the same port, and it leads at once: nobody waits for the lease
    of one who is known to be dead."""
    jobs = [start(world, etcd_server, f"n{i}", "2:2") for i in range(2)]
    peers = world.hub.ranks(2)
    was = leader(etcd_server)
    first = leading(world, etcd_server)
    host = host_of(first, jobs)
    first.kill()
    for launched in jobs:
        launched.until_text("the master answers again")
    now = leader(etcd_server)
    # another port only where another process has taken this one meanwhile
    assert now.holder == was.holder
    assert now.nonce != was.nonce
    assert host.stderr.count("serving job") >= 2
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0]


@further("etcd/test_store::test_a_master_that_was_stopped_past_its_lease")
def test_the_master_alone_stands_still(world: World, etcd_server: EtcdServer) -> None:
    """Nobody else could take over in a job of one agent: it ends the master that leads no more, and
    starts another."""
    launched = start(world, etcd_server, "n0", "1:2")
    peers = world.hub.ranks(1)
    first = leading(world, etcd_server)
    first.suspend()
    assert not await_exit([first.pid])
    launched.until_text("does not exit; killing it")
    launched.until_text("the master answers again")
    assert not peers[0].gone
    finish(peers)
    assert launched.wait() == 0


@further(
    "etcd/test_store::test_the_outcome_stays_and_the_leadership_goes",
    "master/test_return::test_a_master_by_hand_goes_on_where_it_was_and_remembers_the_end",
)
def test_who_comes_after_the_end_is_told(world: World, etcd_server: EtcdServer) -> None:
    """A job that failed: no second one begins under its name, and its end is the later one's."""
    launched = start(world, etcd_server, "n0", "1:2", "--max-restarts=0")
    world.hub.ranks(1)[0].order("exit", code=3)
    assert launched.wait() == 1
    # given up at the end, or it runs out where etcd was slow
    await_true(lambda: not ask(etcd_server, "master"), "end of the leadership")
    late = start(world, etcd_server, "n1", "1:2")
    assert late.wait() == 1
    assert "etcd has the result of an earlier run of job" in late.stderr
    assert "a new run needs a new --rdzv-id" in late.stderr
    assert len(world.hub.peers) == 1, "its ranks were started again"
    assert "serving job" not in late.stderr
    status = (f"--master-store={etcd_server.url}", f"--rdzv-id={JOB}")
    asked = world.launch(ELASTICRUN, "status", *status)
    assert asked.wait() == 1
    assert f"job '{JOB}' has ended" in asked.stderr
    assert ask(etcd_server, "master") == b""


@further("etcd/test_cli")
def test_status_finds_the_master(world: World, etcd_server: EtcdServer) -> None:
    token = {"ELASTICRUN_TOKEN": "the token of this job, long enough"}
    where = (f"--master-store={etcd_server.url}", f"--rdzv-id={JOB}")
    args = (*where, "--nnodes=1:2", *FAST, PUPPET)
    env = {"LOGLEVEL": "INFO", **token, **patient_masters()}
    launched = world.launch(ELASTICRUN, *args, env=env)
    peers = world.hub.ranks(1)
    asked = world.launch(ELASTICRUN, "status", *where, "--json", env=token)
    assert asked.wait() == 0, asked.stderr
    page = json.loads(asked.stdout)["master"]
    assert (page["job_id"], page["world_size"]) == (JOB, 1)
    finish(peers)
    assert launched.wait() == 0


@further("etcd/test_masters::test_the_second_one_ends_with_a_sentence_and_a_code")
def test_a_master_that_does_not_lead_ends_quietly(world: World, etcd_server: EtcdServer) -> None:
    """Two agents that start at one instant: one master serves, and no warning is printed."""
    jobs = [start(world, etcd_server, f"n{i}", "4:4", "--nproc-per-node=1") for i in range(4)]
    peers = world.hub.ranks(4)
    served = [j for j in jobs if "serving job" in j.stderr]
    assert len(served) == 1
    for launched in jobs:
        # a slow machine may be warned of other things, such as a long wait
        warnings = [line for line in launched.stderr.splitlines() if line.startswith("W")]
        warnings = [line for line in warnings if "answer" not in line]
        told = [line for line in warnings if "master" in line or "leads" in line]
        assert not told, told
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0, 0, 0]
    assert EXIT_NOT_LEADING not in {j.process.returncode for j in jobs}


@pytest.mark.parametrize("launched_as", cases(["none", "wrong"], kept=["wrong"]))
def test_what_cannot_be_is_a_sentence(
    world: World, etcd_server: EtcdServer, launched_as: str
) -> None:
    url = "etcd://127.0.0.1:1" if launched_as == "none" else "zookeeper://127.0.0.1:1"
    meet = (f"--master-store={url}", "--rdzv-id=x", "--rdzv-conf=join_timeout=20")
    launched = world.launch(ELASTICRUN, *meet, "--nnodes=1:2", PUPPET)
    code = launched.wait()
    assert "Traceback" not in launched.stderr
    assert code == (1 if launched_as == "none" else 2)
    if launched_as == "none":
        assert "etcd://127.0.0.1:1 does not answer, for 20 s" in launched.stderr
    else:
        assert "is not an etcd address: write etcd://HOST:PORT" in launched.stderr
