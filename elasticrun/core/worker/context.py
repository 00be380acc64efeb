"""What the components of a worker group share."""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.core import events as fx
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.reasons import Reason
from elasticrun.core.worker.ranks import LocalRanks, StoreSlot
from elasticrun.core.worker.states import State
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName


class GroupContext:
    """The shared state of one node's ranks. Components append their effects to `out`, in order."""

    def __init__(self, nproc: int, host: str) -> None:
        """`host` names this node in the failures created here."""
        self.state = State.PREPARING
        self.reason: Reason | None = None  # why this node waits
        self.start: m.Start | None = None  # the last place that this node received
        self.outcome: fx.Exit | None = None  # how the agent will exit, once known
        self.ranks = LocalRanks(nproc, host)
        self.stores = StoreSlot()
        self.deadlines: Deadlines[str] = Deadlines()
        self.out: list[fx.AgentEffect] = []

    def is_current_round(self, round_: RoundName) -> bool:
        """Whether this is the latest round in which this node received a place."""
        return self.start is not None and round_ == self.start.round

    def failures(self) -> tuple[m.Failure, ...]:
        """Failures of the local ranks, in the order in which they were recorded."""
        return tuple(self.ranks.failures.values())

    def failed(self, local_rank: int, failure: m.Failure) -> None:
        """Record a rank's failure, and report all failures to the master."""
        self.ranks.failures[local_rank] = failure
        self.report_failures()

    def send(self, report: m.Report) -> None:
        self.out.append(fx.Say(report))

    def report(self, kind: Callable[..., m.Report], *values: object) -> None:
        """Send a report about the last round in which this node had a place, if there was one."""
        if self.start is not None:
            self.send(kind(self.start.round, *values))

    def report_failures(self) -> None:
        if self.ranks.failures:
            self.report(m.RanksFailed, self.failures()[: m.MAX_FAILURES])

    def note(self, line: str, level: str = "info", why: Reason | None = None) -> None:
        """Log a line for the operator. `why`: a reason that names an unreachable peer."""
        self.out.append(fx.Note(line, level, why=why))

    def signal(self, signum: int) -> None:
        if targets := self.ranks.record_signal(signum):
            self.out.append(fx.SignalRanks(targets, signum))
