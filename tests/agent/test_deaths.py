"""Deaths and signals, with real processes: nothing is left behind, and what must live lives on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from elasticrun.testing.processes import command, is_fork_server, is_master
from elasticrun.wire.env import OMP_NUM_THREADS, WARM_SERVER
from tests.forkserver.driver import warm_process
from tests.further import cases, further
from tests.harness import (
    ELASTICRUN,
    PATIENT,
    SCRIPTS,
    Launched,
    Peer,
    World,
    await_exit,
    free_port,
    is_alive,
)

PUPPET = str(SCRIPTS / "puppet.py")
ONE_THREAD = {**PATIENT, OMP_NUM_THREADS: "1"}  # as `elasticrun warm` sets it
ONE_RESTART = ("--max-restarts=1", "--restart-backoff=0")


def helper(job: Launched, kind: Callable[[int], bool]) -> psutil.Process:
    """The agent's own child of this kind."""
    for process in job.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            if kind(process.pid):
                return process
    raise AssertionError(f"the agent has no child for which {kind.__name__}")


def all_of(job: Launched) -> list[int]:
    """Every process of the job."""
    return [job.pid, *(process.pid for process in job.below())]


def signal_all(job: Launched, signum: signal.Signals) -> None:
    """As a scheduler does; the agent forwards it, so some may be gone before their turn comes."""
    for pid in all_of(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def puppets(
    world: World, *args: str, patient: bool = True, **more: str
) -> tuple[Launched, list[Peer]]:
    """A job of one node whose two ranks wait for orders."""
    env = {**(PATIENT if patient else {}), **more}
    job = world.launch(ELASTICRUN, "--nproc-per-node=2", *args, PUPPET, env=env)
    return job, world.hub.ranks(2, restart=0)


def finish_all(jobs: list[Launched], ranks: list[Peer]) -> None:
    for rank in ranks:
        rank.order("exit")
    assert {job.wait() for job in jobs} == {0}


def trap(world: World, rank: Peer, signum: signal.Signals, **how: str) -> None:
    """Have the rank handle a signal."""
    rank.order("trap", signums=[signum], **how)
    world.hub.word(rank, "done", what="trap")


def with_children(world: World, rank: Peer) -> list[int]:
    """Have the rank start a plain child, and one that leads a session of its own."""
    pids = []
    for session in (False, True):
        rank.order("child", session=session)
        found = world.hub.until(
            lambda: [m["pid"] for m in rank.said if m["event"] == "done"][len(pids) :],
            "a child of a rank",
        )
        pids.append(found[0])
    return pids


def test_a_stopped_rank_ends_as_the_others_do(world: World) -> None:
    """SIGTERM waits in a process that is stopped, until something sends SIGCONT."""
    job, ranks = puppets(world)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    job.process.terminate()
    assert job.wait() == 1
    assert "forcefully exiting via 9" not in job.stderr
    world.nothing_left()


# ---------------------------------------------------------------- kill -9


def is_port_proxy(pid: int) -> bool:
    return "port_proxy_child" in command(pid)


@pytest.mark.parametrize(
    "stopped", cases([is_fork_server, is_master, is_port_proxy, None], kept=[is_fork_server])
)
def test_kill_9_of_the_agent_while_a_helper_is_stopped_leaves_nothing(
    world: World, stopped: Callable[[int], bool] | None
) -> None:
    """Nor while it runs."""
    job, ranks = puppets(world, "--nnodes=1", "--node-rank=0", f"--master-port={free_port()}")
    children = with_children(world, ranks[1])
    everything = [*all_of(job), *children]
    if stopped is not None:
        os.kill(helper(job, stopped).pid, signal.SIGSTOP)
    job.process.kill()
    assert await_exit(everything) == set()
    world.nothing_left()


@further("test_kill_9_of_the_agent_while_a_helper_is_stopped_leaves_nothing")
def test_kill_9_of_the_agent_while_a_guard_is_stopped_leaves_nothing(world: World) -> None:
    with warm_process(world.tmp / "warm.sock", world.environment(ONE_THREAD)) as place:
        job, _ = puppets(world, **{WARM_SERVER: str(place)})
        guard = psutil.Process(helper(job, is_fork_server).pid).parent()
        assert guard.pid != job.pid
        everything = [*all_of(job), guard.pid]
        guard.suspend()
        job.process.kill()
        assert await_exit(everything) == set()


@further(
    "master/test_return::test_one_that_stands_still_is_replaced",
    "test_a_stopped_rank_ends_as_the_others_do",
)
def test_sigterm_while_the_master_is_stopped_ends_the_job(world: World) -> None:
    """It is killed at the end, without a word."""
    job, _ = puppets(world)
    os.kill(helper(job, is_master).pid, signal.SIGSTOP)
    job.process.terminate()
    assert job.wait() == 1
    assert "Traceback" not in job.stderr
    assert "defect" not in job.stderr
    world.nothing_left()


def of_two(*more: str) -> tuple[str, ...]:
    """The words for each of two nodes, with one rank each."""
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    return ("--nnodes=2", "--nproc-per-node=1", *where, *more, PUPPET)


def one_of_two(world: World) -> Launched:
    """An agent that waits for a second node, which never comes."""
    job = world.launch(ELASTICRUN, *of_two(), env={"LOGLEVEL": "INFO"})
    job.until_text("waiting for nodes")
    return job


@further("e2e/test_lives::test_an_agent_at_any_moment")
def test_kill_9_of_the_agent_before_its_ranks_leaves_nothing(world: World) -> None:
    job = one_of_two(world)
    job.until_text("the job's page: http://")
    job.process.kill()
    world.nothing_left()


def restarted(world: World, victim: Callable[[psutil.Process], Any], **env: str) -> Launched:
    """A job of which `victim` of its fork server was killed, to its end: what a rank has started in
    a session of its own goes, too, and only then comes the next life."""
    job, ranks = puppets(world, *ONE_RESTART, **env)
    children = with_children(world, ranks[0])
    server = helper(job, is_fork_server)
    below = [process.pid for process in server.children(recursive=True)]
    assert set(children) <= set(below)
    killed = victim(server)
    assert killed.pid != job.pid, "the warm process was not used: no fork server has a guard"
    killed.kill()
    assert await_exit([server.pid, *below]) == set()
    again = world.hub.ranks(2, restart=1)
    assert helper(job, is_fork_server).pid != server.pid
    finish_all([job], again)
    return job


def test_kill_9_of_the_fork_server_restarts_the_job(world: World) -> None:
    job = restarted(world, lambda server: server)
    assert "the fork server ended: it was killed" in job.stderr
    assert "s: restart 1 of 1 (rank 0: the fork server ended: it was killed" in job.stderr


@further("test_kill_9_of_the_fork_server_restarts_the_job")
def test_kill_9_of_a_guard_restarts_the_job(world: World) -> None:
    with warm_process(world.tmp / "warm.sock", world.environment(ONE_THREAD)) as place:
        job = restarted(world, psutil.Process.parent, **{WARM_SERVER: str(place)})
    assert "s: restart 1 of 1 (rank 0: the fork server ended: its guard was killed" in job.stderr


@further("test_kill_9_of_the_fork_server_restarts_the_job")
def test_kill_9_of_the_fork_server_without_restarts_ends_the_job(world: World) -> None:
    job, ranks = puppets(world)
    helper(job, is_fork_server).kill()
    assert job.wait() == 1
    world.hub.lost(ranks)
    assert "FAILED" in job.stderr
    assert "Traceback" not in job.stderr


@further("master/test_return::test_three_times_in_a_row_while_it_trains")
def test_kill_9_of_the_master_is_not_felt_by_the_ranks(world: World) -> None:
    run = world.tmp / "run"
    job, ranks = puppets(world, *ONE_RESTART, f"--run-dir={run}", patient=False)
    master = helper(job, is_master)
    assert command(master.pid).startswith("elasticrun: master of ")
    master.kill()
    assert await_exit([master.pid]) == set()
    job.until_text("starting a new one")
    assert all(is_alive(rank.pid) and not rank.gone for rank in ranks)
    # The new master must have adopted the round: it restarts it, with the budget of the job.
    ranks[1].order("die")
    again = world.hub.ranks(2, restart=1)
    assert {rank.world_size for rank in again} == {2}
    finish_all([job], again)
    told = (run / "events.jsonl").read_text()
    assert told.count("the previous job master was killed by signal 9") == 1, told


@further("master/test_return::test_three_times_in_a_row_while_it_trains")
def test_a_job_may_end_while_its_master_is_dead(world: World) -> None:
    job, ranks = puppets(world, patient=False)
    master = helper(job, is_master)
    for rank in ranks:
        rank.order("exit")
    with contextlib.suppress(psutil.NoSuchProcess):  # all is over by now
        master.kill()
    assert job.wait() == 0


@further("e2e/test_lives::test_descendants_of_a_dead_rank")
def test_a_dead_ranks_descendants_are_gone_before_the_next_life(world: World) -> None:
    job, ranks = puppets(world, *ONE_RESTART)
    children = with_children(world, ranks[1])
    ranks[1].order("die")
    again = world.hub.ranks(2, restart=1)
    assert [pid for pid in children if is_alive(pid)] == []
    assert not any(is_alive(rank.pid) for rank in ranks)
    finish_all([job], again)


@further("e2e/test_lives::test_descendants_of_a_dead_rank")
def test_what_finished_ranks_leave_behind_goes_with_the_job(world: World) -> None:
    job, ranks = puppets(world, "--child-exit-timeout=1")
    children = with_children(world, ranks[0])
    finish_all([job], ranks)
    assert [pid for pid in children if is_alive(pid)] == []


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "signum", cases([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], kept=[signal.SIGTERM])
)
def test_a_signal_to_every_process_at_once_lets_the_script_save(
    world: World, signum: signal.Signals
) -> None:
    job, ranks = puppets(world)
    saved = [world.scratch / f"saved-{rank.rank}" for rank in ranks]
    for rank, path in zip(ranks, saved, strict=True):
        trap(world, rank, signum, how="save", path=str(path))
        rank.order("wait")
    signal_all(job, signum)
    assert job.wait() == 1
    assert all(path.read_text().endswith("whole\n") for path in saved)
    assert f"elasticrun: ended by {signum.name} ({signum.value})" in job.stderr
    assert "Traceback" not in job.stderr


