"""How long to wait for more nodes before a round forms or is replaced by a larger one.

*Last call*, before the first round, waits for nodes that may or may not exist: see `rendezvous`.

A *debounce* handles events that reach nodes one after another: a switch fails and its nodes are
lost over a minute; a rack regains power and its nodes return over two. One round per node would
cost every node of the job a restart each time. The first response is never delayed, because one
lost node is usually just one lost node. That round covers everything that happens until it forms.
If another node is affected after that, but within STORM_WINDOW of the previous one, the debounce
treats all of this as one event, and the job waits, once, until nothing more has happened for a
fixed time. So an event costs two rounds. An event that does not end is answered after STORM_LONGEST
and not delayed again.

The *join window* decides when pending nodes may join a running round: it weighs a restart of all
nodes against a wait for some.

* A round younger than GROW_YOUNG (an adopted round counts from its adoption) has little to lose: a
  pending node is admitted when no other has appeared for LAST_CALL_QUIET (or twice the largest gap
  between new nodes). This last call counts from the moment an agent appears, because the agent
  joins only after its torch import; last call waits for agents that have appeared but not joined. A
  node that has left since the round formed counts from its join instead. The wait happens before
  ranks are stopped, not after.
* While the job is still *starting*, pending nodes are admitted together, once a debounce considers
  the start complete: one larger round instead of one for each of eight nodes that start over forty
  seconds. The job counts as starting during its first round, if the nodes of that round arrived far
  apart, or if, counting the pending nodes, at most half of `max` nodes are present and more than
  two are missing. (Nobody can know how many nodes will come; this rule distinguishes a job of 2:8
  with three nodes from one of 1:4 with two.)
* In a large job the same applies to nodes that return one after another: the first is admitted at
  once, the others together.
* An older round admits nodes once `grow_cooldown` has passed since it began. With `grow == "now"`
  neither the age of the round nor the start of the job counts.
* After an operator has changed the size of the job, the age of the round does not count either.
* If the pending nodes complete the `max` nodes, the debounce and last call do not apply.
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
from elasticrun.core.reasons import Pending
from elasticrun.wire.messages import JobSpec


class LastCall:
    """Ends when nodes stop arriving; the docstring of `rendezvous` has the rules.

    Quiet time counts from a node's arrival (its Hello), not from when it has imported torch and can
    start. Half of LAST_CALL_QUIET must also pass after a node can start, for nodes that are
    slightly slower.
    """

    def __init__(self, timeout: float, horizon: float = math.inf) -> None:
        """`timeout`: the longest silence. A node that arrives more than `horizon` seconds after the
        previous one begins a new series: the gap between series does not count."""
        self._timeout = timeout
        self._horizon = horizon
        self._last: float | None = None
        self._gap = 0.0
        self._ready = -math.inf
        self.started_at: float | None = None

    def arrival(self, now: float) -> None:
        """A node has arrived: it has sent Hello. The time it then takes to import torch does not
        count."""
        gap = 0.0 if self._last is None else now - self._last
        self._gap = max(self._gap, gap) if gap <= self._horizon else 0.0
        self._last = now

    def ready(self, now: float) -> None:
        """A node that arrived earlier can start."""
        self._ready = now

    def start(self, now: float) -> None:
        """Start last call, because there are enough nodes; no-op if it has started."""
        if self.started_at is None:
            self.started_at = now

    def cancel(self) -> None:
        """Stop last call: there are no longer enough nodes, or a round has formed."""
        self.started_at = None

    def ends(self, *, announced: bool) -> float:
        """When last call ends if no other node joins; call `start` first. `announced`: nodes are
        connected that have not joined."""
        assert self.started_at is not None
        quiet = max(LAST_CALL_QUIET, 2.0 * self._gap)
        if announced:
            quiet = self._timeout
        last = self.started_at if self._last is None else self._last
        settled = self._ready + min(LAST_CALL_QUIET / 2.0, self._timeout)
        return min(
            max(self.started_at, last + min(quiet, self._timeout), settled),
            self.started_at + LAST_CALL_CAP_FACTOR * self._timeout,
        )


class Debounce:
    """Delays the response to a series of events; times are monotonic seconds."""

    def __init__(self, quiet: float) -> None:
        """`quiet`: seconds without an event that end a series."""
        self._quiet = quiet
        self._seen: set[Hashable] = set()
        self._last = -math.inf
        self.gap = 0.0
        """The largest gap between two events of the current series."""
        self._answered = False  # a round has formed since the series began
        self._open = False  # an event has happened since the last round
        self._held_since = math.inf  # when the first event after a response happened

    def record(self, what: Hashable, now: float) -> None:
        """Record an event. A repetition is ignored: it does not show how far the event spreads."""
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
        """A round formed with the nodes that are present. `wholly`: it covers all events so far."""
        if self._open:
            self._answered, self._open = True, not wholly
            if self._open:
                self._held_since = min(self._held_since, now)

    def holds_until(self) -> float | None:
        """Until when the response to the latest event must wait; None or a past time: no wait."""
        if not (self._answered and self._open) or len(self._seen) < 2:
            return None
        return min(self._last + self._quiet, self._held_since + STORM_LONGEST)


SERIES = 20.0
"""New nodes further apart than this many seconds are not a series. The next one is admitted as if
it were the first, because nothing suggests that more will come."""


class JoinWindow:
    """Decides when pending nodes are admitted. Times are monotonic seconds."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        # the series continues across the rounds that new nodes cause, so nodes that return one
        # after another are admitted together and not by a round each
        self._call = LastCall(spec.last_call_timeout, horizon=SERIES)
        # starts of nodes, up to the job's second round. Twice the timeout, because unlike last call
        # this wait costs the present nodes nothing: they keep training
        self._starts = Debounce(2.0 * spec.last_call_timeout)
        self._returns = Debounce(STORM_QUIET)  # returns of nodes, after the first round
        self._appeared = 0  # number of the last of these events, which makes each one different
        self._running = False  # a round has formed
        self._starting = False  # the current round is the job's first
        self._is_spread_out = False  # the nodes of the first round have arrived far apart
        self._formed_at = 0.0
        self._flapping: dict[str, None] = {}  # appeared and left again since the round formed
        self._opened: float | None = None  # when the first of the pending nodes joined
        self._scaled = False  # an operator has scaled the job since the round formed

    def appeared(self, node: str, now: float) -> None:
        """An agent without a place in the round has attached; it may still have to prepare its
        store."""
        self._starts.record(node, now)
        if self._running:
            self._call.arrival(now)
            self._appeared += 1
            self._returns.record(self._appeared, now)

    def joined(self, node: str, now: float) -> None:
        """A node has joined and is pending, while a round runs."""
        if self._opened is None:
            self._opened = now
        if node in self._flapping:
            self._call.arrival(now)

    def scaled(self) -> None:
        """An operator has set the number of nodes: the age of the round no longer delays new
        nodes."""
        self._scaled = True

    def left(self, node: str) -> None:
        """The node left before it was admitted. If it returns, its join counts, not its arrival."""
        self._flapping[node] = None

    def formed(self, now: float, *, announced: bool = False) -> None:
        """A round has formed, or was taken over from another master. `announced`: as in
        `admission`."""
        self._running = True
        self._starting = self._scaled = False
        self._starts.answered(now, wholly=not announced)
        self._returns.answered(now, wholly=not announced)
        self._call.cancel()
        self._formed_at = now
        self._flapping.clear()
        self._opened = None

    def job_began(self) -> None:
        """The round that has just formed is the job's first."""
        self._starting = True
        self._is_spread_out = self._starts.gap > 2.0 * LAST_CALL_QUIET

    def admission(
        self, size: int, possible: int, largest: int, announced: bool
    ) -> tuple[float, Pending]:
        """When the pending nodes are admitted if nothing else happens, and why not now. `size`:
        members of the round. `possible`: its size with the pending nodes. `largest`: its maximum
        size. `announced`: other nodes have appeared but not joined yet."""
        opened = self._formed_at if self._opened is None else self._opened
        self._call.start(opened)
        due, reason = opened, Pending("no_more")
        if possible < largest:
            due = self._call.ends(announced=announced)
            held = self._debounced(size, possible, largest)
            if held is not None and held[0] > due:
                due, reason = held
        old = opened - self._formed_at >= GROW_YOUNG and not self._scaled
        if self._spec.grow != "now" and old:
            due = max(due, self._formed_at + self._spec.grow_cooldown)
            reason = Pending("cooldown", self._spec.grow_cooldown)
        return due, reason

    def _debounced(self, size: int, possible: int, largest: int) -> tuple[float, Pending] | None:
        missing = largest - possible
        starting = self._starting and self._spec.grow != "now"
        if starting and missing > 2 and possible <= missing:
            self._is_spread_out = True
        if starting and self._is_spread_out:
            due = self._starts.holds_until()
            reason = Pending("start")
        elif size >= STORM_NODES:
            due = self._returns.holds_until()
            reason = Pending("returns")
        else:
            return None
        return None if due is None else (due, reason)
