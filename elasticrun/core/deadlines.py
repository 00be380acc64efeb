"""Keyed deadlines for thousands of keys whose deadlines mostly move later.

A beat only moves its node's deadline later, thousands of times a second in a large job. `arm`
therefore stores a later time without touching the heap; the heap entry is corrected when the old
time comes up. Moving a deadline later costs O(1); moving it earlier or removing it costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


def earliest(*times: float | None) -> float | None:
    """The earliest of the times that are not None; None if all are."""
    return min((when for when in times if when is not None), default=None)


class Deadlines(Generic[Key]):
    """At most one deadline per key. Keys with the same deadline come out in the order they were
    armed."""

    def __init__(self) -> None:
        self._when: dict[Key, float] = {}
        self._queued: dict[Key, int] = {}  # serial number of the key's valid heap entry
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: Key) -> bool:
        return key in self._when

    def __iter__(self) -> Iterator[Key]:
        return iter(self._when)

    def when(self, key: Key) -> float | None:
        """The deadline of `key`, None if it is not armed."""
        return self._when.get(key)

    def arm(self, key: Key, when: float) -> None:
        """Set or move the deadline of `key` to `when` (monotonic seconds)."""
        old = self._when.get(key)
        self._when[key] = when
        if old is None or when < old:
            self._push(key, when)

    def disarm(self, key: Key) -> None:
        """Remove the deadline of `key`; no-op if there is none."""
        self._when.pop(key, None)
        self._queued.pop(key, None)

    def clear(self) -> None:
        """Remove every deadline."""
        self._when.clear()
        self._queued.clear()
        self._heap.clear()

    def shift(self, by: float) -> None:
        """Move every deadline later by `by` seconds; O(n)."""
        self._when = {key: when + by for key, when in self._when.items()}

    def next(self) -> float | None:
        """The earliest deadline, None if nothing is armed."""
        while self._heap:
            when, serial, key = self._heap[0]
            if self._queued.get(key) != serial:
                heapq.heappop(self._heap)
            elif self._when[key] > when:
                heapq.heapreplace(self._heap, (self._when[key], serial, key))
            else:
                return when
        return None

    def pop_due(self, now: float) -> list[Key]:
        """Remove and return every key that is due at `now`, earliest first."""
        due: list[Key] = []
        while self._heap and self._heap[0][0] <= now:  # no entry is later than its key's deadline
            when = self.next()
            if when is None or when > now:
                break
            key = heapq.heappop(self._heap)[2]
            self.disarm(key)
            due.append(key)
        return due

    def _push(self, key: Key, when: float) -> None:
        if len(self._heap) > 2 * len(self._when) + 64:  # too many stale entries
            self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        self._serial += 1
        self._queued[key] = self._serial
        heapq.heappush(self._heap, (when, self._serial, key))
