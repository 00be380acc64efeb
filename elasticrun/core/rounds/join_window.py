"""How long to wait for nodes before a round forms or is given up for another.

*Last call*, before the first round, waits for nodes that nobody has announced: see `rendezvous`.

A *debounce* is for things that befall nodes one after another and may be one event: a switch fails
and its nodes are lost over a minute; a rack gets its power back and they return over two. A round
for each of them would cost every node of the job a restart each time. The first answer is never
held back: one lost node is mostly one lost node, and whatever happens until that round has formed
is in it. Only when the next thing happens to another node, within STORM_WINDOW of the one before
and after a round was already given for it, is it one event, and then the job waits until nothing
more has come for a fixed time, once. So an event costs two rounds. One that does not end is
answered after STORM_LONGEST all the same, and then no more held back.

The *door*: when newcomers are let into a round that runs; a restart for all against a wait for
some.

* A round younger than GROW_YOUNG (one that is adopted counts from then) has little to lose: a
  newcomer is let in when no other has appeared for LAST_CALL_QUIET (or twice the largest gap
  between newcomers). Last call counts from the moment an agent appears, since its join comes only
  when its torch is imported, and waits for those who have appeared and not joined; but one that
  comes and goes counts when it joins. It is spent before ranks are stopped, not after.
* While the job is still *being started* newcomers are let in together, when a debounce takes the
  start for over: one larger round, and not one for each of eight nodes that start over forty
  seconds. It is, in its first round, if the nodes of that round came apart, or if with the first
  newcomer not more are there than missing and more than two are missing. (That one newcomer is
  alone cannot be known; this is what tells a job of 2:8 with three nodes from one of 1:4 with two.)
* In a large job the same holds for nodes that come back one after another: the first is let in at
  once, the others together.
* An older round lets them in when `grow_cooldown` is over since it began; with `grow == "now"` the
  age of the round does not count, nor whether the job is being started.
* Once an operator has changed the size of the job, the age of the round does not count either.
* When `max` is reached there is nobody to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from elasticrun.config import (
    GROW_YOUNG,
    LAST_CALL_CAP_FACTOR,
    LAST_CALL_QUIET,
    STORM_LONGEST,
    STORM_NODES,
    STORM_QUIET,
    STORM_WINDOW,
)
from elasticrun.core.reasons import AtDoor
from elasticrun.wire.messages import JobSpec


class LastCall:
    """It ends when nodes have stopped coming; the rules are in the head of `rendezvous`.

    A silence begins when a node has come (its Hello), not when it has imported torch and can start;
    but half of LAST_CALL_QUIET passes after that too, for those who were a moment slower."""

    def __init__(self, timeout: float, horizon: float = math.inf) -> None:
        """`timeout`: see there. A node that comes more than `horizon` seconds after the
        one before begins a new series: the gap between series says nothing."""
        self._timeout = timeout
        self._horizon = horizon
        self._last: float | None = None
        self._gap = 0.0
        self._ready = -math.inf
        self.began: float | None = None

    def arrival(self, now: float) -> None:
        """A node has come: its Hello counts, not how long it then imports torch before it joins."""
        gap = 0.0 if self._last is None else now - self._last
        self._gap = max(self._gap, gap) if gap <= self._horizon else 0.0
        self._last = now

    def ready(self, now: float) -> None:
        """A node that had come before can start."""
        self._ready = now

    def begin(self, now: float) -> None:
        """There are nodes enough; without effect if it has begun."""
        if self.began is None:
            self.began = now

    def cancel(self) -> None:
        """There are not enough any more."""
        self.began = None

    def ends(self, *, announced: bool) -> float:
        """When it ends if nobody else joins. `announced`: nodes are known to be on their way."""
        assert self.began is not None
        quiet = max(LAST_CALL_QUIET, 2.0 * self._gap)
        if announced:
            quiet = self._timeout
        last = self.began if self._last is None else self._last
        settled = self._ready + min(LAST_CALL_QUIET / 2.0, self._timeout)
        return min(
            max(self.began, last + min(quiet, self._timeout), settled),
            self.began + LAST_CALL_CAP_FACTOR * self._timeout,
        )


class Debounce:
    """One series of happenings; times are monotonic seconds."""

    def __init__(self, quiet: float) -> None:
        """`quiet`: seconds of silence that end a series."""
        self._quiet = quiet
        self._seen: set[Hashable] = set()
        self._last = -math.inf
        self.gap = 0.0
        """The largest between two happenings of the present series."""
        self._answered = False  # a round was formed since the series began
        self._open = False  # something has happened that no round has answered
        self._held_since = math.inf  # when something first happened after an answer

    def seen(self, what: Hashable, now: float) -> None:
        """It happened. The same thing again says nothing about how far the event spreads."""
        if now - self._last > STORM_WINDOW:
            self._seen.clear()
            self.gap, self._answered, self._held_since = 0.0, False, math.inf
        elif what in self._seen:
            return
        else:
            self.gap = max(self.gap, now - self._last)
        self._seen.add(what)
        self._last, self._open = now, True
        if self._answered:
            self._held_since = min(self._held_since, now)

    def answered(self, now: float, *, wholly: bool = True) -> None:
        """A round was formed of those who are there. `wholly`: for all that was seen so far."""
        if self._open:
            self._answered, self._open = True, not wholly
            if self._open:
                self._held_since = min(self._held_since, now)

    def holds(self) -> float | None:
        """Until when the answer to what was seen last waits; None, or long past: it need not."""
        if not (self._answered and self._open) or len(self._seen) < 2:
            return None
        return min(self._last + self._quiet, self._held_since + STORM_LONGEST)


SERIES = 20.0
"""Newcomers further apart than these seconds are no series: the next one is let in as if it were
the first, since nobody says that more will come."""


class Door:
    """Where newcomers wait. Times are monotonic seconds."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        # the series goes on over the rounds that newcomers cause: nodes that come back one after
        # another are let in together, and not each by a round of its own
        self._call = LastCall(spec.last_call_timeout, horizon=SERIES)
        # twice: unlike last call it costs those who are there nothing, since they train
        self._starts = Debounce(
            2.0 * spec.last_call_timeout
        )  # of nodes, up to the job's second round
        self._returns = Debounce(STORM_QUIET)  # and after the first
        self._appeared = 0
        self._running = False  # a round was formed
        self._starting = False  # it is the job's first
        self._apart = False  # and its nodes come one after another
        self._formed_at = 0.0
        self._fickle: dict[str, None] = {}  # came and went again since the round was formed
        self._opened: float | None = None  # when the first of those who wait now had joined
        self._scaled = False  # since the round was formed an operator has asked for more, or less

    def appeared(self, node: str, now: float) -> None:
        """An agent that has no place in the round is there; it may have to make its store ready."""
        self._starts.seen(node, now)
        if self._running:
            self._call.arrival(now)
            self._appeared += 1
            self._returns.seen(self._appeared, now)

    def joined(self, node: str, now: float) -> None:
        """A node waits at the door of a round that runs."""
        if self._opened is None:
            self._opened = now
        if node in self._fickle:
            self._call.arrival(now)

    def scaled(self) -> None:
        """An operator has said how many nodes there are to be: whoever comes is wanted now."""
        self._scaled = True

    def went(self, node: str) -> None:
        """It went again before it was let in: the next time its joining counts, not its coming."""
        self._fickle[node] = None

    def formed(self, now: float, *, announced: bool = False) -> None:
        """A round was formed, or taken over from another master. `announced`: as in `entry`."""
        self._running = True
        self._starting = self._scaled = False
        self._starts.answered(now, wholly=not announced)
        self._returns.answered(now, wholly=not announced)
        self._call.cancel()
        self._formed_at = now
        self._fickle.clear()
        self._opened = None

    def job_began(self) -> None:
        """The round that was just formed is the job's first."""
        self._starting = True
        self._apart = self._starts.gap > 2.0 * LAST_CALL_QUIET

    def entry(
        self, size: int, possible: int, largest: int, announced: bool
    ) -> tuple[float, AtDoor]:
        """When those at the door are let in if nothing else happens, and why not now. `size`:
        members of the round, `possible`: how many it could have with them, `largest`: at most.
        `announced`: others have appeared and not joined yet."""
        opened = self._formed_at if self._opened is None else self._opened
        self._call.begin(opened)
        due, reason = opened, AtDoor("no_more")
        if possible < largest:
            due = self._call.ends(announced=announced)
            held = self._held(size, possible, largest)
            if held is not None and held[0] > due:
                due, reason = held
        old = opened - self._formed_at >= GROW_YOUNG and not self._scaled
        if self._spec.grow != "now" and old:
            due = max(due, self._formed_at + self._spec.grow_cooldown)
            reason = AtDoor("cooldown", self._spec.grow_cooldown)
        return due, reason

    def _held(self, size: int, possible: int, largest: int) -> tuple[float, AtDoor] | None:
        missing = largest - possible
        starting = self._starting and self._spec.grow != "now"
        if starting and missing > 2 and possible <= missing:
            self._apart = True
        if starting and self._apart:
            due = self._starts.holds()
            reason = AtDoor("start")
        elif size >= STORM_NODES:
            due = self._returns.holds()
            reason = AtDoor("returns")
        else:
            return None
        return None if due is None else (due, reason)
