"""Store hosts that hang or end before they listen, with a real fork server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import pytest

from elasticrun.agent.workers import stores
from elasticrun.agent.workers.spawner import Child
from elasticrun.agent.workers.stores import Stores, next_store
from elasticrun.core.events import AgentEvent, StoreReady
from elasticrun.wire.spawning import Exited, FromSpawner, SpawnFailed
from elasticrun.wire.types import Endpoint
from tests.agent.configs import launched, node_context, reaping, spawners
from tests.agent.snapshots.played import Spawners
from tests.harness import LIMIT

pytestmark = pytest.mark.slow

HANGS_AT_FIRST = """
import pathlib, signal, sys
here = pathlib.Path(__file__).parent.parent
if not (here / "ended").exists():
    while True:
        signal.pause()
sys.path.remove(str(here))
del sys.modules["torch"]
import torch
"""


class Limits(dict[bool, float]):
    """A short one for the first start; the others may take as long as they need."""

    def __missing__(self, forked: bool) -> float:
        self[forked] = LIMIT
        return 0.2


class Node:
    """As much of an agent as a store needs."""

    def __init__(self, ended: Path | None = None) -> None:
        """`ended`: a file that is made when a store host has ended."""
        self._ended = ended
        self.events: list[AgentEvent] = []
        self.ends: list[str] = []
        self._came = asyncio.Event()

    def _deliver(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._came.set()

    def _fatal(self, sentence: str) -> None:
        self.ends.append(sentence)
        self._came.set()

    async def has_store(self) -> None:
        """Prepare one; until it is there, or given up."""
        launch = launched(mode="exec")  # executed, a store host imports torch itself
        node = node_context(launch, deliver=self._deliver, fatal=self._fatal)
        async with reaping() as reaper:
            started = spawners(launch, reaper)
            stores = Stores(node, started, 0.0, start_limits=Limits())
            hear = stores.on_child_message

            def heard(child: Child, message: FromSpawner) -> None:
                if isinstance(message, Exited | SpawnFailed) and self._ended is not None:
                    self._ended.touch()
                hear(child, message)

            stores.on_child_message = heard
            stores.prepare()
            try:
                async with asyncio.timeout(LIMIT):
                    await self._came.wait()
            finally:
                await started.close(LIMIT)
                stores.close()


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch) -> Path:
    """A file that is imported in the place of torch."""
    (tmp_path / "torch").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torch" / "__init__.py"


def test_a_store_host_that_hangs_is_replaced(fake_torch: Path, caplog) -> None:
    fake_torch.write_text(HANGS_AT_FIRST)
    ended = fake_torch.parent.with_name("ended")
    node = Node(ended)
    with caplog.at_level(logging.WARNING, logger="elasticrun"):
        asyncio.run(node.has_store())
    assert ended.exists()
    (ready,) = node.events
    assert isinstance(ready, StoreReady)
    assert "a store host is not listening 0.2 s after its start; killing it" in caplog.text


def test_a_torch_that_cannot_be_imported_is_tried_once(fake_torch: Path) -> None:
    fake_torch.write_text("raise ImportError('torch is broken')")
    node = Node()
    asyncio.run(node.has_store())
    assert not node.events
    assert node.ends == [
        "a store host could not be started: no store: ImportError: torch is broken"
    ]


def test_where_none_can_be_started_the_agent_ends(fake_torch: Path, monkeypatch) -> None:
    fake_torch.write_text("raise RuntimeError('torch is broken')")
    monkeypatch.setattr(stores, "RETRY", 0.01)
    monkeypatch.setattr(stores, "MAX_TRIES", 2)
    monkeypatch.setattr(Limits, "__missing__", lambda limits, forked: LIMIT)
    node = Node()
    asyncio.run(node.has_store())
    assert not node.events
    (why,) = node.ends
    assert why.startswith("a store host could not be started: ")
    assert "torch is broken" in why
    assert why.endswith(", 2 times in a row")


async def test_one_that_is_asked_for_before_its_next_try_is_started_once(monkeypatch) -> None:
    monkeypatch.setattr(stores, "RETRY", 0.0)
    played = Spawners()
    made = Stores(node_context(), played, 0.0)
    made.prepare()
    made.on_child_message(played.children[1], SpawnFailed(1, "no process is left"))
    made.prepare()
    for _ in range(3):
        await asyncio.sleep(0)  # the next try is due
    made.close()
    assert len(played.children) == 2


async def test_the_next_store_has_the_next_port_if_that_is_free(monkeypatch, tmp_path) -> None:
    """Other nodes foresee it. What another agent of the same user has bound is not free."""
    monkeypatch.setattr(stores, "PORTS", tmp_path / "range")
    stores.PORTS.write_text("1024\t65535\n")
    played = Spawners()
    made = Stores(node_context(), played)

    def prepared() -> int:
        made.prepare()
        return played.orders.get_nowait().port

    ports = [prepared() for _ in range(10)]  # some other process may have one that would follow
    assert any(
        port == next_store(Endpoint("127.0.0.1", last)).port
        for last, port in itertools.pairwise(ports)
    )
    with stores.bind_port(ports[-1] + 1) as other:
        assert prepared() != other.getsockname()[1]
    stores.PORTS.write_text("1024\t1025\n")
    assert prepared() > 0
    made.close()
