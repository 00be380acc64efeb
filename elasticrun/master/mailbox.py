"""Orders on their way to one agent: the newest about each thing, in the order of their last change.

Orders are level-triggered, so an older one about the same thing is worth nothing once a newer one
stands. Most are about the node itself, so that one of a kind is enough; what is said of an attempt
to persist, or of a shard, is no word about another. A mailbox therefore holds few orders, however
slow its reader is, and no stream is dropped because its agent reads late: that would make a healthy
node suspect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elasticrun.wire import messages as m

MOST: Final = 32_768
"""Orders that wait for one reader, above all the shards that its ranks may ask for; with one more
the stream is closed, and the agent, when it dials anew, asks again."""


def subject(order: m.Order) -> str:
    """What an order is about: another of the same subject takes its place."""
    kind = type(order).__name__
    if isinstance(order, m.Persist | m.CommitCheckpoint):
        return f"{kind} {order.attempt}"
    if isinstance(order, m.PersistOver):
        return f"{kind} {order.attempt or f'{order.round} {order.step}'}"
    if isinstance(order, m.Holder):
        return f"{kind} {order.round} {order.step} {order.rank}"
    if isinstance(order, m.Replicate):
        return f"{kind} {order.saver}"
    return kind


class Mailbox:
    """Filled by the loop, emptied by the one task that writes to the stream."""

    def __init__(self) -> None:
        self.on_close: Callable[[], object] = lambda: None
        """Called once by `close`: whoever empties the box limits how long that may take."""
        self._orders: dict[str, bytes] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, about: str, order: bytes) -> None:
        """Leave an encoded order; it replaces one about the same (`subject`) that was not sent
        yet."""
        if self._closed:
            return
        self._orders.pop(about, None)  # the newest goes last: a Start after the Stop it answers
        if about == "Start":  # it waits no more, and need not read why it did
            self._orders.pop("Wait", None)
        if len(self._orders) >= MOST:
            self.close()
            return
        self._orders[about] = order
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
        return self._orders.pop(next(iter(self._orders)))

    def __len__(self) -> int:
        return len(self._orders)