@further("compat/test_signals::test_sigusr1_does_not_kill_the_launcher")
def test_sigusr1_is_forwarded_and_the_agent_lives_on(world: World) -> None:
    job, ranks = puppets(world)
    for rank in ranks:
        trap(world, rank, signal.SIGUSR1)
    job.signal(signal.SIGUSR1)
    for rank in ranks:
        world.hub.word(rank, "signal", signum=signal.SIGUSR1.value)
    finish_all([job], ranks)


@further(
    "core/scripts/forwarded_signal_kills_a_rank.txt",
    "test_a_signal_to_every_process_at_once_lets_the_script_save",
)
def test_sigusr1_to_every_process_at_once_is_no_failure(world: World) -> None:
    """As `scancel --signal=USR1` does: ranks without a handler die of it, and start again."""
    job, ranks = puppets(world)
    old = {rank.hello["pid"] for rank in ranks}
    signal_all(job, signal.SIGUSR1)
    again = world.hub.ranks(2, pid=lambda pid: pid not in old)
    finish_all([job], again)
    assert "restarting the ranks with 1 node, world size 2 (no restart used)" in job.stderr


@further("compat/test_signals::test_ranks_that_ignore_are_killed_after_the_timeout")
def test_a_rank_that_ignores_sigterm_is_killed_after_the_timeout(world: World) -> None:
    job, ranks = puppets(world, "--shutdown-timeout=1", LOGLEVEL="INFO")
    for rank in ranks:
        trap(world, rank, signal.SIGTERM, how="ignore")
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    for rank in ranks:
        assert f"Sending process {rank.pid} closing signal SIGTERM" in job.stderr
        line = f"Unable to shutdown process {rank.pid} via 15, forcefully exiting via 9"
        assert line in job.stderr


