"""What the failures of a round cost, and whether they end the job.

The whole job has one restart budget, kept by the master (torchrun has one per agent, and they
diverge). A round's failure window is open from its first failure until the next round forms.
Meanwhile `judge` returns whether the job ends, or what the next round must wait for. `settle`
charges the cost when the next round forms, so a round is charged at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elasticrun.config import RESTART_HEALTHY_AFTER
from elasticrun.core.persisted import RestartFacts
from elasticrun.core.reasons import (
    FailedElsewhere,
    NoRestartsLeft,
    PeerLost,
    RankFailed,
    Reason,
    RestartDelayed,
    SaidFinal,
    no_restarts_left,
    read,
    recorded,
    text,
)
from elasticrun.core.rounds.attribution import Attribution, Cause
from elasticrun.core.rounds.failures import (
    ECHOES,
    Ending,
    also_ended,
    cause_first,
    code_of,
    is_script_fault,
    is_self_inflicted,
    reason_of,
    root_cause,
)
from elasticrun.wire.messages import Failure, FailureKind, JobSpec

MIN_DOUBT = 1.0
"""Minimum seconds to wait for the report of a node loss when all failures look like peer loss."""

MAX_RANKS_REMEMBERED = 1024
"""Maximum number of failures of one round that are kept; further echoes add no information."""

MAX_AGES = 1024
"""Maximum number of charges that are recorded one by one. A job that may restart more often within
one window loses the older charges when its master dies."""


class Cost(StrEnum):
    """What the failures of a round cost."""

    NOTHING = "nothing"
    CHARGE = "charge"  # one restart
    DOUBT = "doubt"  # all look like peer loss, and the peer's loss is not known yet
    HOPELESS = "hopeless"  # a cause, and no restart left
    FINAL = "final"  # the script said that a retry cannot help


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the failures of a round cost as far as known. `until`: when a DOUBT becomes HOPELESS."""

    cost: Cost
    reason: Reason | None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """A failure and the node that reported it."""

    node: str
    failure: Failure
    by_itself: bool  # not an echo, not being stopped, and the node is not innocent
    innocent: bool  # its node is not to blame


