"""The inventory of this node's snapshots: content, removal, and reports to the master.

It is read from the segments themselves. A message over a socket may be lost with its rank; a commit
cannot. Each report contains the whole inventory, and reports are rate-limited.

While ranks run, a step counts once all local ranks have committed it. After they have exited, a
step that only some have committed also counts, unless all of them have another step of the same
round: rank-local state (random numbers, the data loader) exists nowhere else.

A slot has one pin word, possibly for several reasons: the current ranks restore from it, it is
being written to storage, or the ranks have requested that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from elasticrun.agent.link.link import Link
from elasticrun.agent.runtime import Timer
from elasticrun.agent.snapshots.folder import LocalRound
from elasticrun.agent.snapshots.saver import Savers
from elasticrun.agent.snapshots.segments import Held, Segments
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.segment import NONE, Snapshot, round_key
from elasticrun.wire import messages as m
from elasticrun.wire.snapshots import RankHere, Restored
from elasticrun.wire.types import RoundName

MOST_GAP: Final = 64
"""Maximum gap between two ranks whose replicas a report lists in one row; ranks in between have
0."""

_SAME_ON_RANKS: Final = {
    "folder": "folder",
    "keep_last": "Keep.last",
    "keep_every": "Keep.every",
    "replicas": "replicas",
}
"""Fields of RankHere that must be equal on all ranks of a node, and the user's names for them."""

CHOSEN: Final = "restore"
"""The pin reason of a slot that the current generation restores from."""


class Router(Protocol):
    """The owner of all parts of this node's snapshots."""

    def tidy(self) -> None:
        """Release what is no longer needed, because pins were removed or a step is complete."""

    def holdings(self) -> m.Holdings:
        """What this node holds now."""

    def nodes(self) -> int:
        """Number of nodes in the round."""


