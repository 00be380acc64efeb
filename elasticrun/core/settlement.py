"""What the failures of a round cost, and whether they end the job: the window against the budget.

The window is open from the first failure of a round until the next round forms. Meanwhile `judge`
says whether the job is at its end, or what the next round has to wait for; `settle` writes the bill
when it forms, once per round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticrun.core.budget import Budget
from elasticrun.core.failures import Bill, Verdict, Window
from elasticrun.wire.messages import Failure, JobSpec

LEAST_DOUBT = 1.0
"""Seconds for which failures that all look like peer loss wait for news of a death, at least."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Either the job ends (`end`), or the next round waits `until` because of `reason`."""

    end: str = ""
    reason: str = ""
    until: float = 0.0


class Settlement:
    """The failures of the present round and the budget of the job."""

    def __init__(self, spec: JobSpec) -> None:
        self._doubt = max(LEAST_DOUBT, spec.heartbeat_timeout)
        self.budget = Budget(
            max_restarts=spec.max_restarts,
            window=spec.restart_window,
            backoff=spec.restart_backoff,
        )
        self.window = Window(self._doubt)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those of the present round, root cause first."""
        return self.window.failures

    def new_round(self, *, adopted: bool = False) -> None:
        """A round begins, or one of another master is taken over."""
        self.window = Window(self._doubt, adopted=adopted)

    def add(self, node: str, failures: Iterable[Failure], now: float) -> bool:
        """Note what `node` reported; whether any of it was new."""
        return self.window.add(node, failures, now)

    def verdict(self, membership: str, now: float) -> Verdict:
        """What it costs as things stand; `membership` says which member has gone or may have."""
        return self.window.verdict(membership=membership, restarts_left=self.budget.left(now))

    def judge(self, membership: str, formed_at: float, now: float) -> Judgement | None:
        """Whether failures end the job or hold the next round back. `formed_at`: when the round
        that failed began."""
        opened = self.window.opened_at
        if opened is None:
            return None
        verdict = self.verdict(membership, now)
        late = verdict.until is not None and now >= verdict.until
        if verdict.bill is Bill.HOPELESS or (verdict.bill is Bill.DOUBT and late):
            return Judgement(end=f"{verdict.reason}; no restart is left")
        if verdict.bill is Bill.DOUBT and verdict.until is not None:
            reason = "ranks have lost a peer: waiting for the news that its node is lost"
            return Judgement(reason=reason, until=verdict.until)
        if verdict.bill is Bill.CHARGE:
            wait = self.budget.delay(opened - formed_at)
            if now < opened + wait:
                reason = f"ranks die soon after they start: the next restart waits {wait:g} s"
                return Judgement(reason=reason, until=opened + wait)
        return None

    def settle(self, membership: str, formed_at: float, now: float) -> str:
        """The next round forms: charge what the last one cost. A line for the log, or empty."""
        opened = self.window.opened_at
        if opened is None:
            return ""
        verdict = self.verdict(membership, now)
        if verdict.bill is not Bill.CHARGE:
            return f"no restart is charged: {verdict.reason}"
        self.budget.charge(now, opened - formed_at)
        return f"restart {self.budget.count}: {verdict.reason}; {self.budget.left(now)} left"
