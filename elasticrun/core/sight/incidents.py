"""What stopped training, one record each: cause, decision, phases of the way back, cost."""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.wire import messages as m


class Incidents:
    """One is open at most: from what ended a round until training goes on, or the job ends."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx

    def heard(self, node: str, report: m.Quiet | m.LastLines | m.Stacks) -> None:
        """What belongs to the open one."""

    def round_over(self, reason: str) -> None:
        """The round is closed for this reason."""

    def round_begins(self) -> None:
        """The next one is formed."""

    def settle(self) -> None:
        """After every event that was decided on."""

    def page(self) -> tuple[IncidentRow, ...]:
        """The newest last."""
        return ()