@further("compat/test_signals::test_a_signal_before_the_first_start")
def test_sigterm_while_nodes_are_awaited_ends_in_order(world: World) -> None:
    job = one_of_two(world)
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert "elasticrun[" in job.stderr
    assert "]: ended by SIGTERM (15)" in job.stderr
    assert "Traceback" not in job.stderr


# ---------------------------------------------------------------- ports


@pytest.fixture
def web_server() -> Iterator[int]:
    """A port where somebody answers, but not in HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                with visitor, contextlib.suppress(OSError):  # it has gone meanwhile
                    visitor.recv(100)
                    visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_static_master_that_is_to_be_elsewhere_is_told(world: World) -> None:
    """Nobody gave node ranks: each node has rank 0 and would wait for the others for ever."""
    words = ("--nnodes=2", "--master-addr=192.0.2.1", f"--master-port={free_port()}")
    job = world.launch(ELASTICRUN, *words, PUPPET)
    job.until_text("192.0.2.1 is not an address of this host; give each node its --node-rank")
    job.signal(signal.SIGTERM)
    assert job.wait() == 1


def test_a_port_of_somebody_else_is_one_sentence(world: World, web_server: int) -> None:
    job = world.launch(
        ELASTICRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{web_server}", PUPPET
    )
    assert job.wait() == 1
    assert f"{web_server} is in use by a process that is not an elasticrun master" in job.stderr
    assert "Traceback" not in job.stderr


def test_a_taken_master_port_is_one_sentence(world: World, web_server: int) -> None:
    logs = ("--redirects=3", f"--log-dir={world.scratch}/logs")
    job = world.launch(
        ELASTICRUN, "--nnodes=2", "--node-rank=0", f"--master-port={web_server}", *logs, PUPPET
    )
    assert job.wait() == 1
    assert f"cannot listen on the master port 127.0.0.1:{web_server}" in job.stderr
    assert "give this one its --node-rank" in job.stderr
    # of several nodes each says first where its ranks' output is
    said = rf"^elasticrun\[.+\]: the output of its ranks is in {re.escape(logs[1][10:])}/\S+$"
    assert re.search(said, job.stderr, re.MULTILINE), job.stderr
    assert "Traceback" not in job.stderr


@further("e2e/test_surroundings::test_a_port_that_a_connection_holds_for_a_moment")
def test_the_port_is_free_again_when_the_command_returns(world: World) -> None:
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    for _ in range(2):
        job = world.launch(ELASTICRUN, "--rdzv-backend=c10d", endpoint, "--no-python", "/bin/true")
        assert job.wait() == 0, job.stderr


# ---------------------------------------------------------------- several agents


@further("e2e/test_surroundings::test_behind_a_proxy")
def test_two_agents_of_one_endpoint_form_one_job(world: World) -> None:
    command = of_two("--rdzv-id=two", *ONE_RESTART)
    jobs = [world.launch(ELASTICRUN, *command, env=PATIENT) for _ in range(2)]
    ranks = world.hub.ranks(2, restart=0, world_size=2)
    assert {rank.rank for rank in ranks} == {0, 1}
    ranks[1].order("die")
    finish_all(jobs, world.hub.ranks(2, restart=1))


@further("compat/test_environment::test_every_variable_is_torchruns")
def test_a_static_job_has_the_port_that_was_named(world: World) -> None:
    port = free_port()
    common = ("--nnodes=2", "--nproc-per-node=1", f"--master-port={port}", *ONE_RESTART)
    jobs = [
        world.launch(ELASTICRUN, *common, f"--node-rank={rank}", PUPPET, env=PATIENT)
        for rank in (1, 0)
    ]
    for life in (0, 1):
        ranks = world.hub.ranks(2, restart=life)
        assert [(rank.group_rank, rank.master_port) for rank in ranks] == [(0, port), (1, port)]
        for rank in ranks:
            rank.order("allreduce")
        assert {world.hub.word(rank, "done", what="allreduce")["sum"] for rank in ranks} == {2}
        if life == 0:
            ranks[0].order("die")
    finish_all(jobs, ranks)


def test_standard_streams_may_be_closed(world: World) -> None:
    script = 'exec "$0" -m elasticrun --nproc-per-node=2 "$1" <&- >&- 2>&-'
    job = world.command(["/bin/sh", "-c", script, sys.executable, PUPPET], env=PATIENT)
    ranks = world.hub.ranks(2)
    finish_all([job], ranks)


@further("master/test_return::test_a_master_that_outlives_its_agent_takes_its_record_with_it")
def test_the_hosting_agents_death_is_one_lost_node(world: World) -> None:
    """Its master lives on for the others, and a new agent finds it."""
    command = of_two("--rdzv-id=hosted", "--max-restarts=2", "--restart-backoff=0")
    host = world.launch(ELASTICRUN, *command, env={"LOGLEVEL": "INFO", **PATIENT})
    host.until_text("serving job")
    other = world.launch(ELASTICRUN, *command, env=PATIENT)
    first = world.hub.ranks(2, world_size=2)
    host.process.kill()
    replacement = world.launch(ELASTICRUN, *command, env=PATIENT)
    known = {rank.pid for rank in first}
    again = world.hub.ranks(2, world_size=2, pid=lambda pid: pid not in known)
    finish_all([other, replacement], again)


def test_a_master_that_cannot_start_is_one_sentence(world: World) -> None:
    """A broken installation: here the interpreter's own start-up hook refuses the master."""
    hook = world.scratch / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\nif 'elasticrun.master' in sys.orig_argv: raise SystemExit(3)\n"
    )
    job = world.launch(ELASTICRUN, PUPPET, env={"PYTHONPATH": str(hook)})
    assert job.wait() == 1
    assert "the job master cannot be started: it exited with 1 each time" in job.stderr
