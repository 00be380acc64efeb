"""The last processes of ranks, at the end of the agent: asked first, then ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from elasticrun.agent.marked import end_at_once
from elasticrun.agent.ranks import Ranks
from elasticrun.agent.threads import in_thread
from elasticrun.config import AgentConfig
from elasticrun.wire import env


async def clear_descendants(ranks: Ranks, grace: float, hurry: asyncio.Event) -> None:
    """What finished ranks have left in sessions of their own gets SIGTERM, and `grace` seconds
    until it is killed; `hurry` ends the wait for it."""
    clearing = asyncio.create_task(ranks.clear(grace))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait(
        {clearing, hurried}, timeout=grace + 1.0, return_when=asyncio.FIRST_COMPLETED
    )
    clearing.cancel()
    hurried.cancel()


async def end_callers_ranks(config: AgentConfig, pids: Iterable[int], limit: float) -> None:
    """Ranks of a caller of elastic_launch are not below us, and the caller may be dead. Returns
    after `limit` seconds at the latest."""
    mark = f"{env.CALLER}={config.env.get(env.CALLER, '')}".encode()
    named = tuple(pids)
    with contextlib.suppress(TimeoutError):
        await in_thread(lambda: end_at_once(named, mark, limit), limit=limit, name="sweep")
