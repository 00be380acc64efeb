"""When newcomers are let into a round that runs: a restart for all, against a wait for some.

* A round younger than GROW_YOUNG (one that is adopted counts from then) has little to lose: a
  newcomer is let in when no other has appeared for LAST_CALL_QUIET (or twice the largest gap
  between newcomers). Last call counts from the moment an agent appears, since its join comes only
  when its torch is imported, and waits for those who have appeared and not joined; but one that
  comes and goes counts when it joins. It is spent before ranks are stopped, not after.
* While the job is still *being started* newcomers are let in together, when `burst` takes the start
  for over: one larger round, and not one for each of eight nodes that start over forty seconds. It
  is, in its first round, if the nodes of that round came apart, or if with the first newcomer not
  more are there than missing and more than two are missing. (That one newcomer is alone cannot be
  known; this is what tells a job of 2:8 with three nodes from one of 1:4 with two.)
* In a large job the same holds for nodes that come back one after another: the first is let in at
  once, the others together.
* An older round lets them in when `grow_cooldown` is over since it began; with `grow == "now"` the
  age of the round does not count, nor whether the job is being started.
* When `max` is reached there is nobody to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.config import (
    GROW_YOUNG,
    LAST_CALL_QUIET,
    STORM_LONGEST,
    STORM_NODES,
    STORM_QUIET,
    STORM_WINDOW,
)
from elasticrun.core.burst import Burst
from elasticrun.core.last_call import LastCall
from elasticrun.wire.messages import JobSpec

SERIES = 20.0
"""Newcomers further apart than these seconds are no series: the next one is let in as if it were
the first, since nobody says that more will come."""


@dataclass(frozen=True, slots=True)
class Entry:
    """When those at the door are let in if nothing else happens, and why not now."""

    due: float
    reason: str


class Door:
    """Where newcomers wait. Times are monotonic seconds."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        # the series goes on over the rounds that newcomers cause: nodes that come back one after
        # another are let in together, and not each by a round of its own
        self._call = LastCall(spec.last_call_timeout, horizon=SERIES)
        self._starts = self._burst()  # of nodes, up to the job's second round
        self._returns = self._burst()  # and after the first
        self._appeared = 0
        self._running = False  # a round was formed
        self._starting = False  # it is the job's first
        self._apart = False  # and its nodes come one after another
        self._formed_at = 0.0
        self._fickle: dict[str, None] = {}  # came and went again since the round was formed
        self._opened: float | None = None  # when the first of those who wait now had joined

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

    def went(self, node: str) -> None:
        """It went again before it was let in: the next time its joining counts, not its coming."""
        self._fickle[node] = None

    def formed(self, now: float, *, announced: bool = False) -> None:
        """A round was formed, or taken over from another master. `announced`: as in `entry`."""
        self._running = True
        self._starting = False
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

    def entry(self, size: int, possible: int, largest: int, announced: bool) -> Entry:
        """What those at the door are to be told. `size`: members of the round, `possible`: how many
        it could have with them, `largest`: at most. `announced`: others have appeared and not
        joined yet."""
        opened = self._formed_at if self._opened is None else self._opened
        self._call.begin(opened)
        due, reason = opened, "at the door: let in when no more nodes come"
        if possible < largest:
            due = self._call.ends(announced=announced)
            held = self._held(size, possible, largest)
            if held is not None and held.due > due:
                due, reason = held.due, held.reason
        if self._spec.grow != "now" and opened - self._formed_at >= GROW_YOUNG:
            due = max(due, self._formed_at + self._spec.grow_cooldown)
            reason = (
                f"at the door: let in {self._spec.grow_cooldown:g} s after the round began "
                "(--grow=now: at once), or when a node is lost"
            )
        return Entry(due, reason)

    def _held(self, size: int, possible: int, largest: int) -> Entry | None:
        missing = largest - possible
        if self._starting and self._spec.grow != "now" and missing > 2 and possible <= missing:
            self._apart = True
        if self._starting and self._spec.grow != "now" and self._apart:
            # twice: unlike last call it costs those who are there nothing, since they train
            due = self._starts.holds(most=2.0 * self._spec.last_call_timeout)
            reason = "at the door: the job is being started; let in together when no more come"
            return None if due is None else Entry(due, reason)
        if size >= STORM_NODES:
            due = self._returns.holds()
            reason = "at the door: nodes come one after another; let in together when no more come"
            return None if due is None else Entry(due, reason)
        return None

    @staticmethod
    def _burst() -> Burst:
        return Burst(
            window=STORM_WINDOW, least=LAST_CALL_QUIET, most=STORM_QUIET, longest=STORM_LONGEST
        )
