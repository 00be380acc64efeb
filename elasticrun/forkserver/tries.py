"""Asking another node's saver again while it is away or busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Final, TypeVar

from elasticrun.forkserver.bulk import Broken, Refused

T = TypeVar("T")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between two tries."""


def tried(work: Callable[[], T], stop: Event, limit: float) -> T:
    """What `work` returns, tried again while the other side is away or busy, for `limit` seconds or
    until `stop`. Broken, Denied, Refused."""
    end = time.monotonic() + limit
    pause = FIRST_PAUSE
    while True:
        try:
            return work()
        except (Broken, Refused) as error:
            final = isinstance(error, Refused) and not error.again
            if final or time.monotonic() + pause > end or stop.wait(pause):
                raise
        pause = min(2 * pause, LONGEST_PAUSE)
