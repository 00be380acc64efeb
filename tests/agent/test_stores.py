"""A store host that hangs before it listens, with a real fork server and a real store."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from elasticrun.agent.processes import Reaper
from elasticrun.agent.spawner import Spawners
from elasticrun.agent.spawner_process import start_spawner
from elasticrun.agent.stores import Stores
from elasticrun.core.effects import AgentEvent, StoreReady
from elasticrun.wire.spawner import Exited, FromSpawner, Spawned, SpawnFailed, StoreListening
from tests.agent.configs import agent_config
from tests.harness import LIMIT

HANGS_ONCE = """
import pathlib, signal, sys
here = pathlib.Path(__file__).parent.parent
try:
    (here / "hung").touch(exist_ok=False)
except FileExistsError:
    sys.path.remove(str(here))
    del sys.modules["torch"]
    import torch
else:
    while True:
        signal.pause()
"""


class Limits(dict[bool, float]):
    """A short one for the first start; the others may take as long as they need."""

    def __missing__(self, forked: bool) -> float:
        self[forked] = LIMIT
        return 0.2


def test_a_store_host_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(HANGS_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events: list[AgentEvent] = []
    came = asyncio.Event()

    def deliver(event: AgentEvent) -> None:
        events.append(event)
        came.set()

    async def body() -> None:
        reaper = Reaper()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
        config = agent_config(launch="exec")  # executed, a store host imports torch itself
        spawners = Spawners(
            config, start_spawner(config, ()), reaper, ignored=(), spared=set, heard=heard,
            lost=lambda reason: pytest.fail(reason), fatal=lambda why: pytest.fail(why),
        )  # fmt: skip
        stores = Stores(spawners, lambda: "127.0.0.1", deliver, hold=0.0, start_limits=Limits())
        parts.append(stores)
        stores.prepare()
        try:
            async with asyncio.timeout(LIMIT):
                await came.wait()
        finally:
            await spawners.close(LIMIT)
            stores.close()
            await reaper.sweep(keep=(), limit=LIMIT)
            loop.remove_signal_handler(signal.SIGCHLD)

    parts: list[Stores] = []

    def heard(message: FromSpawner) -> None:
        (stores,) = parts
        if isinstance(message, Spawned):
            stores.spawned(message)
        elif isinstance(message, StoreListening):
            stores.listening(message)
        elif isinstance(message, Exited | SpawnFailed):
            assert stores.gone(message)

    with caplog.at_level(logging.WARNING, logger="elasticrun"):
        asyncio.run(body())
    assert (tmp_path / "hung").exists()
    (ready,) = events
    assert isinstance(ready, StoreReady)
    assert "a store host does not listen 0.2 s after its start: it is ended" in caplog.text
