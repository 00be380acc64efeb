"""What a machine or a user may do to a job: proxies, other jobs, taken ports, frozen terminals,
nodes that are there twice, a rank that cannot be reaped."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from elasticrun.wire import messages as m
from elasticrun.wire.rpc import channel
from elasticrun.wire.types import Endpoint
from tests.aio import run
from tests.compat.live import agents, allreduce, finish, job
from tests.counting import Counting, times
from tests.further import cases, further
from tests.harness import (
    ELASTICRUN,
    LIMIT,
    PATIENT,
    SCRIPTS,
    World,
    clean_environment,
    free_port,
    ran,
    until_file,
)
from tests.master.people import SPEC, hello

pytestmark = pytest.mark.slow


def one_sentence(text: str) -> bool:
    """Something for the user, and no traceback."""
    return bool(text.strip()) and "Traceback" not in text


@further(why="each run of the tests has several jobs on one host")
def test_two_jobs_on_one_host(world: World) -> None:
    first = job(world, ELASTICRUN, "--standalone", "--nproc-per-node=2")
    second = job(world, ELASTICRUN, "--standalone", "--nproc-per-node=2")
    peers = world.hub.ranks(4)
    by_run = {
        run_id: [p for p in peers if p.run_id == run_id] for run_id in {p.run_id for p in peers}
    }
    assert [len(group) for group in by_run.values()] == [2, 2]
    for group in by_run.values():
        assert allreduce(world, sorted(group, key=lambda p: p.rank)) == [2, 2]
    finish(peers, first, second)


def test_behind_a_proxy(world: World) -> None:
    """A proxy that answers nothing stands in the environment; gRPC would go through it."""
    dead = f"http://127.0.0.1:{free_port()}"
    env = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), dead)
    jobs = agents(world, ELASTICRUN, 1, "1", free_port(), env=env)
    peers = world.hub.ranks(1)
    finish(peers, *jobs)


def test_a_port_that_a_connection_holds_for_a_moment(world: World) -> None:
    """It is nobody's master, and nobody else will start one: when it is free, this agent does."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = free_port()  # one of the kernel's choice could be anybody's as soon as it is free
        connection = socket.create_connection(somebody.getsockname(), None, ("127.0.0.1", port))
        with connection, somebody.accept()[0]:
            launched = job(
                world, ELASTICRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"
            )
            launched.until_text("no job master answers")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peers = world.hub.ranks(1)
    finish(peers, launched)


@further("cli/detection/test_processes::test_a_node_of_another_job_is_refused_at_the_port")
def test_another_jobs_master(world: World) -> None:
    """Two jobs that name one endpoint do not merge: the second is told."""
    port = free_port()
    (first,) = agents(world, ELASTICRUN, 1, "1", port)
    (peer,) = world.hub.ranks(1)
    words = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=other")
    second = job(world, ELASTICRUN, "--rdzv-backend=c10d", *words)
    assert second.wait() not in (0, -6)
    assert one_sentence(second.stderr)
    finish([peer], first)


NOT_MET = {
    # the endpoint, --rdzv-conf, what is said
    "nobody is there": ("127.0.0.1:{port}", "join_timeout=2,is_host=0", ""),
    "no such name": ("no-such-host.invalid:29400", "join_timeout=2", "no-such-host.invalid"),
    "too few nodes": ("127.0.0.1:{port}", "join_timeout=2", ""),
}


@pytest.mark.parametrize("name", cases(NOT_MET, kept=["no such name"]))
def test_nodes_that_do_not_meet(world: World, name: str) -> None:
    """join_timeout ends it, with one sentence."""
    endpoint, conf, said = NOT_MET[name]
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint.format(port=free_port())}")
    words = ("--nnodes=2", *meet, "--rdzv-id=x", f"--rdzv-conf={conf}")
    launched = job(world, ELASTICRUN, *words)
    assert launched.wait() == 1
    assert one_sentence(launched.stderr)
    assert said in launched.stderr


