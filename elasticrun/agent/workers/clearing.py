"""The end of an agent: one step after the other, whatever becomes of each, all within one bound."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from elasticrun.agent.logs.output import RankOutput
from elasticrun.agent.runtime import in_thread
from elasticrun.agent.workers.ranks import Ranks
from elasticrun.config import AgentConfig
from elasticrun.operator_log import logger
from elasticrun.system.sweep import end_at_once
from elasticrun.wire import env

BOUND: Final = 20.0
"""Seconds for all steps together, but for those that others need: finished ranks' own processes get
their grace, and output is shown as long as somebody reads it. After a death signal there are no
such steps: whoever has sent it kills us some time later, Kubernetes after 30 s in all."""

KILLED_AFTER: Final = 29.0
"""Seconds after a death signal by which it should all be over..."""

SIGNALLED_BOUND: Final = 4.0
"""... but this much is taken in any case: who lets ranks take longer has to give us that on top."""

LEAST: Final = 1.0
"""Seconds that a step has in any case, when those before it have taken all."""

SHOW_PATIENCE: Final = 5.0
"""Seconds without a reader, or without an answer of the disk, until output is given up."""

SHOW_LIMIT: Final = 10.0
"""Seconds for showing output once somebody wants us gone."""


class Clearing:
    """The steps of the end. One that fails or is late is told, and the next one is done."""

    def __init__(self) -> None:
        self._until = math.inf
        self._signalled: float | None = None
        self.hurry = asyncio.Event()
        """A death signal has come since: waits for others' sake are over."""

    def signalled(self) -> None:
        """A death signal has come; the first one counts."""
        if self._signalled is None:
            self._signalled = time.monotonic()

    def begin(self) -> None:
        """The bound counts from now on."""
        now = time.monotonic()
        self._until = now + BOUND
        if self._signalled is not None:
            self._until = min(
                self._until, max(now + SIGNALLED_BOUND, self._signalled + KILLED_AFTER)
            )

    def left(self, limit: float) -> float:
        """Seconds that a step which takes `limit` at most may still take."""
        return min(limit, max(LEAST, self._until - time.monotonic()))

    def now(self, what: str, work: Callable[[], object]) -> None:
        """A step that does not wait."""
        try:
            work()
        except Exception:
            logger.exception("%s failed", what)

    async def step(self, what: str, work: Awaitable[object], limit: float | None) -> None:
        """A step that takes `limit` seconds at most; None: it has a limit of its own."""
        limit = None if limit is None else self.left(limit)
        try:
            await asyncio.wait_for(work, limit)
        except TimeoutError:
            logger.error("%s took longer than %.3g s and was given up", what, limit)
        except Exception:
            logger.exception("%s failed", what)

    async def descendants(self, ranks: Ranks, grace: float) -> None:
        """What finished ranks have left in sessions of their own gets SIGTERM, and `grace` seconds
        until it is killed; `hurry` ends the wait for it."""
        await self._first_of(ranks.clear(grace), grace + 1.0)

    async def output(self, output: RankOutput, *, hurried: bool) -> None:
        """Show what the ranks have printed, as long as somebody reads it; from a death signal on,
        or from now on if that is past (`hurried`), for SHOW_LIMIT seconds."""
        showing = asyncio.ensure_future(in_thread(lambda: output.close(SHOW_PATIENCE), name="show"))
        if not hurried:
            await self._first_of(asyncio.shield(showing), None)
        if not showing.done():
            limit = self.left(SHOW_LIMIT) if hurried else SHOW_LIMIT
            output.hurry(limit)
            await asyncio.wait({showing}, timeout=limit + SHOW_PATIENCE)
        if not showing.done():
            showing.cancel()
            logger.error("output could not be shown to its end: the disk does not answer")
            return
        showing.result()

    async def _first_of(self, work: Awaitable[object], limit: float | None) -> None:
        """Wait for the work, for a death signal, or for `limit` seconds."""
        working = asyncio.ensure_future(work)
        hurried = asyncio.ensure_future(self.hurry.wait())
        try:
            done, _ = await asyncio.wait(
                {working, hurried}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            working.cancel()
            hurried.cancel()
        if working in done:
            working.result()


async def end_callers_ranks(config: AgentConfig, pids: Iterable[int], limit: float) -> None:
    """Ranks of a caller of elastic_launch are not below us, and the caller may be dead. Returns
    after `limit` seconds at the latest."""
    mark = f"{env.CALLER}={config.env.get(env.CALLER, '')}".encode()
    named = tuple(pids)
    with contextlib.suppress(TimeoutError):
        await in_thread(lambda: end_at_once(named, mark, limit), limit=limit, name="sweep")
