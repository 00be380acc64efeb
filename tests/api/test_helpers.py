"""Helpers that a caller of elastic_launch executes on orders; the test plays the agent."""

from __future__ import annotations

import errno
import gc
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest

from elasticrun.forkserver.functions.agent_process import AgentProcess
from elasticrun.forkserver.functions.function_spawner import FunctionSpawner
from elasticrun.forkserver.functions.helpers import Helpers
from elasticrun.host.system.processes import below
from elasticrun.snapshots.shm.segment import VERSION
from elasticrun.wire import spawning as sp
from elasticrun.wire.snapshots import SaverHere
from tests.api import functions
from tests.forkserver.driver import LIMIT, Conversation, gone
from tests.forkserver.test_probe import a_plan
from tests.forkserver.test_server import held_port
from tests.further import further
from tests.snapshots.saver import play

pytestmark = pytest.mark.slow

M = TypeVar("M")


class Agent(Conversation):
    """The agent's end of the conversation, and its life as the caller sees it."""

    def __init__(self, spawner: FunctionSpawner) -> None:
        self._life, self._end = socket.socketpair()
        super().__init__(spawner.agents_end.dup(), sp.FromSpawner)

    def fileno(self) -> int:
        return self._life.fileno()

    def read(self) -> bool:
        return bool(self._life.recv(1))

    def close(self) -> None:
        self._life.close()

    def ends(self) -> None:
        self.socket.close()
        self._end.close()

    def hears(self, key: int, *, done: bool) -> sp.ProbeSaid:
        return self.wait(sp.ProbeSaid, lambda said: said.key == key and said.done == done)

    def probe(self, store_port: int, rank: int, fault: str = "", check: str = "c") -> int:
        key = self.new_key()
        self.tell(order(key, store_port, rank, fault, check))
        return key


def order(key: int, store_port: int, rank: int, fault: str = "", check: str = "c") -> sp.SpawnProbe:
    plan = replace(
        a_plan(check, store_port),
        rank=rank,
        fault=fault,
        matrix=64,
        dtype="float32",
        matmuls=2,
        sizes=(4096,),
        transfers=2,
    )
    return sp.SpawnProbe(key, plan, {"OMP_NUM_THREADS": "1"}, ("PYTHONHOME",))


@contextmanager
def calling(start_method: str) -> Iterator[Agent]:
    """A caller that serves in a thread, as a notebook's would."""
    spawner = FunctionSpawner(functions.echo, (), start_method, b"MARK=probes")
    agent = Agent(spawner)
    thread = threading.Thread(target=spawner.serve, args=(cast(AgentProcess, agent),))
    thread.start()
    try:
        yield agent
    finally:
        agent.ends()
        thread.join(LIMIT)
        assert not thread.is_alive()
        agent.close()


@further("forkserver/test_probe", "health/test_network_check")
def test_a_caller_s_probes_meet_fail_and_end() -> None:
    holder, port = held_port()
    with holder, calling("spawn") as agent:
        store = agent.new_key()
        agent.tell(sp.SpawnStore(store, port))
        agent.wait(sp.StoreListening)

        keys = [agent.probe(port, rank) for rank in (0, 1)]
        for key in keys:
            assert not agent.spawned(key).forked
            result = agent.hears(key, done=True)
            assert result.ok, result.reason
            assert result.compute > 0
            assert result.transfers[0] > 0
            assert agent.exited(key).code == 0

        bad = agent.probe(port, 0, "probe-hang=compute", "again")
        assert agent.hears(bad, done=False).phase == "compute"
        agent.tell(sp.SendSignal(bad, signal.SIGKILL))
        result = agent.hears(bad, done=True)
        assert (result.own, result.reason) == (True, "it was killed by SIGKILL")
        assert agent.exited(bad).code == -signal.SIGKILL

        agent.tell(sp.CloseStore(store))
        agent.exited(store)


@further(
    "forkserver/test_probe::test_probes_do_not_outlive_a_killed_fork_server",
)
def test_a_caller_s_probes_end_with_the_conversation() -> None:
    gc.collect()  # what earlier tests have left must not be closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    holder, port = held_port()
    with holder, calling("spawn") as agent:
        keys = [agent.probe(port, rank, "probe-hang=compute") for rank in (0, 1)]
        pids = [agent.spawned(key).pid for key in keys]
        for key in keys:
            agent.hears(key, done=False)
    assert gone(pids) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_probe_that_cannot_be_watched_is_not_left_alone(monkeypatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    said: list[sp.FromSpawner] = []
    before = below(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with selectors.DefaultSelector() as selector:
        Helpers(selector, said.append).start(order(1, 1, 0, "probe-hang=compute"))
    assert said == [sp.SpawnFailed(1, "no probe could be started: Too many open files")]
    assert below(os.getpid()) <= before


# ---------------------------------------------------------------- the saver


def a_saver(agent: Agent) -> play.Agent:
    made = play.Agent(agent, secret="5ec2e7", env={"MARK": "x"}, unset=("HOME",))
    assert not made.spawned_as.forked
    assert made.here == SaverHere(VERSION, made.key, 0)
    return made


def test_a_caller_s_saver_lives_as_long_as_its_conversation() -> None:
    with calling("spawn") as agent:
        first = a_saver(agent)
        agent.tell(sp.Keepalive(0.01))
        first.check()
        environ = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
        assert b"MARK=x" in environ
        assert not any(line.startswith(b"HOME=") for line in environ)
        assert b"5ec2e7" not in Path(f"/proc/{first.pid}/cmdline").read_bytes()
        first.socket.close()
        assert agent.exited(first.key).code == 0


def test_a_caller_s_saver_is_replaced_and_ends_with_the_agent() -> None:
    gc.collect()  # what earlier tests have left must not be closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    with calling("spawn") as agent:
        first, second = a_saver(agent), a_saver(agent)
        assert agent.exited(first.key).code == -9
        second.check()
    assert gone([first.pid, second.pid]) == []
    first.socket.close()
    second.socket.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