def test_status_and_an_agent_of_another_version(world: World) -> None:
    """`elasticrun status ENDPOINT` says who is there and what a waiting node waits for. A Hello
    with a protocol of the future is refused in a sentence; the job is not disturbed."""
    port = free_port()
    (launched,) = agents(world, ELASTICRUN, 1, "2", port)
    launched.until_text("wait")
    asked = world.launch(ELASTICRUN, "status", f"127.0.0.1:{port}")
    assert asked.wait() == 0, asked.stderr
    assert "agents" in asked.stdout
    assert "wait" in asked.stdout

    spec = structs.replace(SPEC, job_id="agents")

    async def meet() -> m.Order | None:
        async with channel.open_channel(Endpoint("127.0.0.1", port)) as line:
            stream = channel.attend(line)
            await stream.send(hello("stranger", spec=spec, protocol=999, version="99"))
            answer = await stream.receive()
            stream.cancel()
            return answer

    answer = run(meet())
    assert isinstance(answer, m.Refused)
    assert answer.exit_code == 1
    assert re.search(r"\b999\b", answer.reason)
    (second,) = agents(world, ELASTICRUN, 1, "2", port)
    finish(world.hub.ranks(2), launched, second)


def test_a_master_of_another_version(world: World) -> None:
    """An agent that is refused ends with the master's sentence and its code."""
    sentence = "this master speaks another protocol than the agent"

    async def refuse_all() -> int:
        async def attend(context: object) -> None:
            await context.read()  # type: ignore[attr-defined]
            await context.write(  # type: ignore[attr-defined]
                channel.protobuf.order_to_wire(m.Refused(sentence, 78))
            )

        async def status(_: object) -> bytes:
            return b""

        server = channel.make_server(attend, status, max_calls=4)
        port = channel.listen(server, "127.0.0.1", 0)
        await server.start()
        words = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--rdzv-conf=is_host=0")
        launched = job(world, ELASTICRUN, "--nnodes=2", "--rdzv-backend=c10d", *words)
        code = await asyncio.to_thread(launched.wait)
        await server.stop(None)
        assert sentence in launched.stderr
        assert one_sentence(launched.stderr)
        return code

    assert run(refuse_all()) == 78


def test_a_frozen_terminal(world: World) -> None:
    """Nobody reads the console of two agents with `-t 3`; the ranks train on, far beyond what a
    pipe holds, and the agents do what they are there for: they pass a signal on."""
    port = free_port()
    readers, jobs = [], []
    for _ in range(2):
        read_end, write_end = os.pipe()
        readers.append(read_end)
        jobs += agents(
            *(world, ELASTICRUN, 1, "2", port),
            *("-t3", f"--log-dir={world.scratch / 'logs'}"),
            console=write_end,
        )
        os.close(write_end)
    peers = world.hub.ranks(2)
    for peer in peers:
        peer.order("trap", signums=[int(signal.SIGUSR1)])
        world.hub.word(peer, "done", what="trap")
    for peer in peers:
        peer.order("steps", count=500, text="x" * 4000 + "\n")  # 2 MB each
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    for launched in jobs:
        launched.signal(signal.SIGUSR1)
    for peer in peers:
        world.hub.word(peer, "signal", signum=int(signal.SIGUSR1))
    assert allreduce(world, peers) == [2, 2]
    assert len(world.hub.peers) == 2  # no other life
    drains = [subprocess.Popen(["cat"], stdin=fd, stdout=subprocess.DEVNULL) for fd in readers]
    for fd in readers:
        os.close(fd)
    finish(peers, *jobs)
    assert [drain.wait(LIMIT) for drain in drains] == [0, 0]
    for file in (world.scratch / "logs").rglob("stdout.log"):
        assert file.read_text().count("x" * 4000) == 500  # the files miss nothing


