"""The hang watch: samples the ranks while nothing moves, and judges the samples.

A node reports when none of its ranks has moved for some seconds. A node that does not report is
training, and costs nothing. When all nodes of the round are quiet, every rank is sampled, at
growing intervals (`schedule`). A verdict is what two successive samples agree on, with no counter
moved in between (`waiting`). Users see it once it has held long enough; later, if at all, the round
is ended because of it (`limits`). Before that, every node writes all stacks to files.

`states` defines the states and their transitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.nodes.node import Health
from elasticrun.core.rounds.failures import SIGTERM
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.rounds.round import Stage
from elasticrun.core.sight.hangs.limits import HangLimits
from elasticrun.core.sight.hangs.sample import Sample, rows
from elasticrun.core.sight.hangs.schedule import (
    EARLY_EVERY,
    FIRST_SAMPLE,
    LATER,
    SECOND_SAMPLE,
    Samples,
    next_sample,
)
from elasticrun.core.sight.hangs.states import (
    ROUNDING,
    Acted,
    Agreed,
    Moving,
    Opinion,
    Reported,
    State,
    Still,
    Suspected,
    Unjudged,
)
from elasticrun.core.sight.hangs.waiting import Impasse, Klass, Scene
from elasticrun.core.sight.hangs.words import in_words, note, what_follows, where_written
from elasticrun.core.sight.picture import RankRow, StackRow, VerdictRow
from elasticrun.core.wishes import Fail, RecordSoon, Wish
from elasticrun.core.words import render_lasting
from elasticrun.wire import messages as m
from elasticrun.wire.types import write_ranges

JITTER: Final = 2.0
"""Seconds by which two reports of the same quiet time may differ, because transmission varies."""

STATES: Final[Mapping[Klass, str]] = {Klass.WEAK: "busy", Klass.STILL: "idle"}
"""The state to display for ranks that a verdict of this class names; otherwise "odd"."""


@dataclass(frozen=True, slots=True)
class LastState:
    """What is known of the ranks of a round when it ends."""

    quiet: float = 0.0  # seconds since anything moved; 0.0 if no rank waits, or one works for all
    left: float = 0.0  # how many of these since users saw a verdict
    verdict: VerdictRow | None = None  # the one on a hang that users saw
    stacks: tuple[StackRow, ...] = ()  # of the last sample with stacks
    wrote: str = ""  # last output of the culprit, from the dumped sample


@dataclass(frozen=True, slots=True)
class _QuietNode:
    """A node on which no rank moves."""

    since: float
    waiting: int = 0  # ranks in a collective
    works_until: float = -math.inf  # when a rank was last active; math.inf: one is active


@dataclass(slots=True)
class _Activity:
    """What is known of the ranks' activity since the round began."""

    quiet: dict[str, _QuietNode] = field(default_factory=dict)
    has_moved: bool = False  # a collective or a step is known to be completed
    early_at: float = -math.inf  # when the last early sample was requested


