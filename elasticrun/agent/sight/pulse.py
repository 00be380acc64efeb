"""Whether anything moves on this node: what the beats of its ranks are folded into.

A rank moves when a counter of its collectives or its step is another one than at the last beat. The
node says so when that changes, and nothing while it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.wire.messages import Quiet
from elasticrun.wire.progress import GroupSays
from elasticrun.wire.types import RoundName

PULSE_EVERY: Final = 2.5
"""Seconds between two looks at the local ranks."""

QUIET_AFTER: Final = 1.6 * PULSE_EVERY
"""Seconds without a move after which the master is told: at the second look that sees none, and no
later where that one comes some milliseconds early."""

BUSY_CPU: Final = 0.02
"""Cores that a rank uses, itself and all below it, from which it is at work ..."""

BUSY_IO: Final = 64 * 1024 / PULSE_EVERY
"""... or bytes a second that it reads and writes."""


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A rank at one look. `groups`: None where it has not answered."""

    groups: tuple[GroupSays, ...] | None = None
    step: int = -1
    cpu: float = 0.0  # cores, since the last look
    io: float = 0.0  # bytes a second
    acts: bool = False  # a main thread, of it or of a process below, has read or written at all

    @property
    def waits(self) -> bool:
        """Whether it is in a collective that is not complete."""
        return any(row.entered > row.done for row in self.groups or ())

    @property
    def works(self) -> bool:
        """Whether it does anything worth the name."""
        return self.acts or self.cpu >= BUSY_CPU or self.io >= BUSY_IO


@dataclass(slots=True)
class _Known:
    """Of a rank."""

    moved: float  # when it did, or the life began
    counted: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    step: int = -1


class LocalQuiet:
    """One life of the ranks. Times are seconds on the clock of `now`."""

    def __init__(self, round_name: RoundName, ranks: Iterable[int], now: float) -> None:
        self._round = round_name
        self._began = now
        self._ranks = {rank: _Known(now) for rank in ranks}
        self._looked = now
        self._first = 0.0
        self._moves = False  # any has ever
        self._counted = False
        self._now: tuple[bool, int, bool] = (False, 0, False)  # quiet, waiting, busy
        self._said: tuple[bool, int, bool] | None = (False, 0, False)
        self._tells_first = False

    def beat(self, beats: Mapping[int, RankBeat], now: float) -> None:
        """A look at all ranks. One that comes late is the first of a new window: what was not
        looked at is not counted as quiet."""
        lost = now - self._looked - PULSE_EVERY
        if lost > PULSE_EVERY:
            for known in self._ranks.values():
                known.moved += lost
        before, self._looked = self._looked, now
        moved = [rank for rank, beat in beats.items() if self._moved(rank, beat, before)]
        self._counted = self._counted or any(beat.groups for beat in beats.values())
        if moved and not self._moves:
            self._moves = self._tells_first = True
            self._first = now - self._began
        if self.seconds(now) < QUIET_AFTER:
            self._now = (False, 0, False)
        else:
            waiting = sum(beat.waits for beat in beats.values())
            self._now = (True, waiting, any(beat.works for beat in beats.values()))

    def _moved(self, rank: int, beat: RankBeat, before: float) -> bool:
        """Since the look before, which was then. One that is done and no other that is begun, right
        after a move, is no news: torch counts the last one late, and the next look knows better."""
        known = self._ranks[rank]
        counted = {row.key: (row.entered, row.started, row.done) for row in beat.groups or ()}
        if (beat.groups is None or counted == known.counted) and beat.step <= known.step:
            return False
        # a group that has just been made is no move: nobody has got further by it
        was = {key: known.counted.get(key, (0, -1, 0)) for key in counted}
        what = 2 if known.moved == before else 3
        news = any(was[key][:what] != row[:what] for key, row in counted.items())
        news = news or beat.step > known.step
        if beat.groups is not None:
            known.counted = counted
        known.step = max(known.step, beat.step)
        if news:
            known.moved = self._looked
        return news

    def seconds(self, now: float) -> float:
        """Since any rank moved; since the life began, where none has."""
        return max(0.0, now - max((one.moved for one in self._ranks.values()), default=now))

    def rank_seconds(self, rank: int, now: float) -> float:
        """Since this one moved."""
        return max(0.0, now - self._ranks[rank].moved)

    def news(self, now: float) -> Quiet | None:
        """What the master is to hear; None while that is what it has heard."""
        if self._now == self._said and not self._tells_first:
            return None
        quiet, waiting, busy = self._now
        seconds = self.seconds(now) if quiet else 0.0
        first = self._first if self._tells_first else 0.0
        return Quiet(self._round, seconds, first, self._counted, waiting, busy)

    def told(self) -> None:
        """The master has been sent that."""
        self._said, self._tells_first = self._now, False

    def again(self) -> None:
        """The master may not know what it was told."""
        self._said, self._tells_first = None, self._moves
