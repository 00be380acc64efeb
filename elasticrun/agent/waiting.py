"""Tells users who see warnings only why a node waits, when it waits long, and how its wait ends."""

from __future__ import annotations

import asyncio
from typing import Final

from elasticrun.core.group_states import GroupStatus, State
from elasticrun.core.wording import some
from elasticrun.operator_log import logger
from elasticrun.wire.messages import Start

STILL_WAITING: Final = 10.0
"""Seconds after which a wait is told; shorter ones are no news."""


class LongWaits:
    """One warning per reason that has stood for STILL_WAITING seconds."""

    def __init__(self) -> None:
        self._seen: tuple[State, str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def look(self, status: GroupStatus) -> None:
        """To be called with the brain's picture whenever it may have changed."""
        if self._seen == (status.state, status.reason):
            return
        self._seen = (status.state, status.reason)
        self.close()
        if status.state in (State.PREPARING, State.JOINED) and status.reason:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STILL_WAITING, self._tell, status.reason)

    def _tell(self, reason: str) -> None:
        rest = reason.removeprefix("waiting")  # which most reasons begin with
        logger.warning("still waiting%s%s", ": " if rest == reason else "", rest)

    def close(self) -> None:
        """Say no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def starting(now: Start, last: Start | None, most: int) -> str:
    """What is said when ranks start in a round that is not the job's first. `last`: the one that
    this node was part of before, if any; `most`: restarts that the user has given the job."""
    size = f"{some(now.world_size, 'rank')} on {some(now.group_world_size, 'node')}"
    where = f"round {now.round.number} with {size}"
    if now.restore is not None:
        where += f", from step {now.restore.step} in memory"
    if last is None:
        return f"the ranks start here: {where}"
    if now.restart_count == last.restart_count:
        return f"the ranks start again, at no restart's cost: {where}"
    return f"the ranks start again: {where}, restart {now.restart_count} of {most}"
