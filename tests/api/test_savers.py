"""The saver that a caller of elastic_launch executes on orders; the test plays the agent."""

from __future__ import annotations

import gc
import os
import secrets
import socket
from pathlib import Path

import pytest

from elasticrun.shm.segment import VERSION
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.snapshots import Checked, CheckSnapshot, FromSaver, SaverHere
from elasticrun.wire.spawning import Pet, SpawnSaver
from tests.api.test_probes import Agent, calling
from tests.forkserver.driver import LIMIT, gone

pytestmark = pytest.mark.slow


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
        agent.tell(Pet(0.01))
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
