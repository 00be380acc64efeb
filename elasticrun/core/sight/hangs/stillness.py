"""How long other ranks may wait for a rank at one place in the user's source.

A place is a file and a function, with the library that the function has called. The durations of
waits that ended well are remembered, so a checkpoint that takes ten minutes is known after the
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NewType

from elasticrun.core.persisted import LongWait

Place = NewType("Place", str)
"""File, function and library: "train.py load_shard torch.utils.data"."""

WAIT_FACTOR: Final = 5.0
"""Ranks may wait this many times as long as the longest wait at that place that ended well."""

MIN_LIMIT: Final = 60.0
"""Minimum limit in seconds: a strong verdict needs samples that agree for this long."""

MAX_LIMIT: Final = 3600.0
"""Maximum limit in seconds: a person should look at anything that has taken an hour."""

DEFAULT_LIMIT: Final = 300.0
"""Limit in seconds for a place without a known wait or library: it may call a service."""

START_LIMIT: Final = 1800.0
"""Limit in seconds before the first collective or step of a round: the rank loads data, compiles,
or fetches a model."""

PRIORS: Final = (
    (("_inductor", "_dynamo", "triton"), 1800.0),
    (("torch.serialization", "distributed.checkpoint", "safetensors"), 1800.0),
    (("init_process_group", "TCPStore", "_create_c10d_store", "rendezvous"), 600.0),
)
"""Limits in seconds for libraries that are known to be slow: compilers, storage, and torch's
rendezvous, whose own limits are as long."""

MAX_PLACES: Final = 256
"""Maximum number of places; the one that was seen least recently is dropped first."""

MIN_WAIT: Final = 5.0
"""Waits shorter than this many seconds are not remembered: every step has some."""


NEWS_FACTOR: Final = 1.2
"""A wait this many times as long as the longest known one is recorded at once."""


def place_of(line: str, library: str) -> Place:
    """The place of "train.py:88 load_shard" and a library, without the line number."""
    head, _, function = line.partition(" ")
    file = head.rpartition(":")[0] or head
    return Place(" ".join(part for part in (file, function, library) if part))


class Places:
    """The longest waits that ended well, by place."""

    def __init__(self) -> None:
        self._longest: dict[Place, float] = {}

    def learn(self, place: Place, seconds: float) -> bool:
        """A wait at this place ended well after `seconds`. Return whether that should be
        recorded."""
        if not place or seconds < MIN_WAIT:
            return False
        before = self._longest.pop(place, 0.0)
        self._longest[place] = max(seconds, before)
        if len(self._longest) > MAX_PLACES:
            del self._longest[next(iter(self._longest))]
        return seconds > NEWS_FACTOR * before

    def limit(self, place: Place, *, first: bool) -> float:
        """Seconds that ranks may wait at this place. `first`: no rank has moved in this round
        yet."""
        known = self._longest.get(place)
        found = (
            _prior(place) if known is None else min(max(WAIT_FACTOR * known, MIN_LIMIT), MAX_LIMIT)
        )
        return max(found, START_LIMIT) if first else found

    def record(self) -> tuple[LongWait, ...]:
        """What the next master needs."""
        return tuple(LongWait(place, seconds) for place, seconds in self._longest.items())

    def restore(self, waits: Iterable[LongWait]) -> None:
        """Restore what the previous master knew."""
        for one in waits:
            self.learn(Place(one.place), one.seconds)


def _prior(place: Place) -> float:
    for words, seconds in PRIORS:
        if any(word in place for word in words):
            return seconds
    return DEFAULT_LIMIT
