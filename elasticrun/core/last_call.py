"""Last call: how long to wait for nodes that nobody has announced."""

from __future__ import annotations

import math

from elasticrun.config import LAST_CALL_CAP_FACTOR, LAST_CALL_QUIET


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
