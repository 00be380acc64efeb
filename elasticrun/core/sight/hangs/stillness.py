"""For how long nothing has moved, and how long a place in the user's source may be waited for.

A place is a file and a function, with the library that it has called. What a wait there took that
ended well is remembered, so a checkpoint that takes ten minutes is known after the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NewType

from elasticrun.core.persisted import LongWait

Place = NewType("Place", str)
"""File, function and library: "train.py load_shard torch.utils.data"."""

FACTOR: Final = 5.0
"""A place may be waited for this many times as long as the longest wait there that ended well."""

SHORTEST: Final = 60.0
"""Seconds that any place may be waited for: a strong verdict needs looks that agree that long."""

LONGEST: Final = 3600.0
"""And at most: what has taken an hour is worth a person's look."""

USERS_OWN: Final = 300.0
"""Seconds for a line of the user's source at which nobody has waited yet: it may ask a service."""

FIRST: Final = 1800.0
"""Seconds for whatever is waited for before the first collective or step of a life: it loads data,
compiles, fetches a model."""

PRIORS: Final = (
    (("_inductor", "_dynamo", "triton"), 1800.0),
    (("torch.serialization", "distributed.checkpoint", "safetensors"), 1800.0),
    (("init_process_group", "TCPStore", "_create_c10d_store", "rendezvous"), 600.0),
)
"""Seconds for libraries that are known to take their time: compilers, storage, the rendezvous of
torch, whose own limits are as long."""

MOST: Final = 256
"""Places that are remembered; the one that was seen longest ago is forgotten first."""

WORTH: Final = 5.0
"""Seconds below which a wait teaches nothing: every step has such."""


NEWS: Final = 1.2
"""Times the longest wait that is known from which a longer one is written down at once."""


def place_of(line: str, library: str) -> Place:
    """The place of "train.py:88 load_shard" and a library: the number of the line counts not."""
    head, _, function = line.partition(" ")
    file = head.rpartition(":")[0] or head
    return Place(" ".join(part for part in (file, function, library) if part))


class Places:
    """The longest waits that ended well, by place."""

    def __init__(self) -> None:
        self._longest: dict[Place, float] = {}

    def learn(self, place: Place, seconds: float) -> bool:
        """A wait at this place has ended well after so many seconds. Whether that is news which is
        worth a record."""
        if not place or seconds < WORTH:
            return False
        before = self._longest.pop(place, 0.0)
        self._longest[place] = max(seconds, before)
        if len(self._longest) > MOST:
            del self._longest[next(iter(self._longest))]
        return seconds > NEWS * before

    def limit(self, place: Place, *, first: bool) -> float:
        """Seconds that may be waited for a rank there. `first`: no rank has moved in this life."""
        known = self._longest.get(place)
        found = _prior(place) if known is None else min(max(FACTOR * known, SHORTEST), LONGEST)
        return max(found, FIRST) if first else found

    def record(self) -> tuple[LongWait, ...]:
        """What the next master is to know."""
        return tuple(LongWait(place, seconds) for place, seconds in self._longest.items())

    def restore(self, waits: Iterable[LongWait]) -> None:
        """What a master before this one knew."""
        for one in waits:
            self.learn(Place(one.place), one.seconds)


def _prior(place: Place) -> float:
    for words, seconds in PRIORS:
        if any(word in place for word in words):
            return seconds
    return USERS_OWN
