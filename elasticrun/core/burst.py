"""Things that befall nodes one after another, and whether they are one event that goes on.

A switch fails and its nodes are lost over a minute; a rack gets its power back and they return over
two. A round for each of them would cost every node of the job a restart each time. A burst looks at
the times at which it happened so far and says how long the job should hold still before it answers.

The first answer is never held back: one lost node is mostly one lost node, and whatever happens
until that round has formed is in it. Only when the next thing happens to another node, within
`window` of the one before and after a round was already given for it, is it one event, and then the
job waits for its end, once. So an event costs two rounds, however it is spread.

How long is "its end"? If gaps are memoryless and n of them took T seconds together, a further gap
longer than q has probability (1 + q/T)^-n, whatever their rate. So a silence of

    q = T * (DOUBT^(-1/n) - 1)

means with certainty 1 - DOUBT that nothing more comes: 1.05 T after 16 gaps (as long as the event
itself has lasted), 9 T after five. Few gaps say little, so q is bounded by `most`. Where most came
at once and a few trickle in after them T says little; there the silence is twice the largest gap at
least. A fixed wait that is safe for losses spread over two minutes would cost a minute also where a
rack went dark within one second; this one costs what the news itself takes.

An event that does not end is answered after `longest` all the same, and then no more held back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

DOUBT = 1e-5
"""Chance that an event whose gaps are memoryless goes on after it was taken to be over."""


class Burst:
    """One series of happenings; times are monotonic seconds."""

    def __init__(self, *, window: float, least: float, most: float, longest: float) -> None:
        """`window`: happenings further apart are different events. `least` and `most` bound the
        silence that ends an event, `longest` the whole wait; all in seconds."""
        self._window = window
        self._least = least
        self._most = most
        self._longest = longest
        self._seen: set[Hashable] = set()
        self._first = self._last = 0.0
        self.gap = 0.0
        """The largest between two happenings of the present event."""
        self._answered = False  # a round was formed since the event began
        self._open_since: float | None = None  # the first happening that no round has answered
        self._exhausted = False

    def seen(self, what: Hashable, now: float) -> None:
        """It happened. The same thing again says nothing about how far the event spreads."""
        if not self._seen or now - self._last > self._window:
            self._seen = {what}
            self._first = self._last = now
            self.gap = 0.0
            self._answered = self._exhausted = False
            self._open_since = now
        elif what not in self._seen:
            self._seen.add(what)
            self.gap = max(self.gap, now - self._last)
            self._last = now
            if self._open_since is None:
                self._open_since = now

    def answered(self, now: float, *, wholly: bool = True) -> None:
        """A round was formed of those who are there. `wholly`: for all that was seen so far."""
        if self._open_since is not None:
            self._exhausted = self._exhausted or now >= self._open_since + self._longest
            self._answered = True
            self._open_since = None if wholly else now

    def holds(self, most: float | None = None) -> float | None:
        """Until when the answer to what was seen last should wait; None: it need not. `most`:
        where less than its bound is to be waited in silence."""
        gaps = len(self._seen) - 1
        if not self._answered or self._open_since is None or self._exhausted or gaps < 1:
            return None
        quiet = (self._last - self._first) * (math.pow(DOUBT, -1.0 / gaps) - 1.0)
        quiet = max(quiet, 2.0 * self.gap, self._least)
        quiet = min(quiet, self._most if most is None else most)
        return min(self._last + quiet, self._open_since + self._longest)
