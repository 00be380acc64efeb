"""Connects the components that observe training to the job.

`watch` finds hangs, `ledger` books the time of every slot, `incidents` records what stopped
training, `history` keeps the master's notes. None of them knows another.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.events import Judged, Note, Replied
from elasticrun.core.reasons import Reason
from elasticrun.core.sight.causes import FAILURES, origin_of
from elasticrun.core.sight.hangs.watch import Watch
from elasticrun.core.sight.incidents import Incidents, Losses
from elasticrun.core.sight.ledger import SlotLedger
from elasticrun.core.sight.picture import (
    EventRow,
    Goodput,
    PaceRow,
    Picture,
    SettingRow,
    VerdictRow,
)
from elasticrun.core.wishes import Wish
from elasticrun.core.words import render_lasting
from elasticrun.wire import messages as m

MAX_PENDING = 64
"""Maximum number of readers that wait for a sample; others get an error and may try again."""

SAMPLE_LIMIT = 8.0
"""Seconds after which a reader is answered with what has arrived of its sample."""


MAX_NOTES = 1000
"""Maximum number of notes that the history keeps."""


class History:
    """The last notes of the master, one line each."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._lines: deque[tuple[float, Note]] = deque(maxlen=MAX_NOTES)

    def settle(self) -> None:
        """Call after every event that led to decisions: keep the notes that it caused."""
        for effect in self._ctx.out:
            if isinstance(effect, Note):
                self._lines.append((self._ctx.now, effect))

    def page(self) -> tuple[EventRow, ...]:
        """The kept notes, the newest last."""
        now = self._ctx.now
        return tuple(
            EventRow(note.number, max(0.0, now - at), "", note.text, note.level)
            for at, note in self._lines
        )


