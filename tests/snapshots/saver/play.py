"""Plays the agent to a real saver: its socket, descriptors beside messages, segments in memfds."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from elasticrun.snapshots.shm.segment import Segment
from elasticrun.wire import snapshots as s
from elasticrun.wire.spawning import Exited, SpawnSaver
from tests.forkserver.driver import LIMIT, Conversation
from tests.snapshots.dcp.checkpoints import ordered
from tests.snapshots.dcp.slots import NAMED, HandMade

M = TypeVar("M")

SECRET = "5ec2e7"


class Shared:
    """A segment in a memfd, as an agent has it."""

    def __init__(self, made: Segment) -> None:
        memory = memoryview(made.payload(0).obj)
        self.fd = os.memfd_create("segment")
        os.ftruncate(self.fd, len(memory))
        self.mapping = mmap.mmap(self.fd, 0)
        self.mapping[:] = memory
        self.segment = Segment(memoryview(self.mapping))

    def close(self) -> None:
        os.close(self.fd)


class Agent(Conversation):
    """One saver, and the conversation with it."""

    def __init__(
        self,
        driver: Conversation,
        *,
        host: str = "",
        secret: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        unset: tuple[str, ...] = (),
    ) -> None:
        """`driver`: the conversation with who starts it."""
        self.driver = driver
        place = f"elasticrun-test-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closing = contextlib.ExitStack()
        with listener:
            listener.bind("\0" + place)
            listener.listen()
            self.key = driver.new_key()
            driver.tell(SpawnSaver(self.key, place, host, secret, dict(env), unset))
            self.spawned_as = driver.spawned(self.key)
            self.pid = self.spawned_as.pid
            listener.settimeout(LIMIT)
            sock, _ = listener.accept()
        super().__init__(sock, s.FromSaver)
        self.here = self.wait(s.SaverHere)
        assert self.here.key == self.key

    def open(self, made: Segment, key: int = 1, local_rank: int = 0) -> Shared:
        """Give it a segment; it is closed with this conversation."""
        shared = Shared(made)
        self._closing.callback(shared.close)
        self.tell(s.SegmentOpen(key, local_rank), shared.fd)
        return shared

    def serve(self, made: Segment, step: int = 7, rank: int = 0, key: int = 1) -> Shared:
        """And have it served to other nodes."""
        shared = self.open(made, key)
        self.tell(s.Serve(key, 0, 1, NAMED, step, rank))
        return shared

    def check(self, key: int = 1, slot: int = 0, sequence: int = 1) -> s.Checked:
        """Have a snapshot compared with its hashes."""
        self.tell(s.CheckSnapshot(key, slot, sequence))
        return self.wait(s.Checked)

    def commits(self, attempt: str = "a1", writers: int = 1) -> s.CommitDone:
        """Have a checkpoint's marker written."""
        self.tell(s.CommitNow(attempt, writers))
        return self.wait(s.CommitDone)

    def writes(self, order: s.PersistParts) -> s.PartsDone:
        """Have parts written, which goes well."""
        self.tell(order)
        return self.written()

    def written(self) -> s.PartsDone:
        """They are, and well."""
        done = self.wait(s.PartsDone)
        assert done.ok, done.reason
        return done

    def hash(self, key: int = 1, slot: int = 0, sequence: int = 1) -> s.Checked:
        """Have a snapshot hashed, and compared with that."""
        self.tell(s.HashSnapshot(key, slot, sequence))
        while True:  # a check overtakes what waits to be hashed, and then has nothing to compare
            checked = self.check(key, slot, sequence)
            if "had not been hashed" not in checked.reason:
                return checked

    def ended(self) -> Exited:
        return self.driver.exited(self.key)

    def close(self) -> Exited:
        """Hang up; the saver ends by that."""
        self.socket.close()
        self._closing.close()
        return self.ended()


@contextlib.contextmanager
def saver(driver: Conversation, **more: Any) -> Iterator[Agent]:
    agent = Agent(driver, **more)
    try:
        yield agent
    finally:
        agent.socket.close()
        agent._closing.close()
    if not any(m.key == agent.key for m in driver.all_of(Exited)):
        driver.exited(agent.key)


def state(rank: int = 0, world: int = 1, elements: int = 1024) -> HandMade:
    """A sharded weight, a whole one that all ranks have, a value of all, and what is a rank's."""
    whole = torch.arange(world * elements, dtype=torch.float32).reshape(world, elements)
    made = HandMade(rank)
    made.chunk(
        "model", "weight", is_=whole[rank : rank + 1], shape=tuple(whole.shape), at=(rank, 0)
    )
    made.tensor("rng", is_=torch.tensor([rank, 5], dtype=torch.uint8), own=True)
    made.value("seed", is_=rank * 11, own=True)
    if rank == 0:
        made.tensor("model", "bias", is_=torch.full((7,), 0.5))
        made.value("epoch", is_=3)
    return made


def persist(folder: Any, *parts: s.PartOf, attempt: str = "a1", **changes: Any) -> s.PersistParts:
    """An order that this node coordinates."""
    world = max(1, len(parts))
    of = {"attempt": attempt, "folder": str(folder), "world_size": world, "parts": parts}
    return ordered(**(of | changes))


def part(rank: int = 0, key: int = 1) -> s.PartOf:
    return s.PartOf(key=key, slot=0, sequence=1, rank=rank, shared=True)