class Inventory:
    """The rounds whose snapshots may be on this node."""

    def __init__(self, segments: Segments, wanted: WantedSnapshots, nproc: int) -> None:
        self._segments = segments
        self._wanted = wanted
        self._nproc = nproc
        self._rounds: dict[bytes, LocalRound] = {}
        self._configured_by: RankHere | None = None  # the first rank of the current generation
        self.reading: int | None = None
        """The checkpoint that ranks of the current generation restored from; -1: none; None: not
        reported yet, so they may be reading any."""
        self.present: LocalRound | None = None
        """The newest generation of the local ranks."""

    def adopt(self, rounds: Iterable[LocalRound]) -> None:
        """Adopt the rounds of the previous agent."""
        self._rounds = {one.key: one for one in rounds}

    def start(self, start: m.Start) -> None:
        """Start a new generation; forget older ones without a snapshot here."""
        present = replace(LocalRound.of(start, self._nproc), worked=self.worked)
        self._rounds.pop(present.key, None)
        self._rounds[present.key] = self.present = present
        self._configured_by = None
        self.reading = None
        here = {snapshot.round for one in self._segments.held for snapshot in one.snapshots()}
        needed = here | {present.key}
        self._rounds = {key: kept for key, kept in self._rounds.items() if key in needed}

    def configure(self, here: RankHere) -> str:
        """Set the checkpoint folder and retention of the current generation. Returns a sentence if
        this rank contradicts the first one, whose values stay in effect."""
        assert self.present is not None
        first = self._configured_by
        if first is None:
            self._configured_by = here
            last, every = here.keep_last, here.keep_every
            present = replace(self.present, folder=here.folder, keep_last=last, keep_every=every)
            self._rounds[present.key] = self.present = present
            return ""
        if differing := [
            f"{name}={getattr(here, field)!r} and {getattr(first, field)!r}"
            for field, name in _SAME_ON_RANKS.items()
            if getattr(here, field) != getattr(first, field)
        ]:
            return (
                f"the Checkpointers of ranks {here.rank} and {first.rank} differ: "
                f"{', '.join(differing)}. Give all ranks the same options, and pass all state of a "
                "rank to one Checkpointer"
            )
        return ""

    def restored(self, message: Restored) -> None:
        """Record the result of a local rank's restore."""
        self.reading = message.step if message.source == "storage" else -1
        if self.present is not None and message.looked:
            present = replace(self.present, base=message.step)
            self._rounds[present.key] = self.present = present

    @property
    def worked(self) -> bool:
        """Whether ranks took work that is handed out, in one of these rounds or an earlier one."""
        return any(one.worked for one in self._rounds.values())

    def note_work(self) -> bool:
        """Record that ranks take work. Returns whether that is new."""
        if self.present is None or self.present.worked:
            return False
        present = replace(self.present, worked=True)
        self._rounds[present.key] = self.present = present
        return True

    def other_folder(self, name: RoundName, folder: str) -> str:
        """The checkpoint folder of this round's snapshots if it differs from `folder`, because they
        then belong to another training; else ""."""
        found = self.local_round(name)
        return "" if found is None or found.folder == folder else found.folder

    def committed(self, step: int) -> bool:
        """Record that a checkpoint of this step exists. Returns whether that has changed `last`."""
        present = self.present
        if present is None or (info := present.info.committed(step)) is present.info:
            return False
        self._rounds[present.key] = self.present = replace(present, info=info)
        return True

    def last(self) -> m.RoundInfo | None:
        """The newest round whose ranks ran here, possibly under an earlier agent."""
        ran_here = [one for one in self._rounds.values() if one.nproc]
        if not ran_here:
            return None
        return max(ran_here, key=lambda one: (one.name.term, one.name.number)).info

    def rounds(self) -> list[LocalRound]:
        """All known rounds, the newest last."""
        return list(self._rounds.values())

    def local_round(self, name: RoundName) -> LocalRound | None:
        return self._rounds.get(round_key(name))

    def learn(self, name: RoundName, world_size: int) -> None:
        """Add a round of which this node has no ranks, but will hold replicas."""
        added = LocalRound(m.RoundInfo(name, world_size))
        if added.key not in self._rounds:
            if self.present is not None:
                last, every = self.present.keep_last, self.present.keep_every
                added = replace(added, folder=self.present.folder, keep_last=last, keep_every=every)
            self._rounds = {added.key: added, **self._rounds}

    # ------------------------------------------------------------ single snapshots

    def find(self, name: RoundName, step: int, rank: int) -> tuple[Held, Snapshot] | None:
        """The snapshot of this rank of (round, step), if it is here."""
        mine = [one for one in self.all_of(name, step) if one[2] == rank]
        return min(mine, key=lambda one: one[0].replica)[:2] if mine else None

    def all_of(self, name: RoundName, step: int) -> list[tuple[Held, Snapshot, int]]:
        """Every snapshot of (round, step) on this node, with its rank."""
        return [
            (held, snapshot, rank)
            for held, snapshot, local_round, rank in self.everything()
            if (local_round.name, snapshot.step) == (name, step)
        ]

    def everything(self) -> Iterator[tuple[Held, Snapshot, LocalRound, int]]:
        """Every snapshot of a known generation on this node, with its rank."""
        for one in self._segments.held:
            for snapshot in one.snapshots():
                local_round = self._rounds.get(snapshot.round)
                if local_round is not None and (rank := _rank(one, local_round)) >= 0:
                    yield one, snapshot, local_round, rank

    # ------------------------------------------------------------ all snapshots

    def holdings(
        self, *, may_write: bool, ranks_without: Callable[[int], set[int]] = lambda step: set()
    ) -> tuple[m.Holding, ...]:
        """All that is held, the newest first.

        `may_write`: ranks of the current generation may still write. `ranks_without`: the local
        ranks that could not save a step; the step is reported without them."""
        held = self._segments.held
        contents = self._contents(held)
        if self.present is not None:
            for round, step in self._wanted.names():
                if round == self.present.key and len(ranks_without(step)) == self.present.nproc:
                    contents[round, step] = [0] * self.present.nproc
        found: list[m.Holding] = []
        own = any(one.own for one in held if one.local_rank >= 0)
        order = {key: at for at, key in enumerate(self._rounds)}
        for key, step in sorted(contents, key=lambda name: (order[name[0]], name[1]), reverse=True):
            local_round, row = self._rounds[key], tuple(contents[key, step])
            lacks = {number for number, content in enumerate(row) if not content}
            partly = bool(lacks) and not (
                local_round is self.present and lacks <= ranks_without(step)
            )
            if partly and (
                (may_write and local_round is self.present) or self._has_better(contents, key, step)
            ):
                continue
            wanted = self._wanted.has(key, step)
            place = (local_round.first_rank, local_round.info.world_size)
            found.append(m.Holding(local_round.name, step, *place, row, wanted, own=own))
        return _fitting([*found, *self._replicas()])

    def whole_here(self, held: Iterable[Held]) -> int:
        """The newest step of this generation that all local ranks have committed; -1: none."""
        if self.present is None:
            return -1
        key = self.present.key
        rows = self._contents(held).items()
        return max((step for (k, step), row in rows if k == key and 0 not in row), default=-1)

    def has_whole(self, held: Held, watermark: int) -> bool:
        """Whether this segment contains a step of the current generation that is complete in the
        job."""
        present = self.present
        return present is not None and any(
            one.round == present.key and one.step <= watermark for one in held.snapshots()
        )

    def abandoned_step(self, held: Iterable[Held], watermark: int) -> int:
        """The newest step that can be given up because it can never be complete; -1: none.

        This applies if ranks of the current generation hold different steps above the watermark,
        and some ranks have skipped a step that others have. The result is below all steps that
        every local rank holds."""
        if self.present is None:
            return -1
        rows = [
            {s.step for s in one.snapshots() if s.round == self.present.key and s.step > watermark}
            for one in held
        ]
        steps = set().union(*rows)
        if not any(step not in row and step < max(row) for row in rows if row for step in steps):
            return -1
        common = set.intersection(*rows)
        return max((step for step in steps if not common or step < min(common)), default=-1)

    # ------------------------------------------------------------ removal

    def prune(self, restore: m.Restore | None, active: set[str]) -> None:
        """Prepare the segments for a new generation, while no rank is running: withdraw snapshots
        newer than the one to restore from, pin that one, and reset the control pages. Pins for
        snapshots that the ranks want written to storage stay, and those with a reason in
        `active`."""
        for one in self._segments.held:
            segment = one.segment
            for snapshot in one.snapshots():
                if restore is None or _is_newer(snapshot, restore):
                    segment.withdraw(snapshot.slot)
            left = {snapshot.slot: snapshot for snapshot in one.snapshots()}
            for slot in range(segment.slots):
                reasons = one.pins.get(slot, set()) & active
                if slot in left:
                    reasons |= self._wanted.reason(left[slot])
                one.pins[slot] = reasons
                segment.pin(slot, bool(reasons))
            segment.watermark = NONE if restore is None else restore.step
            segment.save_at = segment.current = NONE
            chosen = None if restore is None else one.find(round_key(restore.round), restore.step)
            if chosen is not None:
                one.pin(chosen.slot, CHOSEN)

    def withdraw(self, restore: m.Restore, ranks: Collection[int]) -> None:
        """Withdraw what these ranks have of the snapshot to restore, because it differs from its
        replicas: they get another one."""
        for held, snapshot, rank in self.all_of(restore.round, restore.step):
            if rank in ranks:
                held.segment.withdraw(snapshot.slot)

    def prunable(self, current: Sequence[Held | None], watermark: int) -> list[Held]:
        """Segments of local ranks that are no longer needed: those with an outdated layout, and
        those of a local rank that no longer exists (an earlier agent had more). `current`: the
        segment of each local rank in this generation."""
        found: list[Held] = []
        for one in self._segments.held:
            beyond = one.local_rank >= len(current)
            now = current[one.local_rank] if one.local_rank >= 0 and not beyond else None
            if now is None and not beyond:
                continue  # its rank has not asked for one yet
            if now is one or one.is_pinned():
                continue
            heirs = [heir for heir in current if heir is not None] if now is None else [now]
            if not one.snapshots() or any(self.has_whole(heir, watermark) for heir in heirs):
                found.append(one)
        return found

    def _contents(self, held: Iterable[Held]) -> dict[tuple[bytes, int], list[int]]:
        """Layout.content of each local rank's snapshot (0: none), by round and step."""
        found: dict[tuple[bytes, int], list[int]] = {}
        for one in held:
            for snapshot in one.snapshots() if one.local_rank >= 0 else ():
                local_round = self._rounds.get(snapshot.round)
                if local_round is None or one.local_rank >= local_round.nproc:
                    continue
                row = found.setdefault((snapshot.round, snapshot.step), [0] * local_round.nproc)
                row[one.local_rank] = one.content
        return found

    def _replicas(self) -> list[m.Holding]:
        """The replicas of other nodes' ranks."""
        rows: dict[tuple[bytes, int], dict[int, int]] = {}
        for one in self._segments.held:
            for snapshot in one.snapshots() if one.replica >= 0 else ():
                if snapshot.round in self._rounds:
                    row = rows.setdefault((snapshot.round, snapshot.step), {})
                    row[one.replica] = one.content
        found = []
        for (key, step), row in rows.items():
            local_round = self._rounds[key]
            for first, contents in _stretches(row):
                place = (first, local_round.info.world_size)
                found.append(
                    m.Holding(local_round.name, step, *place, contents, False, replica=True)
                )
        return found

    def _has_better(
        self, contents: dict[tuple[bytes, int], list[int]], key: bytes, step: int
    ) -> bool:
        """Whether all local ranks hold another step of this round."""
        return any(k == key and s != step and 0 not in row for (k, s), row in contents.items())


