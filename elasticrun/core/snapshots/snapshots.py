"""All snapshots of a job: takes reports, queues orders.

`Work` knows what was used by each step of the work that is handed out. `RestorePoints` tracks which
steps are whole and chooses which one a round restores, `Agreement` compares ranks with equal state,
`Replicas` orders copies, `Checkpoints`
decides which snapshots nodes write, `Departures` chooses the step that ranks save before a node
leaves. The caller takes the results from `outbox`. A node that is leaving counts only for the
attempt that it takes part in: its agent stays until that is over, because it may hold the only copy
of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from elasticrun.config import REPLICA_LIMIT
from elasticrun.core.deadlines import earliest
from elasticrun.core.persisted import AgreementFacts, Rejected, SnapshotFacts, WorkFacts
from elasticrun.core.snapshots.agreement import Agreement, Difference
from elasticrun.core.snapshots.checkpoints import Checkpoints
from elasticrun.core.snapshots.choice import RestorePoints
from elasticrun.core.snapshots.replication import Replicas
from elasticrun.core.snapshots.types import Key, Outbox
from elasticrun.core.words import plural
from elasticrun.core.work.work import Work
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

MAX_TRIES = 5
"""Maximum number of steps requested, one after another, until all ranks can save one."""


class Snapshots:
    """Dispatches reports to the components of this folder."""

    def __init__(self, saves: m.SaveSpec, mint: Callable[[], str], term: int = 1) -> None:
        """`mint` returns a name for every attempt to write; `term`: of this master."""
        self._at_breakpoint = saves.at_breakpoint
        self.outbox = Outbox()
        self.work = Work(self.outbox)
        self.points = RestorePoints(term, saves.restore_step, self.outbox, self.work)
        self.checkpoints = Checkpoints(saves, mint, self.points, self.outbox, self.work)
        self.departures = Departures(self.outbox)
        self._replicas = Replicas(REPLICA_LIMIT, self.outbox)
        self.agreement = Agreement(saves.on_corruption, self.outbox)

    def begin_round(
        self, info: m.RoundInfo, seats: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """A round was formed, adopted or read from the record. Agents discard everything newer than
        the snapshot that it restores. `seats`: each node's group rank; it grows as more become
        known."""
        self.checkpoints.round_begins(info.restore)
        self.points.begin_round(info)
        self._replicas.begin_round(seats)
        if info.restore is not None:
            self.checkpoints.release_incomplete()

    # ------------------------------------------------------------ nodes

    def on_holdings(self, node: str, report: m.Holdings, now: float) -> None:
        """Process the report of all that a living node holds."""
        self.points.on_holdings(node, report)
        self._replicas.on_holdings(node, report)
        self.checkpoints.on_holdings(node, report)
        if report.kept is not None:
            self.agreement.remember(report.kept)
        self.points.answer()
        self.proceed(now)

    def not_replicated(self, node: str, report: m.NotReplicated, now: float) -> None:
        """A node could not copy what it was ordered to copy."""
        self._replicas.failed(node, report)
        self.proceed(now)

    def persisted(self, node: str, report: m.Persisted, now: float) -> None:
        """A node has written its share of a checkpoint, or failed to."""
        self.checkpoints.persisted(node, report, now)
        self.departures.saved(self.checkpoints.written)

    def departing(
        self, node: str, report: m.Departing | m.Missed, name: RoundName, members: tuple[str, ...]
    ) -> None:
        """A member of the current round is leaving, or cannot save the requested step."""
        self.departures.begin_round(name)
        if node not in members:
            return
        if isinstance(report, m.Departing):
            self.departures.departing(node, report, members)
        else:
            self.departures.missed(node, report, members)
        self.checkpoints.requested = self.departures.requested
        self.departures.saved(self.checkpoints.written)

    def forget(
        self, node: str, now: float, *, gone_because: str = "", replaced: bool = False
    ) -> None:
        """The node's stream broke, or the node is gone: its snapshots do not count. `gone_because`:
        why the node will not return; "" if it may reconnect and report its holdings again.
        `replaced`: a newer incarnation of it has attached."""
        self.points.forget(node, for_good=bool(gone_because))
        if self.agreement.running is not None:
            self.agreement.forget(node)
        if gone_because:
            self.checkpoints.node_gone(node, gone_because, now, replaced=replaced)

    def nodes_leave(self, nodes: Iterable[str], now: float, *, signalled: bool = False) -> None:
        """These nodes will be ordered to leave, or have announced that they leave (`signalled`:
        because of a death signal). If only they hold a part of the newest whole step, start writing
        it first: for departing nodes if the requested step is unsaved, for other nodes only with
        --save-at-breakpoint or if `signalled`."""
        nodes = tuple(nodes)
        unsaved = self.departures.nodes_leave(nodes)
        rescue = (signalled or self._at_breakpoint) if unsaved is None else unsaved
        leaving = dict.fromkeys(node for node in nodes if node not in self.points.leaving)
        newest = self.points.choose().restore if leaving and rescue else None
        ledger = self.points.ledger(newest.round) if newest is not None else None
        if newest is not None and ledger is not None and ledger.needs(newest.step, leaving):
            self.checkpoints.save(newest, now)
        self._replicas.nodes_leave(leaving)
        self.points.leave({node: self.checkpoints.kept_by(node) for node in leaving})

    def attached(self, node: str, now: float, *, member: bool) -> None:
        """A node has attached: send what it may have missed. `member`: of the round."""
        self.points.leaving.pop(node, None)
        self._replicas.attached(node)
        self.checkpoints.attached(node, now)
        if member:
            self.points.send_watermark(node)
            if (order := self.departures.order) is not None:
                self.outbox.send(order, node)

    # ------------------------------------------------------------ time

    def proceed(self, now: float) -> None:
        """Raise the watermark, end attempts that are late, and start those that are due."""
        points = self.points
        self._replicas.proceed(points.ledgers, points.reports, points.leaving, now)
        self.checkpoints.release_failed()
        points.raise_watermark(self._replicas)
        self.checkpoints.proceed(now)
        if points.ledgers and points.failed_saves.open:
            points.failed_saves.proceed(now, points.ledgers[0].world_size)

    def compare(self, now: float) -> list[Difference]:
        """Compare replicas of the running round, if that is due; return what differs."""
        return self.agreement.proceed(self.points.ledgers[0], self.points.reports, now)

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        failed = self.points.failed_saves
        return earliest(
            self._replicas.next_deadline(),
            self.checkpoints.next_deadline(),
            failed.next_deadline() if failed.open else None,
        )

    def overslept(self, by: float) -> None:
        """The master was not listening for `by` seconds: every deadline moves by that much."""
        self._replicas.overslept(by)
        self.agreement.overslept(by)
        self.checkpoints.overslept(by)

    # ------------------------------------------------------------ the record, the page

    def facts(self, _now: float) -> SnapshotFacts:
        """What the next master needs."""
        points = self.points
        rejected = tuple(Rejected(*key, times) for key, times in points.rejected.items())
        written = self.checkpoints.written
        rewound, work = points.rewound_from, WorkFacts()
        if self.work.is_used:
            work = self.work.facts()
        agreement = self.agreement.facts() if self.agreement.is_used else AgreementFacts()
        return SnapshotFacts(written, rejected, rewound, points.restore_step, work, agreement)

    def restore(self, facts: SnapshotFacts, _at: float) -> None:
        """Restore what the previous master knew."""
        self.checkpoints.restore(facts.written)
        self.work.restore(facts.work)
        self.points.restore(facts)
        self.agreement.restore(facts.agreement)

    def status(self) -> str:
        """One sentence for the status page; "" for a job without snapshots."""
        parts = []
        newest = self.points.choose().restore
        if newest is not None:
            ledger = self.points.ledger(newest.round)
            paired = ledger is not None and self._replicas.is_on_two(ledger, newest.step)
            where = ", on two nodes" if paired else ""
            parts.append(f"step {newest.step} is complete in memory{where}")
        parts += self.checkpoints.status()
        if skipped := self.points.count_skipped():
            parts.append(f"{plural(skipped, 'snapshot')} skipped in this round: no slot was free")
        parts.append(self.departures.status())
        return "; ".join(filter(None, parts))


class Departures:
    """Nodes that are leaving the current round, and the step that all ranks save before that.

    A departing node reports its current step, and within how many steps a message reaches every
    rank. The requested step is that far beyond the newest known one; nodes that depart at the same
    time get the same one. If a rank had already passed that step, or had no memory for it, a step
    twice as far ahead is requested; after MAX_TRIES the nodes leave without one.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._round: RoundName | None = None
        self._nodes: dict[str, m.Departing] = {}
        self._step = -1  # the requested step; -1: none
        self._margin = 0
        self._tries = 0
        self._is_saved = False  # or given up
        self._is_written = False

    def begin_round(self, name: RoundName) -> None:
        """A round was formed or adopted."""
        if name != self._round:
            self._round = name
            self._nodes.clear()
            self._step = -1
            self._tries = 0
            self._is_saved = self._is_written = False

    def departing(self, node: str, report: m.Departing, members: Sequence[str]) -> None:
        """A node is leaving. It repeats this to a new master, and after its stream broke.
        `members`: recipients of the orders."""
        if report.round != self._round:
            return
        if node not in self._nodes:
            self._outbox.log(f"node {node} must leave: {report.reason}")
        self._nodes[node] = report
        self._margin = max(self._margin, report.margin)
        if self._step < 0 or self._is_saved:
            self._is_saved = False
            recorded = max(report.asked, -1)
            fresh = recorded > self._step  # the previous master requested it
            step = recorded if fresh else max(report.step, self._step) + self._margin
            self._request_step(step, self._reason(), members)

    def missed(self, node: str, report: m.Missed, members: Sequence[str]) -> None:
        """A rank cannot save the requested step: request a later one, or give up."""
        if report.round != self._round or report.asked != self._step or self._is_saved:
            return
        why = f"node {node} had passed step {self._step}, or had no memory for it"
        self._tries += 1
        old = self._step
        if self._tries < MAX_TRIES:
            self._margin = min(2 * self._margin, m.MAX_MARGIN)
            self._request_step(max(report.step, self._step) + self._margin, why, members)
        else:
            self._is_saved = True  # given up: request no step again until another node departs
            tries = f"{MAX_TRIES} steps were requested"
            self._outbox.log(f"{tries}, but no step could be saved by all ranks: {why}", "warning")
        # Release the slots held for the old step. Sent after the new SaveAt, because nodes may
        # leave on PersistOver.
        over = m.PersistOver("", report.round, old, ok=False, reason=why)
        self._outbox.send(over, *members)

    def saved(self, restore: m.Restore | None) -> None:
        """The newest checkpoint is `restore`: note whether it includes the requested step."""
        if restore is not None and restore.round == self._round and 0 <= self._step <= restore.step:
            self._is_saved = self._is_written = True

    def has_saved(self, name: RoundName) -> bool:
        """Whether the step that departing nodes requested in this round is in storage."""
        return self._is_written and name == self._round

    def nodes_leave(self, nodes: Iterable[str]) -> bool | None:
        """These nodes leave. Return whether the requested step is unsaved; None if they were not
        departing."""
        found = [node for node in nodes if self._nodes.pop(node, None) is not None]
        return not self._is_saved if found else None

    @property
    def order(self) -> m.SaveAt | None:
        """The order that a node of the round may have missed, if any."""
        if self._round is None or self._step < 0 or self._is_saved or not self._nodes:
            return None
        return m.SaveAt(self._round, self._step, self._reason())

    @property
    def requested(self) -> Key | None:
        """The round and the step that were requested last; None if none was."""
        return None if self._round is None or self._step < 0 else (self._round, self._step)

    def status(self) -> str:
        """A clause for the status page; "" if no node is leaving."""
        return f"{self._reason()}: all ranks save step {self._step}" if self.order else ""

    def _request_step(self, step: int, why: str, members: Sequence[str]) -> None:
        self._step = step
        self._is_written = False
        assert self._round is not None
        self._outbox.log(f"all ranks must save step {step}: {why}")
        self._outbox.send(m.SaveAt(self._round, step, self._reason()), *members)

    def _reason(self) -> str:
        nodes = list(self._nodes)
        more = f" and {plural(len(nodes) - 1, 'node')} more" if len(nodes) > 1 else ""
        return f"node {nodes[0]}{more} must leave" if nodes else "a node must leave"