@further("test_a_frozen_terminal", "agent/logs/test_logs")
def test_a_reader_that_goes_away(world: World) -> None:
    """`elasticrun … | head -1`: a closed console is no reason to stop training."""
    read_end, write_end = os.pipe()
    launched = world.launch(
        *(ELASTICRUN, "-t3", "--nproc-per-node=2", str(SCRIPTS / "puppet.py")),
        stdout=write_end,
        env=PATIENT,
    )
    os.close(write_end)
    peers = world.hub.ranks(2)
    os.close(read_end)
    for peer in peers:
        peer.order("print", text="to nobody")
        world.hub.word(peer, "done", what="print")
    assert allreduce(world, peers) == [2, 2]
    finish(peers, launched)


def test_a_program_in_the_place_of_a_script(world: World) -> None:
    """A binary is known by its first bytes: one sentence, before anything starts."""
    script = world.scratch / "train"
    script.write_bytes(b"\x7fELF\x00\x01 not python")
    launched = world.launch(ELASTICRUN, str(script))
    assert launched.wait() not in (0, -6)
    assert one_sentence(launched.stderr)
    assert "--no-python" in launched.stderr


def test_the_console_files_are_read(world: World) -> None:
    """The harness' own way to wait for a line; a wait that cannot fail would prove nothing."""
    path = world.scratch / "never"
    with pytest.raises(AssertionError, match="did not become"):
        until_file(path, lambda text: "x" in text, limit=0.2)


def test_an_interpreter_to_be_inspected_at_its_end(tmp_path: Path) -> None:
    """PYTHONINSPECT is the ranks'; the job trains, and no process of ours fails by it."""
    script = tmp_path / "s.py"
    script.write_text("import sys\nprint('trained', flush=True)\nsys.stderr.flush()\n")
    inspected = {**clean_environment(), "PYTHONINSPECT": "1"}
    done = ran("--standalone", "--nproc-per-node=2", str(script), env=inspected)
    assert done.stdout.count("trained") == 2
    assert "PYTHONINSPECT is set" in done.stderr
    assert "ended with" not in done.stderr
    assert done.stderr.rstrip().endswith("SystemExit: 0")  # as torchrun's own, which ends with 1


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
    assert "node rank-1 belongs to another agent" in twin.stderr
    assert "Traceback" not in twin.stderr
    jobs[-1].until_text("spare")
    assert allreduce(world, peers) == [2, 2]
    finish(peers, *jobs)
    assert len(world.hub.peers) == 2  # no other round


@further(
    "core/rounds/test_failures::test_a_final_word_ends_the_job_whatever_else_failed",
    "core/scripts/final_word.txt",
)
def test_a_script_that_says_do_not_try_again(world: World) -> None:
    """A rank of one of two nodes ends with 93: no restart is spent, and both nodes end with it."""
    jobs = agents(world, ELASTICRUN, 2, "2", free_port(), "--max-restarts=3")
    peers = world.hub.ranks(2)
    peers[1].order("exit", code=93)
    assert [j.wait() for j in jobs] == [93, 93]
    assert all("the script reports that a retry cannot help" in j.stderr for j in jobs)
    assert len(world.hub.peers) == 2  # no other round


@further(
    "testing/test_job::test_a_master_by_hand_a_signal_and_the_end",
    "master/test_process::test_by_hand_it_ends_on_sigterm_with_a_sentence_for_a_taken_port",
)
def test_a_master_by_hand_and_a_quiet_console(counting: Counting) -> None:
    """`elasticrun master` serves agents that host nothing, and ends with their job. While ranks
    train, nothing changes and nobody writes a line."""
    words = {"master": True, "master_options": ["--nnodes=2", times()]}
    counted = counting.start("2", times(is_host=0), env={"COUNTS_PAUSE": "0.01"}, **words)
    first = counting.first(2)
    counted.wait_for_output("master", "round 1 begins")
    for node in (0, 1):  # the last two that an agent says before its ranks are there
        counted.wait_for_output(node, "the job's page")
        counted.wait_for_output(node, "ranks will be started by")

    def shown() -> list[str]:
        """What is said of this machine comes when it has been looked at, some seconds later."""
        lines = counting.said().splitlines()
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
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    ptrace.restype = ctypes.c_long
    return bool(ptrace(0x4206, pid, None, None) == 0)  # PTRACE_SEIZE
