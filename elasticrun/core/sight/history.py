"""What happened, a line each, for people: every note of the master, in a ring."""

from __future__ import annotations

from collections import deque

from elasticrun.core.context import JobContext
from elasticrun.core.events import Note
from elasticrun.core.sight.picture import EventRow

MOST = 1000
"""Lines that are kept."""


class History:
    """The newest lines."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._lines: deque[tuple[int, float, Note]] = deque(maxlen=MOST)
        self._count = 0

    def settle(self) -> None:
        """After every event that was decided on: keep what was noted."""
        for effect in self._ctx.out:
            if isinstance(effect, Note):
                self._count += 1
                self._lines.append((self._count, self._ctx.now, effect))

    def page(self) -> tuple[EventRow, ...]:
        """The newest last."""
        now = self._ctx.now
        return tuple(
            EventRow(number, max(0.0, now - at), "", note.text, note.level)
            for number, at, note in self._lines
        )
