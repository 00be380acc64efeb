"""How the time of every slot was spent: slot-seconds by category and cause, without gaps or
overlaps.

A slot is one rank's place on a node, from the agent's hello to its leave; it is in exactly one
category at any time. Sums are whole microseconds, so the rows add up exactly to the time held. The
members of a round share one category, which changes for all at once.

Ranks are booked as training as soon as they run. When a report says when training really began,
the time before that is moved to the start, or to the recovery from what ended the last round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import fmean, median

from elasticrun.core.context import JobContext
from elasticrun.core.nodes.node import Health, Node
from elasticrun.core.persisted import IncidentCause, LedgerEnd, LedgerFacts, LedgerLine, LedgerNode
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.rounds.round import Round, Stage
from elasticrun.core.sight.causes import Origin
from elasticrun.core.sight.goodput import MICROS, MIN_WALL, Account, goodput
from elasticrun.core.sight.picture import Goodput
from elasticrun.wire import messages as m

Key = tuple[str, str]
"""Category and cause."""

ROUND: Key = ("", "")
"""Placeholder for a member whose ranks run: it has the category of the whole round."""

MOVING: Key = ("moving", "")
STEP: Key = ("step", "")
SAVE: Key = ("save", "")
WAIT: Key = ("wait", "")
UNKNOWN: Key = ("unknown", "")
IDLE = "idle"

USEFUL = (MOVING, STEP)

SAMPLES = 240
"""Maximum number of step times that define the usual one; at most one per second is sampled."""

MIN_SAMPLES = 10
"""Minimum number of step times for that."""

MAX_ROWS = 32
"""Maximum number of slow nodes, and of operations that scripts declare, with a row of their own;
the others share one."""


def _micros(seconds: float) -> int:
    return round(seconds * MICROS)


class SlotLedger:
    """Books the time of all slots."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._at = _micros(ctx.now)
        self._book: Counter[Key] = Counter()  # slot-microseconds
        self._held: Counter[Key] = Counter()  # current slots
        self._places: dict[str, tuple[int, Key]] = {}  # slots of a node, and their category
        self._slots = 0
        self._total = 0  # slot-microseconds held
        self._wall = 0  # microseconds in which any slot was held
        self._seen: tuple[Round, Phase, bool] | None = None  # at the last complete update
        self._over = ctx.outcome is not None

        self._key = MOVING  # category of the members whose ranks run
        self._live = 0  # slot-microseconds of this round in `_key` that may still move
        self._moved = False  # progress was reported in this round
        self._counted = False  # torch counts this round's collectives, so the first is reported
        self._waits = ("", "")  # class of the current verdict; the operation a rank has declared
        self.cause = ""
        """Why the last round ended; "": no round has ended."""
        self._newest = -1  # step
        self._is_first_known = True  # whether the first step of this round is known
        self._done = 0  # number of steps whose time is in STEP
        self._waited = 0  # slot-microseconds of this round in WAIT that a save may explain
        self._trained = 0  # microseconds spent on steps that were kept
        self._saves = 0  # number of saves, summed over all slots
        self._sums: dict[str, LedgerNode] = {}  # node -> what is booked of its sums
        self._usual: deque[float] = deque(maxlen=SAMPLES)  # seconds of a step, at this world size
        self._sampled = 0.0  # when the last step time was sampled
        self._size = 0  # number of ranks
        self._slow = ""  # the member that was found slow; "": none
        self._pace = (0.0, 0.0)  # usual and maximum normal seconds of a step
        self._unseen = False  # nodes of another master's round have yet to reattach
        self._gap = 0  # slot-microseconds in UNKNOWN that belong to the round if it continues
        self._ends: dict[IncidentCause, LedgerEnd] = {}

    # ------------------------------------------------------------ reports

    def on_report(self, node: str, report: m.Quiet | m.Steps) -> None:
        """Process a report about the progress of the ranks."""
        round_ = self._ctx.round
        running = self._ctx.rdzv.phase is Phase.RUNNING
        if round_ is None or report.round != round_.name or not running or self._over:
            return
        if isinstance(report, m.Steps):
            self._stepped(node, report, round_)
        elif report.first > 0.0:
            if self._newest < 0:  # if steps are reported, the first of them counts, as in incidents
                self._first_progress(0.0)
        elif report.counted and not self._moved and not self._counted:
            self._counted = True
            self._recategorise(self._warm())

    def found_slow(self, node: str, usual: float) -> None:
        """Book the excess of this member's steps over the usual time as slow from now on; no-op if
        another member was found slow in this round. `usual`: estimated seconds of a step if the
        node were like the others, used if there are too few samples or if it is less than what they
        show."""
        if self._slow:
            return
        self._slow, self._pace = node, (usual, usual)
        if len(self._usual) >= MIN_SAMPLES:
            middle = median(self._usual)
            most = middle + 3.0 * median(abs(one - middle) for one in self._usual)
            self._pace = min(self._pace, (fmean(one for one in self._usual if one <= most), most))

    def _stepped(self, node: str, report: m.Steps, round_: Round) -> None:
        slots, restore = round_.members[node].ranks, round_.info.restore
        first = report.step - report.steps
        if not self._is_first_known and restore is not None:  # the first steps may be unreported
            first = min(first, restore.step)
        if not self._is_first_known:
            self._is_first_known = True
            if 0 <= first < self._newest:
                self._book_repeated(self._newest - first)
                self._newest = first
        self._first_progress(report.steps * report.seconds)
        if self._key == MOVING:
            self._recategorise(STEP)
        if self._newest < 0:
            self._newest = max(0, first)
        if report.step > self._newest:
            self._done += report.step - self._newest
            self._newest = report.step
        saved = self._spend(node, report, slots)
        self._compare(report.steps, max(0.0, report.seconds - saved / slots / report.steps), slots)

    def _spend(self, node: str, report: m.Steps, slots: int) -> float:
        """Book what saves and restores took since the node's last report; return the slot-seconds
        of saves."""
        before = self._sums.get(node) or LedgerNode(node, 0, 0, 0)
        saves = max(before.saves, report.saves)
        saved = max(before.saved, _micros(report.saved))
        restored = max(before.restored, _micros(report.restored))
        after = LedgerNode(node, saves, saved, restored)
        if after == before:
            return 0.0
        self._sums[node] = after
        self._advance()
        self._shift(self._warm(), ("restore", self.cause), restored - before.restored)
        self._saves += (saves - before.saves) * slots
        spent = saved - before.saved
        waited = min(spent, self._waited)  # a sample has shown that all ranks waited for the save
        self._waited -= waited
        self._shift(WAIT, SAVE, waited)
        self._take_from_round(SAVE, spent - waited)
        return spent / MICROS

    def _compare(self, steps: int, seconds: float, slots: int) -> None:
        """`steps` steps took `seconds` each, without saves: book a slow node's excess, or sample
        it."""
        usual, most = self._pace
        if self._slow and seconds > most and self._key in USEFUL:
            key = self._row("slow", self._slow)
            self._take_from_round(key, _micros((seconds - usual) * steps) * slots)
        elif not self._slow and self._ctx.now - self._sampled >= 1.0:
            self._sampled = self._ctx.now
            self._usual.append(seconds)

    def _first_progress(self, trained: float) -> None:
        """Ranks report the first progress of the round, which happened `trained` seconds ago: move
        what was booked as training before that."""
        if self._moved:
            return
        self._moved = True
        self._advance()
        useful = min(self._live, _micros(trained) * self._held[ROUND])
        self._shift(self._key, self._warm(), self._live - useful)
        self._shift(self._key, MOVING, useful)
        self._key, self._live = MOVING, useful

    def _book_repeated(self, steps: int) -> None:
        """`steps` steps are repeated: move their time out of STEP."""
        steps = min(steps, self._done)
        if steps > 0:
            self._shift(STEP, ("redone", self.cause), self._book[STEP] * steps // self._done)
            self._done -= steps
            self._count(self.cause, "", ends=0, steps=steps)

    def round_begins(self) -> None:
        """A round has formed."""
        self._advance()
        self._key, self._live, self._gap = MOVING, 0, 0
        self._moved = self._counted = False
        self._waits, self._waited = ("", ""), 0
        if 0 <= self._newest < self._ctx.newest:  # the last steps were not reported
            self._done += self._ctx.newest - self._newest
            self._newest = self._ctx.newest
        self._is_first_known = self._newest < 0
        self._sums, self._slow = {}, ""
        round_ = self._ctx.round
        if round_ is not None and round_.info.world_size != self._size:
            self._size = round_.info.world_size
            self._usual.clear()

    def round_over(self, origin: Origin, quiet: float) -> None:
        """The round ended before it was done. `quiet`: seconds since anything moved in it."""
        self._advance()
        self.cause = origin.cause
        quiet = quiet or origin.silent
        if self._key in USEFUL:
            late = min(self._live, _micros(quiet) * self._held[ROUND])
            self._shift(self._key, self._warm(), late)
        self._count(origin.cause, origin.node, ends=1, steps=0)

    def settle(self, node: str | None, quiet: float, verdict: str, says: str = "") -> None:
        """Call after every event that led to decisions: book the time that has passed. `node`: the
        node of the event. `verdict`: the class of the hang that users see, "" for none. `quiet`:
        seconds since it began. `says`: the long operation that an awaited rank has declared."""
        ctx, rdzv = self._ctx, self._ctx.rdzv
        self._advance()
        moved, ctx.membership.moved = ctx.membership.moved, set()
        if self._over:
            return
        if (verdict, says) != self._waits:
            self._judge(verdict, quiet, says)
        if self._unseen and not rdzv.last.unseen:
            self._all_reattached()
        short = len(ctx.membership.present) < ctx.spec.min_nodes
        seen = (rdzv.last, rdzv.phase, short)
        before, self._seen = self._seen, seen
        same = before is not None and before[0] is seen[0] and before[1:] == seen[1:]
        nodes = moved if same else {*moved, *ctx.nodes, *self._places}
        for one in nodes if node is None else {*nodes, node}:
            self._update_node(one, short=short)
        if ctx.outcome is not None:
            self._over = True
            self._held.clear()
            self._places.clear()
            self._slots = 0

    def _all_reattached(self) -> None:
        """Every node of another master's round has reattached or was given up: book the gap."""
        self._unseen, self._seen = False, None
        if self._ctx.rdzv.phase is Phase.RUNNING:
            self._shift(UNKNOWN, self._key, self._gap)
            self._live += self._gap
        self._gap = 0

    def _judge(self, verdict: str, quiet: float, says: str) -> None:
        """The verdict has changed: switch the category, and move the quiet time to the new one."""
        declared, had = self._waits[1], self._key[0] in ("hang", "wait")
        self._waits = (verdict, says)
        key = self._row("wait", says) if verdict == "weak" else ("hang", verdict)
        if not verdict and not had:
            return
        if not verdict:
            self._waited += self._live if self._key == WAIT else 0
            key, self._live = STEP if self._newest >= 0 else MOVING, 0
        elif declared:  # what was booked while an operation was declared stays with it
            self._live = 0
        elif had:
            self._shift(self._key, key, self._live)
        elif self._key in USEFUL:
            self._live = min(self._live, _micros(quiet) * self._held[ROUND])
            self._shift(self._key, key, self._live)
        else:
            return
        self._key = key

    # ------------------------------------------------------------ what each node does

    def _update_node(self, node: str, *, short: bool) -> None:
        """Update the node's slots and their category. The time until now must be booked already."""
        known = self._ctx.nodes.get(node)
        slots, key = (0, ROUND) if known is None else self._place(known, short=short)
        before, was = self._places.pop(node, (0, ROUND))
        self._held[was] -= before
        if slots:
            self._places[node] = (slots, key)
            self._held[key] += slots
        self._slots += slots - before

    def _place(self, node: Node, *, short: bool) -> tuple[int, Key]:
        ctx, rdzv, name = self._ctx, self._ctx.rdzv, node.id
        seat = ctx.round.members.get(name) if ctx.round is not None else None
        slots = seat.ranks if seat is not None else 0
        if node.known_hello is not None:
            slots = node.known_hello.local_world_size
        if node.health not in (Health.ALIVE, Health.SUSPECT):
            return 0, ROUND
        if rdzv.phase is Phase.RUNNING and rdzv.last.is_member(name):
            return slots, self._of_member(rdzv.last, name)
        if rdzv.is_held_back(name):
            return slots, (IDLE, "door")
        if rdzv.phase is Phase.RUNNING:
            full = ctx.spec.max_nodes // ctx.spec.node_unit * ctx.spec.node_unit
            return slots, (IDLE, "spare" if len(rdzv.last.stages) >= full else "door")
        if name in rdzv.last.unseen:
            return slots, UNKNOWN
        if node.is_probed_alone:
            return slots, ("start", "check")
        if short:
            return slots, (IDLE, "below_min")
        return slots, ("down", self.cause) if self.cause else ("start", "wait")

    def _of_member(self, last: Round, name: str) -> Key:
        if self._unseen:
            return UNKNOWN
        stage = last.stages[name]
        if stage is Stage.STARTING:
            return ("down", self.cause) if self.cause else ("start", "spawn")
        return (IDLE, "done") if stage is Stage.FINISHED else ROUND

    def _warm(self) -> Key:
        """The category of ranks that run but do not train yet."""
        return ("down", self.cause) if self.cause else ("start", "init")

    # ------------------------------------------------------------ sums

    def _advance(self) -> None:
        """Book the time that has passed. O(categories)."""
        now = round(self._ctx.now * MICROS)
        passed, self._at = max(0, now - self._at), max(now, self._at)
        if not passed or not self._slots:
            return
        for key, slots in self._held.items():
            if slots:
                self._book[self._key if key == ROUND else key] += slots * passed
        self._live += self._held[ROUND] * passed
        if self._unseen:
            self._gap += self._held[UNKNOWN] * passed
        self._total += self._slots * passed
        self._wall += passed
        self._trained += passed if self._key == STEP and self._held[ROUND] else 0

    def _recategorise(self, key: Key) -> None:
        """Change the category of the running members, and move what this round has booked to the
        old one."""
        self._advance()
        self._shift(self._key, key, self._live)
        self._key = key

    def _row(self, category: str, cause: str) -> Key:
        """The key of a row whose cause is a node or a text of a script; the cause is "others" if
        there are MAX_ROWS rows already."""
        known = sum(kind == category for kind, _ in self._book)
        key = (category, cause)
        return key if key in self._book or known < MAX_ROWS else (category, "others")

    def _take_from_round(self, key: Key, amount: int) -> None:
        """Move `amount` from the round's current category to `key`, at most what this round has
        there."""
        amount = min(amount, self._live)
        self._shift(self._key, key, amount)
        self._live -= amount

    def _shift(self, source: Key, target: Key, amount: int) -> None:
        amount = max(0, min(amount, self._book[source]))
        if source == STEP and amount:
            self._trained -= self._trained * amount // self._book[STEP]
        if target == STEP:
            self._trained += amount // (self._held[ROUND] or self._slots or 1)
        self._book[source] -= amount
        self._book[target] += amount

    def _count(self, cause: str, node: str, *, ends: int, steps: int) -> None:
        one = self._ends.get(cause)
        if one is None:
            self._ends[cause] = LedgerEnd(cause, ends, node, steps)
            return
        named = node if node == one.node or not ends else ""
        node = named if ends else one.node
        self._ends[cause] = LedgerEnd(cause, one.count + ends, node, one.steps + steps)

    # ------------------------------------------------------------ for the next master

    def facts(self, _now: float) -> LedgerFacts:
        """What the next master needs."""
        self._advance()
        lines = []
        for key in self._book.keys() | self._held.keys():
            own = ROUND if key == self._key else None
            slots = self._held[key] + (self._held[ROUND] if own else 0)
            if key != ROUND and (self._book[key] or slots):
                lines.append(LedgerLine(*key, self._book[key], slots))
        if self._held[ROUND] and not any((one.category, one.cause) == self._key for one in lines):
            lines.append(LedgerLine(*self._key, 0, self._held[ROUND]))
        return LedgerFacts(
            lines=tuple(sorted(lines, key=lambda line: (line.category, line.cause))),
            ends=tuple(self._ends.values()),
            stood=tuple(self._ctx.downtime.items()),
            hung=self._ctx.hung,
            wall=self._wall,
            cause=self.cause,
            newest=self._newest,
            done=self._done,
            trained=self._trained,
            saves=self._saves,
            nodes=tuple(self._sums.values()),
        )

    def restore(self, facts: LedgerFacts, at: float) -> None:
        """Continue from what the previous master recorded at time `at`. The time since then is
        unknown, until the nodes of its round have reported that they still run it."""
        passed = _micros(self._ctx.now - at)
        for line in facts.lines:
            self._book[line.category, line.cause] += line.micros
            self._total += line.micros
            if not self._over:
                self._book[UNKNOWN] += line.slots * passed
                self._total += line.slots * passed
        self._ends = {one.cause: one for one in facts.ends}
        self._ctx.downtime.update(facts.stood)
        self._ctx.hung = facts.hung
        self._wall = facts.wall + (0 if self._over else passed)
        self.cause, self._newest, self._done = facts.cause, facts.newest, facts.done
        self._trained, self._saves = facts.trained, facts.saves
        self._sums = {one.node: one for one in facts.nodes}
        self._key = STEP if facts.newest >= 0 else MOVING
        self._moved = True  # a new master cannot know when ranks first made progress
        unseen, round_ = self._ctx.rdzv.last.unseen, self._ctx.round
        if unseen and round_ is not None and not self._over:
            self._unseen = True
            of_round = sum(round_.members[node].ranks for node in unseen)
            self._gap = min(of_round * passed, self._book[UNKNOWN])
        if not self._over:
            short = len(self._ctx.membership.present) < self._ctx.spec.min_nodes
            for node in self._ctx.nodes:
                self._update_node(node, short=short)

    # ------------------------------------------------------------ for display

    def sums(self) -> tuple[dict[Key, int], int]:
        """Slot-microseconds by category and cause, and the total held."""
        self._advance()
        return {key: micros for key, micros in self._book.items() if micros}, self._total

    def page(self, downtime: Mapping[IncidentCause, float]) -> Goodput | None:
        """The time accounting; None before the first round. `downtime`: seconds without training,
        by cause of the incidents."""
        if self._ctx.round is None:
            return None
        sums, total = self.sums()
        ends, steps_reported = tuple(self._ends.values()), self._newest >= 0
        ended = self._ctx.outcome is not None and bool(self._ctx.round.why_stopped and ends)
        rest = (
            ends,
            self._saves,
            steps_reported,
            tuple(self._ctx.recoveries),
            ended,
            downtime,
            self._ctx.hung,
        )
        found = Account(sums, total, self._wall, self._trained, *rest)
        return goodput(found, self._ctx.spec)

    def last_line(self, downtime: Mapping[IncidentCause, float]) -> str:
        """The line at the job's end; "" for a short job in which no round was lost."""
        found = self.page(downtime)
        is_shown = found is not None and (found.ends or self._wall >= MIN_WALL)
        return found.summary if found is not None and is_shown else ""
