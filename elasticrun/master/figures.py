"""What the status shows and /metrics counts beside the brain's picture; it decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from elasticrun.wire.ids import RoundName
from elasticrun.wire.messages import Holdings, JobStatus, Probed, RanksFailed, Report, Steps


class Figures:
    """Failed ranks so far, how far training has come, and how old job and round are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._round: RoundName | None = None
        self._since = 0.0
        self._step, self._stepped = -1, 0.0
        self._stepped_in: RoundName | None = None
        self.began = clock()
        """When the job did, as far as is known here."""
        self._failed: set[int] = set()
        self._failed_in: RoundName | None = None
        self.failures = 0
        """Ranks that failed, each once per round, however often its node says so."""
        self.rounds = 0
        """Rounds this master has started."""
        self.nodes = 0
        """In the last of them."""
        self.probes = 0
        """Answers to probes, one a node and pass of the network check."""

    def started(self, name: RoundName, nodes: int = 0) -> None:
        """A Start of this round, which has so many nodes, goes out."""
        self.nodes = nodes
        if name != self._round:
            self._round, self._since = name, self._clock()
            self.rounds += 1

    def heard(self, report: Report) -> None:
        """A report reached the brain."""
        if isinstance(report, Probed):
            self.probes += 1
        elif isinstance(report, Steps):
            self._came_to(report.round, report.step)
        elif isinstance(report, Holdings):
            for held in report.held:
                self._came_to(held.round, held.step)
        if not isinstance(report, RanksFailed):
            return
        if report.round != self._failed_in:
            self._failed_in = report.round
            self._failed.clear()
        new = {failure.rank for failure in report.failures} - self._failed
        self._failed |= new
        self.failures += len(new)

    def _came_to(self, name: RoundName, step: int) -> None:
        """Ranks of this round have told of a step, or hold it; a later life may begin further
        back."""
        if self._round in (None, name) and (name != self._stepped_in or step > self._step):
            self._step, self._stepped, self._stepped_in = step, self._clock(), name

    def shown(self, picture: JobStatus) -> JobStatus:
        """The brain's picture, with the step and the ages of this moment."""
        now = self._clock()
        since = 0.0 if self._step < 0 else now - self._stepped
        return replace(
            picture,
            step=self._step,
            step_age=max(0.0, since),
            age=max(0.0, now - self.began),
        )

    def round_age(self) -> float | None:
        """Seconds since the newest round started; None before the first."""
        return None if self._round is None else self._clock() - self._since