class Window:
    """The failures of one round, from the first report until the next round forms.

    Survivors are stopped when it opens. The cost is settled when the next round forms, because only
    then is it known whether a node was lost.
    """

    def __init__(self, doubt: float, *, adopted: bool = False, alone: bool = False) -> None:
        """`doubt`: seconds to wait for the report of a node loss when all failures look like peer
        loss and no restart is left. `adopted`: another master formed the round; only that master
        may know why a peer was lost. `alone`: the round has one node, which messages need
        not name."""
        self._alone = alone
        self._doubt = doubt
        self._adopted = adopted
        self.excused: Reason | None = None
        """Why failures from now on cost nothing; None if they may cost."""
        self._reports: dict[int, _Report] = {}  # by rank
        self._first: _Report | None = None  # the root cause at present, even if it is only an echo
        self.cause: Cause | None = None
        """The root cause at present; None if it is only an echo or costs nothing."""
        self._final: RankFailed | None = None  # the first failure that no retry can fix
        self.reason: RankFailed | None = None
        """The cause at present, as a reason, even if it is only an echo; None before any
        failure."""
        self.opened_at: float | None = None
        self._ended: dict[int, str] = {}  # ranks that exited with 0 unstopped -> node

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures, root cause first; at most MAX_FAILURES."""
        found = cause_first([one.failure for one in self._reports.values()])
        if not self._ended or self._first is None:
            return found
        return (self._with_ended_ranks(self._first), *found[1:])

    def excuse(self, reason: Reason | None) -> None:
        """The round is ending for another reason: failures from now on are echoes. No-op after the
        first failure."""
        if not self._reports and not self.excused:
            self.excused = reason

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: a report of a node loss may be that late."""
        if self.opened_at is not None:
            self._doubt += by

    @property
    def failed_by_itself(self) -> bool:
        """Whether ranks ended the round by themselves, without an outside cause."""
        failures = [one.failure for one in self._reports.values()]
        causes = [one for one in failures if one.kind not in ECHOES]
        return bool(causes) and not self.excused and all(map(is_self_inflicted, causes))

    def add(
        self,
        node: str,
        failures: Iterable[Failure],
        now: float,
        *,
        stopped: bool = False,
        innocent: bool = False,
    ) -> bool:
        """Add what `node` reported; return whether any of it was new. `stopped`: its ranks were
        being stopped, so the way they ended proves nothing. `innocent`: the node is not to
        blame."""
        before = len(self._reports)
        for failure in failures:
            if failure.kind is FailureKind.FINAL:
                self._final = self._final or self._reason_of(node, failure)
            known = [] if self._first is None else [self._first.failure]
            is_cause = root_cause([*known, failure]) is failure
            full = len(self._reports) >= MAX_RANKS_REMEMBERED and not is_cause
            if full or failure.rank in self._reports:
                continue
            by_itself = not (stopped or innocent) and failure.kind not in ECHOES
            report = _Report(node, failure, by_itself, innocent)
            self._reports[failure.rank] = report
            if is_cause:
                whole = self._with_ended_ranks(report) if self._ended else failure
                self._first, self.reason = report, self._reason_of(node, whole)
        if len(self._reports) == before:
            return False
        self.opened_at = now if self.opened_at is None else self.opened_at
        self.cause = self._find_cause(self.opened_at)
        return True

    def ended(self, node: str, ranks: Iterable[int]) -> None:
        """Note that ranks of this node exited with 0 before they were stopped. That explains why
        ranks of other nodes lose their connection to them."""
        self._ended.update(dict.fromkeys(ranks, node))
        if self._first is not None:
            self.reason = self._reason_of(self._first.node, self._with_ended_ranks(self._first))

    def _with_ended_ranks(self, report: _Report) -> Failure:
        """The failure. A peer loss also names the ranks of other nodes that had exited with 0 (its
        own agent has named those of its node)."""
        if report.failure.kind is not FailureKind.PEER_LOST:
            return report.failure
        others = [rank for rank, node in self._ended.items() if node != report.node]
        return also_ended(report.failure, others) if others else report.failure

    def _find_cause(self, at: float) -> Cause | None:
        """The value of `cause`. O(failures), so do not call this for every event."""
        if self._first is None or self.excused or self._first.failure.kind in ECHOES:
            return None
        node, rank = self._first.node, self._first.failure.rank
        others = any(one.by_itself and one.node != node for one in self._reports.values())
        first_rank, innocent = rank - self._first.failure.local_rank, self._first.innocent
        return Cause(node, rank, first_rank, others, self.reason, at, innocent)

    def reported_by_another(self, node: str) -> bool:
        """Whether a node other than `node` reported failures in this round."""
        return any(one.node != node for one in self._reports.values())

    def verdict(self, *, membership: Reason | None, restarts_left: int) -> Verdict:
        """What the failures cost. `membership`: which member is lost or suspect, None if none."""
        if self._final is not None:
            return Verdict(Cost.FINAL, SaidFinal(self._final))
        if self._first is None or self.excused or membership:
            return Verdict(Cost.NOTHING, membership or self.excused)
        kind, reason = self._first.failure.kind, self.reason
        assert reason is not None
        if kind is FailureKind.STOPPED:
            return Verdict(Cost.NOTHING, reason)
        if kind is FailureKind.PEER_LOST and self._adopted:
            return Verdict(Cost.NOTHING, FailedElsewhere(reason))
        if restarts_left > 0:
            return Verdict(Cost.CHARGE, reason)
        if kind is FailureKind.PEER_LOST and self.opened_at is not None:
            return Verdict(Cost.DOUBT, reason, self.opened_at + self._doubt)
        return Verdict(Cost.HOPELESS, reason)

    def _reason_of(self, node: str, failure: Failure) -> RankFailed:
        return reason_of(failure, "" if self._alone else node)


class Budget:
    """Counts the charged restarts. The restart after one short round is immediate. After further
    short rounds it waits 1, 2, 4 ... seconds, so an outage of storage does not consume the budget
    in milliseconds."""

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
        self.short_rounds = 0
        """Number of consecutive rounds that failed soon after they began."""
        self.count = 0
        """Restarts charged since the job began: TORCHELASTIC_RESTART_COUNT."""

    def adopt(self, count: int) -> None:
        """Take over the count that the ranks of an adopted round were started with."""
        if count > self.count:
            self._adopted += count - self.count
            self.count = count

    def restore(self, facts: RestartFacts, at: float) -> None:
        """Restore what the previous master recorded at time `at`."""
        self.count = facts.count
        self.short_rounds = facts.short_lives
        if self._window > 0:
            self._charges = deque(at - age for age in facts.charges)
        else:
            self._adopted = facts.count

    def ages(self, now: float) -> tuple[float, ...]:
        """For the record: the ages of the charges within the window, oldest first; only the newest
        MAX_AGES. Empty without a window."""
        if self._window <= 0:
            return ()
        self.remaining(now)
        return tuple(now - when for when in self._charges)[-MAX_AGES:]

    def exhausted_clause(self) -> str:
        """The clause that says that the budget is spent."""
        return no_restarts_left(self._max, self._window)

    def exhausted_reason(self, first: RankFailed, pattern: str) -> NoRestartsLeft:
        """The reason for the job's end: the budget is spent at this failure."""
        return NoRestartsLeft(first, self._max, self._window, pattern)

    def remaining(self, now: float) -> int:
        """Number of restarts that may still be charged."""
        while self._window > 0 and self._charges and self._charges[0] <= now - self._window:
            self._charges.popleft()
        spent = len(self._charges) + (self._adopted if self._window == 0 else 0)
        return max(0, self._max - spent)

    def delay(self, uptime: float) -> float:
        """Seconds that a restart after a run of `uptime` seconds waits; call it before `charge`."""
        if self._backoff <= 0 or uptime >= self._healthy_after or self.short_rounds == 0:
            return 0.0
        return float(min(self._backoff, 2.0 ** min(self.short_rounds - 1, 30)))

    def charge(self, now: float, uptime: float) -> None:
        """Spend one restart for a round that ran for `uptime` seconds."""
        if uptime >= self._healthy_after:
            self.short_rounds = 0
        self.short_rounds += 1
        self._charges.append(now)
        self.count += 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """Either the job ends because of `end`, with exit code `code`, or the next round waits `until`
    because of `reason`."""

    end: Reason | None = None
    code: int = code_of(Ending.RANK)
    reason: Reason | None = None
    until: float = 0.0


