"""The curves of a training for the page: metrics and the time of a step, as means of time buckets.

The buckets grow with the job: at most MAX_BUCKETS, each of up to LONGEST seconds, so that they hold
at least the last day in a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.core.sight.picture import CurveRow, TrainingRow

MAX_BUCKETS: Final = 240
LONGEST: Final = 512.0
"""Seconds of the longest bucket: 240 of these are 34 hours."""

MAX_CURVES: Final = 8
"""Maximum number of metrics; later names are left out."""

TOTAL: Final = "total"
"""The metric with the number of the training's last step."""

RECENT: Final = 20
"""Number of buckets whose mean is the current time of a step."""


@dataclass(slots=True)
class _Bucket:
    """What was reported in one stretch of time."""

    at: float  # its beginning
    step: int = -1  # the newest
    seconds: float = 0.0  # between steps of one round ...
    steps: int = 0  # ... and how many these were
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def merge(self, later: _Bucket) -> None:
        """Add the next bucket."""
        self.step = later.step if later.step >= 0 else self.step
        self.seconds += later.seconds
        self.steps += later.steps
        for name, total in later.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
            self.counts[name] = self.counts.get(name, 0) + later.counts[name]

    def mean(self, name: str) -> float | None:
        return _short(self.sums[name] / self.counts[name]) if name in self.sums else None


class Curves:
    """The curves of one job. Times are in seconds on one clock."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width = 1.0
        self._names: list[str] = []
        self._last: tuple[int, int, float] | None = None  # round, step, time
        self._total = -1
        self._reports_metrics = -1  # the last round in which rank 0 did

    def add(self, at: float, round_number: int, step: int, values: Mapping[str, str]) -> None:
        """Add what was reported about a step at this time. `values`: numbers as text; others are
        left out. Reports without values are ignored in rounds in which rank 0 reports some: their
        times are less exact."""
        if values:
            self._reports_metrics = round_number
        elif self._reports_metrics == round_number:
            return
        bucket = self._bucket(at)
        last = self._last
        if last is not None and last[0] == round_number and last[1] < step and last[2] < at:
            bucket.seconds += at - last[2]
            bucket.steps += step - last[1]
        if last is None or last[:2] < (round_number, step):
            self._last = (round_number, step, at)
            bucket.step = step
        for name, text in values.items():
            value = _number(text)
            if name == TOTAL:
                self._total = int(value) if 0 <= value < 1 << 62 else -1
            elif math.isfinite(value) and self._is_known(name):
                bucket.sums[name] = bucket.sums.get(name, 0.0) + value
                bucket.counts[name] = bucket.counts.get(name, 0) + 1

    def _is_known(self, name: str) -> bool:
        if name not in self._names and len(self._names) < MAX_CURVES:
            self._names.append(name)
        return name in self._names

    def _bucket(self, at: float) -> _Bucket:
        """The bucket of this time, or of the newest one, if this time is older."""
        begin = math.floor(at / self._width) * self._width
        if not self._buckets or begin > self._buckets[-1].at:
            self._buckets.append(_Bucket(begin))
            while len(self._buckets) > MAX_BUCKETS:
                self._thin()
        return self._buckets[-1]

    def _thin(self) -> None:
        """Double the buckets' width, or drop the oldest one."""
        if self._width >= LONGEST:
            del self._buckets[0]
            return
        self._width *= 2
        fresh: list[_Bucket] = []
        for bucket in self._buckets:
            begin = math.floor(bucket.at / self._width) * self._width
            if fresh and fresh[-1].at == begin:
                fresh[-1].merge(bucket)
            else:
                bucket.at = begin
                fresh.append(bucket)
        self._buckets = fresh

    def row(self, now: float) -> TrainingRow | None:
        """The complete buckets, and the current one if it is the only one; None before the first
        step."""
        complete = [one for one in self._buckets if one.at + self._width <= now]
        shown = complete or self._buckets
        if not shown:
            return None
        recent = [one for one in shown[-RECENT:] if one.steps]
        steps = sum(one.steps for one in recent)
        each = sum(one.seconds for one in recent) / steps if steps else -1.0
        curves = [
            CurveRow("step", tuple(_short(b.seconds / b.steps) if b.steps else None for b in shown))
        ]
        for name in self._names:
            curves.append(CurveRow(name, tuple(bucket.mean(name) for bucket in shown)))
        newest = self._last[1] if self._last is not None else -1
        left = (self._total - newest) * each if each >= 0.0 and self._total >= newest else -1.0
        return TrainingRow(
            ages=tuple(round(now - one.at, 1) for one in shown),
            width=self._width,
            steps=tuple(one.step for one in shown),
            curves=tuple(curves),
            total=self._total,
            left=left,
        )


def _short(value: float) -> float:
    """Five digits: more cannot be seen, and every second is sent."""
    return float(f"{value:.5g}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