class Sight:
    """The components that observe training. `status` returns the job's status, for the picture."""

    def __init__(self, ctx: JobContext, status: Callable[[], m.JobStatus]) -> None:
        self._ctx = ctx
        self._status = status
        self.watch = Watch(ctx)
        self.ledger = SlotLedger(ctx)
        self.incidents = Incidents(ctx)
        self.history = History(ctx)
        self._losses = Losses(ctx)
        self._verdict: VerdictRow | None = None  # the one last reported
        self._seen_at = 0.0  # when it last applied
        self._pending: dict[int, tuple[int, float]] = {}  # request -> its sample, deadline

    def on_report(self, node: str, report: m.SightReport) -> bool:
        """Process a report; return whether it may change a decision."""
        if isinstance(report, m.Quiet | m.LastLines):
            self.incidents.on_report(report)
        if isinstance(report, m.LastLines):
            return True
        if isinstance(report, m.NotFinite):
            return self._losses.on_report(report)
        if isinstance(report, m.Quiet):
            self.ledger.on_report(node, report)
        return self.watch.on_report(node, report)

    def on_request(self, number: int, request: m.Request) -> None:
        """Answer a request now, or once the sample that it needs has arrived."""
        needs_sample = request.verb == "stacks" or request.live
        runs = needs_sample and self._ctx.outcome is None
        sample = self.watch.request_sample(stacks=request.verb == "stacks") if runs else 0
        if not sample:
            self._answer(number)
        elif len(self._pending) >= MAX_PENDING:
            reason = f"{MAX_PENDING} requests are pending already: try again in a few seconds"
            self._ctx.out.append(Replied(number, m.Reply(False, reason)))
        else:
            self._pending[number] = (sample, self._ctx.now + SAMPLE_LIMIT)

    def pursue(self) -> tuple[Wish, ...]:
        """Request the samples that are due and judge those that are complete; answer readers."""
        wishes = self.watch.pursue()
        now = self._ctx.now
        if self._losses.until is not None and now >= self._losses.until:
            self._name_losses()
        for number, (sample, until) in list(self._pending.items()):
            if self.watch.is_sample_over(sample) or now >= until:
                del self._pending[number]
                self._answer(number)
        return wishes

    def settle(self, node: str | None) -> None:
        """Call after every event that led to decisions. `node`: the node that reported; None:
        none."""
        verdict = self.watch.verdict()
        if verdict is not None or self._verdict is not None:
            hangs = verdict is not None and not verdict.says and self._ctx.outcome is None
            self._publish_verdict(verdict if hangs else None)
        if verdict is None:
            self.ledger.settle(node, 0.0, "")
        else:
            self.ledger.settle(node, verdict.since, verdict.klass, verdict.says)
        if self._ctx.outcome is not None and self._losses.until is not None:
            self._name_losses()
        self.incidents.settle(self.watch.last_state)
        self.history.settle()
        if self._ctx.outcome is not None and self._pending:  # no more ranks are sampled
            for number in self._pending:
                self._answer(number)
            self._pending.clear()

    def _publish_verdict(self, verdict: VerdictRow | None) -> None:
        """Publish a verdict once, and once more when it is over."""
        now = self._ctx.now
        before, self._verdict = self._verdict, verdict
        passed, self._seen_at = now - self._seen_at, now
        if before and verdict and (before.klass, before.ranks) == (verdict.klass, verdict.ranks):
            return
        if before is not None:
            since = before.since + passed
            sentence = render_lasting(before.said, passed)
            final = replace(before, sentence=sentence, since=since, then="")
            self._ctx.out.append(Judged(final, over=True))
        if verdict is not None:
            self._ctx.out.append(Judged(verdict, over=False))

    def round_begins(self) -> None:
        """A round has formed, or was taken over."""
        self.watch.round_begins()
        self.ledger.round_begins()
        self.incidents.round_begins()

    def round_over(self, reason: Reason) -> bool:
        """The round has ended; return whether because of a failure."""
        ctx, state = self._ctx, self.watch.last_state()
        if ctx.round is not None and not ctx.rdzv.succeeded:
            if self._losses.until is not None:
                self._name_losses()
            origin = origin_of(ctx, reason)
            self.ledger.round_over(origin, state.quiet)
            self.incidents.round_over(reason, origin, state)
        self.watch.round_over()
        return self.ledger.cause in FAILURES

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""
        due, losses = self.watch.next_deadline(), self._losses.until
        if not self._pending and losses is None:
            return due
        return earliest(due, losses, *(until for _, until in self._pending.values()))

    def _name_losses(self) -> None:
        """Name the ranks whose loss was not finite first."""
        if (reason := self._losses.settle()) is not None:
            self.incidents.mention(reason)

    def picture(self) -> Picture:
        """Everything known about the job; O(ranks)."""
        looked, ranks = self.watch.ranks()
        stacks, missing = self.watch.stacks()
        return Picture(
            status=self._status(),
            looked=looked,
            verdict=self.watch.verdict(),
            ranks=ranks,
            stacks=stacks,
            stacks_missing=missing,
            said=self.watch.last_lines(),
            goodput=self.goodput(),
            incidents=self.incidents.page(),
            events=self.history.page(),
            slow=tuple(one.slow for one in self._ctx.nodes.values() if one.slow),
            paces=tuple(
                PaceRow(one.id, one.pace.seconds, one.pace.own, bool(one.slow))
                for one in self._ctx.nodes.values()
                if one.pace is not None
            ),
            settings=settings(self._ctx.spec),
        )

    def goodput(self) -> Goodput | None:
        """The time accounting; None before the first round."""
        return self.ledger.page(self.incidents.downtime())

    def last_line(self) -> str:
        """The same at the job's end; "" if it is not worth a line."""
        return self.ledger.last_line(self.incidents.downtime())

    def _answer(self, number: int) -> None:
        body = msgspec.json.encode(self.picture()).decode()
        self._ctx.out.append(Replied(number, m.Reply(True, "", body)))


def settings(spec: m.JobSpec) -> tuple[SettingRow, ...]:
    """The settings of the job, one row each."""
    plain = msgspec.to_builtins(spec)
    rows = []
    for name, value in plain.items():
        inner = value if isinstance(value, dict) else {name: value}
        rows += [SettingRow(key, json.dumps(one)) for key, one in inner.items()]
    return tuple(rows)
