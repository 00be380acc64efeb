"""Where the time of every slot went: slot-seconds by category and cause, which add up."""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.sight.picture import Goodput
from elasticrun.wire import messages as m


class SlotLedger:
    """A slot is one rank's place on a node, from the agent's hello to its leave."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx

    def heard(self, node: str, report: m.Quiet | m.Steps) -> None:
        """What tells that ranks train."""

    def settle(self) -> None:
        """After every event that was decided on: book what has passed."""

    def page(self) -> Goodput | None:
        """None before the first round."""
        return None
