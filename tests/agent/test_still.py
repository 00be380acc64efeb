"""A fork server that stands still while it is needed, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from elasticrun.agent import spawner
from elasticrun.agent.boot import Reaper, start_spawner
from elasticrun.agent.spawner import Child, Spawners
from elasticrun.wire.spawning import Exited, FromSpawner, Spawned, SpawnRank
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.agent.configs import agent_config
from tests.harness import LIMIT, await_exit


class Node:
    """As much of an agent as spawners need; `ranks` that sleep."""

    def __init__(self) -> None:
        self.said: list[FromSpawner] = []
        self.reasons: list[str] = []
        self.children: dict[int, Child] = {}
        self._changed = asyncio.Event()
        self._reaper = Reaper()

    async def __aenter__(self) -> Node:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reaper.reap)
        config = agent_config(launch="exec")
        self.spawners = Spawners(
            config, start_spawner(config, ()), self._reaper, ignored=(), spared=set,
            lost=self._lost, fatal=lambda why: pytest.fail(why),
        )  # fmt: skip
        await self.until(lambda: self.server.ready is not None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.spawners.close(LIMIT)
        await self._reaper.sweep(keep=(), limit=LIMIT)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def heard(self, child: Child, message: FromSpawner) -> None:
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
            order = SpawnRank(*(0, number, entry, {}, ()), "", "", "", (), ())
            child = self.spawners.start(order, self)
            self.children[child.key] = child
        await self.until(lambda: len(self.born()) == count)
        return self.born()

    def born(self) -> list[Spawned]:
        return [message for message in self.said if isinstance(message, Spawned)]

    def exits(self) -> list[Exited]:
        return [message for message in self.said if isinstance(message, Exited)]


def play(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[Node, int, list[Spawned]], Awaitable[None]]
) -> None:
    """`body` is called with ranks' orders answered; from then on answers are wanted within 1 s."""

    async def whole() -> None:
        async with Node() as node:
            pid = node.server.process.pid
            assert pid is not None
            ranks = await node.ranks(2)
            await node.until(lambda: node.server._silence is None)
            monkeypatch.setattr(spawner, "ANSWER_LIMIT", 1.0)
            await body(node, pid, ranks)

    asyncio.run(whole())


def test_a_rank_that_dies_beside_a_stopped_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed and replaced, its other rank with it, and the agent's brain is told why."""

    async def body(node: Node, server: int, ranks: list[Spawned]) -> None:
        first, second = ranks
        os.kill(server, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        await node.until(lambda: node.reasons)
        assert "stands still (SIGSTOP, a debugger): no answer for 1 s" in node.reasons[0]
        assert await_exit([server, second.pid]) == set()
        assert node.server.process.pid != server
        assert not node.exits()

    play(monkeypatch, body)


def test_an_order_to_a_stopped_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node, server: int, ranks: list[Spawned]) -> None:
        rank = ranks[0]
        os.kill(server, signal.SIGSTOP)
        node.children[rank.key].signal(signal.SIGTERM)
        await node.until(lambda: node.reasons)
        assert await_exit([server, rank.pid]) == set()

    play(monkeypatch, body)


def test_a_fork_server_that_nobody_needs_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks train on; and one that answers late, within the limit, is kept."""

    async def body(node: Node, server: int, ranks: list[Spawned]) -> None:
        first, second = ranks
        os.kill(server, signal.SIGSTOP)
        still = asyncio.get_running_loop().time() + 1.5 * spawner.ANSWER_LIMIT
        await node.until(lambda: asyncio.get_running_loop().time() > still)
        assert not node.reasons
        monkeypatch.setattr(spawner, "ANSWER_LIMIT", LIMIT)
        os.kill(first.pid, signal.SIGKILL)
        await node.until(lambda: node.server._silence is not None)
        os.kill(server, signal.SIGCONT)
        await node.until(node.exits)
        await node.until(lambda: node.server._silence is None)
        assert not node.reasons
        assert node.server.process.pid == server
        os.kill(second.pid, 0)

    play(monkeypatch, body)


def test_an_agent_that_stood_still_itself_gives_the_fork_server_another_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(node: Node, server: int, ranks: list[Spawned]) -> None:
        rank = ranks[0]
        os.kill(server, signal.SIGSTOP)
        node.children[rank.key].signal(0)
        node.server._due -= spawner.STALLED + 0.1  # as after a Ctrl-Z of both
        node.server._silent()
        os.kill(server, signal.SIGCONT)
        await node.until(lambda: node.server._silence is None)
        assert not node.reasons

    play(monkeypatch, body)
