"""Copies of snapshots from other nodes, on the agent's order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from elasticrun.forkserver import bulk
from elasticrun.forkserver.lanes import Lane, Piece
from elasticrun.forkserver.reasons import reason_of
from elasticrun.forkserver.tries import tried
from elasticrun.wire.bulk import Get
from elasticrun.wire.ids import Endpoint, RoundName
from elasticrun.wire.segment import round_key
from elasticrun.wire.snapshots import Fetch, Fetched, FetchInto, FetchSize, FromSaver

FETCH_LIMIT: Final = 20.0
"""Seconds of new tries: ranks wait for it, and storage has the state too."""

MAX_FETCHES: Final = 8192
"""Under way; two for each local rank."""


class Fetches:
    """All of them. Belongs to the loop's thread."""

    def __init__(
        self, secret: str, say: Callable[[FromSaver], None], lane: Lane, replicas: Lane
    ) -> None:
        """`lane`: for what ranks wait for; `replicas`: for what nobody does."""
        self._secret = secret
        self._say = say
        self._lane = lane
        self._replicas = replicas
        self._orders: dict[int, Fetch] = {}

    def begin(self, order: Fetch) -> None:
        """Ask for the sizes; FetchSize follows."""
        self._orders.pop(order.key, None)
        while len(self._orders) >= MAX_FETCHES:
            self._orders.pop(next(iter(self._orders)))
        self._orders[order.key] = order
        place = Endpoint(order.host, order.port)
        get = Get(round_key(_name(order)).hex(), order.step, order.rank, body=False)

        def work(stop: threading.Event) -> FetchSize:
            head = tried(lambda: bulk.ask_size(place, self._secret, get), stop, FETCH_LIMIT)
            return FetchSize(order.key, True, "", head.layout_length, head.slot_bytes, head.layout)

        def failed(error: BaseException) -> FetchSize:
            return FetchSize(order.key, False, self._about(order, error), 0, 0)

        def done(size: FetchSize) -> None:
            if not size.ok and self._orders.get(order.key) is order:
                del self._orders[order.key]
            self._say(size)

        self._lane_of(order).add(Piece(work, failed, done))

    def go_on(self, into: FetchInto, descriptor: int) -> None:
        """The memory is there; takes the descriptor over. Fetched follows."""
        key = into.key
        order = self._orders.pop(key, None)
        if order is None:
            os.close(descriptor)
            self._say(Fetched(key, False, "nothing was to be fetched into this memory"))
            return
        place = Endpoint(order.host, order.port)

        def copy() -> None:
            which = (_name(order), order.step, order.rank)
            bulk.fetch(place, self._secret, *which, descriptor, into.slot, into.layout)

        def work(stop: threading.Event) -> Fetched:
            try:
                tried(copy, stop, FETCH_LIMIT)
            finally:
                os.close(descriptor)
            return Fetched(key, True, "")

        def failed(error: BaseException) -> Fetched:
            return Fetched(key, False, self._about(order, error))

        self._lane_of(order).add(Piece(work, failed, self._say))

    def _lane_of(self, order: Fetch) -> Lane:
        return self._replicas if order.replica else self._lane

    def _about(self, order: Fetch, error: BaseException) -> str:
        place = Endpoint(order.host, order.port)
        return (
            f"step {order.step} of rank {order.rank} could not be had from the saver at {place}: "
            f"{reason_of(error)}"
        )


def _name(order: Fetch) -> RoundName:
    return RoundName(order.round.term, order.round.number, order.round.nonce)
