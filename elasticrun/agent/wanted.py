"""Snapshots that the ranks want written out: kept until the master says that this is over.

A slot has one word that says that it is pinned, and several reasons for that; this is one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from elasticrun.agent.held import Held
from elasticrun.agent.inventory import Inventory
from elasticrun.agent.segments import Segments
from elasticrun.operator_log import logger
from elasticrun.wire.segment import Snapshot

TIMES: Final = 3.0
"""One is kept for so many times the limit of an attempt: a master that has forgotten it must not
stop snapshots for good."""


class Wanted:
    """`limit`: seconds that one attempt to persist may take; `freed` is called when pins were taken
    away for good."""

    def __init__(
        self, segments: Segments, inventory: Inventory, limit: float, freed: Callable[[], None]
    ) -> None:
        self._segments = segments
        self._inventory = inventory
        self._limit = TIMES * limit
        self._freed = freed
        self._timers: dict[tuple[bytes, int], asyncio.TimerHandle] = {}

    def add(self, round: bytes, step: int, current: Iterable[Held]) -> None:
        """Every local rank's share of it stays."""
        name = (round, step)
        if name not in self._timers:
            self._inventory.want(*name)
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(self._limit, self._forgotten, *name)
        for held in current:
            if (found := held.find(*name)) is not None:
                held.pin(found.slot, _pin(*name))

    def look(self, current: list[Held]) -> None:
        """A rank pins what it wants written before it says so, and may have died in between."""
        for held in current:
            for snapshot in held.snapshots():
                if held.segment.pinned(snapshot.slot) and not held.pins.get(snapshot.slot):
                    self.add(snapshot.round, snapshot.step, current)

    def reason(self, snapshot: Snapshot) -> set[str]:
        """What a slot with this snapshot is pinned for, if it is wanted."""
        name = (snapshot.round, snapshot.step)
        return {_pin(*name)} if self._inventory.wants(*name) else set()

    def over(self, round: bytes, step: int) -> None:
        """It was written, or will not be."""
        timer = self._timers.pop((round, step), None)
        if timer is not None:
            timer.cancel()
        self._inventory.unwant(round, step)
        for held in self._segments.held:
            held.unpin(_pin(round, step))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _forgotten(self, round: bytes, step: int) -> None:
        logger.warning("step %d was to be written, and was not: it is not kept for that", step)
        self.over(round, step)
        self._freed()


def _pin(round: bytes, step: int) -> str:
    return f"wanted {round.hex()}/{step}"
