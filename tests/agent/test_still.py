"""A fork server that stands still while it is needed, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elasticrun.agent.boot import Reaper
from elasticrun.agent.workers import spawner
from elasticrun.agent.workers.spawner import Child
from elasticrun.wire.spawning import Exited, FromSpawner, Spawned, SpawnRank
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.agent.configs import launched, reaping, spawners
from tests.harness import LIMIT, await_exit


class Node:
    """As much of an agent as spawners need; `ranks` that sleep."""

    pid: int  # of the fork server that it has at first
    first: Spawned
    second: Spawned

    def __init__(self, reaper: Reaper) -> None:
        self.said: list[FromSpawner] = []
        self.reasons: list[str] = []
        self.children: dict[int, Child] = {}
        self._changed = asyncio.Event()
        self.spawners = spawners(launched(mode="exec"), reaper, self._lost)

    def on_child_message(self, child: Child, message: FromSpawner) -> None:
        self.said.append(message)
        self._changed.set()

    def lost(self, child: Child) -> None: ...

    def _lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self._changed.set()

    @property
    def server(self) -> spawner.Spawner:
        return self.spawners._current

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                self._changed.clear()
                with_timer = asyncio.create_task(self._changed.wait())
                await asyncio.wait({with_timer}, timeout=0.05)  # readiness makes no event
                with_timer.cancel()

    async def ranks(self, count: int) -> list[Spawned]:
        for number in range(count):
            entry = Entrypoint(EntryKind.COMMAND, "sleep", ("1000",))
            order = SpawnRank(*(0, number, entry, {}, ()), "", "", "")
            child = self.spawners.start(order, self)
            self.children[child.key] = child
        await self.until(lambda: len(self.born()) == count)
        return self.born()

    def born(self) -> list[Spawned]:
        return [message for message in self.said if isinstance(message, Spawned)]

    def exits(self) -> list[Exited]:
        return [message for message in self.said if isinstance(message, Exited)]


@contextlib.asynccontextmanager
async def begun(monkeypatch) -> AsyncIterator[Node]:
    """The orders of two ranks are answered; from then on answers are wanted within 1 s."""
    async with reaping() as reaper:
        node = Node(reaper)
        try:
            await node.until(lambda: node.server.ready is not None)
            node.pid = node.server.process.pid
            node.first, node.second = await node.ranks(2)
            await node.until(lambda: node.server._answer_timer.is_set is False)
            monkeypatch.setattr(spawner, "ANSWER_LIMIT", 1.0)
            yield node
        finally:
            await node.spawners.close(LIMIT)


@pytest.fixture
def node(monkeypatch) -> contextlib.AbstractAsyncContextManager[Node]:
    return begun(monkeypatch)


async def test_a_rank_that_dies_beside_a_stopped_fork_server(node: Node) -> None:
    """It is killed and replaced, its other rank with it, and the agent's brain is told why."""
    os.kill(node.pid, signal.SIGSTOP)
    os.kill(node.first.pid, signal.SIGKILL)
    await node.until(lambda: node.reasons)
    assert "is stopped (SIGSTOP, a debugger): no answer for 1 s" in node.reasons[0]
    assert await_exit([node.pid, node.second.pid]) == set()
    assert node.server.process.pid != node.pid
    assert not node.exits()


async def test_an_order_to_a_stopped_fork_server(node: Node) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    node.children[node.first.key].signal(signal.SIGTERM)
    await node.until(lambda: node.reasons)
    assert await_exit([node.pid, node.first.pid]) == set()


async def test_a_fork_server_that_nobody_needs_may_stand_still(node: Node, monkeypatch) -> None:
    """Its ranks train on; and one that answers late, within the limit, is kept."""
    os.kill(node.pid, signal.SIGSTOP)
    still = asyncio.get_running_loop().time() + 1.5 * spawner.ANSWER_LIMIT
    await node.until(lambda: asyncio.get_running_loop().time() > still)
    monkeypatch.setattr(spawner, "ANSWER_LIMIT", LIMIT)
    os.kill(node.first.pid, signal.SIGKILL)
    await node.until(lambda: node.server._answer_timer.is_set)
    os.kill(node.pid, signal.SIGCONT)
    await node.until(node.exits)
    await node.until(lambda: node.server._answer_timer.is_set is False)
    assert not node.reasons
    assert node.server.process.pid == node.pid
    os.kill(node.second.pid, 0)


async def test_a_fork_server_that_cannot_be_started_yet_is_tried_again(
    node: Node, monkeypatch
) -> None:
    """No process is to be had for a moment: the node does not end of it."""
    really, failed = spawner.start_spawner, []

    def start(*args: Any, **more: Any) -> Any:
        if len(failed) < 2:
            failed.append(args)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return really(*args, **more)

    monkeypatch.setattr(spawner, "start_spawner", start)
    monkeypatch.setattr(spawner, "START_AGAIN", 0.01)
    os.kill(node.pid, signal.SIGKILL)
    await node.until(lambda: node.reasons)
    assert len(failed) == 2
    assert node.server.process.pid != node.pid


async def test_an_agent_that_stood_still_gives_the_fork_server_another_limit(node: Node) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    node.children[node.first.key].signal(0)
    patience = node.server._answer_timer
    step = patience._timer._handle
    threading.Event().wait(2 * spawner.ANSWER_LIMIT)  # the loop stands still, as on Ctrl-Z
    await node.until(lambda: patience._timer._handle is not step)  # it has looked
    assert patience._left == spawner.ANSWER_LIMIT
    patience._left = LIMIT  # the fork server may stand still for a while after this, too
    os.kill(node.pid, signal.SIGCONT)
    await node.until(lambda: node.server._answer_timer.is_set is False)
    assert not node.reasons
