"""Incidents: what stopped training, one record each, with cause, decision, phases of recovery, and
cost.

An incident is closed by the first collective or step of the restarted ranks. If neither is
reported, it stays open after all ranks run, until the next incident or the end of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from elasticrun.config import EXIT_OK
from elasticrun.core.context import JobContext
from elasticrun.core.events import Filed
from elasticrun.core.reasons import (
    LossNotFinite,
    NoRestartsLeft,
    Reason,
    budget_clause,
    failure_in,
    read,
    text,
)
from elasticrun.core.sight.causes import Origin, followers, origin_of
from elasticrun.core.sight.hangs.watch import LastState
from elasticrun.core.sight.picture import IncidentRow, PhaseRow, StackRow, VerdictRow
from elasticrun.core.words import plural, recovery_times
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName, write_ranges

MAX_INCIDENTS = 200
"""Maximum number of incidents kept."""

RUNNING_PHASES = ("restore", "warm")
"""Phases in which all ranks run again."""

MAX_STACKS = 32
"""Maximum number of groups of stacks per incident."""

MAX_CHARS = 4096
"""Maximum length of the text that stands in for a rank's last lines, if these are missing."""

SETTLE = 2.0
"""Seconds from the first report of a loss that is not finite until ranks are named."""

MAX_FOUND = 8
"""Maximum number of findings that an incident mentions."""

MAX_FOLLOWED = 8
"""Maximum number of later round ends that an incident lists."""

MAX_WROTE = 8
"""Maximum number of ranks whose last lines an incident keeps until it is known which of them failed
first."""


@dataclass(slots=True)
class _Open:
    """The incident that is open."""

    number: int
    began: float  # when it was detected
    round: int
    slots: int
    price: float  # price of a slot for one second
    origin: Origin
    newest: int  # newest step reported in the ended round; -1: none
    phase: str = "stop"
    since: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)  # seconds by phase
    awaited: set[str] = field(default_factory=set)  # members that have not stopped, or started, yet
    decision: str = ""
    followed: list[str] = field(default_factory=list)
    excluded: tuple[str, ...] = ()
    ranks: int = 0  # of the next round
    restored: int = -1  # the step that this round restores; -1: unknown
    steps_lost: int = 0
    is_first_reported: bool = False  # a node has reported its first collective or step
    wrote: dict[int, str] = field(default_factory=dict)  # last lines of some ranks, by rank
    stacks: tuple[StackRow, ...] = ()
    verdict: VerdictRow | None = None
    found: tuple[str, ...] = ()
    ended: bool = False  # the job ended
    is_tentative: bool = False  # not shown yet: a node left on request, and the others may too
    is_training: bool = False  # training continues

    def begin_phase(self, phase: str, now: float) -> None:
        """End the current phase of recovery and begin this one."""
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def row(self, now: float, *, over: bool) -> IncidentRow:
        spent, restarted = dict(self.spent), -1.0
        if self.phase:
            spent[self.phase] = spent.get(self.phase, 0.0) + now - self.since
        if self.is_training or self.phase in ("warm", ""):
            restarted = sum(took for name, took in spent.items() if name not in RUNNING_PHASES)
        verdict = self.verdict if self.origin.cause != "hang" else None
        return IncidentRow(
            number=self.number,
            cause=self.origin.cause,
            sentence=self.origin.sentence,
            followed="; ".join(self.followed),
            decision=self.decision,
            age=now - self.began,
            round=self.round,
            node=self.origin.node,
            rank=self.origin.rank,
            over=over,
            excluded=self.excluded,
            phases=tuple(PhaseRow(name, seconds) for name, seconds in spent.items()),
            steps_lost=self.steps_lost,
            slot_seconds=self.slots * sum(spent.values()),
            cost=self.slots * sum(spent.values()) * self.price,
            last_lines=self.wrote.get(self.origin.rank, ""),
            stacks=self.stacks,
            exitcode=self.origin.exitcode,
            step=self.newest,
            kind=self.origin.kind,
            ended_before=self.origin.ended_before,
            ended=self.ended,
            hang="" if verdict is None else f"{verdict.klass}: {verdict.sentence}",
            verdict=self.verdict,
            found="; ".join(self.found),
            restarted=restarted,
            first_step=sum(spent.values()) if self.is_training else -1.0,
        )


