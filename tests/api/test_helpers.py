"""Helpers that a caller of elastic_launch executes on orders; the test plays the agent."""

from __future__ import annotations

import errno
import gc
import os
import secrets
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import pytest

from elasticrun.caller.agent_process import AgentProcess
from elasticrun.caller.function_spawner import FunctionSpawner
from elasticrun.caller.helpers import Helpers
from elasticrun.shm.segment import VERSION
from elasticrun.system.processes import below
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.snapshots import Checked, CheckSnapshot, FromSaver, SaverHere
from elasticrun.wire.spawning import (
    CloseStore,
    Exited,
    FromSpawner,
    Keepalive,
    ProbePlan,
    ProbeSaid,
    SendSignal,
    Spawned,
    SpawnFailed,
    SpawnProbe,
    SpawnSaver,
    SpawnStore,
    StoreListening,
)
from tests.api import functions
from tests.forkserver.driver import LIMIT, Conversation, gone
from tests.forkserver.test_server import held_port

pytestmark = pytest.mark.slow

M = TypeVar("M")


class Agent(Conversation):
    """The agent's end of the conversation, and its life as the caller sees it."""

    def __init__(self, spawner: FunctionSpawner) -> None:
        self._life, self._end = socket.socketpair()
        super().__init__(spawner.agents_end.dup(), FromSpawner)
        self._keys = 0

    def fileno(self) -> int:
        return self._life.fileno()

    def hear(self) -> bool:
        return bool(self._life.recv(1))

    def close(self) -> None:
        self._life.close()

    def ends(self) -> None:
        self.socket.close()
        self._end.close()

    def key(self) -> int:
        self._keys += 1
        return self._keys

    def spawned(self, key: int) -> Spawned:
        return self.wait(Spawned, lambda said: said.key == key)

    def hears(self, key: int, *, done: bool) -> ProbeSaid:
        return self.wait(ProbeSaid, lambda said: said.key == key and said.done == done)

    def exited(self, key: int) -> int:
        return self.wait(Exited, lambda said: said.key == key).code

    def probe(self, store_port: int, rank: int, fault: str = "", check: str = "c") -> int:
        key = self.key()
        self.tell(order(key, store_port, rank, fault, check))
        return key


def order(key: int, store_port: int, rank: int, fault: str = "", check: str = "c") -> SpawnProbe:
    plan = ProbePlan(
        check=check,
        rank=rank,
        world_size=2,
        store_host="127.0.0.1",
        store_port=store_port,
        device="cpu",
        device_index=0,
        backend="gloo",
        matrix=64,
        dtype="float32",
        matmuls=2,
        sizes=(4096,),
        transfers=2,
        warmup=1,
        limit=LIMIT,
        fault=fault,
    )
    return SpawnProbe(key, plan, {"OMP_NUM_THREADS": "1"}, ("PYTHONHOME",), ())


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


def test_a_caller_s_probes_meet_fail_and_end() -> None:
    holder, port = held_port()
    with holder, calling("spawn") as agent:
        store = agent.key()
        agent.tell(SpawnStore(store, port))
        agent.wait(StoreListening)

        keys = [agent.probe(port, rank) for rank in (0, 1)]
        for key in keys:
            assert not agent.spawned(key).forked
            result = agent.hears(key, done=True)
            assert result.ok, result.reason
            assert result.compute > 0
            assert result.transfers[0] > 0
            assert agent.exited(key) == 0

        bad = agent.probe(port, 0, "probe-hang=compute", "again")
        assert agent.hears(bad, done=False).phase == "compute"
        agent.tell(SendSignal(bad, signal.SIGKILL))
        result = agent.hears(bad, done=True)
        assert (result.own, result.reason) == (True, "it was killed by SIGKILL")
        assert agent.exited(bad) == -signal.SIGKILL

        agent.tell(CloseStore(store))
        agent.exited(store)


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


def test_a_probe_that_cannot_be_watched_is_not_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    said: list[FromSpawner] = []
    before = below(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with selectors.DefaultSelector() as selector:
        Helpers(selector, said.append).start(order(1, 1, 0, "probe-hang=compute"))
    assert said == [SpawnFailed(1, "no probe could be started: Too many open files")]
    assert below(os.getpid()) <= before


# ---------------------------------------------------------------- the saver


class Saver:
    """One that has dialled the agent's socket."""

    def __init__(self, agent: Agent) -> None:
        place = f"elasticrun-test-{secrets.token_hex(8)}"
        self.key = agent.key()
        self._frames = FrameBuffer(FromSaver)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + place)
            listener.listen()
            listener.settimeout(LIMIT)
            agent.tell(SpawnSaver(self.key, place, "", "5ec2e7", {"MARK": "x"}, ("HOME",), ()))
            born = agent.spawned(self.key)
            assert not born.forked
            self.pid = born.pid
            self.socket, _ = listener.accept()
        self.socket.settimeout(LIMIT)
        assert self.hear() == SaverHere(VERSION, self.key, 0)

    def hear(self) -> FromSaver:
        for message in self._frames.feed(self.socket.recv(65536)):
            assert isinstance(message, FromSaver)
            return message
        raise AssertionError("half a message came")

    def answers(self) -> bool:
        self.socket.sendall(encode(CheckSnapshot(1, 0, 1)))
        return isinstance(self.hear(), Checked)


def test_a_caller_s_saver_lives_as_long_as_its_conversation() -> None:
    with calling("spawn") as agent:
        first = Saver(agent)
        agent.tell(Keepalive(0.01))
        assert first.answers()
        environ = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
        assert b"MARK=x" in environ
        assert not any(line.startswith(b"HOME=") for line in environ)
        assert b"5ec2e7" not in Path(f"/proc/{first.pid}/cmdline").read_bytes()
        first.socket.close()
        assert agent.exited(first.key) == 0


def test_a_caller_s_saver_is_replaced_and_ends_with_the_agent() -> None:
    gc.collect()  # what earlier tests have left must not be closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    with calling("spawn") as agent:
        first, second = Saver(agent), Saver(agent)
        assert agent.exited(first.key) == -9
        assert second.answers()
    assert gone([first.pid, second.pid]) == []
    first.socket.close()
    second.socket.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
