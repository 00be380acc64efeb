"""Detects whether any rank of this node makes progress, from samples every PULSE_EVERY seconds.

A rank makes progress when its step or a counter of its collectives has changed since the last
sample. The node reports only changes of this state, which are rare in normal training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.wire.messages import Quiet
from elasticrun.wire.progress import GroupAnswer
from elasticrun.wire.types import RoundName

PULSE_EVERY: Final = 2.5
"""Seconds between two samples of the local ranks."""

QUIET_AFTER: Final = 1.6 * PULSE_EVERY
"""Seconds without progress after which the master is notified: at the second sample without
progress, even if that one comes some milliseconds early."""

BUSY_CPU: Final = 0.02
"""Minimum cores that a busy rank and its descendants use. Enough I/O (BUSY_IO) also makes it
busy."""

BUSY_IO: Final = 64 * 1024 / PULSE_EVERY
"""Minimum bytes per second that a busy rank and its descendants read and write."""


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A rank in one sample. `groups`: None if it has not answered."""

    groups: tuple[GroupAnswer, ...] | None = None
    step: int = -1
    cpu: float = 0.0  # cores, since the last sample
    io: float = 0.0  # bytes per second
    did_io: bool = False  # the main thread of the rank or a descendant has done I/O

    @property
    def is_waiting(self) -> bool:
        """Whether it is in an incomplete collective."""
        return any(row.entered > row.done for row in self.groups or ())

    @property
    def is_working(self) -> bool:
        """Whether it does any significant work."""
        return self.did_io or self.cpu >= BUSY_CPU or self.io >= BUSY_IO


@dataclass(slots=True)
class _Known:
    """The last known state of a rank."""

    moved: float  # time of its last progress, or the start of the round
    counted: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    step: int = -1


class QuietTracker:
    """Tracks for how long the ranks of one round have made no progress. Times are in seconds, on
    the clock of `now`."""

    def __init__(self, round_name: RoundName, ranks: Iterable[int], now: float) -> None:
        self._round = round_name
        self._began = now
        self._ranks = {rank: _Known(now) for rank in ranks}
        self._sampled_at = now
        self._first = 0.0
        self._moves = False  # any rank has ever made progress
        self._counted = False
        self._now: tuple[bool, int, bool] = (False, 0, False)  # quiet, waiting, busy
        self._sent: tuple[bool, int, bool] | None = (False, 0, False)
        self._send_first = False

    def beat(self, beats: Mapping[int, RankBeat], now: float) -> None:
        """Process a sample of all ranks. The delay of a late sample does not count as quiet
        time."""
        lost = now - self._sampled_at - PULSE_EVERY
        if lost > PULSE_EVERY:
            for known in self._ranks.values():
                known.moved += lost
        before, self._sampled_at = self._sampled_at, now
        moved = [rank for rank, beat in beats.items() if self._record_sample(rank, beat, before)]
        self._counted = self._counted or any(beat.groups for beat in beats.values())
        if moved and not self._moves:
            self._moves = self._send_first = True
            self._first = now - self._began
        if self.seconds(now) < QUIET_AFTER:
            self._now = (False, 0, False)
        else:
            waiting = sum(beat.is_waiting for beat in beats.values())
            self._now = (True, waiting, any(beat.is_working for beat in beats.values()))

    def _record_sample(self, rank: int, beat: RankBeat, before: float) -> bool:
        """Record this rank's sample; returns whether the rank has made progress since `before`, the
        time of the last sample.

        Right after progress, a completed collective without a new one does not count: torch counts
        the last completion late, and the next sample is more accurate."""
        known = self._ranks[rank]
        counted = {row.key: (row.entered, row.started, row.done) for row in beat.groups or ()}
        if (beat.groups is None or counted == known.counted) and beat.step <= known.step:
            return False
        # a new group is not progress
        was = {key: known.counted.get(key, (0, -1, 0)) for key in counted}
        what = 2 if known.moved == before else 3
        news = any(was[key][:what] != row[:what] for key, row in counted.items())
        news = news or beat.step > known.step
        if beat.groups is not None:
            known.counted = counted
        known.step = max(known.step, beat.step)
        if news:
            known.moved = self._sampled_at
        return news

    def seconds(self, now: float) -> float:
        """Seconds since any rank made progress, or since the start of the round."""
        return max(0.0, now - max((one.moved for one in self._ranks.values()), default=now))

    def rank_seconds(self, rank: int, now: float) -> float:
        """Seconds since this rank made progress."""
        return max(0.0, now - self._ranks[rank].moved)

    def news(self, now: float) -> Quiet | None:
        """A report for the master; None if the state has not changed since the last report."""
        if self._now == self._sent and not self._send_first:
            return None
        quiet, waiting, busy = self._now
        seconds = self.seconds(now) if quiet else 0.0
        first = self._first if self._send_first else 0.0
        return Quiet(self._round, seconds, first, self._counted, waiting, busy)

    def mark_sent(self) -> None:
        """Record that the report from `news` has been sent."""
        self._sent, self._send_first = self._now, False

    def mark_unsent(self) -> None:
        """Have `news` return the current state again, because the master may have lost it."""
        self._sent, self._send_first = None, self._moves
