"""When ranks are looked at, and what follows: the verdict on a job whose ranks stand still.

A node says when nothing of its ranks has moved for some seconds; one that does not say so trains,
and costs nothing. When all nodes of the round are quiet, every rank is looked at, at growing
distances. What two looks in a row say, between which no counter has moved, is a verdict. It is told
when it has been true long enough for its class, and acted on later, if at all:

    class     told     acted on (--on-hang=auto)
    certain   10 s     30 s
    strong    60 s     as long as that place may be waited for (`stillness`)
    weak      120 s    never, unless --hang-limit
    still     300 s    never

Before a round is ended for it, all stacks are taken and written down on every node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.nodes.node import Health
from elasticrun.core.rounds.failures import SIGTERM
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.rounds.round import Stage
from elasticrun.core.sight.hangs.look import RollCall, rows
from elasticrun.core.sight.hangs.stillness import Place, Places, place_of
from elasticrun.core.sight.hangs.waiting import (
    SAID,
    Impasse,
    Klass,
    Scene,
    Sighting,
    fingerprint,
    judge,
)
from elasticrun.core.sight.picture import RankRow, StackRow, VerdictRow
from elasticrun.core.wishes import Fail, RecordSoon, Wish
from elasticrun.core.words import Lasting, lasting
from elasticrun.wire import messages as m
from elasticrun.wire.types import write_ranges

FIRST_LOOK: Final = 5.5
"""Seconds of stillness before the first look: agents say so after 5 s. With the 2.5 s at most that
they take to see the last move, what is certain is told 10 to 13 s after it."""

SECOND: Final = 4.5
"""Seconds between the first look and the one that must say the same."""

EARLY_EVERY: Final = 60.0
"""Seconds between two such early pairs: a job with slow steps is quiet in each of them. Where every
rank is in a collective they are not waited for."""

LATER: Final = (30.0, 60.0, 65.0)
"""Seconds of stillness at which it is looked again, and then every LATEST seconds."""

LATEST: Final = 30.0

APART: Final = 4.0
"""Seconds that two looks must be apart to say more than one."""

JITTER: Final = 2.0
"""Seconds by which two reports of one stillness may differ, for the way that they have come."""

FRESH: Final = 1.0
"""Seconds for which a look is as good as a new one for a person: many may watch one job."""

GRAIN: Final = 0.001
"""Seconds that count for nothing."""

TOLD: Final[Mapping[Klass, float]] = {
    Klass.CERTAIN: 10.0,
    Klass.STRONG: 60.0,
    Klass.WEAK: 120.0,
    Klass.STILL: 300.0,
}
"""Seconds of stillness from which a verdict of this class is told."""

STATES: Final[Mapping[Klass, str]] = {Klass.WEAK: "busy", Klass.STILL: "idle"}
"""How ranks are shown that such a verdict names; else they are odd."""

CERTAIN_ENDS: Final = 30.0
"""Seconds of stillness after which a round that certainly cannot go on is ended."""

STILL_ENDS: Final = 900.0
"""The same where nobody does anything and nobody waits for a rank, and --on-hang=restart."""

TORCH: Final = 0.8
"""Part of torch's own limit for a collective after which stacks are taken in any case: at its end
torch kills the ranks, and nobody would ever know what they did."""


@dataclass(frozen=True, slots=True)
class Stood:
    """How a round stood when it was over."""

    quiet: float = 0.0  # seconds since anything moved in it; 0.0 while a rank works for all others
    left: float = 0.0  # of these, since that was told of
    verdict: VerdictRow | None = None  # on a hang that was told of
    stacks: tuple[StackRow, ...] = ()  # of the last look at its ranks
    wrote: str = ""  # what the odd rank had written last, at a look that was written down


@dataclass(frozen=True, slots=True)
class _Quiet:
    """A node of whose ranks none moves."""

    since: float
    waiting: int = 0  # ranks in a collective
    works_until: float = -math.inf  # when a rank last did anything; math.inf: now


@dataclass(frozen=True, slots=True)
class _Opinion:
    """What a look has said."""

    at: float
    counters: tuple[object, ...]
    impasse: Impasse


class Watch:
    """Quiet nodes, looks at them, and the verdict."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._places = Places()
        self._places.restore(ctx.waits)
        self._since_of: dict[str, _Quiet] = {}  # nodes that are quiet
        self._has_moved = False  # a collective or a step of this life is known to have been done
        self._number = 0  # of the last look
        self._look: RollCall | None = None  # that is under way
        self._last: RollCall | None = None
        self._with_stacks: RollCall | None = None
        self._with_lines: RollCall | None = None
        self._early_at = -math.inf
        self._away = ctx.away
        self._move()

    def _move(self) -> None:
        """Something moves, or nothing is known: no stillness."""
        self._since: float | None = None  # when the last node fell quiet; None: not all are
        self._members: tuple[str, ...] = ()  # who is looked at by itself; () if nobody may be
        self._looks: list[float] = []  # seconds of stillness at which it was looked by itself
        self._opinion: _Opinion | None = None  # of the last look
        self._row_at = 0.0  # when the first of the last looks was that all say the same
        self._idle_at = -math.inf  # until when any rank did anything, as of the last look
        self._verdict: Impasse | None = None  # that two looks have agreed on
        self._told: Impasse | None = None  # what readers are shown
        self._told_at = 0.0  # when that was found
        self._noted: Impasse | None = None  # what a line has been written of
        self._noted_at = math.inf  # when the first was
        self._final = False  # the look that is under way is the last before it is acted on
        self._acted = False
        self._torch_ends: float | None = None  # when torch itself ends the job
        self._dump_by: float | None = None
        self._dumped = False
        self._written: RollCall | None = None  # the look that files were written of

    # ------------------------------------------------------------ what happens

    def heard(self, node: str, report: m.Quiet | m.Inspected | m.Stacks) -> bool:
        """Whether it is news."""
        round_, look = self._ctx.round, self._look
        if round_ is None or report.round != round_.name:
            return False
        if not isinstance(report, m.Quiet):
            if look is None or report.number != look.order.number:
                return False
            look.take(node, report)
            return look.done
        self._has_moved = self._has_moved or report.first > 0.0
        before = self._since_of.pop(node, None)
        if report.seconds <= 0.0:
            return before is not None
        known = before or _Quiet(-math.inf)
        since, until = self._ctx.now - report.seconds, known.works_until
        until = math.inf if report.busy else self._ctx.now if until == math.inf else until
        news = abs(since - known.since) > JITTER
        self._since_of[node] = _Quiet(since if news else known.since, report.waiting, until)
        return news

    def round_begins(self) -> None:
        """Nothing is known of its ranks."""
        if self._since_of:
            self.round_over()
        self._has_moved = False
        self._early_at = -math.inf

    def round_over(self) -> None:
        """Nobody is looked at until the next one begins."""
        self._last = None
        if self._since_of or self._since is not None or self._look is not None:
            self._since_of.clear()
            self._look = None
            self._move()

    def pursue(self) -> tuple[Wish, ...]:
        """Ask for looks that are due, and judge. The round ends for a verdict that is acted on."""
        if not self._since_of and self._since is None and self._look is None:
            return ()  # all train
        now = self._ctx.now
        wishes = self._see_whether_it_moves()
        look = self._look
        if look is not None and (look.done or now >= look.until):
            self._look = None
            wishes += self._seen(look)
        due = self._due()
        if self._look is None and due is not None and now >= due:
            wishes += self._look_by_itself()
        return wishes

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""
        if self._since is None and self._look is None:
            return None
        return self._due() if self._look is None else self._look.until

    def look(self, *, stacks: bool) -> int:
        """Ask every node for a look that a person wants; its number. 0: no round runs."""
        under_way = self._look
        if under_way is not None and (under_way.order.stacks or not stacks):
            return under_way.order.number
        last = self._last
        fresh = last is not None and last.whole and self._ctx.now - last.at < FRESH
        if last is not None and fresh and (last.order.stacks or not stacks):
            return last.order.number
        nodes = [node for node in self._running() if self._ctx.nodes[node].session is not None]
        if not nodes or self._ctx.rdzv.phase is not Phase.RUNNING:
            return 0
        self._ask(nodes, stacks=stacks, dump=0, lines=True)
        return self._number

    def looked(self, number: int) -> bool:
        """Whether all that can be had of this look is here."""
        return self._look is None or self._look.order.number != number

    # ------------------------------------------------------------ for people

    def quiet(self) -> float:
        """Seconds since a counter or a step of any rank moved, or, where no rank waits for others,
        since any did anything; 0.0 while they do."""
        since = self._since
        if since is None:
            return 0.0
        if not any(one.waiting for one in self._since_of.values()):
            since = max(since, *(one.works_until for one in self._since_of.values()))
        return max(0.0, self._ctx.now - since)

    def stood(self) -> Stood:
        """What the record of the round's end keeps of its ranks; nothing while they move."""
        if self._since is None:
            return Stood()
        told = self._told
        if told is None:
            return Stood(self.quiet(), stacks=self.stacks()[0])
        works = told.klass is Klass.WEAK and not self._acted
        quiet = 0.0 if works else self.quiet()
        left = min(quiet, max(0.0, self._ctx.now - self._noted_at))
        verdict = None if told.says else self.verdict()
        wrote = self._written.said_by(told.odd[0]) if self._written is not None else ""
        return Stood(quiet, left, verdict, self.stacks()[0], wrote)

    def verdict(self) -> VerdictRow | None:
        """What has been told and is still so."""
        told = self._told
        if told is None:
            return None
        told_for = self._ctx.now - self._told_at
        said = tuple(
            piece if isinstance(piece, str) else round(piece + told_for)
            for piece in self._in_words(told)
        )
        folder, _ = self._written.folder(told.node) if self._written else ("", "")
        return VerdictRow(
            klass=told.klass.value,
            kind=told.kind,
            sentence=lasting(said),
            since=self.quiet(),
            ranks=write_ranges(told.odd),
            node=told.of_node,
            then=self._then(told),
            folder=folder,
            says=told.says,
            place=told.place or self._lines(told).get("", ""),
            said=said,
        )

    def _lines(self, told: Impasse) -> Mapping[str, str]:
        """Where stacks find the threads of the rank that it is about, since nothing has moved."""
        look = self._with_stacks
        fresh = look is not None and self._since is not None and look.at >= self._since
        return look.lines_of(told.odd[0]) if look and fresh and told.odd and not told.says else {}

    def _in_words(self, told: Impasse) -> Lasting:
        """Its sentence, and what only stacks tell: where a rank is that does not say so itself, and
        a worker of its data loader."""
        lines = self._lines(told)
        if "" in lines and not told.place and told.klass is not Klass.STILL:
            return (*told.said, f"; it is at {lines['']}")
        loader = next((thread for thread in lines if thread.startswith("loader")), "")
        return (*told.said, f"; its {loader} is at {lines[loader]}") if loader else told.said

    def ranks(self) -> tuple[float, tuple[RankRow, ...]]:
        """The age of the last look, -1.0 for none, and its ranks."""
        look = self._last
        if look is None:
            return -1.0, ()
        told = self._told
        odd = {} if told is None else dict.fromkeys(told.odd, STATES.get(told.klass, "odd"))
        found = rows(Scene(look.sightings, self.quiet()), odd)
        place = self._lines(told).get("", "") if told is not None else ""
        if place and told is not None:  # of one that does not answer
            odd_one = told.odd[0]
            found = tuple(
                replace(row, place=place) if row.rank == odd_one and not row.place else row
                for row in found
            )
        return self._ctx.now - look.at, found

    def stacks(self) -> tuple[tuple[StackRow, ...], str]:
        """Of the last look with stacks, the rarest first; and what is missing."""
        look = self._with_stacks
        return ((), "") if look is None else (look.stacks(), look.missing())

    def said(self) -> tuple[StackRow, ...]:
        """What ranks had written last when a person looked; where they write files."""
        return () if self._with_lines is None else self._with_lines.said()

    # ------------------------------------------------------------ stillness

    def _running(self) -> list[str]:
        """Members of the round whose ranks are not all done."""
        last = self._ctx.rdzv.last
        return [
            node for node in last.stages if node not in last.completed and node in self._ctx.nodes
        ]

    def _see_whether_it_moves(self) -> tuple[Wish, ...]:
        """Since when all members are quiet, and whether they may be judged."""
        ctx, last = self._ctx, self._ctx.rdzv.last
        since = None
        if self._since_of and len(self._since_of) + len(last.completed) >= len(last.stages):
            running = self._running()
            if all(node in self._since_of for node in running):
                since = max((self._since_of[node].since for node in running), default=None)
        wishes = self._moved_on(since) if since != self._since else ()
        if ctx.away != self._away:  # what was said meanwhile is old
            self._away, self._opinion, self._verdict = ctx.away, None, None
        self._members = tuple(running) if since is not None and self._are_all_there(running) else ()
        if not self._members:
            self._opinion = self._verdict = None
        return wishes

    def _moved_on(self, since: float | None) -> tuple[Wish, ...]:
        """The stillness that was is over, and another one begins, or none."""
        now, before = self._ctx.now, self._since
        wishes: tuple[Wish, ...] = ()
        if before is not None and (opinion := self._opinion) is not None:
            seconds = now - before if since is None else since - before
            if self._places.learn(_place(opinion.impasse), seconds):
                self._ctx.waits, wishes = self._places.record(), (RecordSoon(),)
            if self._noted is not None:
                self._warn(f"ranks go on after {now - before:.0f} s", "info")
        self._move()
        self._since = since
        return wishes

    def _are_all_there(self, running: list[str]) -> bool:
        """Whether every member is well and heard: else nothing is judged."""
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

    # ------------------------------------------------------------ looks

    def _due(self) -> float | None:
        """When it is looked by itself."""
        if self._since is None or not self._members or self._ctx.spec.watch.on_hang == "off":
            return None
        verdict = self._verdict if not self._acted else None
        acts = None if verdict is None else self._ends_at(verdict)
        dump_by = None if self._dumped else self._dump_by
        limit, before = self._ctx.spec.watch.hang_limit, self._opinion
        if limit > 0.0 and self._verdict is None and before is not None:
            acts = max(self._since + limit, before.at + SECOND)  # to agree with what was seen last
        return earliest(self._since + self._next(), acts, dump_by)

    def _next(self) -> float:
        """Seconds of stillness at which the next look is due."""
        assert self._since is not None
        if not self._looks:
            rare = self._since + FIRST_LOOK >= self._early_at + EARLY_EVERY
            limit = self._ctx.spec.watch.hang_limit or math.inf
            late = min(LATER[0], max(FIRST_LOOK, limit - SECOND))
            return FIRST_LOOK if rare or self._all_wait() else late
        last = self._looks[-1]
        if len(self._looks) == 1:
            return last + SECOND
        for when in LATER:
            if when > last + 1.0:
                return when
        return (last + 1.0) // LATEST * LATEST + LATEST

    def _all_wait(self) -> bool:
        """Whether every rank is in a collective, as none is that has slow steps."""
        quiet = (self._since_of[node] for node in self._members)
        round_, waiting = self._ctx.round, sum(one.waiting for one in quiet)
        return round_ is not None and waiting == round_.facts.world_size

    def _span(self, at: float) -> float:
        """Seconds of stillness then; a look that was due is never early by a rounding."""
        return 0.0 if self._since is None else at - self._since + GRAIN

    def _look_by_itself(self) -> tuple[Wish, ...]:
        ctx, before = self._ctx, self._opinion
        assert self._since is not None
        seconds = self._span(ctx.now)
        if not self._looks and seconds < LATER[0]:
            self._early_at = ctx.now
        self._looks = [*self._looks[-1:], ctx.now - self._since]
        ends = None if self._verdict is None else self._ends_at(self._verdict)
        self._final = ends is not None and ctx.now + GRAIN >= ends and not self._acted
        klass = None if before is None else before.impasse.klass
        told_soon = klass in (Klass.CERTAIN, Klass.STRONG) and seconds >= TOLD[klass]
        if before is not None and klass is Klass.STILL:
            told_soon = self._begins(before.impasse) + TOLD[Klass.STILL] <= ctx.now + GRAIN
        late = self._dump_by is not None and ctx.now >= self._dump_by
        dump = self._final or ((told_soon or late) and not self._dumped)
        if dump:
            ctx.dumps, self._dumped = ctx.dumps + 1, True
        self._ask(self._members, stacks=dump, dump=ctx.dumps if dump else 0, lines=dump)
        return (RecordSoon(),) if dump else ()

    def _ask(
        self, nodes: list[str] | tuple[str, ...], *, stacks: bool, dump: int, lines: bool = False
    ) -> None:
        round_ = self._ctx.round
        assert round_ is not None
        self._number += 1
        order = m.Inspect(round_.name, self._number, stacks, dump, lines)
        self._look = RollCall(order, nodes, self._ctx.now, self._ended())
        self._ctx.broadcast(nodes, order)

    def _ended(self) -> list[Sighting]:
        """Ranks of members that are done."""
        round_ = self._ctx.round
        seats = round_.members if round_ is not None else {}
        found = []
        for node in self._ctx.rdzv.last.completed:
            if (seat := seats.get(node)) is not None:
                for rank in range(seat.first_rank, seat.first_rank + seat.ranks):
                    seen = m.RankSeen(rank, 1, m.Being.ENDED, True, False, 0.0, 0.0)
                    found.append(Sighting(node, seen))
        return found

    # ------------------------------------------------------------ the verdict

    def _seen(self, look: RollCall) -> tuple[Wish, ...]:
        """A look is over: judge, tell, act."""
        self._last = look
        if look.order.stacks:
            self._with_stacks = look
        if look.order.dump:
            self._written = look
        if look.order.lines:
            self._with_lines = look
        final, self._final = self._final, False
        sightings = look.sightings
        self._has_moved = self._has_moved or any(
            one.seen.step >= 0 or any(at.done > 0 for at in one.seen.at) for one in sightings
        )
        round_ = self._ctx.round
        all_seen = look.whole and round_ is not None and len(sightings) == round_.facts.world_size
        judged = all_seen and self._ctx.spec.watch.on_hang != "off"
        if self._since is None or not self._members or not judged:
            self._opinion = self._verdict = None
            return ()
        self._agree(look, sightings, self._span(look.at))
        self._heed_torch(look, sightings)
        if self._verdict is None:
            return ()
        self._tell(self._verdict, look.at)
        return self._act(self._verdict, look) if final and not self._acted else ()

    def _agree(self, look: RollCall, sightings: list[Sighting], seconds: float) -> None:
        """Whether this look says what the one before has said, and nothing has moved."""
        before = self._opinion
        scene = Scene(sightings, seconds)
        impasse = judge(scene)
        self._idle_at = look.at - scene.idle if scene.idle < seconds else -math.inf
        if impasse is None:
            self._opinion = self._verdict = None
            return
        opinion = _Opinion(look.at, fingerprint(sightings), impasse)
        same = (
            before is not None
            and before.counters == opinion.counters
            and before.impasse.is_like(impasse)
        )
        if same and before is not None and look.at - before.at < APART:
            return
        self._row_at = self._row_at if same else look.at
        self._opinion = opinion
        self._verdict = impasse if same else None

    def _heed_torch(self, look: RollCall, sightings: list[Sighting]) -> None:
        """When torch will end an open collective, and by when stacks must have been taken."""
        ends = []
        for one in sightings:
            for at in one.seen.at:
                if at.limit > 0.0 and at.entered > at.done:
                    ends.append((look.at + at.limit - at.age, look.at + TORCH * at.limit - at.age))
        self._torch_ends, self._dump_by = min(ends, default=(None, None))

    def _limit(self, impasse: Impasse) -> float | None:
        """Seconds of stillness after which the round is ended for it; None: never."""
        watch = self._ctx.spec.watch
        if watch.on_hang not in ("auto", "restart") or impasse.held:
            return None
        hard = watch.on_hang == "restart"
        limits: list[float] = []
        if impasse.klass is Klass.CERTAIN:
            limits.append(CERTAIN_ENDS)
        elif impasse.klass is Klass.STRONG and hard:
            limits.append(self._places.limit(_place(impasse), first=not self._has_moved))
        elif impasse.klass is Klass.STILL and hard:
            limits.append(STILL_ENDS)
        return min(limits, default=None)

    def _begins(self, verdict: Impasse) -> float:
        """From when the time of a verdict counts. A rank that is seen to work now and then is no
        idle one, however long nothing has moved; where nobody waits, what any of them does counts
        as a movement."""
        assert self._since is not None
        if verdict.klass is Klass.STILL and self._idle_at > self._since:
            return self._idle_at
        by_activity = verdict.klass in (Klass.STRONG, Klass.STILL)
        return max(self._since, self._row_at - FIRST_LOOK) if by_activity else self._since

    def _ends_at(self, verdict: Impasse) -> float | None:
        """When the round is ended for it; None: never. --hang-limit counts from the last movement,
        whatever ranks were seen to do."""
        limit, watch = self._limit(verdict), self._ctx.spec.watch
        ends = None if limit is None else self._begins(verdict) + limit
        if watch.hang_limit <= 0.0 or verdict.klass is Klass.STILL or verdict.held:
            return ends
        if watch.on_hang not in ("auto", "restart") or self._since is None:
            return ends
        return earliest(ends, self._since + max(watch.hang_limit, FIRST_LOOK + SECOND))

    def _tell(self, verdict: Impasse, at: float) -> None:
        """Once for each verdict. `at`: when it was found again."""
        told, ends = self._told, self._ends_at(verdict)
        since = self._since if verdict.klass is not Klass.STILL else self._begins(verdict)
        when = TOLD[Klass.STRONG] if verdict.held else TOLD[verdict.klass]
        due = at + GRAIN >= (since or 0.0) + when or (ends is not None and at + GRAIN >= ends)
        due = due or (self._dump_by is not None and self._ctx.now >= self._dump_by)
        if told is not None or due:
            self._told, self._told_at = verdict, self._opinion.at if self._opinion else at
        if not due or (self._noted is not None and self._noted.is_like(verdict)):
            return
        before = self._noted
        self._noted, self._noted_at = verdict, min(self._noted_at, self._ctx.now)
        then = self._then(verdict)
        look = self._written
        folder, node = look.folder(verdict.node) if look is not None else ("", "")
        where = f"; stacks are in {folder}" if folder else ""
        if look is not None and not folder:
            where = "; stacks are in no file (--log-dir DIR keeps them)"
        where += f" on node {node}" if folder and len(self._ctx.rdzv.last.stages) > 1 else ""
        told_by = "no hang" if verdict.kind == SAID else f"hang ({verdict.klass.value})"
        broken = before is not None and before.says and not verdict.says
        over = f" (its time in {before.says} is over)" if before is not None and broken else ""
        level = "info" if verdict.says else "warning"
        self._warn(f"{told_by}: {lasting(self._in_words(verdict))}{over}; {then}{where}", level)

    def _warn(self, text: str, level: str = "warning") -> None:
        """To whoever looks at the master or at a node of the round."""
        self._ctx.note(text, level, told=True)
        self._ctx.broadcast(self._members, m.Warn(text))

    def _then(self, verdict: Impasse) -> str:
        """What will be done about it."""
        ctx, ends = self._ctx, self._ends_at(verdict)
        parts = []
        if ends is None:
            parts.append("it is left as it is")
            if verdict.kind == SAID:
                parts[0] += ", as its script has said so"
            elif verdict.held:
                parts[0] += ", as a person is at work"
            elif ctx.spec.watch.on_hang == "tell":
                parts[0] += " (--on-hang=tell)"
            elif verdict.kind == "stopped":
                parts[0] += ", until somebody sends it SIGCONT (--on-hang=restart ends it)"
            elif verdict.klass is Klass.STRONG:
                parts[0] += ", as it may wait for something (--on-hang=restart ends it)"
            elif verdict.klass is Klass.STILL:
                parts[0] += " (--on-hang=restart ends it)"
            elif verdict.klass is Klass.WEAK:
                parts[0] += ", as it may well go on (--hang-limit sets an end)"
        elif ctx.restarts.budget.left(ctx.now):
            parts.append(f"all ranks are restarted in {max(0.0, ends - ctx.now):.0f} s")
        else:
            left = max(0.0, ends - ctx.now)
            parts.append(f"the job ends in {left:.0f} s: {ctx.restarts.budget.none_left()}")
        if self._torch_ends is not None and self._torch_ends > ctx.now:
            if ends is not None and self._torch_ends < ends:
                parts.clear()
            parts.append(f"torch would end this in {self._torch_ends - ctx.now:.0f} s")
        return "; ".join(parts)

    def _act(self, verdict: Impasse, look: RollCall) -> tuple[Wish, ...]:
        """End the round for it."""
        ends = self._ends_at(verdict)
        if ends is None or look.at + GRAIN < ends:
            return ()
        self._acted = True
        rank = verdict.odd[0]
        seen = {one.seen.rank: one for one in look.sightings}[rank]
        round_ = self._ctx.round
        seat = round_.members.get(seen.node) if round_ is not None else None
        known, stack = self._ctx.nodes.get(seen.node), look.stack_of(rank)
        failure = m.Failure(
            host=known.host if known is not None else "",
            rank=rank,
            local_rank=rank - seat.first_rank if seat is not None else -1,
            pid=seen.seen.pid,
            exitcode=-SIGTERM,  # by which it is ended
            time_us=0,
            kind=m.FailureKind.HUNG,
            message=verdict.sentence,
            traceback=f"{verdict.sentence}\n{stack}" if stack else "",
            error_file="",
        )
        return (Fail(seen.node, failure, is_blamed=bool(verdict.of_node)),)


def _place(impasse: Impasse) -> Place:
    return place_of(impasse.place, impasse.library)
