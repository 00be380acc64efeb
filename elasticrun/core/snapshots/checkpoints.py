"""Which snapshot every shard can still give, what is written out of it, and when that is over.

What is whole and what the next round goes on from stands in `breakpoint_choice`. Here a checkpoint
is written of the newest whole step that the ranks want written, and with --save-at-breakpoint of
the one that a failure left; one at a time. A failed attempt is made anew, later and later; a node
that goes ends it, unless its part is in. The snapshot of a later failure takes the place of an
older one, whose slot is needed. A node that is told to go, or says so, counts for nothing but the
attempt that it takes part in: its agent stays until that is over, for it may hold the only copy of
a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from elasticrun.core.persisted import Rejected
from elasticrun.core.snapshots.choice import BreakpointChoice
from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.writing import (
    MAX_TRIES,
    Attempt,
    Key,
    Plan,
    Storage,
    divide,
    in_size,
    order_of,
)
from elasticrun.core.words import some
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MOST_ENDED = 3
"""Attempts whose ends a node is told again when it attaches; more do not end while it is away."""

WAIT_FOR_ALL = 5.0
"""Seconds for which a whole step that is to be written waits for ranks that may hold it soon: their
own items would be missing."""


class BreakpointSave(BreakpointChoice):
    """See the module's head."""

    def __init__(self, saves: m.SaveSpec, mint: Callable[[], str], term: int = 1) -> None:
        """`mint` gives a name for every attempt; `term`: of this master."""
        super().__init__(term, saves.restore_step)
        self._spec = saves
        self._mint = mint
        self._attempt: Attempt | None = None  # at what is planned
        self._plan: Plan | None = None
        self._storage = Storage()
        self._begun: Key | None = None  # the newest that was planned: older ones are passed over
        self._since: dict[Key, float] = {}  # wanted and whole, but not everywhere yet: since when
        self._ended: dict[str, list[m.PersistOver]] = {}  # node -> how its last attempts ended
        self._no_saver = False
        self._owed: tuple[Key, str] | None = None  # planned last, not written, and why
        self.asked: Key | None = None  # this step, and later ones, are saved since a node leaves
        self.written: m.Restore | None = None  # the newest checkpoint that was committed

    # ------------------------------------------------------------ nodes and rounds

    def begin_round(
        self,
        name: RoundName,
        world_size: int,
        restore: m.Restore | None,
        seats: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """A round was formed, adopted or read from the record. `restore`: what it goes on from;
        agents withdraw whatever is newer. `seats`: group ranks by node, as they are learned."""
        plan = self._plan
        if plan is not None:
            kept = restore and order_of(plan.key) <= order_of((restore.round, restore.step))
            if not kept:
                self.abandon("the job goes on from another step")
        owed = self._owed
        if owed and (not restore or order_of(owed[0]) > order_of((restore.round, restore.step))):
            self._owed = None  # training has gone back behind it
        self._began = True
        if restore is not None and restore.step != self.restore_step:
            self._has_obeyed = True  # under the master before this one
        self._know(name, world_size, restore)
        self._replicas.begin_round(seats)
        self._since.clear()
        for ledger in self._ledgers[1:]:
            for step in ledger.steps():
                if not ledger.is_whole(step):
                    self._release(ledger, step, ledger.why_not_whole(step))

    def heard(self, node: str, report: m.Holdings, now: float) -> None:
        """All that a living node holds."""
        self._take_in(node, report)
        self._replicas.heard(node, report)
        for one in report.held:
            if one.wanted and self._is_passed((one.round, one.step)):
                self._tell_released(node, one.round, one.step, "")
        self._answer()
        self.proceed(now)

    def forget(self, node: str, now: float, *, gone: str = "") -> None:
        """Its stream broke: it will say again what it holds. `gone`: it will not, and why."""
        self._lose_sight(node, for_good=bool(gone))
        if gone:
            self._going.pop(node, None)
            self._ended.pop(node, None)
            if self._attempt is not None and self._attempt.needs(node):
                self._fail(f"node {node} {gone}", now, blameless=True)

    def going(self, nodes: Iterable[str], now: float, *, rescue: bool | None = None) -> None:
        """These nodes are to be told to go, or have said that they do. If they have the only copy
        of something, and what ranks lose is to be written out, that begins before they hear it.
        `rescue`: whether it is to be; None: as after a failure."""
        leaving = dict.fromkeys(node for node in nodes if node not in self._going)
        rescue = self._spec.at_breakpoint if rescue is None else rescue
        newest = self.choose().restore if leaving and rescue else None
        ledger = self._ledger(newest.round) if newest is not None else None
        if newest is not None and ledger is not None and ledger.needs(newest.step, leaving):
            self.save(newest, now)
        self._going.update(leaving)
        self._replicas.going(leaving)
        for node in leaving:
            self._count(node)

    def attached(self, node: str, now: float, *, member: bool) -> None:
        """A stream of a node stands: what it may not have been told. `member`: of the round."""
        self._going.pop(node, None)
        self._replicas.attached(node)
        for ended in self._ended.get(node, ()):  # which may have gone with the last stream
            if not ended.ok or ended.step >= self.rewound_from:
                self.orders.append(((node,), ended))
        attempt = self._attempt
        if attempt is not None and attempt.needs(node):
            if node not in attempt.written:
                self.orders.append(((node,), attempt.order(node, now)))
            elif attempt.committing:
                self.orders.append(((node,), m.CommitCheckpoint(attempt.name)))
        if member and self._ledgers and self._mark() != m.Watermark(self._ledgers[0].name, -1):
            self.orders.append(((node,), self._mark()))

    def _kept(self, node: str, ledger: Ledger) -> int | None:
        attempt = self._attempt
        if attempt is None or node not in attempt.parts or attempt.plan.key[0] != ledger.name:
            return None
        return attempt.plan.key[1]

    # ------------------------------------------------------------ what is written

    def save(self, restore: m.Restore, now: float) -> None:
        """This snapshot, which a failure left, is to be written out, unless it was or is."""
        key = (restore.round, restore.step)
        if self.is_in_storage(key) or (self._plan is not None and self._plan.key == key):
            return
        self.abandon(f"step {restore.step} is written instead")
        self._intend(Plan(key, "breakpoint"))
        self._try(now)

    def is_in_storage(self, key: Key) -> bool:
        """Whether it was written, or a later one that ranks would rather go on from."""
        written = None if self.written is None else self._name_of(self.written)
        if written is None or self.rewound_from >= 0:
            return written == key
        return order_of(key) <= order_of(written)

    def proceed(self, now: float) -> None:
        """Raise the watermark, end what is late, begin what is due."""
        self._replicas.proceed(self._ledgers, self._raw, self._going, now)
        self._raise_watermark()
        if self._attempt is not None and now >= self._attempt.deadline:
            self._fail(f"it was not finished within {self._spec.limit:g} s", now)
        wanted = self._wanted(now) if self._attempt is None else None
        if wanted is not None:
            asked = self.asked
            is_asked = asked is not None and asked[0] == wanted[0] and asked[1] <= wanted[1]
            late = 0.0 if is_asked else self._storage.not_before
            self._intend(Plan(wanted, "asked" if is_asked else "periodic", late))
        self._try(now)

    def persisted(self, node: str, report: m.Persisted, now: float) -> None:
        """A node has written its share, or the coordinator the marker; or could not."""
        attempt = self._attempt
        if attempt is None or report.attempt != attempt.name or node not in attempt.parts:
            return
        if not report.ok:
            self._fail(f"{report.reason} (node {node})", now)
        elif report.committed and node == attempt.coordinator and attempt.committing:
            self._committed(attempt, now)
        elif not report.committed and node not in attempt.written:
            attempt.written[node] = report.nbytes
            if attempt.committing:
                order = m.CommitCheckpoint(attempt.name)
                self.orders.append(((attempt.coordinator,), order))

    def not_replicated(self, node: str, report: m.NotReplicated, now: float) -> None:
        """A node could not copy what it was told to."""
        self._replicas.failed(node, report)
        self.proceed(now)

    def hurry(self, now: float) -> None:
        """The job is to end: what waits after a failed attempt is tried once more without, and so
        is what was given up, if it is still whole."""
        self._storage.not_before = now
        if self._plan is None and self._owed is not None:
            key, _ = self._owed
            ledger = self._ledger(key[0])
            if ledger is not None and ledger.is_whole(key[1]):
                self._storage.failures = 0
                self._intend(Plan(key, "periodic"))
        if self._plan is not None:
            self._plan.not_before = now
            self._try(now)

    def abandon(self, reason: str) -> None:
        """Nothing is written any more."""
        if self._attempt is not None:
            self._over(self._attempt, ok=False, reason=reason)
        if self._plan is not None:
            self._owe(self._plan.key, "no saver is ready" if self._no_saver else reason)
        self._plan = None

    def _owe(self, key: Key, why: str) -> None:
        """This one was to be written, and is not; the first reason stays."""
        owed = self._owed
        if owed is None or order_of(owed[0]) < order_of(key):
            self._owed = (key, why)

    @property
    def owed(self) -> str:
        """Which checkpoint is not in storage that was the last to be written, and why, in a clause;
        empty if none is lacking."""
        if self._owed is None:
            return ""
        (_, step), why = self._owed
        return f"step {step} is not in storage, where it was to be: {why}"

    @property
    def busy(self) -> str:
        """What is being written or about to be, in a sentence; empty if nothing is."""
        if self._plan is not None:
            return f"step {self._plan.key[1]} is being saved"
        waiting = [key[1] for key in self._since]
        return f"step {max(waiting)} is about to be saved" if waiting else ""

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        pairing = self._replicas.next_deadline()
        dues = [] if pairing is None else [pairing]
        if self._attempt is not None:
            return min([*dues, self._attempt.deadline])
        dues += [since + WAIT_FOR_ALL for since in self._since.values()]
        if self._plan is not None and not self._no_saver:
            dues.append(self._plan.not_before)
        return min(dues, default=None)

    def overslept(self, by: float) -> None:
        """The master did not listen for `by` seconds: no answer is late by that."""
        self._replicas.overslept(by)
        if self._attempt is not None:
            self._attempt.deadline += by

    # ------------------------------------------------------------ the record, the page

    def restore(
        self,
        written: m.Restore | None,
        rejected: Iterable[Rejected],
        rewound_from: int = -1,
        restore_step: int = -1,
    ) -> None:
        """What the master before this one knew."""
        self.written = written
        self.rewound_from = rewound_from
        self.restore_step = restore_step
        self._begun = (written.round, written.step) if written is not None else None
        self._restore_rejected(rejected)

    def status(self) -> str:
        """One sentence for the status page; empty of a job without snapshots."""
        parts = []
        newest = self.choose().restore
        if newest is not None:
            ledger = self._ledger(newest.round)
            paired = ledger is not None and self._replicas.is_on_two(ledger, newest.step)
            where = ", on two nodes" if paired else ""
            parts.append(f"step {newest.step} is whole in memory{where}")
        if self.written is not None:
            parts.append(f"step {self.written.step} is the newest checkpoint")
        if self._attempt is not None:
            done = f"{len(self._attempt.written)} of {some(len(self._attempt.parts), 'node')}"
            parts.append(f"step {self._attempt.plan.key[1]} is being saved ({done} done)")
        elif self._plan is not None:
            why = "no saver is ready" if self._no_saver else "the last attempt failed"
            parts.append(f"step {self._plan.key[1]} waits to be saved: {why}")
        if skipped := self._skipped():
            parts.append(f"{some(skipped, 'snapshot')} skipped in this round: no slot was free")
        return "; ".join(parts)

    # ------------------------------------------------------------ what is wanted

    def _wanted(self, now: float) -> Key | None:
        """The newest snapshot that ranks want written, and that is as whole as it will get."""
        whole = {
            (ledger.name, step)
            for ledger in self._ledgers
            for step, snap in ledger.snaps.items()
            if snap.wanted and ledger.is_whole(step) and not self._is_passed((ledger.name, step))
        }
        if self._plan is not None:
            whole.discard(self._plan.key)
        self._since = {key: self._since.get(key, now) for key in whole}
        for key in sorted(whole, key=order_of, reverse=True):
            ledger = self._ledger(key[0])
            running = ledger is not None and ledger.upto is None and not ledger.is_full(key[1])
            if not running or now >= self._since[key] + WAIT_FOR_ALL:
                del self._since[key]
                return key
        return None

    def _is_passed(self, key: Key) -> bool:
        """Whether it was written, or never will be."""
        if self._plan is not None and key == self._plan.key:
            return False
        return self._begun is not None and order_of(key) <= order_of(self._begun)

    def _intend(self, plan: Plan) -> None:
        self._plan = plan
        if self._begun is None or order_of(plan.key) > order_of(self._begun):
            self._begun = plan.key
        for ledger in self._ledgers:
            for step in ledger.steps():
                if order_of((ledger.name, step)) < order_of(plan.key):
                    self._release(ledger, step, f"step {plan.key[1]} is written instead")
        self._since = {k: at for k, at in self._since.items() if order_of(k) > order_of(plan.key)}

    def _release(self, ledger: Ledger, step: int, reason: str, told: Collection[str] = ()) -> None:
        """No checkpoint will be written (any more) of a step that ranks want written."""
        snap = ledger.snaps.get(step)
        for node in [one for one in snap.wanted if one not in told] if snap is not None else ():
            self._tell_released(node, ledger.name, step, reason)

    def _tell_released(self, node: str, round_: RoundName, step: int, reason: str) -> None:
        written = self.written is not None and (round_, step) == self._name_of(self.written)
        ok_reason = "" if written else reason or "a newer one was taken"
        order = m.PersistOver("", round_, step, ok=written, reason=ok_reason)
        self.orders.append(((node,), order))

    # ------------------------------------------------------------ attempts

    def _try(self, now: float) -> None:
        plan = self._plan
        if plan is None or self._attempt is not None or now < plan.not_before:
            return
        ledger = self._ledger(plan.key[0])
        step = plan.key[1]
        if ledger is None or not ledger.is_whole(step):
            why = ledger.why_not_whole(step) if ledger is not None else "no node holds it any more"
            self._say(f"step {step} cannot be saved: {why}", "warning")
            self._owe(plan.key, why)
            self._drop_plan(why)
            return
        parts = divide(ledger, step)
        savers = {node: self._raw[node].saver for node in parts}
        coordinator = next((n for n in parts if savers[n] is not None or len(parts) == 1), None)
        self._no_saver = coordinator is None
        if coordinator is None:
            return  # until a node says that it has one
        self._attempt = Attempt(
            name=self._mint(),
            plan=plan,
            world_size=ledger.world_size,
            parts=parts,
            coordinator=coordinator,
            endpoint=savers[coordinator],
            began=now,
            deadline=now + self._spec.limit,
            rewound_from=self.rewound_from,
        )
        for node in parts:
            self.orders.append(((node,), self._attempt.order(node, now)))

    def _committed(self, attempt: Attempt, now: float) -> None:
        round_, step = attempt.plan.key
        self.written = m.Restore(round_, step, attempt.world_size)
        if attempt.rewound_from == self.rewound_from and (
            self.restore_step < 0 or self._has_obeyed
        ):
            self.rewound_from = self.restore_step = -1  # storage tells by itself from now on
        self._storage.works()
        if self._owed is not None and order_of(self._owed[0]) <= order_of(attempt.plan.key):
            self._owed = None
        parts = some(attempt.writers, "part")
        size = in_size(sum(attempt.written.values()))
        took = f"{now - attempt.began:.1f} s"
        self._say(f"the checkpoint of step {step} is written: {parts}, {size} in {took}")
        self._plan = None
        self._over(attempt, ok=True, reason="")
        ledger = self._ledger(round_)
        if ledger is not None:
            self._release(ledger, step, "", told=attempt.parts)

    def _fail(self, reason: str, now: float, *, blameless: bool = False) -> None:
        """The attempt under way has come to nothing. `blameless`: the next need not wait."""
        attempt = self._attempt
        assert attempt is not None
        plan = attempt.plan
        what = f"the checkpoint of step {plan.key[1]} was not written: {reason}"
        self._over(attempt, ok=False, reason=reason)
        self._owe(plan.key, reason)
        if blameless:
            self._say(what, "warning")
            return
        wait = self._storage.failed(now)
        plan.not_before = self._storage.not_before
        if self._storage.failures < MAX_TRIES:
            self._say(f"{what}; it is tried again in {wait:g} s", "warning")
            return
        times = f"{self._storage.failures} attempts have failed in a row"
        later = f"the next checkpoint is tried in {wait:g} s at the earliest"
        self._say(f"{what}; {times}: this one is given up, {later}", "error")
        self._drop_plan(reason)

    def _drop_plan(self, reason: str) -> None:
        plan, self._plan = self._plan, None
        ledger = self._ledger(plan.key[0]) if plan is not None else None
        if plan is not None and ledger is not None:
            self._release(ledger, plan.key[1], reason)

    def _over(self, attempt: Attempt, *, ok: bool, reason: str) -> None:
        order = m.PersistOver(attempt.name, *attempt.plan.key, ok=ok, reason=reason)
        self._attempt = None
        here = tuple(node for node in attempt.parts if node in self._raw)
        for node in attempt.parts:
            self._ended[node] = [*self._ended.get(node, ()), order][-MOST_ENDED:]
        if here:
            self.orders.append((here, order))
        for node in here:
            if node in self._going:
                self._count(node)

    @staticmethod
    def _name_of(restore: m.Restore) -> Key:
        return (restore.round, restore.step)
