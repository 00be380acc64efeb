"""What killed agents of other jobs of this user have left in shared memory: looked at when this
agent starts, and again when the time of the next one is over (`config.ORPHAN_GRACE`)."""

from __future__ import annotations

import asyncio
import time

from elasticrun import config
from elasticrun.agent.segment_folder import Cleaned, clean
from elasticrun.agent.threads import in_thread, tell_failure
from elasticrun.operator_log import logger

LIMIT = 60.0
"""Seconds for one look; the kernel takes a while to free gigabytes."""


class Orphans:
    """Of the folder `base`, apart from those of this job. Belongs to the loop's thread, but for
    `look`."""

    def __init__(self, base: str, job_id: str) -> None:
        self._base = base
        self._job_id = job_id
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def look(self, grace: float | None = None) -> Cleaned:
        """Remove those whose time is over; blocks."""
        grace = config.ORPHAN_GRACE if grace is None else grace
        return clean(self._base, self._job_id, grace, time.time())

    def again(self, due: float | None) -> None:
        """Look again in so many seconds; None: there is nothing to look for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due, self._due)

    async def make_room(self) -> bool:
        """There is no room without what they have left: whether there was any of it."""
        try:
            found = await in_thread(lambda: self.look(0.0), limit=LIMIT, name="orphans")
        except (OSError, TimeoutError):
            return False
        if found.removed:
            logger.warning(
                "snapshots of %d killed agents of other jobs were removed: there was no room in %s",
                *(found.removed, self._base),
            )
        return found.removed > 0

    def close(self) -> None:
        """This agent ends; the next one looks."""
        self.again(None)
        if self._task is not None:
            self._task.cancel()

    def _due(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look_again())
        tell_failure(self._task, logger.error, "looking for killed agents' snapshots")

    async def _look_again(self) -> None:
        try:
            found = await in_thread(self.look, limit=LIMIT, name="orphans")
        except (OSError, TimeoutError):
            return  # a folder that does not answer is the next agent's
        self.again(found.due)