class Watch:
    """Runs the states of the hang watch."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._activity = _Activity()
        self._samples = Samples(ctx)
        self._limits = HangLimits(ctx)
        self._state: State = Moving()

    # ------------------------------------------------------------ events

    def on_report(self, node: str, report: m.Quiet | m.Inspected | m.Stacks) -> bool:
        """Process a report; return whether it changes anything."""
        round_, activity = self._ctx.round, self._activity
        if round_ is None or report.round != round_.name:
            return False
        if not isinstance(report, m.Quiet):
            return self._samples.take(node, report)
        activity.has_moved = activity.has_moved or report.first > 0.0
        before = activity.quiet.pop(node, None)
        if report.seconds <= 0.0:
            return before is not None
        known = before or _QuietNode(-math.inf)
        since, until = self._ctx.now - report.seconds, known.works_until
        until = math.inf if report.busy else self._ctx.now if until == math.inf else until
        news = abs(since - known.since) > JITTER
        quiet_since = since if news else known.since
        activity.quiet[node] = _QuietNode(quiet_since, report.waiting, until)
        return news

    def round_begins(self) -> None:
        """A round has formed: forget the activity of earlier ranks."""
        if self._activity.quiet:
            self.round_over()
        self._activity = _Activity()

    def round_over(self) -> None:
        """The round is over: nothing is sampled until the next one begins."""
        self._activity.quiet.clear()
        self._state = Moving()
        if self._samples.last is not None or self._samples.under_way is not None:
            self._samples.forget()

    def pursue(self) -> tuple[Wish, ...]:
        """Request samples that are due, and judge complete ones. Returns a Fail wish if the round
        must end because of a verdict."""
        state, samples = self._state, self._samples
        if not self._activity.quiet and isinstance(state, Moving) and samples.under_way is None:
            return ()  # all ranks train
        wishes = self._update_stillness()
        if (sample := samples.take_finished()) is not None:
            wishes += self._judge(sample)
        due = self._due()
        if samples.under_way is None and due is not None and self._ctx.now >= due:
            wishes += self._sample()
        return wishes

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""
        if (under_way := self._samples.under_way) is not None:
            return under_way.until
        return None if isinstance(self._state, Moving) else self._due()

    def request_sample(self, *, stacks: bool) -> int:
        """Request a sample for a user from every node; return its number. 0: no round runs."""
        return self._samples.request_for_user(self._running(), stacks=stacks)

    def is_sample_over(self, number: int) -> bool:
        """Whether no more of this sample will arrive."""
        under_way = self._samples.under_way
        return under_way is None or under_way.order.number != number

    # ------------------------------------------------------------ for users

    def quiet(self) -> float:
        """Seconds since a counter or a step of any rank moved; if no rank waits for others, since
        any rank was active. 0.0 while ranks move."""
        if isinstance(self._state, Moving):
            return 0.0
        since, nodes = self._state.since, self._activity.quiet.values()
        if not any(one.waiting for one in nodes):
            since = max(since, *(one.works_until for one in nodes))
        return max(0.0, self._ctx.now - since)

    def last_state(self) -> LastState:
        """What the incident of the round's end records of the ranks; empty while they move."""
        still = self._state
        if isinstance(still, Moving):
            return LastState()
        reported = still.reported
        if reported is None:  # ranks that wait for nobody may sleep on purpose
            waits = any(one.waiting for one in self._activity.quiet.values())
            return LastState(self.quiet() if waits else 0.0, stacks=self.stacks()[0])
        impasse, written = reported.verdict.impasse, still.dump.written
        works = impasse.klass is Klass.WEAK and not isinstance(still.notice, Acted)
        quiet = 0.0 if works else self.quiet()
        left = min(quiet, max(0.0, self._ctx.now - reported.first_at))
        verdict = None if impasse.says else self.verdict()
        wrote = written.last_lines_of(impasse.odd[0]) if written is not None else ""
        return LastState(quiet, left, verdict, self.stacks()[0], wrote)

    def verdict(self) -> VerdictRow | None:
        """The verdict that users see; None if there is none or it no longer applies."""
        still = self._state
        if isinstance(still, Moving) or (reported := still.reported) is None:
            return None
        impasse, lines = reported.verdict.impasse, self._lines(still, reported.verdict.impasse)
        shown_for = self._ctx.now - reported.verdict.at
        pieces = tuple(
            piece if isinstance(piece, str) else round(piece + shown_for)
            for piece in in_words(impasse, lines)
        )
        written = still.dump.written
        return VerdictRow(
            klass=impasse.klass.value,
            kind=impasse.kind,
            sentence=render_lasting(pieces),
            since=self.quiet(),
            ranks=write_ranges(impasse.odd),
            node=impasse.of_node,
            then=self._what_follows(still, reported.verdict),
            folder=written.folder(impasse.node)[0] if written is not None else "",
            says=impasse.says,
            place=impasse.place or lines.get("", ""),
            said=pieces,
        )

    def ranks(self) -> tuple[float, tuple[RankRow, ...]]:
        """The age of the last sample, -1.0 for none, and the rows of its ranks."""
        sample = self._samples.last
        if sample is None:
            return -1.0, ()
        still = self._state
        reported = None if isinstance(still, Moving) else still.reported
        if isinstance(still, Moving) or reported is None:
            return self._ctx.now - sample.at, rows(Scene(sample.sightings, self.quiet()), {})
        impasse = reported.verdict.impasse
        odd = dict.fromkeys(impasse.odd, STATES.get(impasse.klass, "odd"))
        found = rows(Scene(sample.sightings, self.quiet()), odd)
        if place := self._lines(still, impasse).get(""):  # of a rank that does not answer
            found = tuple(
                replace(row, place=place) if row.rank == impasse.odd[0] and not row.place else row
                for row in found
            )
        return self._ctx.now - sample.at, found

    def stacks(self) -> tuple[tuple[StackRow, ...], str]:
        """The stacks of the last sample that has some, the rarest first; and what is missing."""
        sample = self._samples.with_stacks
        return ((), "") if sample is None else (sample.stacks(), sample.missing())

    def last_lines(self) -> tuple[StackRow, ...]:
        """The last lines of the ranks, from the last sample with lines, if ranks write files."""
        sample = self._samples.with_lines
        return () if sample is None else sample.last_lines()

    def _lines(self, still: Still, impasse: Impasse) -> Mapping[str, str]:
        """Where the threads of the named rank are, from stacks taken since nothing moves; {}
        without any."""
        if not impasse.odd or impasse.says:
            return {}
        return self._samples.lines_of(impasse.odd[0], still.since)

    # ------------------------------------------------------------ stillness

    def _running(self) -> list[str]:
        """Members of the round whose ranks are not all done."""
        last = self._ctx.rdzv.last
        return [
            node for node in last.stages if node not in last.completed and node in self._ctx.nodes
        ]

    def _update_stillness(self) -> tuple[Wish, ...]:
        """Update since when all members have been quiet, and whether they can be judged."""
        ctx, quiet, last = self._ctx, self._activity.quiet, self._ctx.rdzv.last
        since, running = None, self._running()
        if (
            len(quiet) + len(last.completed) >= len(last.stages)
            and running
            and all(node in quiet for node in running)
        ):
            since = max(quiet[node].since for node in running)
        before = self._state
        was = None if isinstance(before, Moving) else before.since
        wishes = self._change_stillness(since) if since != was else ()
        if isinstance(still := self._state, Still):
            still.members = tuple(running) if self._are_all_there(running) else ()
            opinion = still.opinion
            if not still.members or (opinion is not None and opinion.away != ctx.away):
                still.belief = Unjudged()  # the master has been away since
        return wishes

    def _change_stillness(self, since: float | None) -> tuple[Wish, ...]:
        """Nothing has moved since another time (`since`), or something moves now (None)."""
        now, before = self._ctx.now, self._state
        wishes: tuple[Wish, ...] = ()
        if isinstance(before, Still):
            seconds = now - before.since if since is None else since - before.since
            if self._limits.learn(before, seconds):
                wishes = (RecordSoon(),)
            if before.reported is not None:
                self._warn(f"ranks continue after {now - before.since:.0f} s", "info")
        self._state = Moving() if since is None else Still(since)
        return wishes

    def _are_all_there(self, running: list[str]) -> bool:
        """Whether every member is healthy and connected; otherwise nothing is judged."""
        ctx, last = self._ctx, self._ctx.rdzv.last
        if ctx.rdzv.phase is not Phase.RUNNING or last.leaving or last.unseen:
            return False
        if ctx.membership.mass_silence.until is not None or not last.away.keys() <= last.completed:
            return False
        return all(
            last.stages[node] is Stage.RUNNING
            and ctx.nodes[node].health is Health.ALIVE
            and ctx.nodes[node].session is not None
            for node in running
        )

    # ------------------------------------------------------------ samples

    def _due(self) -> float | None:
        """When to sample the ranks next; None: not at present."""
        still, watch = self._state, self._ctx.spec.watch
        if isinstance(still, Moving) or not still.members or watch.on_hang == "off":
            return None
        acts = None
        match still.belief:
            case Agreed(opinion) if not isinstance(still.notice, Acted):
                acts = self._ends_at(still, opinion)
            case Suspected(opinion) if watch.hang_limit > 0.0:
                acts = max(still.since + watch.hang_limit, opinion.at + SECOND_SAMPLE)
        rare = still.since + FIRST_SAMPLE >= self._activity.early_at + EARLY_EVERY
        early = rare or self._all_wait(still)
        due = still.since + next_sample(still.samples_at, early=early, hang_limit=watch.hang_limit)
        return earliest(due, acts, None if still.dump.taken else still.dump.due)

    def _all_wait(self, still: Still) -> bool:
        """Whether every rank is in a collective: then it is not just a slow step."""
        quiet = (self._activity.quiet[node] for node in still.members)
        round_, waiting = self._ctx.round, sum(one.waiting for one in quiet)
        return round_ is not None and waiting == round_.info.world_size

    def _sample(self) -> tuple[Wish, ...]:
        """Request the sample that is due."""
        ctx, still = self._ctx, self._state
        assert isinstance(still, Still)
        if not still.samples_at and still.seconds(ctx.now) < LATER[0]:
            self._activity.early_at = ctx.now
        still.samples_at = (*still.samples_at[-1:], ctx.now - still.since)
        final, dump = False, still.dump
        if isinstance(still.belief, Agreed) and not isinstance(still.notice, Acted):
            ends = self._ends_at(still, still.belief.opinion)
            final = ends is not None and ctx.now + ROUNDING >= ends
        opinion = still.opinion
        is_shown = opinion is not None and self._limits.needs_stacks(still, opinion)
        late = dump.due is not None and ctx.now >= dump.due
        stacks = final or ((is_shown or late) and not dump.taken)
        if stacks:
            ctx.dumps, dump.taken = ctx.dumps + 1, True
        number = ctx.dumps if stacks else 0
        self._samples.request(still.members, stacks=stacks, dump=number, lines=stacks, final=final)
        return (RecordSoon(),) if stacks else ()

    # ------------------------------------------------------------ the verdict

    def _judge(self, sample: Sample) -> tuple[Wish, ...]:
        """A sample is complete, or its time is over: judge, report, and act on it."""
        sightings, round_, still = sample.sightings, self._ctx.round, self._state
        self._activity.has_moved = self._activity.has_moved or any(
            one.seen.step >= 0 or any(at.done > 0 for at in one.seen.at) for one in sightings
        )
        if isinstance(still, Moving):
            return ()
        if sample.order.dump:
            still.dump.written = sample
        all_seen = (
            sample.is_complete and round_ is not None and len(sightings) == round_.info.world_size
        )
        if not still.members or not all_seen or self._ctx.spec.watch.on_hang == "off":
            still.belief = Unjudged()
            return ()
        still.judge(sample, sightings, self._ctx.away)
        if not isinstance(still.belief, Agreed):
            return ()
        self._report(still, still.belief.opinion, sample.at)
        if sample.final and isinstance(still.notice, Reported):
            return self._act(still, still.notice, sample)
        return ()

    def _ends_at(self, still: Still, opinion: Opinion) -> float | None:
        return self._limits.ends_at(still, opinion, first=not self._activity.has_moved)

    def _report(self, still: Still, opinion: Opinion, at: float) -> None:
        """Show a verdict that was agreed on at time `at`, once it is due; log one line per
        verdict."""
        ctx, impasse, before = self._ctx, opinion.impasse, still.reported
        ends, dump = self._ends_at(still, opinion), still.dump
        due = self._limits.is_shown(still, opinion, at) or (
            ends is not None and at + ROUNDING >= ends
        )
        due = due or (dump.due is not None and ctx.now >= dump.due)
        if before is None and not due:
            return
        is_news = before is None or (due and not before.noted.is_like(impasse))
        noted = impasse if before is None or is_news else before.noted
        reported = Reported(opinion, noted, ctx.now if before is None else before.first_at)
        still.notice = Acted(reported) if isinstance(still.notice, Acted) else reported
        if is_news:
            pieces = in_words(impasse, self._lines(still, impasse))
            where = where_written(dump.written, impasse.node, len(ctx.rdzv.last.stages))
            then = self._what_follows(still, opinion)
            level = "info" if impasse.says else "warning"
            self._warn(note(pieces, impasse, before, then, where), level)

    def _warn(self, text: str, level: str) -> None:
        """Log a line on the master and on the nodes of the round."""
        self._ctx.note(text, level, on_nodes=True)
        self._ctx.broadcast(self._running(), m.Warn(text))

    def _what_follows(self, still: Still, opinion: Opinion) -> str:
        ends = self._ends_at(still, opinion)
        return what_follows(self._ctx, opinion.impasse, ends, still.dump.torch_ends)

    def _act(self, still: Still, reported: Reported, sample: Sample) -> tuple[Wish, ...]:
        """End the round because of this verdict, if it is time."""
        ends, verdict = self._ends_at(still, reported.verdict), reported.verdict.impasse
        if ends is None or sample.at + ROUNDING < ends:
            return ()
        still.notice = Acted(reported)
        rank = verdict.odd[0]
        seen = {one.seen.rank: one for one in sample.sightings}[rank]
        round_ = self._ctx.round
        seat = round_.members.get(seen.node) if round_ is not None else None
        known, stack = self._ctx.nodes.get(seen.node), sample.stack_of(rank)
        failure = m.Failure(
            host=known.host if known is not None else "",
            rank=rank,
            local_rank=rank - seat.first_rank if seat is not None else -1,
            pid=seen.seen.pid,
            exitcode=-SIGTERM,  # the signal that ends it
            time_us=0,
            kind=m.FailureKind.HUNG,
            message=verdict.sentence,
            traceback=f"{verdict.sentence}\n{stack}" if stack else "",
            error_file="",
        )
        return (Fail(seen.node, failure, is_blamed=bool(verdict.of_node)),)
