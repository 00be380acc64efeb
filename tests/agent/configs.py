"""Configurations for tests of the agent, and what such tests have of one: waits, spawners."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import pytest

from elasticrun.agent.boot import Reaper, start_spawner
from elasticrun.agent.context import NodeContext
from elasticrun.agent.workers.spawner import Spawners
from elasticrun.config import Identity, Launch, LogPlan, Place
from elasticrun.wire.messages import JobSpec, RoundInfo, Start
from elasticrun.wire.types import Endpoint, EntryKind, Entrypoint, RoundName
from tests.harness import LIMIT
from tests.starts import changed

T = TypeVar("T")


JOB: Final = Identity("the-job")
STANDALONE: Final = Place("standalone")


def job_spec(**changes: Any) -> JobSpec:
    """What is asked of a job of one node."""
    values: dict[str, Any] = {
        "job_id": "",
        "min_nodes": 1,
        "max_nodes": 1,
        "node_unit": 1,
        "max_restarts": 3,
        "restart_backoff": 0.0,
        "restart_window": 0.0,
        "join_timeout": 60.0,
        "last_call_timeout": 1.0,
        "heartbeat_timeout": 5.0,
        "grow": "auto",
        "grow_cooldown": 600.0,
        "restart_grace": 30.0,
        "master_lost_timeout": 60.0,
        **changes,
    }
    return JobSpec(**values)


def launched(spec: dict[str, Any] | None = None, **changes: Any) -> Launch:
    """Two ranks on one node."""
    values: dict[str, Any] = {
        "spec": job_spec(**(spec or {})),
        "entry": Entrypoint(EntryKind.SCRIPT, "train.py", ("--lr=1",)),
        "logs": LogPlan(log_dir="/dev/null"),
        "nproc_per_node": 2,
        **changes,
    }
    return Launch(**values)


def start(**changes: Any) -> Start:
    """A place: the second of three nodes, two ranks on each."""
    place = Start(
        info=RoundInfo(RoundName(7, 3, "n"), world_size=6, restart_count=2),
        group_rank=1,
        group_world_size=3,
        first_rank=2,
        role_first_rank=2,
        role_world_size=6,
        store=Endpoint("10.0.0.7", 4711),
        host_store=False,
    )
    return changed(place, changes.pop("round", None), **changes)


class Waiting:
    """Whom a test waits for: whatever comes sets `changed`."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    async def until(self, good: Callable[[], T]) -> T:
        async with asyncio.timeout(LIMIT):
            while not (found := good()):
                self.changed.clear()
                await self.changed.wait()
        return found


@asynccontextmanager
async def reaping() -> AsyncIterator[Reaper]:
    """Reaps the children of this process, of which none is left."""
    reaper, loop = Reaper(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
    try:
        yield reaper
    finally:
        await reaper.sweep(limit=LIMIT)
        loop.remove_signal_handler(signal.SIGCHLD)


def spawners(launch: Launch, reaper: Reaper, lost: Callable[[str], Any] = pytest.fail) -> Spawners:
    """With a real fork server; `lost` is told why it ended."""
    first = start_spawner(launch, ())
    return Spawners(node_context(launch, reaper=reaper), first, (), lost)


def node_context(launch: Launch | None = None, link: Any = None, **how: Any) -> NodeContext:
    """What the parts of a node share; what it delivers is for nobody, and its end is a failure."""
    how = {"place": STANDALONE, "identity": JOB, **how}
    how = {"deliver": id, "fatal": pytest.fail, "reaper": Reaper(), "writer": None, **how}
    node = NodeContext(launch or launched(), **{"address": "127.0.0.1", **how})
    node.link = link
    return node
