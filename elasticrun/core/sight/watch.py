"""When ranks are looked at, and what follows: the verdict on a job whose ranks stand still."""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.sight.picture import RankRow, StackRow, VerdictRow
from elasticrun.wire import messages as m


class Watch:
    """Quiet nodes, looks at them, and the verdict."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self.demand: tuple[str, m.Failure] | None = None
        """The round is to end for this failure of a node's rank; the job takes it from here."""

    def heard(self, node: str, report: m.Quiet | m.Inspected | m.Stacks) -> bool:
        """Whether it is news."""
        return False

    def pursue(self) -> None:
        """Request for looks that are due, and judge."""

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""
        return None

    def round_begins(self) -> None:
        """Nothing is known of its ranks."""

    def round_over(self) -> None:
        """Nobody is looked at until the next one begins."""

    def look(self, *, stacks: bool) -> int:
        """Request every node for a look that a person wants; its number. 0: no round runs."""
        return 0

    def looked(self, number: int) -> bool:
        """Whether all that can be had of this look is here."""
        return True

    def quiet(self) -> float:
        """Seconds since a counter or a step of any rank moved; 0.0 while they move."""
        return 0.0

    def verdict(self) -> VerdictRow | None:
        return None

    def ranks(self) -> tuple[float, tuple[RankRow, ...]]:
        """The age of the last look, -1.0 for none, and its ranks."""
        return -1.0, ()

    def stacks(self) -> tuple[tuple[StackRow, ...], str]:
        """Of the last look with stacks, the rarest first; and what is missing."""
        return (), ""
