"""A traceback whose lines are still arriving: they are shown together."""

from __future__ import annotations

from typing import Final

from elasticrun.agent.logs import masks

BEGINNING: Final = b"Traceback (most recent call last)"

SETTLED: Final = 0.1
"""Seconds without a further line after which a traceback that may be complete is shown."""

LONGEST_WAIT: Final = 1.0
"""Seconds after which the lines so far are shown, even if more are arriving."""

MOST_LINES: Final = 1000

MOST_BYTES: Final = 256 * 1024

_JOINTS: Final = (
    b"During handling of the above exception",
    b"The above exception was the direct cause",
)


class PendingTraceback:
    """The lines of one rank's traceback, including chained ones.

    It is known to be complete when a line without indentation follows the exception's own line, or
    when nothing has followed for SETTLED seconds. If torch has put `[rank3]:` before every line, a
    multi-line message also belongs to the traceback.
    """

    def __init__(self, line: bytes, now: float) -> None:
        self._prefixed = masks.body(line) is not line
        self._lines: list[bytes] = []
        self._size = 0
        self._since = now
        self._newest = now
        self.is_over = False
        """Set by `take`: the exception's own line has arrived, and nothing after it for a while."""
        self._done = False
        self.add(line, now)

    @staticmethod
    def begins(line: bytes) -> bool:
        """Whether a traceback begins with this line."""
        return BEGINNING in line

    def includes(self, line: bytes) -> bool:
        """Whether the line belongs to this traceback."""
        text = masks.body(line)
        if not self._done or (self._prefixed and text is not line):
            return True
        return not text.strip() or text[:1] in b" \t" or text.startswith((*_JOINTS, BEGINNING))

    def add(self, line: bytes, now: float) -> bool:
        """Add a line; true if the traceback has reached its maximum size and must be shown."""
        if not self._lines:
            self._since = now
        text = masks.body(line)
        if BEGINNING in text:
            self._done = False
        elif text.strip() and text[:1] not in b" \t" and not text.startswith(_JOINTS):
            self._done = True
        self._lines.append(line)
        self._size += len(line)
        self._newest = now
        return len(self._lines) >= MOST_LINES or self._size >= MOST_BYTES

    def due(self) -> float:
        """When to show the traceback if no further line arrives."""
        if self._done:
            return min(self._newest + SETTLED, self._since + LONGEST_WAIT)
        return self._since + LONGEST_WAIT

    def take(self, now: float) -> bytes:
        """Remove and return the lines so far, to be shown; sets `is_over`."""
        text = b"\n".join(self._lines)
        self.is_over = now >= self._newest + SETTLED and (self._done or not self._lines)
        self._lines, self._size = [], 0
        self._since = now
        return text
