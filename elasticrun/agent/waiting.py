"""Tells users why a node waits, when it waits long, and how long it may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elasticrun.core.group_states import GroupStatus, State

LEAVING: Final = 1.0
"""Seconds after which it is told that a node that is to leave waits for its ranks to save a step: a
Ctrl-C whose step is saved sooner is one line, that of the end."""

SOON: Final = 3.0
"""Seconds after which a wait for other nodes, or for ranks to end, is told."""

LATE: Final = 10.0
"""The same for every other wait."""

AGAIN: Final = 60.0
"""Seconds after which it is told again, if it lasts."""

FOR_NODES: Final = "waiting for nodes: "
LAST_CALL: Final = "last call: "

_ENDS: Final = (State.STOPPING, State.ENDING)
_WAITS: Final = (State.PREPARING, State.JOINED, *_ENDS)


class LongWaits:
    """One line per reason that has stood for a while, and one a minute from then on. `place` is
    where the nodes meet, in words; `say` gets each line; `clock` is the brain's."""

    def __init__(
        self, place: Callable[[], str], say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._place = place
        self._say = say
        self._clock = clock
        self._seen: tuple[State, str] | None = None
        self._status: GroupStatus | None = None
        self._timer: asyncio.TimerHandle | None = None

    def look(self, status: GroupStatus) -> None:
        """To be called with the brain's picture whenever it may have changed."""
        self._status = status
        if self._seen == (status.state, status.reason):
            return
        self._seen = (status.state, status.reason)
        self.close()
        if _leaves(status):
            self._after(LEAVING)
        elif status.state in _WAITS and status.reason:
            quick = status.state in _ENDS or status.reason.startswith((FOR_NODES, LAST_CALL))
            self._after(SOON if quick else LATE)

    def _after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tell)

    def _tell(self) -> None:
        if self._status is not None:
            self._say(in_words(self._status, self._place(), self._clock()))
        self._after(AGAIN)

    def close(self) -> None:
        """Say no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _leaves(status: GroupStatus) -> bool:
    """It runs on only until its ranks have saved a step."""
    return status.state is State.RUNNING and status.wait_ends is not None


def in_words(status: GroupStatus, place: str, now: float) -> str:
    """What is said of a wait at `now`."""
    left = 0.0 if status.wait_ends is None else status.wait_ends - now
    if _leaves(status):
        lost = f"{status.master_lost}; this node leaves"
        limit = f"in {max(left, 0):.0f} s at most; a second signal ends it at once"
        return f"{lost if status.master_lost else status.reason}, {limit}"
    if status.state in _ENDS:
        limit = f"; killed in {left:.0f} s" if left > 0 else ""
        return f"{status.reason}: waiting for the ranks to end{limit}"
    reason = status.reason.removeprefix(FOR_NODES)
    if reason != status.reason or reason.startswith(LAST_CALL):
        reason = f"rendezvous {place}: {reason}"
    return f"{reason}, {left:.0f} s left" if left > 0 else reason