class Restarts:
    """The failures of the current round and the budget of the job."""

    def __init__(self, spec: JobSpec) -> None:
        self._doubt = max(MIN_DOUBT, spec.heartbeat_timeout)
        self._scheduler_codes = spec.scheduler_codes
        self.budget = Budget(
            max_restarts=spec.max_restarts,
            window=spec.restart_window,
            backoff=spec.restart_backoff,
        )
        self.window = Window(self._doubt)
        self.attribution = Attribution()
        self._nodes = 0

    def facts(self, now: float) -> RestartFacts:
        """What the next master needs."""
        budget, excuse = self.budget, self.window.excused
        return RestartFacts(
            count=budget.count,
            charges=budget.ages(now),
            short_lives=budget.short_rounds,
            blamed=self.attribution.record(now),
            **recorded(excuse=excuse) if excuse is not None else {},
        )

    def restore(self, facts: RestartFacts, at: float) -> None:
        """Restore what another master recorded; call `new_round` first."""
        self.budget.restore(facts, at)
        self.attribution.restore(facts.blamed, at)
        self.window.excuse(read(facts.excuse, facts.excuse_code))

    def new_round(self, *, adopted: bool = False, nodes: int = 0) -> None:
        """A round begins, or another master's round is taken over. `nodes`: its number of nodes, if
        known."""
        self._nodes = nodes
        self.window = Window(self._doubt, adopted=adopted, alone=nodes == 1)

    def verdict(self, membership: Reason | None, now: float) -> Verdict:
        """The cost at present; `membership` says which member is lost or suspect."""
        return self.window.verdict(membership=membership, restarts_left=self.budget.remaining(now))

    def judge(self, membership: Reason | None, formed_at: float, now: float) -> Judgement | None:
        """Ranks have failed: return whether that ends the job or delays the next round; None if
        neither. `formed_at`: when the failed round began."""
        opened = self.window.opened_at
        assert opened is not None
        verdict = self.verdict(membership, now)
        if verdict.cost is Cost.FINAL:
            return Judgement(end=verdict.reason, code=code_of(Ending.FINAL))
        late = verdict.until is not None and now >= verdict.until
        if verdict.cost is Cost.HOPELESS or (verdict.cost is Cost.DOUBT and late):
            cause = self.window.cause
            pattern = self.attribution.in_words(cause, self._nodes) if cause else ""
            assert self.window.reason is not None
            end = self.budget.exhausted_reason(self.window.reason, pattern)
            root = root_cause(self.window.failures)
            own = self._scheduler_codes and root is not None and is_script_fault(root)
            return Judgement(end=end, code=code_of(Ending.SPENT if own else Ending.RANK))
        if verdict.cost is Cost.DOUBT and verdict.until is not None:
            return Judgement(reason=PeerLost(alone=self._nodes == 1), until=verdict.until)
        if verdict.cost is Cost.CHARGE:
            wait = self.budget.delay(opened - formed_at)
            if now < opened + wait:
                return Judgement(reason=RestartDelayed(wait), until=opened + wait)
        return None

    def settle(self, membership: Reason | None, formed_at: float, now: float) -> str:
        """The next round forms: charge the cost of the failed one. Return a line for the log."""
        opened = self.window.opened_at
        assert opened is not None
        verdict = self.verdict(membership, now)
        if verdict.cost is not Cost.CHARGE:
            return f"no restart is charged: {text(verdict.reason)}"
        cause = self.window.cause
        if cause is not None:
            self.attribution.add_cause(cause)
        self.budget.charge(now, opened - formed_at)
        return (
            f"restart {self.budget.count}: {text(verdict.reason)}; "
            f"{self.budget.remaining(now)} left"
        )