def _rank(one: Held, local_round: LocalRound) -> int:
    """The rank whose snapshots of this generation are there; -1: none."""
    if one.local_rank >= 0:
        return local_round.first_rank + one.local_rank if one.local_rank < local_round.nproc else -1
    return one.replica if one.replica < local_round.info.world_size else -1


def _stretches(row: dict[int, int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Split contents by rank into runs with small gaps: the first rank of each run, and its
    contents."""
    run: list[int] = []
    for rank in [*sorted(row), -1]:
        if run and (rank < 0 or rank - run[-1] > MOST_GAP):
            yield run[0], tuple(row.get(one, 0) for one in range(run[0], run[-1] + 1))
            run = []
        run.append(rank)


def _fitting(held: list[m.Holding]) -> tuple[m.Holding, ...]:
    """As many holdings as fit in a report: newest first, and this node's ranks before replicas."""
    found: list[m.Holding] = []
    listed = 0
    for one in sorted(
        held, key=lambda h: (-h.round.term, -h.round.number, -h.step, h.replica, h.first_rank)
    ):
        listed += len(one.contents)
        if len(found) == m.MAX_HOLDINGS or listed > m.MAX_CONTENTS:
            break
        found.append(one)
    return tuple(found)


def _is_newer(snapshot: Snapshot, restore: m.Restore) -> bool:
    """Whether it is newer than the snapshot to restore from, or from a discarded history."""
    name = restore.round
    if (snapshot.term, snapshot.number) == (name.term, name.number):
        return not snapshot.is_of(name) or snapshot.step > restore.step
    return (snapshot.term, snapshot.number) > (name.term, name.number)


KEEP_FACTOR: Final = 3.0
"""A wanted snapshot is kept for this multiple of an attempt's limit. It is finite, because a master
may lose an attempt, which would block slots forever."""


class WantedSnapshots:
    """Snapshots that the ranks want written to storage, kept until the master reports the end, or
    for KEEP_FACTOR times `limit`, the seconds that one attempt may take."""

    def __init__(self, segments: Segments, limit: float, router: Router) -> None:
        self._segments = segments
        self._limit = KEEP_FACTOR * limit
        self._router = router
        self._timers: dict[tuple[bytes, int], asyncio.TimerHandle] = {}

    def names(self) -> list[tuple[bytes, int]]:
        """Rounds and steps of all wanted snapshots."""
        return list(self._timers)

    def has(self, round: bytes, step: int) -> bool:
        return (round, step) in self._timers

    def add(self, round: bytes, step: int, current: Iterable[Held]) -> None:
        """Pin each of these segments' snapshot of this step until `end` or a timeout."""
        name = (round, step)
        if name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(self._limit, self._expire, *name)
        for held in current:
            if (found := held.find(*name)) is not None:
                held.pin(found.slot, _pin(*name))

    def add_pinned(self, current: list[Held]) -> None:
        """Add snapshots that a rank has pinned but not reported. It pins first, and may have exited
        in between."""
        for held in current:
            for snapshot in held.snapshots():
                if held.segment.pinned(snapshot.slot) and not held.pins.get(snapshot.slot):
                    self.add(snapshot.round, snapshot.step, current)

    def reason(self, snapshot: Snapshot) -> set[str]:
        """The pin reasons of a slot with this snapshot, if it is wanted."""
        name = (snapshot.round, snapshot.step)
        return {_pin(*name)} if name in self._timers else set()

    def end(self, round: bytes, step: int) -> None:
        """Remove the pins of a snapshot that was written, or will not be."""
        timer = self._timers.pop((round, step), None)
        if timer is not None:
            timer.cancel()
        for held in self._segments.held:
            held.unpin(_pin(round, step))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, round: bytes, step: int) -> None:
        text = "step %d was not written to storage; its snapshot is no longer kept for that"
        logger.warning(text, step)
        self.end(round, step)
        self._router.tidy()


def _pin(round: bytes, step: int) -> str:
    return f"wanted {round.hex()}/{step}"


REPORTS_PER_SECOND: Final = 50.0
"""Maximum rate at which a master receives reports from all nodes of a round."""

ALONE_EVERY: Final = 1.0
"""Seconds between reports of a round's only node: it detects complete steps itself, and `send_now`
reports urgent changes."""


class HoldingsReport:
    """Decides when to report the inventory to the master."""

    def __init__(self, link: Link, router: Router) -> None:
        self._link = link
        self._router = router
        self._sent: m.Holdings | None = None
        self._sent_at = -math.inf
        self._due = Timer()
        self._closed = False

    def send_soon(self) -> None:
        """Report soon; several changes within a short time make one report."""
        loop = asyncio.get_running_loop()
        nodes = self._router.nodes()
        due = self._sent_at + (nodes / REPORTS_PER_SECOND if nodes > 1 else ALONE_EVERY)
        if due <= loop.time():
            self._offer()
        elif not self._due.is_set and not self._closed:
            self._due.after(due - loop.time(), self._offer)

    def send_now(self, *, again: bool = False) -> None:
        """Report before any later message; `again`: even if nothing has changed."""
        self._due.cancel()
        report = self._router.holdings()
        if self._has_nothing(report) or (report == self._sent and not again):
            return
        self._link.send(report)
        self._mark_sent(report)

    def close(self) -> None:
        self._closed = True
        self._due.cancel()

    def _offer(self) -> None:
        self._due.cancel()
        report = self._router.holdings()
        if self._closed or self._has_nothing(report) or report == self._sent:
            return
        if self._link.offer(report):
            self._mark_sent(report)
        elif self._link.beat_interval:  # the link is busy; a new session gets a full report
            self._due.after(1 / REPORTS_PER_SECOND, self._offer)

    def _has_nothing(self, report: m.Holdings) -> bool:
        """Whether the report is empty, and no script of this job takes snapshots."""
        return self._sent is None and not report.held and report.saver is None

    def _mark_sent(self, report: m.Holdings) -> None:
        self._sent, self._sent_at = report, asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class SnapshotStore:
    """The snapshots on this node, and the components that work with them."""

    segments: Segments
    inventory: Inventory
    savers: Savers
    link: Link
    report: HoldingsReport
    router: Router

    def drop(self, held: Held) -> None:
        """Remove a segment that is no longer needed."""
        self.savers.forget(held)
        self.segments.drop(held)

    def drop_damaged(self) -> None:
        """Drop segments that another process has damaged; their snapshots are lost, and they are
        never reused. Call while no rank of this node may be writing."""
        for held in list(self.segments.held):
            if why := held.why_damaged():
                lost = f"the snapshots of {held.owner} in this node's memory are lost"
                logger.warning("%s: %s; allocating new memory for the next snapshots", lost, why)
                self.drop(held)
