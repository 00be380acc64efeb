"""Orders on their way to one agent: the newest of each kind, in the order of their last change.

Orders are level-triggered, so an older one of the same kind is worth nothing once a newer one
stands. A mailbox therefore holds at most one order per kind, however slow its reader is, and a
stream is never dropped because its agent reads late (COORDINATION 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Mailbox:
    """Filled by the loop, emptied by the one task that writes to the stream."""

    def __init__(self) -> None:
        self.on_close: Callable[[], object] = lambda: None
        """Called once by `close`: whoever empties the box limits how long that may take."""
        self._orders: dict[str, bytes] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, kind: str, order: bytes) -> None:
        """Leave an encoded order; it replaces one of the same kind that was not sent yet."""
        if self._closed:
            return
        self._orders.pop(kind, None)  # the newest goes last: a Start after the Stop it answers
        if kind == "Start":  # it waits no more, and need not read why it did
            self._orders.pop("Wait", None)
        self._orders[kind] = order
        self._changed.set()

    def close(self) -> None:
        """No order follows; those that lie here are still sent."""
        if not self._closed:
            self._closed = True
            self._changed.set()
            self.on_close()

    async def take(self) -> bytes | None:
        """The next order, waiting for one; None when the box is closed and empty."""
        while not self._orders:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        kind = next(iter(self._orders))
        return self._orders.pop(kind)

    def __len__(self) -> int:
        return len(self._orders)