class Incidents:
    """The incidents of a job. At most one is open: from what ended a round until training
    continues, or the job ends. If a node leaves on request, the incident is shown once the other
    nodes have stopped: if they leave too before that, the job ends on request, without incident."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        # with the time at which each began
        self._rows: deque[tuple[float, IncidentRow]] = deque(maxlen=MAX_INCIDENTS)
        self._open: _Open | None = None
        self._ended = ctx.outcome is not None
        self._newest = -1  # newest step reported in this round
        self._steps_reported = False
        self._known_out = self._kept_out()
        self._found: list[str] = []  # in this round
        last = ctx.round
        over = last is not None and last.is_inherited and not (self._ended or ctx.rdzv.succeeded)
        if over and last is not None and last.why_stopped is not None:
            ctx.incidents = max(0, ctx.incidents - 1)  # the previous master has counted it
            why = last.why_stopped
            self.round_over(why, origin_of(ctx, why), LastState())

    # ------------------------------------------------------------ events

    def on_report(self, report: m.Quiet | m.LastLines) -> None:
        """Process a report that may belong to the open incident."""
        if isinstance(report, m.Quiet):
            self._quiet(report)
        elif (one := self._open) is not None:
            fits = len(one.wrote) < MAX_WROTE or report.rank == one.origin.rank
            if report.round.number == one.round and fits:
                one.wrote[report.rank] = report.text
                if not one.is_tentative:
                    self._file(one.row(self._ctx.now, over=False))
        elif self._ended and self._rows:  # the job ended before they arrived
            began, row = self._rows[-1]
            if report.rank == row.rank and report.round.number == row.round:
                self._rows[-1] = (began, replace(row, last_lines=report.text))
                self._file(self._rows[-1][1])

    def on_round_report(self, node: str, report: m.Report) -> None:
        """Process a report about the current round."""
        one, now = self._open, self._ctx.now
        if isinstance(report, m.Steps):
            self._stepped(node, report)
        elif one is None:
            return
        elif isinstance(report, m.Stopped) and one.phase == "stop":
            one.awaited.discard(node)
            if not one.awaited:
                one.begin_phase("gather", now)
                self._show(one)
        elif isinstance(report, m.Running | m.Finished) and one.phase == "spawn":
            one.awaited.discard(node)
            if not one.awaited:
                one.begin_phase("warm", now)
                row = one.row(now, over=False)
                self._file(row)
                self._send(m.Recovery(report.round, row.restarted))

    def mention(self, reason: Reason) -> None:
        """Something was found in this round that does not end it: the incident that does will
        mention it."""
        if len(self._found) < MAX_FOUND:
            self._found.append(text(reason))

    def round_over(self, reason: Reason, origin: Origin, last_state: LastState) -> None:
        """The round ended because of `reason`, before it was done: begin or continue an
        incident."""
        ctx, one = self._ctx, self._open
        if one is not None and one.phase == "warm":
            self._close(is_training=False)
            one = None
        if one is None:
            self._start_record(origin, last_state)
            return
        if len(one.followed) < MAX_FOLLOWED:
            one.followed.append(text(reason))
        one.awaited = self._members()
        one.begin_phase("stop", ctx.now)

    def decided(self, reason: Reason | None, decision: str) -> None:
        """The next round is about to form, so the cause of the last round's end is now certain.
        `decision`: what that end costs; "" if nothing is charged."""
        one = self._open
        if one is None:
            return
        if not one.decision:
            if reason is not None:
                self._correct_origin(one, reason)
            if follow := followers(self._ctx, one.origin):
                one.followed.insert(0, follow)
            late = one.origin.silent - (self._ctx.now - one.began)
            if late > 0.0 and "detect" not in one.spent:
                one.spent = {"detect": late, **one.spent}
        one.decision = decision or one.decision or "a new round is formed (no restart used)"
        one.newest = self._ctx.newest = max(one.newest, self._ctx.newest)

    def round_begins(self) -> None:
        """A round has formed: an open incident enters its spawn phase."""
        one, round_ = self._open, self._ctx.round
        out = self._kept_out()
        self._newest = -1
        self._found.clear()
        if one is not None and round_ is not None:
            one.excluded = tuple(sorted({*one.excluded, *(out - self._known_out)}))
            one.ranks = round_.info.world_size
            restore = round_.info.restore
            one.restored = -1 if restore is None else restore.step
            one.awaited = set(round_.members)
            one.begin_phase("spawn", self._ctx.now)
            self._show(one)
        self._known_out = out

    def settle(self, last_state: Callable[[], LastState]) -> None:
        """Call after every event that led to decisions: close the incident at the end of the job,
        and end its stop phase when no survivor is awaited."""
        ctx, one = self._ctx, self._open
        if ctx.outcome is not None:
            self._job_ended(ctx.outcome, last_state)
        elif one is not None and one.phase == "stop" and not ctx.rdzv.awaits_survivors:
            one.begin_phase("gather", ctx.now)
            self._show(one)

    def downtime(self) -> Mapping[str, float]:
        """Seconds without training so far, by cause. An open incident counts only until all ranks
        ran again, because it may never be reported that they train."""
        found, one = self._ctx.downtime.copy(), self._open
        if one is not None:
            row = one.row(self._ctx.now, over=False)
            down = sum(phase.seconds for phase in row.phases)
            found[row.cause] += row.restarted if row.restarted >= 0.0 else down
        return found

    def page(self) -> tuple[IncidentRow, ...]:
        """All incidents, the newest last."""
        now = self._ctx.now
        rows = [replace(row, age=max(0.0, now - began)) for began, row in self._rows]
        if self._open is not None and not self._open.is_tentative:
            rows.append(self._open.row(now, over=False))
        return tuple(rows[-MAX_INCIDENTS:])

    # ------------------------------------------------------------ beginning and end

    def _start_record(self, origin: Origin, last_state: LastState) -> None:
        ctx, round_ = self._ctx, self._ctx.round
        now = ctx.now
        assert round_ is not None
        ctx.incidents += 1
        ctx.hung += last_state.quiet
        self._open = one = _Open(
            number=ctx.incidents,
            began=now,
            round=round_.name.number,
            slots=round_.info.world_size,
            price=ctx.spec.watch.slot_price / 3600.0,
            origin=origin,
            newest=max(self._newest, ctx.newest),
            since=now,
            awaited=self._members(),
            found=tuple(self._found),
            # an earlier master has shown its incidents
            is_tentative=origin.cause == "preempted" and not round_.is_inherited,
        )
        spent = {
            "detect": last_state.quiet - last_state.left or origin.silent,
            "left": last_state.left,
        }
        one.spent.update({name: seconds for name, seconds in spent.items() if seconds > 0.0})
        one.verdict = last_state.verdict
        if origin.cause == "hang":
            one.wrote[origin.rank] = last_state.wrote[-MAX_CHARS:]
        elif origin.rank >= 0:
            first = ctx.restarts.window.failures[0]
            one.wrote[first.rank] = first.traceback[-MAX_CHARS:]
        if last_state.verdict is not None or origin.cause == "hang":
            one.stacks = last_state.stacks[:MAX_STACKS]
        if not one.is_tentative:
            self._file(one.row(now, over=False))

    def _correct_origin(self, one: _Open, reason: Reason) -> None:
        """Set what caused the incident, now that it is known; a rank's traceback stands for its
        last lines until they arrive."""
        one.origin = origin_of(self._ctx, reason)
        for failure in self._ctx.restarts.window.failures:
            if failure.rank == one.origin.rank and failure.traceback:
                one.wrote.setdefault(failure.rank, failure.traceback[-MAX_CHARS:])

    def _show(self, one: _Open) -> None:
        """The other nodes stay: show the incident if it is not shown yet."""
        if one.is_tentative:
            one.is_tentative = False
            self._file(one.row(self._ctx.now, over=False))

    def _members(self) -> set[str]:
        last = self._ctx.rdzv.last
        return {node for node in last.stages if node not in last.away}

    def _close(self, *, is_training: bool, trained: float = 0.0) -> None:
        """Close the incident. `is_training`: training continues, since `trained` seconds ago. If
        False, the next incident or the end of the job came before any report that training
        continues."""
        ctx, one = self._ctx, self._open
        assert one is not None
        if one.phase == "warm" and not is_training:
            one.spent.setdefault("warm", 0.0)  # how long it took is unknown
            one.phase = ""
        if one.newest >= 0 and one.restored >= 0 and not one.steps_lost:
            one.steps_lost = max(0, one.newest - one.restored)
        one.since += trained
        one.is_training = is_training
        row = one.row(ctx.now, over=True)
        ctx.downtime[row.cause] += sum(phase.seconds for phase in row.phases)
        if is_training and ctx.round is not None:
            repeated = row.steps_lost if one.newest >= 0 and self._steps_reported else -1
            self._send(m.Recovery(ctx.round.name, row.restarted, row.first_step, repeated))
            ctx.recoveries.extend(phase.seconds for phase in row.phases if phase.name == "warm")
        self._rows.append((one.began, row))
        self._open = None
        if is_training and one.is_first_reported:
            lost = f", {plural(row.steps_lost, 'step')} repeated" if row.steps_lost else ""
            back = recovery_times(row.restarted, row.first_step)
            ctx.note(f"incident {row.number}: {row.sentence}; {back}{lost}")
        self._file(row)

    def _job_ended(self, outcome: m.End, last_state: Callable[[], LastState]) -> None:
        if self._ended:
            return
        self._ended = True
        reason = read(outcome.reason, outcome.code)
        failed = failure_in(reason)
        left = not self._ctx.membership.present  # all nodes left on request: no failure
        if left and self._open is not None and self._open.is_tentative:
            self._open = None
        if self._open is None:
            if outcome.exit_code == EXIT_OK or self._ctx.round is None or left:
                return
            assert reason is not None
            self._start_record(origin_of(self._ctx, reason), last_state())
        one = self._open
        assert one is not None
        if not one.decision and one.origin.kind == m.FailureKind.PEER_LOST and failed is not None:
            self._correct_origin(one, failed)  # the earlier exits may be known by now
        if not one.decision and (follow := followers(self._ctx, one.origin)):
            one.followed.insert(0, follow)
        if outcome.exit_code != EXIT_OK or not one.decision:  # else a restart has helped
            why = _why_ended(reason, one.origin) or outcome.reason
            end = f"the job ends with code {outcome.exit_code}: {why}"
            one.decision = f"{one.decision}; {end}" if one.decision else end
        one.ended = outcome.exit_code != EXIT_OK
        one.newest = max(one.newest, self._ctx.newest)
        self._close(is_training=False)

    def _send(self, order: m.Recovery) -> None:
        """Send an order to the members of the round."""
        last = self._ctx.rdzv.last
        self._ctx.broadcast([node for node in last.stages if node not in last.away], order)

    def _file(self, row: IncidentRow) -> None:
        self._ctx.out.append(Filed(row))

    def _kept_out(self) -> set[str]:
        ctx = self._ctx
        return {one.node for one in ctx.exclusions.page(ctx.now)} | set(ctx.rdzv.backing_off)

    # ------------------------------------------------------------ signs that training continues

    def _quiet(self, report: m.Quiet) -> None:
        round_ = self._ctx.round
        if round_ is None or report.round != round_.name:
            return
        one = self._open
        if one is not None and report.first > 0.0 and one.phase in ("spawn", "warm"):
            one.is_first_reported = True
            if not self._steps_reported:
                self._close(is_training=True)

    def _stepped(self, node: str, report: m.Steps) -> None:
        self._steps_reported = True
        self._newest = max(self._newest, report.step)
        one = self._open
        if one is not None and one.phase in ("spawn", "warm"):
            if one.newest >= 0:
                first = report.step - report.steps
                first = min(first, one.restored) if one.restored >= 0 else first
                one.steps_lost = max(0, one.newest - first)
            if report.restored > 0.0 and one.phase == "warm" and self._ctx.round is not None:
                each = report.restored / self._ctx.round.members[node].ranks
                one.spent["restore"] = min(each, self._ctx.now - one.since)
                one.since += one.spent["restore"]
            trained = min(report.steps * report.seconds, self._ctx.now - one.since)
            self._close(is_training=True, trained=trained)


def _why_ended(reason: Reason | None, origin: Origin) -> str:
    """Why the job ended, without the failure that the incident's own sentence names; "" for any
    other reason."""
    match reason:
        case NoRestartsLeft(first=first) if first.rank == origin.rank:
            return budget_clause(reason)
    return ""


class Losses:
    """Which ranks first had a loss that is NaN or infinite, in each round. Each rank reports its
    own first such step once. The reports arrive in any order, so the result is settled a moment
    after the first one, or when the round ends."""

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
