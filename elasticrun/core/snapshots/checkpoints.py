"""Which snapshots are written as checkpoints, by which nodes, and when one is abandoned.

The newest whole step that the ranks want written becomes a checkpoint, and with
--save-at-breakpoint so does the step restored after a failure. One is written at a time. A failed
attempt is repeated after a growing delay. The loss of a node ends an attempt, unless that node has
written its part and is not the coordinator. The step of a later failure takes precedence over one
still being written, whose slot it needs. `RestorePoints` knows which steps are whole.

In an attempt the nodes write one part for each rank whose snapshot they hold: the rank's own items,
and for one rank of each content also the shared items. Once all parts are written, the coordinator
writes the marker, which completes the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from elasticrun.core.snapshots.choice import RestorePoints
from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.types import Key, Outbox, key_of, sort_key
from elasticrun.core.words import plural
from elasticrun.core.work.work import Work
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName

MAX_ENDED = 3
"""Number of past attempts whose end is sent again to a node that attaches: the newest ones."""

MAX_ENDED_NODES = 20_000
"""Maximum number of nodes for which these ends are kept; the oldest are dropped, because nodes may
never return."""

MAX_REFUSED = 64
"""Maximum number of remembered steps that can never be whole."""

WAIT_FOR_ALL = 5.0
"""Seconds that a whole step waits, before it is written, for other ranks to save it too. A step is
whole once each content has a holder; ranks with equal content add their own items."""

BACK_OFF = 1.0
"""Seconds between a failed attempt and the next; doubled each time, up to MAX_BACK_OFF."""

MAX_BACK_OFF = 60.0

MAX_TRIES = 5
"""Number of consecutive failed attempts after which a snapshot is abandoned, because its slot is
needed. From then on each snapshot gets a single attempt, until one succeeds."""


@dataclass(slots=True)
class Plan:
    """A snapshot that must be written."""

    key: Key
    reason: str  # as in Persist
    not_before: float = 0.0


@dataclass(slots=True)
class RetryState:
    """The state of retries: consecutive failed attempts, over all snapshots."""

    failures: int = 0
    not_before: float = 0.0  # the next attempt starts no earlier, unless it cannot wait

    def failed(self, now: float) -> float:
        """Count a failed attempt; return the seconds until the next one."""
        wait = min(MAX_BACK_OFF, BACK_OFF * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.not_before = now + wait
        return wait


@dataclass(slots=True)
class Share:
    """What one node writes."""

    ranks: tuple[int, ...]  # whose own items it writes
    shared: tuple[int, ...]  # of these, the ones whose shared items it writes too


@dataclass(slots=True)
class Attempt:
    """One attempt to write a plan, over all participating nodes."""

    name: str
    plan: Plan
    world_size: int
    parts: dict[str, Share]  # by node
    coordinator: str
    endpoint: Endpoint | None  # of the coordinator's saver
    began: float
    deadline: float
    rewound_from: int = -1  # as in Persist
    used: str = ""  # as in Persist
    written: dict[str, int] = field(default_factory=dict)  # node -> bytes
    writers: int = 0  # number of parts, one per rank

    def __post_init__(self) -> None:
        self.writers = sum(len(part.ranks) for part in self.parts.values())

    @property
    def committing(self) -> bool:
        """Whether every part is written, but not the marker."""
        return len(self.written) == len(self.parts)

    def needs(self, node: str) -> bool:
        """Whether this node still has work to do in the attempt."""
        if node == self.coordinator:
            return True
        return node in self.parts and node not in self.written

    def order(self, node: str, now: float) -> m.Persist:
        """The order for this node: what it must write by when."""
        part = self.parts[node]
        round_, step = self.plan.key
        coordinates = node == self.coordinator
        return m.Persist(
            attempt=self.name,
            round=round_,
            step=step,
            world_size=self.world_size,
            ranks=part.ranks,
            shared=part.shared,
            writers=self.writers,
            coordinates=coordinates,
            coordinator=None if coordinates else self.endpoint,
            reason=self.plan.reason,
            limit=max(0.1, self.deadline - now),
            rewound_from=self.rewound_from,
            used=self.used if coordinates else "",
        )


class Checkpoints:
    """Plans, runs and tracks the attempts."""

    def __init__(
        self,
        spec: m.SaveSpec,
        mint: Callable[[], str],
        points: RestorePoints,
        outbox: Outbox,
        work: Work,
    ) -> None:
        """`mint` returns a name for every attempt."""
        self._work = work
        self._spec = spec
        self._mint = mint
        self._points = points
        self._outbox = outbox
        self._attempt: Attempt | None = None  # of the plan
        self._plan: Plan | None = None
        self._retry = RetryState()
        self._newest_planned: Key | None = None  # older ones are skipped
        self._whole_since: dict[Key, float] = {}  # wanted, whole, may grow -> since when
        self._ended: dict[str, list[m.PersistOver]] = {}  # node -> how its last attempts ended
        self._refused: dict[Key, None] = {}  # wanted, but can never be whole
        self._inherited: Key | None = None  # the previous master may have had to save it
        self._no_saver = False
        self._missing: tuple[Key, str] | None = None  # the last one that was not written, and why
        self.requested: Key | None = None  # this and later steps are saved because a node leaves
        self.written: m.Restore | None = None  # the newest committed checkpoint

    # ------------------------------------------------------------ nodes and rounds

    def round_begins(self, restore: m.Restore | None) -> None:
        """A round begins: drop what is newer than `restore`, because its agents discard that."""
        self._whole_since.clear()
        upto = None if restore is None else sort_key(key_of(restore))
        if self._plan is not None and (upto is None or sort_key(self._plan.key) > upto):
            self.abandon("the job continues from another step")
        if self._missing and (upto is None or sort_key(self._missing[0]) > upto):
            self._missing = None  # training was rewound to before it

    def release_incomplete(self) -> None:
        """Release the steps of older rounds that are not whole: they never will be."""
        for ledger in self._points.ledgers[1:]:
            for step in ledger.steps():
                if not ledger.is_whole(step):
                    self._release(ledger, step, ledger.why_not_whole(step))

    def on_holdings(self, node: str, report: m.Holdings) -> None:
        """Tell a node which of its wanted steps have been written, or never will be."""
        for one in report.held:
            if not one.wanted:
                continue
            if self._is_passed((one.round, one.step)):
                self._send_released(node, one.round, one.step, "")
            elif (ledger := self._points.ledger(one.round)) and (why := ledger.why_never(one.step)):
                self._note_never_whole(ledger, one.step, why)
                self._send_released(node, one.round, one.step, why)

    def node_gone(self, node: str, how: str, now: float, *, replaced: bool = False) -> None:
        """The node is no longer waited for: fail the attempt that needs it. `replaced`: a newer
        incarnation has attached, which knows of no attempt. Otherwise the same agent may return; it
        keeps snapshots until it learns that their attempts are over."""
        if replaced:
            self._ended.pop(node, None)
        if self._attempt is not None and self._attempt.needs(node):
            self._fail(f"node {node} {how}", now, blameless=True)

    def kept_by(self, node: str) -> Key | None:
        """The snapshot for whose checkpoint this node stays, although it is leaving; None: none."""
        attempt = self._attempt
        return attempt.plan.key if attempt is not None and node in attempt.parts else None

    def attached(self, node: str, now: float) -> None:
        """A node has attached: send what it may have missed."""
        for ended in self._ended.get(node, ()):  # may have been lost with the last stream
            if not ended.ok or ended.step >= self._points.rewound_from:
                self._outbox.send(ended, node)
        attempt = self._attempt
        if attempt is not None and attempt.needs(node):
            if node not in attempt.written:
                self._outbox.send(attempt.order(node, now), node)
            elif attempt.committing:
                self._outbox.send(m.CommitCheckpoint(attempt.name), node)

    # ------------------------------------------------------------ writing

    def save(self, restore: m.Restore, now: float) -> None:
        """Write this snapshot, which a failure left, unless it is in storage or being written."""
        key = key_of(restore)
        if self.is_in_storage(key) or (self._plan is not None and self._plan.key == key):
            return
        self.abandon(f"step {restore.step} is written instead")
        self._set_plan(Plan(key, "breakpoint"))
        self._start_attempt(now)

    def is_in_storage(self, key: Key) -> bool:
        """Whether this snapshot, or a later one that ranks would prefer to restore, was written."""
        written = None if self.written is None else key_of(self.written)
        if written is None or self._points.rewound_from >= 0:
            return written == key
        return sort_key(key) <= sort_key(written)

    def proceed(self, now: float) -> None:
        """End attempts that are late, and start those that are due."""
        if self._attempt is not None and now >= self._attempt.deadline:
            self._fail(f"it was not finished within {self._spec.limit:g} s", now)
        newest = self._wanted(now) if self._attempt is None else None
        if newest is not None:
            requested = self.requested
            is_requested = (
                requested is not None and requested[0] == newest[0] and requested[1] <= newest[1]
            )
            late = 0.0 if is_requested else self._retry.not_before
            reason = "breakpoint" if newest == self._inherited else "periodic"
            self._set_plan(Plan(newest, "asked" if is_requested else reason, late))
        self._start_attempt(now)

    def release_failed(self) -> None:
        """For the running round: release wanted steps that can never be whole because a rank could
        not save them. Call this before such steps are given up."""
        for ledger in self._points.ledgers[:1]:
            for step in sorted(ledger.failed):
                snap = ledger.snaps.get(step)
                if snap is None or not snap.wanted or self._is_passed((ledger.name, step)):
                    continue
                if why := ledger.why_never(step):
                    self._note_never_whole(ledger, step, why)
                    self._release(ledger, step, why)

    def _note_never_whole(self, ledger: Ledger, step: int, why: str) -> None:
        """Record that this step was wanted, but can never be whole."""
        key = (ledger.name, step)
        self._refused[key] = None  # older ones that are whole must still be written
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._note_missing(key, why)
        if not self._points.failed_saves.give_up(step):
            self._outbox.log(f"the checkpoint of step {step} is not written: {why}", "error")

    def persisted(self, node: str, report: m.Persisted, now: float) -> None:
        """A node has written its share, or the coordinator the marker; or failed to."""
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
                self._outbox.send(m.CommitCheckpoint(attempt.name), attempt.coordinator)

    def retry_now(self, now: float) -> None:
        """The job is ending: retry a failed attempt without delay, and plan an abandoned snapshot
        again if it is still whole."""
        self._retry.not_before = now
        if self._plan is None and self._missing is not None:
            key, _ = self._missing
            ledger = self._points.ledger(key[0])
            if ledger is not None and ledger.is_whole(key[1]):
                self._retry.failures = 0
                self._set_plan(Plan(key, "periodic"))
        if self._plan is not None:
            self._plan.not_before = now
            self._start_attempt(now)

    def abandon(self, reason: str) -> None:
        """End the current attempt and drop the plan, because of `reason`."""
        if self._attempt is not None:
            self._end_attempt(self._attempt, ok=False, reason=reason)
        if self._plan is not None:
            self._note_missing(self._plan.key, "no saver is ready" if self._no_saver else reason)
        self._plan = None

    def _note_missing(self, key: Key, why: str) -> None:
        """Record that this step should have been written but was not; keep the first reason."""
        missing = self._missing
        if missing is None or sort_key(missing[0]) < sort_key(key):
            self._missing = (key, why)

    @property
    def why_missing(self) -> str:
        """The last wanted checkpoint that is not in storage, and why, as a clause; "" if none is
        missing."""
        if self._missing is None:
            return ""
        (_, step), why = self._missing
        return f"step {step} was not written to storage: {why}"

    @property
    def activity(self) -> str:
        """What is being written or about to be, as a clause; "" if nothing."""
        if self._plan is not None:
            return f"step {self._plan.key[1]} is being saved"
        waiting = [key[1] for key in self._whole_since]
        return f"step {max(waiting)} is about to be saved" if waiting else ""

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        if self._attempt is not None:
            return self._attempt.deadline
        dues = [since + WAIT_FOR_ALL for since in self._whole_since.values()]
        if self._plan is not None and not self._no_saver:
            dues.append(self._plan.not_before)
        return min(dues, default=None)

    def overslept(self, by: float) -> None:
        """The master was not listening for `by` seconds: the attempt gets that much longer."""
        if self._attempt is not None:
            self._attempt.deadline += by

    def restore(self, written: m.Restore | None) -> None:
        """Take over the previous master's newest checkpoint."""
        self.written = written
        self._newest_planned = key_of(written) if written is not None else None

    def take_over(self, restore: m.Restore | None) -> None:
        """The recorded round restores this snapshot. With --save-at-breakpoint, the previous master
        may have died before it was saved."""
        if self._spec.at_breakpoint and restore is not None:
            self._inherited = key_of(restore)

    def status(self) -> list[str]:
        """Clauses for the status page."""
        parts = []
        if self.written is not None:
            parts.append(f"step {self.written.step} is the newest checkpoint")
        if self._attempt is not None:
            done = f"{len(self._attempt.written)} of {plural(len(self._attempt.parts), 'node')}"
            parts.append(f"step {self._attempt.plan.key[1]} is being saved ({done} done)")
        elif self._plan is not None:
            why = "no saver is ready" if self._no_saver else "the last attempt failed"
            parts.append(f"step {self._plan.key[1]} waits to be saved: {why}")
        return parts

    # ------------------------------------------------------------ what ranks want written

    def _wanted(self, now: float) -> Key | None:
        """Remove and return the newest snapshot that ranks want written and that is complete or has
        waited long enough for more ranks; None if there is none."""
        whole = {
            (ledger.name, step)
            for ledger in self._points.ledgers
            for step, snap in ledger.snaps.items()
            if (snap.wanted or self._inherited == (ledger.name, step))
            and ledger.is_whole(step)
            and self._work.knows((ledger.name, step))
            and not self._is_passed((ledger.name, step))
        }
        if self._plan is not None:
            whole.discard(self._plan.key)
        self._whole_since = {key: self._whole_since.get(key, now) for key in whole}
        for key in sorted(whole, key=sort_key, reverse=True):
            ledger = self._points.ledger(key[0])
            may_grow = key == self._inherited or (ledger is not None and ledger.upto is None)
            grows = may_grow and ledger is not None and not ledger.is_full(key[1])
            if not grows or now >= self._whole_since[key] + WAIT_FOR_ALL:
                del self._whole_since[key]
                return key
        return None

    def _is_passed(self, key: Key) -> bool:
        """Whether this snapshot was written, or never will be."""
        if self._plan is not None and key == self._plan.key:
            return False
        if key in self._refused:
            return True
        return self._newest_planned is not None and sort_key(key) <= sort_key(self._newest_planned)

    def _set_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._log_passed(plan)
        if self._newest_planned is None or sort_key(plan.key) > sort_key(self._newest_planned):
            self._newest_planned = plan.key
        for ledger in self._points.ledgers:
            for step in ledger.steps():
                if sort_key((ledger.name, step)) < sort_key(plan.key):
                    self._release(ledger, step, f"step {plan.key[1]} is written instead")
        self._whole_since = {
            k: at for k, at in self._whole_since.items() if sort_key(k) > sort_key(plan.key)
        }

    def _log_passed(self, plan: Plan) -> None:
        """Log wanted steps that are skipped because a newer one is written."""
        passed = sorted(
            step
            for ledger in self._points.ledgers
            for step, snap in ledger.snaps.items()
            if snap.wanted
            and sort_key((ledger.name, step)) < sort_key(plan.key)
            and not self._is_passed((ledger.name, step))
        )
        if passed:
            steps = f"step{'s' if len(passed) > 1 else ''} {', '.join(map(str, passed))}"
            instead = f"step {plan.key[1]} is written instead"
            self._outbox.log(f"the checkpoint of {steps} is skipped: {instead}", "warning")

    def _release(
        self, ledger: Ledger, step: int, reason: str, except_for: Collection[str] = ()
    ) -> None:
        """Tell the nodes whose ranks want this step written that they may release it. `reason`:
        why it is not written; "" if it is."""
        snap = ledger.snaps.get(step)
        for node in (
            [one for one in snap.wanted if one not in except_for] if snap is not None else ()
        ):
            self._send_released(node, ledger.name, step, reason)

    def _send_released(self, node: str, round_: RoundName, step: int, reason: str) -> None:
        written = self.written is not None and (round_, step) == key_of(self.written)
        ok_reason = "" if written else reason or "a newer one was taken"
        self._outbox.send(m.PersistOver("", round_, step, ok=written, reason=ok_reason), node)

    # ------------------------------------------------------------ attempts

    def _start_attempt(self, now: float) -> None:
        plan = self._plan
        if plan is None or self._attempt is not None or now < plan.not_before:
            return
        ledger = self._points.ledger(plan.key[0])
        step = plan.key[1]
        if ledger is None or not ledger.is_whole(step):
            why = ledger.why_not_whole(step) if ledger is not None else "no node holds it now"
            self._outbox.log(f"step {step} cannot be saved: {why}", "warning")
            self._note_missing(plan.key, why)
            self._drop_plan(why)
            return
        parts = divide(ledger, step)
        savers = {node: self._points.reports[node].saver for node in parts}
        coordinator = next((n for n in parts if savers[n] is not None or len(parts) == 1), None)
        self._no_saver = coordinator is None
        if coordinator is None:
            return  # until a node reports a saver
        self._attempt = Attempt(
            name=self._mint(),
            plan=plan,
            world_size=ledger.world_size,
            parts=parts,
            coordinator=coordinator,
            endpoint=savers[coordinator],
            began=now,
            deadline=now + self._spec.limit,
            rewound_from=self._points.rewound_from,
            used=self._work.used_by(plan.key),
        )
        for node in parts:
            self._outbox.send(self._attempt.order(node, now), node)

    def _committed(self, attempt: Attempt, now: float) -> None:
        round_, step = attempt.plan.key
        self.written = m.Restore(round_, step, attempt.world_size)
        self._points.committed(attempt.rewound_from)
        self._retry = RetryState()  # writing works
        if self._missing is not None and sort_key(self._missing[0]) <= sort_key(attempt.plan.key):
            self._missing = None
        parts = plural(attempt.writers, "part")
        size = format_size(sum(attempt.written.values()))
        took = f"{now - attempt.began:.1f} s"
        self._outbox.log(f"the checkpoint of step {step} is written: {parts}, {size} in {took}")
        self._plan = None
        self._end_attempt(attempt, ok=True, reason="")
        ledger = self._points.ledger(round_)
        if ledger is not None:
            self._release(ledger, step, "", except_for=attempt.parts)

    def _fail(self, reason: str, now: float, *, blameless: bool = False) -> None:
        """End the current attempt as failed. `blameless`: storage is not at fault, so the next
        attempt need not wait."""
        attempt = self._attempt
        assert attempt is not None
        plan = attempt.plan
        what = f"the checkpoint of step {plan.key[1]} was not written: {reason}"
        self._end_attempt(attempt, ok=False, reason=reason)
        self._note_missing(plan.key, reason)
        if blameless:
            self._outbox.log(what, "warning")
            return
        wait = self._retry.failed(now)
        plan.not_before = self._retry.not_before
        if self._retry.failures < MAX_TRIES:
            self._outbox.log(f"{what}; retrying in {wait:g} s", "warning")
            return
        times = f"{self._retry.failures} attempts have failed in a row"
        later = f"the next attempt is in {wait:g} s at the earliest"
        self._outbox.log(f"{what}; {times}: this one is given up, {later}", "error")
        self._drop_plan(reason)

    def _drop_plan(self, reason: str) -> None:
        plan, self._plan = self._plan, None
        ledger = self._points.ledger(plan.key[0]) if plan is not None else None
        if plan is not None and ledger is not None:
            self._release(ledger, plan.key[1], reason)

    def _end_attempt(self, attempt: Attempt, *, ok: bool, reason: str) -> None:
        order = m.PersistOver(attempt.name, *attempt.plan.key, ok=ok, reason=reason)
        self._attempt = None
        present = tuple(node for node in attempt.parts if node in self._points.reports)
        for node in attempt.parts:
            self._ended[node] = [*self._ended.get(node, ()), order][-MAX_ENDED:]
        while len(self._ended) > MAX_ENDED_NODES:
            self._ended.pop(next(iter(self._ended)))
        if present:
            self._outbox.send(order, *present)
        self._points.stay_no_longer(attempt.parts)


def divide(ledger: Ledger, step: int) -> dict[str, Share]:
    """Which node writes which ranks of a whole step, in the order of ranks. If two nodes hold a
    rank, one of them writes it, preferably the rank's own node over one with a replica."""
    of: dict[int, tuple[str, int]] = {}
    snap = ledger.snaps[step]
    for node, contents in [*snap.own_contents(), *snap.held.items()]:
        for rank, content in contents.items():
            of.setdefault(rank, (node, content))
    ranks: dict[str, list[int]] = {}
    shared: dict[str, list[int]] = {}
    seen: set[int] = set()
    for rank in sorted(of):
        node, content = of[rank]
        ranks.setdefault(node, []).append(rank)
        if content not in seen:
            seen.add(content)
            shared.setdefault(node, []).append(rank)
    return {node: Share(tuple(own), tuple(shared.get(node, ()))) for node, own in ranks.items()}


def format_size(nbytes: int) -> str:
    """`1.2 GiB`, `300 MiB`, `12 KiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
