"""What the master's brain knows, the picture it gives of it, its record, and how it speaks.

What it makes of it is in `saving` (snapshots), `checking` (the health of nodes), `attaching`
(streams) and `job` (reports and decisions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from elasticrun.config import GROW_YOUNG
from elasticrun.core import events as fx
from elasticrun.core.health.netcheck import NetCheck
from elasticrun.core.health.speed import Stragglers
from elasticrun.core.job.views import facts_of, load, nothing_yet, picture
from elasticrun.core.nodes.admission import Exclusions, Stays
from elasticrun.core.nodes.membership import Membership
from elasticrun.core.nodes.node import Roster
from elasticrun.core.persisted import Facts
from elasticrun.core.rounds.budget import Settlement
from elasticrun.core.rounds.rendezvous import Phase, Rendezvous
from elasticrun.core.rounds.round import Round
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.core.snapshots.types import Key
from elasticrun.core.words import some
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

RECORD_EVERY = 10.0
"""While the job waits for something, what remains of the wait is recorded so often (seconds), so
that a master which dies again and again neither waits for ever nor gives up at once."""


class JobBase:
    """The state of one job's master."""

    def __init__(
        self,
        spec: m.JobSpec | None,
        term: int,
        mint: Callable[[], str],
        facts: Facts | None = None,
    ) -> None:
        """`spec`: None takes that of the facts, or the first m.Hello's. `facts`: the newest that
        the master before this one recorded, None if there is no record. `term` must be higher than
        that of any master before which the facts do not know of; `mint` gives a nonce for every
        round."""
        self._term = term if facts is None else max(term, facts.term + 1)
        self._recorded_term = 0 if facts is None else facts.term
        self._mint = mint
        self._given_spec = spec if spec is not None or facts is None else facts.spec
        self._facts = facts
        self._spec: m.JobSpec | None = None
        self._now = 0.0
        self._number = 0
        self._round: Round | None = None
        self._outcome: m.End | None = None
        self._is_over_told = False
        self._reason = ""
        self._until: float | None = None
        self._ends: float | None = None  # when the wait of `_reason` is over at the latest
        self._all_left = False
        self._left_a_round = True  # a member, while it ran, or not for a signal; or nobody knows
        self._left_behind: Key | None = None  # the newest of all that nodes had as they left
        self._last_failure = ""
        self._hold_reason = ""
        self._recorded_at = 0.0
        self._stale = False  # a fact has changed that no order waits for
        self._roster = Roster()
        self._stays = Stays()
        self._exclusions = Exclusions()
        self._netcheck: NetCheck | None = None  # where the job has asked for it
        self._stragglers: Stragglers | None = None  # where a script reports its steps
        self._at_door: dict[str, None] = {}  # nodes that are probed at the door
        self._probe_orders: dict[str, m.Probe] = {}  # the last one of each node
        self._answered_at_door: list[str] = []  # of these, until it is known what it came to
        self._stirred = False  # something has happened to the check in this step
        self._unresolved: dict[str, str] = {}  # nobody can tell whether they are at fault, and why
        self._suspicions: dict[str, str] = {}  # nodes that are slow and stay, with the evidence
        self._examined: RoundName | None = None  # whose failure's node has been doubted
        self._watched: RoundName | None = None  # whose steps are compared
        self._is_checking = False  # a check was begun whose end was not told of
        self._is_perf_told = False
        self._newest_step = -1  # that ranks of the present round have told of
        self._bad_snapshot = ""  # why the present round cannot go on from its snapshot
        self._sentence: tuple[int, str] | None = None  # how the job ends: exit code and reason
        self._sentenced_at: float | None = None
        self._is_last_saved = False  # what that leaves is being written out, or was
        self._save_by = 0.0  # when that is given up
        self._unheard_for = 0.0  # seconds in which the master did not listen
        self._out: list[fx.JobEffect] = []
        self._membership: Membership
        self._rdzv: Rendezvous
        self._settlement: Settlement
        self._saves: Snapshots

    @property
    def term(self) -> int:
        """This master's: higher than that of every master in its record."""
        return self._term

    @property
    def spec(self) -> m.JobSpec:
        """What the job has agreed on; there is none before the first agent."""
        assert self._spec is not None
        return self._spec

    def next_deadline(self) -> float | None:
        """When `step(Tick(), now)` is due at the latest; 0.0 (long past) before the first step of a
        brain that was given facts."""
        if self._spec is None:
            return None if self._facts is None else 0.0
        if self._outcome is not None:
            return None
        deadlines = (
            self._membership.next_deadline(),
            self._until,
            self._record_due(),
            self._check_due(),
            self._saves.next_deadline(),
        )
        return min((when for when in deadlines if when is not None), default=None)

    def status(self) -> m.JobStatus:
        """The job as one page; O(nodes)."""
        if self._spec is None:
            return nothing_yet(self._given_spec)
        return picture(
            spec=self._spec,
            rdzv=self._rdzv,
            membership=self._membership,
            roster=self._roster,
            round_=self._round,
            budget=self._settlement.budget,
            now=self._now,
            reason=self._hold_reason or self._reason,
            ends=None if self._hold_reason else self._ends,
            last_failure=self._last_failure,
            outcome=self._outcome.reason if self._outcome else "",
            health=self._health,
            excluded=self._exclusions.page(self._now),
            check=self._netcheck.summary() if self._netcheck else "",
            snapshot=self._saves.status(),
        )

    def _health(self, node: str) -> str:
        parts = (
            self._suspicions.get(node, ""),
            self._netcheck.health(node) if self._netcheck else "",
            self._stragglers.health(node) if self._stragglers else "",
        )
        return "; ".join(part for part in parts if part)

    # ------------------------------------------------------------ beginning

    def _begin(self, spec: m.JobSpec, now: float) -> None:
        """The first agent is there, or the first step after a restart: the job goes on from what
        the record says. That this master reigns is its first fact, recorded before any order."""
        self._spec = spec
        self._membership = Membership(heartbeat_timeout=spec.heartbeat_timeout)
        self._rdzv = Rendezvous(spec, now)
        self._settlement = Settlement(spec)
        self._saves = Snapshots(spec.saves, self._mint, self._term)
        facts, self._facts = self._facts, None
        if facts is not None:
            self._number = facts.number
            self._outcome = facts.outcome
            self._round = load(
                facts,
                rdzv=self._rdzv,
                membership=self._membership,
                roster=self._roster,
                settlement=self._settlement,
                stays=self._stays,
                exclusions=self._exclusions,
                saves=self._saves,
                now=now,
            )
            self._note(_in_words(facts))
        self._begin_check(spec.checks)
        self._record()

    def _begin_check(self, checks: m.CheckSpec) -> None:
        if self._round is not None:  # the perf test was before the first round
            checks = replace(checks, perf=False)
        if checks.network or checks.perf:
            self._netcheck = NetCheck(checks, self._mint)
            if self._round is not None:
                self._netcheck.trust(tuple(self._round.members))

    # ------------------------------------------------------------ the record

    def _record(self) -> None:
        """Whatever is told after this waits until it is durable."""
        self._recorded_at = self._now
        self._stale = False
        self._out.append(
            fx.Record(
                facts_of(
                    spec=self.spec,
                    term=self._term,
                    number=self._number,
                    round_=self._round,
                    rdzv=self._rdzv,
                    membership=self._membership,
                    roster=self._roster,
                    settlement=self._settlement,
                    stays=self._stays,
                    exclusions=self._exclusions,
                    saves=self._saves,
                    outcome=self._outcome,
                    now=self._now,
                )
            )
        )

    def _record_due(self) -> float | None:
        """When the record must be made anew although nothing was ordered: now and then while a wait
        runs or after a fact has changed, and once when a round is no longer young, since the next
        master asks how old it is."""
        if self._until is not None or self._stale:
            return self._recorded_at + RECORD_EVERY
        old = self._rdzv.formed_at + GROW_YOUNG
        if self._rdzv.phase is Phase.RUNNING and self._recorded_at < old:
            return old
        return None

    def _keep_record(self) -> None:
        """At the end of a step: record what has changed without an order, or grown old."""
        due = self._record_due()
        if due is not None and self._now >= due:
            self._record()

    # ------------------------------------------------------------ the clock of the check

    def _check_time(self, now: float) -> float:
        """Seconds in which the master listened."""
        return now - self._unheard_for

    def _check_due(self) -> float | None:
        """When an answer to a probe is overdue, by the clock of the brain."""
        due = self._netcheck.next_deadline() if self._netcheck is not None else None
        return None if due is None else due + self._unheard_for

    # ------------------------------------------------------------ small change

    def _tell(self, session: int, order: m.Order) -> None:
        self._out.append(fx.Tell((session,), order))

    def _broadcast(self, nodes: Iterable[str], order: m.Start | m.Stop) -> None:
        found = (self._membership.session_of(node) for node in nodes)
        sessions = tuple(session for session in found if session is not None)
        if sessions:
            self._out.append(fx.Tell(sessions, order))

    def _note(self, text: str, level: str = "info") -> None:
        self._out.append(fx.Note(text, level))


def _in_words(facts: Facts) -> str:
    """What the record says, in a line for the operator."""
    if facts.outcome is not None:
        return f"the record says that the job is over: {facts.outcome.reason}"
    if facts.round is None:
        return "the record says that no round was formed yet"
    what = f"round {facts.round.name} with {some(facts.round.world_size, 'rank')}"
    if facts.round.over:
        return f"the record says that {what} is over: {facts.round.over}"
    return f"the record says that {what} runs"
