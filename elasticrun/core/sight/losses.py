"""Which ranks first had a loss that is NaN or infinite, in each round.

Each rank reports its own first such step once. The reports arrive in any order, so the result is
settled a moment after the first one, or when the round ends.
"""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.reasons import LossNotFinite, text
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName, write_ranges

SETTLE = 2.0
"""Seconds from the first report until the ranks with the first such step are named."""


class Losses:
    """Collects the reports of a round."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self.until: float | None = None
        """When `settle` is due; None if it is not."""
        self._round: RoundName | None = None
        self._is_named = False
        self._step = -1  # the first step with such a loss
        self._ranks: dict[int, str] = {}  # with a loss like that at that step, and the loss

    def on_report(self, report: m.NotFinite) -> bool:
        """Process a report. Return whether it may change a decision."""
        round_ = self._ctx.round
        if round_ is None or report.round != round_.name:
            return False
        if report.round != self._round:
            self._round, self._is_named, self._ranks = report.round, False, {}
        if self._is_named:
            return False
        if not self._ranks or report.step < self._step:
            self._step, self._ranks = report.step, {}
        if report.step == self._step:
            self._ranks[report.rank] = report.value
        if self.until is None:
            self.until = self._ctx.now + SETTLE
        return True

    def settle(self) -> LossNotFinite | None:
        """Name the ranks now; None if they were named before, or there are none."""
        self.until = None
        if self._is_named or not self._ranks:
            return None
        self._is_named = True
        ranks = write_ranges(self._ranks, pairs=True)
        reason = LossNotFinite(self._step, ranks, next(iter(self._ranks.values())))
        self._ctx.note(text(reason), "warning")
        return reason
