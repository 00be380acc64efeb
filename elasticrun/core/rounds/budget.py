"""What the failures of a round cost, and whether they end the job.

One restart budget for the whole job, kept by the master (torchrun keeps one per agent and they
diverge). A round's failure window is open from its first failure until the next round forms.
Meanwhile `judge` says whether the job is at its end, or what the next round has to wait for;
`settle` writes the bill when it forms, so a round is charged once at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elasticrun.config import RESTART_HEALTHY_AFTER
from elasticrun.core.rounds.attribution import Blame, Cause
from elasticrun.core.rounds.failures import (
    Bill,
    Ending,
    Verdict,
    Window,
    code_of,
    is_the_scripts,
    root_cause,
)
from elasticrun.wire.messages import JobSpec

LEAST_DOUBT = 1.0
"""Seconds for which failures that all look like peer loss wait for news of a death, at least."""

MAX_AGES = 1024
"""Charges that are recorded one by one: a job that may restart more often than this in one window
is forgiven the older ones when its master dies."""


class Budget:
    """Counts charges. The first restart is immediate; one after a short life waits 1, 2, 4 ...
    seconds, so that an outage of storage does not eat the budget in milliseconds."""

    def __init__(
        self,
        *,
        max_restarts: int,
        window: float,
        backoff: float,
        healthy_after: float = RESTART_HEALTHY_AFTER,
    ) -> None:
        """`window`: seconds for which a charge counts against `max_restarts` (0: for ever).
        `backoff`: longest wait in seconds (0: never wait)."""
        self._max = max_restarts
        self._window = window
        self._backoff = backoff
        self._healthy_after = healthy_after
        self._charges: deque[float] = deque()
        self._adopted = 0
        self.short_lives = 0
        """How many rounds in a row died soon after they began."""
        self.count = 0
        """Restarts charged since the job began: TORCHELASTIC_RESTART_COUNT."""

    def adopt(self, count: int) -> None:
        """Take over the count that the ranks of an adopted round were started with."""
        if count > self.count:
            self._adopted += count - self.count
            self.count = count

    def restore(self, count: int, ages: Iterable[float], short_lives: int, now: float) -> None:
        """What the record of the master before this one says; `ages` as `ages` gave them."""
        self.count = count
        self.short_lives = short_lives
        if self._window > 0:
            self._charges = deque(now - age for age in ages)
        else:
            self._adopted = count

    def ages(self, now: float) -> tuple[float, ...]:
        """For the record: how old the charges are that lie in the window, oldest first, the newest
        MAX_AGES of them; none where every charge counts for ever."""
        if self._window <= 0:
            return ()
        self.left(now)
        return tuple(now - when for when in self._charges)[-MAX_AGES:]

    def left(self, now: float) -> int:
        """Restarts that may still be charged."""
        while self._window > 0 and self._charges and self._charges[0] <= now - self._window:
            self._charges.popleft()
        spent = len(self._charges) + (self._adopted if self._window == 0 else 0)
        return max(0, self._max - spent)

    def delay(self, life: float) -> float:
        """Seconds that a restart waits after a life of `life` seconds, before it is charged."""
        if self._backoff <= 0 or life >= self._healthy_after or self.short_lives == 0:
            return 0.0
        return float(min(self._backoff, 2.0 ** min(self.short_lives - 1, 30)))

    def charge(self, now: float, life: float) -> None:
        """Spend one restart for a round that lived `life` seconds."""
        if life >= self._healthy_after:
            self.short_lives = 0
        self.short_lives += 1
        self._charges.append(now)
        self.count += 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """Either the job ends (`end`, with `code`), or the next round waits `until` because of
    `reason`."""

    end: str = ""
    code: int = code_of(Ending.RANK)
    reason: str = ""
    until: float = 0.0


class Settlement:
    """The failures of the present round and the budget of the job."""

    def __init__(self, spec: JobSpec) -> None:
        self._doubt = max(LEAST_DOUBT, spec.heartbeat_timeout)
        self._scheduler_codes = spec.scheduler_codes
        self.budget = Budget(
            max_restarts=spec.max_restarts,
            window=spec.restart_window,
            backoff=spec.restart_backoff,
        )
        self.window = Window(self._doubt)
        self.blame = Blame()
        self._nodes = 0

    def new_round(self, *, adopted: bool = False, nodes: int = 0) -> None:
        """A round begins, or one of another master is taken over. `nodes`: how many, if known."""
        self._nodes = nodes
        self.window = Window(self._doubt, adopted=adopted, alone=nodes == 1)

    def cause(self) -> Cause | None:
        """What the present round ended by, if it was a failure of its own."""
        found = None if self.window.excused else self.window.cause
        if found is None:
            return None
        node, failure = found
        others = self.window.others_failed(node)
        first_rank = failure.rank - failure.local_rank
        at = self.window.opened_at or 0.0
        return Cause(node, failure.rank, first_rank, others, self.window.story, at)

    def verdict(self, membership: str, now: float) -> Verdict:
        """What it costs as things stand; `membership` says which member has gone or may have."""
        return self.window.verdict(membership=membership, restarts_left=self.budget.left(now))

    def ended_by(self, now: float) -> str:
        """What the present round ended by, if ranks failed; empty if none did."""
        return "" if self.window.opened_at is None else self.verdict("", now).reason

    def judge(self, membership: str, formed_at: float, now: float) -> Judgement | None:
        """Whether failures end the job or hold the next round back. `formed_at`: when the round
        that failed began."""
        opened = self.window.opened_at
        if opened is None:
            return None
        verdict = self.verdict(membership, now)
        if verdict.bill is Bill.FINAL:
            return Judgement(end=verdict.reason, code=code_of(Ending.FINAL))
        late = verdict.until is not None and now >= verdict.until
        if verdict.bill is Bill.HOPELESS or (verdict.bill is Bill.DOUBT and late):
            cause = self.cause()
            story = self.blame.in_words(cause, self._nodes) if cause else ""
            end = f"{verdict.reason}; no restart is left" + (f"; {story}" if story else "")
            root = root_cause(self.window.failures)
            own = self._scheduler_codes and root is not None and is_the_scripts(root)
            return Judgement(end=end, code=code_of(Ending.SPENT if own else Ending.RANK))
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
        cause = self.cause()
        if cause is not None:
            self.blame.settled(cause)
        self.budget.charge(now, opened - formed_at)
        return f"restart {self.budget.count}: {verdict.reason}; {self.budget.left(now)} left"
