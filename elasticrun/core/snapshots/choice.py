"""Which snapshot the next round restores, and which node can provide which shard of it.

A snapshot is named (round, step). Steps of different rounds are never combined, because after a
restart the same number may stand for another state. Snapshots of two rounds count: those of the
current one, and those of the round that it restored from, up to the restored step. A node's
snapshots count while it is connected. On every new stream it reports all of them again, before it
reports that its ranks have stopped.

*The watermark* is the newest whole step of the current round; older ones are no longer needed. With
replicas it is the newest step with every part on two nodes (`replication`). If ranks hold different
steps above it and none of these can become whole, the steps are *given up*: they no longer count,
so their slots become free.

*The choice* is the newest whole step of the current round, else of the previous one, without bad
steps (a shard did not match its hash). Suspect steps come last.

A step is *suspect* if MAX_REJECTED rounds resumed from it and failed by themselves within
FEW_STEPS, before they had a whole step of their own. A failure before ranks have restored it and
done a step says nothing about it; nor does a signal from outside or the loss of a node. Suspicion
discards nothing: if nothing else is whole in memory, nor in storage, the step is tried again.

*If work is handed out*, a step counts only if it is known what was used by it (`core/work`).

*A person may request* a step (--restore-step). Only that one is restored, from memory or storage,
until a round that did so has a whole step of its own; and again if memory is lost before a
checkpoint of the result is written.

*A master that knows of no round* (a new one without a record, and no living rank that could report
one) trusts what agents have noted: the newest round that any of them names counts as the previous
one, with the snapshot that it had restored. Only rounds of masters with a lower term count: if a
clock was set back, newer snapshots would seem older. Decision 025.

Ranks with state of their own (`per_rank`) get it back at the cost of a few steps at most: the
newest whole step that has the state of every such rank is preferred to a newer one that lacks some.

*Training is rewound* when a snapshot is suspect. A checkpoint of that step or a later one is no
better, so it comes last too (`rewound_from`), until a newer one is committed: that one proves that
training has left the suspect steps behind.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from elasticrun.core.persisted import SnapshotFacts
from elasticrun.core.snapshots.failed_saves import FailedSaves
from elasticrun.core.snapshots.ledger import Ledger, in_spans
from elasticrun.core.snapshots.replication import Replicas
from elasticrun.core.snapshots.types import Key, Outbox, key_of
from elasticrun.core.work.work import Work
from elasticrun.wire import messages as m
from elasticrun.wire.types import NO_SKIP, RoundName, Skip

MAX_WAITING = 65536
"""Maximum number of pending requests for a shard whose holder may come back."""

MAX_REJECTED = 2
"""A snapshot is suspect after this many rounds failed by themselves soon after restoring it."""

NOT_KNOWN = "it is not known what was used by it of the work that is handed out"

FEW_STEPS = 10
"""A failure more than this many steps after a restore is not blamed on the restored snapshot."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next round restores. `why`: why a newer snapshot cannot be used. `skip`: as in
    Start."""

    restore: m.Restore | None
    why: str = ""
    skip: Skip = NO_SKIP


class RestorePoints:
    """Tracks which steps are whole, and chooses what a round restores."""

    def __init__(self, term: int, restore_step: int, outbox: Outbox, work: Work) -> None:
        """`term`: of this master. `restore_step`: requested by a person, -1: none."""
        self._term = term
        self._work = work
        self._outbox = outbox
        self.restore_step = restore_step  # requested; -1 again after a later checkpoint
        self.rewound_from = restore_step + 1 if restore_step >= 0 else -1  # as Skip.storage_from
        self.watermark = -1  # of the current round; -1: none yet
        self.ledgers: list[Ledger] = []  # of the current round and the previous one
        self.reports: dict[str, m.Holdings] = {}  # the last report of each connected node
        self.leaving: dict[str, Key | None] = {}  # nodes that are leaving, and what each stays for
        self.away: dict[str, None] = {}
        """Nodes that may come back with their snapshots."""
        self.has_distrusted = False
        """Whether `distrusted` has ever named a rank."""
        self._has_obeyed = False  # a round that restored the requested step has a whole step
        self._has_round = False  # a round of this master, or one reported to it
        self._last: m.RoundInfo | None = None  # of another master, as agents have noted it
        self._is_clock_logged = False
        self._waiting: dict[tuple[str, m.WhereIs], None] = {}  # the asking node and its request
        self._named: dict[tuple[str, Key, int], tuple[str, int]] = {}  # holders named to nodes
        self._dropped: dict[Key, None] = {}  # not to be restored again: spoiled
        self.rejected: dict[Key, int] = {}  # number of rounds that resumed from it and failed soon
        self._restored: m.Restore | None = None  # by the current round
        self.failed_saves = FailedSaves(outbox)
        self._reached = -1  # newest step that ranks reached after they had restored `_restored`

    # ------------------------------------------------------------ what is known

    @property
    def knows_round_from_agents(self) -> bool:
        """Whether the only known round is another master's, as agents have noted it."""
        return self._last is not None and not self._has_round

    def _note_earlier_round(self, last: m.RoundInfo | None) -> None:
        """Note the newest round that ran on an agent's node."""
        if self._has_round or last is None:
            return
        if last.name.term >= self._term:
            if not self._is_clock_logged:
                self._is_clock_logged = True
                what = f"it belongs to round {last.name}, but this master has term {self._term}"
                why = f"{what}; was a clock set back?"
                self._outbox.log(f"snapshots in memory are not used: {why}", "warning")
            return
        known = self._last
        if known is None or _round_key(known) < _round_key(last):
            self._last = last
            if self.restore_step < 0:
                self.rewound_from = last.skip.storage_from
            self._set_rounds(last)
        elif known.name == last.name and last.skip.storage_from < 0 and self.restore_step < 0:
            self.rewound_from = -1  # a checkpoint committed since then has ended the rewind

    def begin_round(self, info: m.RoundInfo) -> None:
        """A round was formed, adopted or read from the record."""
        self._has_round = True
        if info.restore is not None and info.restore.step != self.restore_step:
            self._has_obeyed = True  # under the previous master
        self._set_rounds(info)

    def _set_rounds(self, info: m.RoundInfo) -> None:
        """Set the rounds that count from now on."""
        restore = info.restore
        old = next((one for one in self.ledgers if restore and one.name == restore.round), None)
        self.ledgers = [Ledger(info.name, info.world_size)]
        if restore is not None:
            origin = old or Ledger(restore.round, restore.world_size)
            origin.end_at(restore.step)
            self.ledgers.append(origin)
        self._restored = restore
        self._reached = self.watermark = -1
        known = {one.name for one in self.ledgers}
        self._dropped = {key: None for key in self._dropped if key[0] in known}
        self.rejected = {key: n for key, n in self.rejected.items() if key[0] in known}
        self._named.clear()
        if self.failed_saves.was_used:
            self.failed_saves.clear()
        self._waiting.clear()
        for node in self.reports:
            self._update_ledgers(node)

    def expect(self, nodes: Iterable[str]) -> None:
        """Expect these nodes to report what they hold."""
        self.away.update(dict.fromkeys(nodes))

    def stop_expecting(self, node: str) -> None:
        """Stop expecting an inventory from this node: it has sent a report that always comes after
        one."""
        if node in self.away:
            del self.away[node]
            self.answer()

    def on_holdings(self, node: str, report: m.Holdings) -> None:
        """Process the inventory report of a connected node."""
        self.reports[node] = report
        self.away.pop(node, None)
        self._note_earlier_round(report.last)
        went_on = report.went_on
        if went_on is not None and self.ledgers and went_on.round == self.ledgers[0].name:
            self._reached = max(self._reached, went_on.step)
        self._update_ledgers(node)

    def forget(self, node: str, *, for_good: bool) -> None:
        """This node's snapshots do not count, for now or `for_good`."""
        self.reports.pop(node, None)
        self.away[node] = None
        self._update_ledgers(node)
        if for_good:
            del self.away[node]
            self.leaving.pop(node, None)
            self._waiting = {one: None for one in self._waiting if one[0] != node}
            self.answer()

    def leave(self, kept: Mapping[str, Key | None]) -> None:
        """These nodes are leaving: each counts only for the snapshot that it stays for."""
        self.leaving.update(kept)
        for node in kept:
            self._update_ledgers(node)

    def stay_no_longer(self, nodes: Iterable[str]) -> None:
        """The attempts for which these nodes may have stayed are over."""
        for node in nodes:
            if node in self.leaving:
                self.leaving[node] = None
                self._update_ledgers(node)

    def _update_ledgers(self, node: str) -> None:
        """Update the ledgers with what a node reported."""
        report = self.reports.get(node)
        held = report.held if report is not None else ()
        for ledger in self.ledgers:
            ledger.update(node, [one for one in held if one.round == ledger.name])
            if node in self.leaving:
                kept = self.leaving[node]
                ledger.keep_only(node, kept[1] if kept and kept[0] == ledger.name else None)

    def count_skipped(self) -> int:
        """How many snapshots the ranks of the current round have skipped: the maximum over the
        ranks."""
        name = self.ledgers[0].name if self.ledgers else None
        reports = (one for one in self.reports.values() if one.last and one.last.name == name)
        return max((one.skipped for one in reports), default=0)

    def ledger(self, name: RoundName) -> Ledger | None:
        """The ledger of this round; None if the round does not count."""
        return next((one for one in self.ledgers if one.name == name), None)

    def raise_watermark(self, replicas: Replicas) -> None:
        """Raise the watermark, or give up steps that can never be whole; send either to all
        nodes."""
        for ledger in self.ledgers[:1]:
            whole = [step for step in ledger.steps() if ledger.is_whole(step)]
            if self.knows_round_from_agents:  # no node needs to know
                self.watermark = max([self.watermark, *whole])
                continue
            settled = [step for step in reversed(whole) if self._work.settle((ledger.name, step))]
            newest = next((s for s in reversed(settled) if replicas.counts(ledger, s)), -1)
            if newest > self.watermark:
                self.watermark = newest
                self._has_obeyed = True
                self._outbox.send(self._watermark_order(), *self.reports)
            elif ledger.failed and (
                (never := ledger.newest_never_whole(max(self.watermark, ledger.given_up[1]))) >= 0
            ):
                ledger.give_up(self.watermark, never)
                self._outbox.send(self._watermark_order(), *self.reports)
            elif whole and whole[0] > self.watermark:
                # it waits for replicas, or for what was used: giving up now would drop it too
                if not self._work.can_settle((ledger.name, whole[0])):
                    ledger.give_up(self.watermark, whole[0])
                    self._outbox.send(self._watermark_order(), *self.reports)
            elif ledger.passed > max(self.watermark, ledger.given_up[1]) and ledger.is_all_reported(
                self.reports
            ):
                ledger.give_up(self.watermark)
                self._outbox.send(self._watermark_order(), *self.reports)

    def send_watermark(self, node: str) -> None:
        """Send the watermark to a member of the current round that may not have received it."""
        if self.ledgers and self._watermark_order() != m.Watermark(self.ledgers[0].name, -1):
            self._outbox.send(self._watermark_order(), node)

    def _watermark_order(self) -> m.Watermark:
        """The watermark of the current round and the steps that are given up, as a message."""
        ledger = self.ledgers[0]
        above, upto = ledger.given_up
        return m.Watermark(ledger.name, self.watermark, upto if above == self.watermark else -1)

    # ------------------------------------------------------------ the choice

    def choose(self) -> Choice:
        """Choose what the next round restores."""
        choice, requested = self._newest(), self.restore_step
        if requested >= 0 and (choice.restore is None or not self._has_obeyed):
            return Choice(
                self._find_whole(requested, self._dropped),
                skip=Skip(self.rewound_from, all_but=requested),
            )
        if choice.restore is not None:
            return choice
        suspects = sorted((key[1] for key in self.rejected if self._is_suspect(key)), reverse=True)
        candidates = (self._find_whole(step, self._dropped) for step in suspects)
        found = next((one for one in candidates if one is not None), None)
        return Choice(found, choice.why, Skip(self.rewound_from, memory=found is not None))

    def _find_whole(self, step: int, without: Container[Key]) -> m.Restore | None:
        """This step, from the newest round in which it is whole in memory; None if there is
        none."""
        for ledger in self.ledgers:
            key = (ledger.name, step)
            if ledger.is_whole(step) and key not in without and self._work.knows(key):
                return m.Restore(ledger.name, step, ledger.world_size)
        return None

    def _is_suspect(self, key: Key) -> bool:
        return self.rejected.get(key, 0) >= MAX_REJECTED

    def _newest(self) -> Choice:
        """The newest whole step that is neither bad nor suspect."""
        why = ""
        for ledger in self.ledgers:
            known = self.watermark if ledger.upto is None else ledger.upto
            steps = [step for step in sorted({*ledger.steps(), known}, reverse=True) if step >= 0]
            usable = [
                step
                for step in steps
                if (key := (ledger.name, step)) not in self._dropped and not self._is_suspect(key)
            ]
            whole = [step for step in usable if ledger.is_whole(step)]
            known_use = [step for step in whole if self._work.knows((ledger.name, step))]
            if whole and whole[0] not in known_use and not why:
                why = f"step {whole[0]} cannot be restored from memory: {NOT_KNOWN}"
            whole = known_use
            if self.knows_round_from_agents and known < 0 and usable and not whole:
                known = usable[0]
            if not why and known in usable and known > max(whole, default=-1):
                lacks = ledger.why_not_whole(known)
                why = f"step {known} cannot be restored from memory: {lacks}"
            if whole:
                step, less = self._prefer_own_state(ledger, whole)
                found = m.Restore(ledger.name, step, ledger.world_size)
                return Choice(found, why or less, Skip(self.rewound_from))
        return Choice(None, why, Skip(self.rewound_from))

    def _prefer_own_state(self, ledger: Ledger, whole: list[int]) -> tuple[int, str]:
        """Which of the whole steps (newest first) to restore. If not the first, also why not: the
        first lacks `per_rank` state that living ranks have at the restored one."""
        own = {
            rank
            for report in self.reports.values()
            for one in report.held
            if one.own and one.round == ledger.name
            for rank, content in enumerate(one.contents, one.first_rank)
            if content
        }
        if not own:
            return whole[0], ""
        held = {
            step: {rank for ranks in ledger.snaps[step].held.values() for rank in ranks} & own
            for step in whole
        }
        every = set().union(*held.values())
        best = next((step for step in whole if held[step] == every), whole[0])
        if best == whole[0]:
            return best, ""
        lacking = in_spans(every - held[whole[0]])
        lacks = f"which lacks the own state of {lacking}"
        return best, f"step {best} is restored instead of step {whole[0]}, {lacks}"

    def failed_by_itself(self) -> None:
        """A rank of the current round failed, without a signal from outside or the loss of a node.
        Count that against the restored snapshot if ranks had resumed from it, came only a few steps
        further, and have no whole step of their own."""
        on = self._restored
        if on is None or self.watermark >= 0:
            return
        if not on.step < self._reached <= on.step + FEW_STEPS:
            return
        key = key_of(on)
        self.rejected[key] = self.rejected.get(key, 0) + 1
        if self.rejected[key] == MAX_REJECTED:
            low = self.rewound_from
            self.rewound_from = on.step if low < 0 else min(low, on.step)
            times = f"ranks have failed {MAX_REJECTED} times within {FEW_STEPS} steps of it"
            then = f"it is used again if no other step is left, or with --restore-step={on.step}"
            self._outbox.log(f"step {on.step} is suspect: {times}; {then}", "warning")

    def distrust(self, ranks: tuple[int, ...], since: int) -> None:
        """What these ranks of the current round have saved from this step on differs from its
        replicas: it does not count."""
        if self.ledgers:
            self.has_distrusted = True
            self.ledgers[0].distrust(ranks, since)

    def distrusted(self, restore: m.Restore | None) -> tuple[int, ...]:
        """The ranks that must not restore their own snapshot, because it differs from its
        replicas."""
        ledger = None if restore is None else self.ledger(restore.round)
        if restore is None or ledger is None:
            return ()
        return ledger.distrusted(restore.step)[: m.MAX_DISTRUSTED]

    def go_back(self, step: int, first: int) -> None:
        """Restore no step of the current round above `step`, nor a checkpoint of one. -1: none of
        this round at all, of which `first` is the first step; then what it restored itself is
        restored again."""
        if not self.ledgers:
            return
        self.ledgers[0].end_at(step)
        if step < 0 and self._restored is not None:
            step = self._restored.step
        since = step + 1 if step >= 0 else first
        low = self.rewound_from
        self.rewound_from = since if low < 0 else min(low, since)

    def shard_bad(self, node: str, report: m.ShardBad) -> bool:
        """A node cannot use a shard: its own, or that of a holder named to it. The shard no longer
        counts. Return whether the current round restores that snapshot."""
        key = (report.round, report.step)
        named = self._named.pop((node, key, report.rank), None)
        ledger = self.ledger(report.round)
        if ledger is None:
            return False
        if (
            named is None
            and ledger is self.ledgers[0]
            and self._note_failed_save(node, ledger, report)
        ):
            return False
        spoilt = ledger.spoil(node, report.step, report.rank)
        if named is not None:
            spoilt = ledger.spoil(named[0], report.step, named[1]) or spoilt
        if not spoilt:
            self._dropped[key] = None  # otherwise the same one would be chosen repeatedly
        what = f"the snapshot of rank {report.rank} at step {report.step} cannot be used"
        self._outbox.log(f"{what}: {report.reason} (node {node})", "warning")
        return self._restored is not None and key_of(self._restored) == key

    def _note_failed_save(self, node: str, ledger: Ledger, report: m.ShardBad) -> bool:
        """Whether the report is from a rank of the running round that could not save a step: then
        its node holds nothing of that rank at that step. Records that."""
        snap = ledger.snaps.get(report.step)
        if ledger.upto is not None or (snap and report.rank in snap.held.get(node, {})):
            return False
        if self._restored is not None and key_of(self._restored) == (report.round, report.step):
            return False
        ledger.save_failed(report.step, report.rank, report.reason)
        if report.rank < ledger.world_size:
            self.failed_saves.add(report.step, report.rank, node, report.reason)
        return True

    def locate(self, node: str, question: m.WhereIs) -> None:
        """Tell `node` which other node has a shard: at once, or once that node's saver is ready, or
        once no node can return with the shard (the requesting node has a time limit)."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting[node, question] = None
            self.answer()
        else:
            self._outbox.send(self._find_holder(node, question)[0], node)

    def answer(self) -> None:
        """Answer the pending requests for shards that can be answered now."""
        for node, question in tuple(self._waiting):
            answer, may_come = self._find_holder(node, question)
            if answer.saver is not None or not may_come:
                del self._waiting[node, question]
                self._outbox.send(answer, node)

    def _find_holder(self, node: str, question: m.WhereIs) -> tuple[m.Holder, bool]:
        """The answer to a request at present, and whether a better one may follow."""
        key = (question.round, question.step)
        ledger = self.ledger(question.round)
        places = ledger.find_places(question.step, question.rank) if ledger is not None else []
        others = [place for place in places if place[0] != node]
        for holder, rank in others:
            report = self.reports.get(holder)
            if report is not None and report.saver is not None:
                self._named[node, key, question.rank] = (holder, rank)
                return m.Holder(*key, question.rank, rank, report.saver, ""), True
        why = "no node holds it now" if not places else "its holder cannot serve it just now"
        may_come = ledger is not None and bool(others or self.away)
        return m.Holder(*key, question.rank, -1, None, why), may_come

    # ------------------------------------------------------------ the record

    def committed(self, rewound_from: int) -> None:
        """A checkpoint was committed whose attempt began while `rewound_from` had this value."""
        if rewound_from == self.rewound_from and (self.restore_step < 0 or self._has_obeyed):
            self.rewound_from = self.restore_step = -1  # newer than the suspect step

    def restore(self, facts: SnapshotFacts) -> None:
        """Restore what the previous master knew."""
        self.rewound_from, self.restore_step = facts.rewound_from, facts.restore_step
        self.rejected.update({(one.round, one.step): one.times for one in facts.rejected})


def _round_key(last: m.RoundInfo) -> tuple[int, int]:
    """Sort key: rounds by age, the oldest first."""
    return (last.name.term, last.name.number)
