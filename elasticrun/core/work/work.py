"""Hands out work, and knows what was used by each step that ranks may restore (decision 042).

A rank uses its leases in the order in which it got them, so a count says which positions it has
used. At each step that is due to be saved it *marks* the count. What was used by a step is what was
used before the round, and the marked beginning of every rank's leases. A step is *settled* once
that is known; `Work` asks for a record of it, and only then may older steps be overwritten.

What every rank has used before its oldest open mark is used whatever step is restored. Each record
merges it into the set of its dataset, and ranks then drop it from their reports. So reports and
records stay short.

Grants are no facts: ranks report all that they have to a new master, which grants nothing until it
has heard every member of the running round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from elasticrun.core.persisted import KnownUse, WorkFacts
from elasticrun.core.snapshots.types import Key, Outbox, key_of, sort_key
from elasticrun.core.work.spans import Spans, decode_used, encode_used
from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_DATASETS, MAX_LEASES, MAX_USED, RoundName

KEPT = "kept"
"""The source of ranks without a Checkpointer: what was used stays used."""

MAX_KNOWN = 6
"""Maximum number of steps of which it is known what was used: the newest. A rank has memory for
fewer, even with the restored step, which counts twice: also as a step of the new round."""


RECORD_AFTER = 64
"""Number of a rank's leases after which what it has used is recorded, so that it can drop them."""

RECORD_KEPT = 16
"""The same without a Checkpointer: of all ranks, or as many as there are ranks. Not more often,
because a record costs as much as there are ranks."""

Dataset = str
"""A dataset's name."""


class WorkNews(Enum):
    """What a report changes."""

    NOTHING = "nothing"  # for other components
    NEWS = "news"
    UNKNOWN = "unknown"  # what was used before the round is not known: it must end


@dataclass(slots=True, eq=False)
class Pool:
    """The positions of a dataset."""

    spec: m.DatasetSpec
    used: Spans  # whatever step is restored; as recorded
    is_open: bool = False  # a rank of this round has named it
    free: deque[tuple[int, int]] | None = None  # neither used nor leased; None: not computed yet

    @property
    def end(self) -> int:
        """The number of positions."""
        return -(-self.spec.total // self.spec.size) * self.spec.size * self.spec.epochs

    def take(self) -> tuple[int, int] | None:
        """Remove and return the next free positions, of one shard; None if nothing is left."""
        if not self.free:
            return None
        start, stop = self.free.popleft()
        end = min(stop, (start // self.spec.size + 1) * self.spec.size)
        if end < stop:
            self.free.appendleft((end, stop))
        return start, end


@dataclass(slots=True, eq=False)
class LeaseList:
    """One rank's leases of a dataset, without the first `dropped` positions, and how many positions
    of them it has received and used, by its last report."""

    dropped: int = 0
    leases: deque[tuple[int, int]] = field(default_factory=deque)
    granted: int = 0  # positions, with the dropped ones
    received: int = 0
    used: int = 0
    marks: tuple[int, ...] = ()
    wants: bool = False
    record_at: int = RECORD_AFTER  # number of leases

    def update(self, report: m.DatasetShare) -> None:
        """Process the rank's report, which may be older than the last grant."""
        leases = deque(m.batched(report.leases))
        self.received = report.dropped + sum(stop - start for start, stop in leases)
        if self.received >= self.granted:  # otherwise it has not received the last grant yet
            dropped, self.dropped = self.dropped, report.dropped
            self.leases, self.granted = leases, self.received
            self.drop(dropped)
        self.used = max(self.used, report.used)
        self.marks, self.wants = report.marks, report.wants

    def grant(self, lease: tuple[int, int]) -> None:
        self.leases.append(lease)
        self.granted += lease[1] - lease[0]

    def first(self, count: int) -> Iterator[tuple[int, int]]:
        """The first `count` positions that the rank got, without the dropped ones."""
        left = count - self.dropped
        for start, stop in self.leases:
            if left <= 0:
                return
            yield start, min(stop, start + left)
            left -= stop - start

    def after(self, count: int) -> tuple[int, ...]:
        """Start and end of the leases without the first `count` positions."""
        found, at = [], self.dropped
        for start, stop in self.leases:
            begin = start + max(0, count - at)
            if begin < stop:
                found += [begin, stop]
            at += stop - start
        return tuple(found)

    def drop(self, count: int) -> None:
        """Drop the first `count` positions."""
        if count > self.dropped:
            self.leases = deque(m.batched(self.after(count)))
            self.dropped = count


@dataclass(slots=True, eq=False)
class Taker:
    """A rank that takes work."""

    node: str
    since: int
    marked: tuple[int, ...] = ()
    shares: dict[Dataset, LeaseList] = field(default_factory=dict)
    idle_after: tuple[int, ...] = ()  # its last mark, if it was idle at its last report

    @property
    def is_idle(self) -> bool:
        """Whether it can use nothing before its next report. It reports that when its loop asks for
        more, so the step of the last samples is over, or no rank can complete it without this
        one."""
        return all(one.used >= one.granted and not one.wants for one in self.shares.values())

    def counts_at(self, step: int, share: LeaseList) -> int:
        """How many positions it had used by a step that it has marked."""
        if step <= self.since:
            return 0
        return share.marks[self.marked.index(step)] if step in self.marked else share.used

    def surely_used(self, share: LeaseList, above: int) -> int:
        """How many positions it has used whatever step above `above` is restored."""
        if self.since > above:
            return 0
        marks = zip(self.marked, share.marks, strict=True)
        return min([share.used, *(count for step, count in marks if step > above)])


class Marks:
    """Counts the ranks that have marked each step. O(1) per report and step."""

    def __init__(self) -> None:
        self._at: Counter[int] = Counter()  # step -> ranks that have marked it
        self._since: Counter[int] = Counter()  # step -> ranks that had taken nothing before it
        self._idle: Counter[int] = Counter()  # step -> idle ranks whose last mark it is

    def count(self, taker: Taker, by: int) -> None:
        """Count this rank's marks; `by`: 1, or -1 before they change. Marks of steps by which it
        had taken nothing add nothing."""
        if by > 0:
            taker.idle_after = (max((taker.since, *taker.marked)),) if taker.is_idle else ()
        for counter, steps in (
            (self._at, [step for step in taker.marked if step > taker.since]),
            (self._since, (taker.since,)),
            (self._idle, taker.idle_after),
        ):
            for step in steps:
                counter[step] += by
                if not counter[step]:
                    del counter[step]

    def at(self, step: int) -> int:
        """The number of ranks that have marked this step."""
        before = sum(ranks for since, ranks in self._since.items() if since >= step)
        return before + self._at[step] + sum(n for last, n in self._idle.items() if last < step)

    def above(self, step: int) -> list[int]:
        """The marked steps above this one."""
        return [one for one in self._at if one > step]


class Work:
    """The work of a job: who has it, and what was used by which step."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.is_used = False
        """Whether a rank has taken work, now or before."""
        self._known: dict[Key, str] = {}  # what was used by a step
        self._kept = ""  # what was used when the last round ended, without a Checkpointer
        self._facts = WorkFacts()  # of the previous master
        self._is_too_long = False
        self._records = self._loaded = 0  # number of the last record, and of the one loaded
        self._was_unused = False  # the loaded record says that no rank had taken work
        self._begin(None)

    def _begin(self, name: RoundName | None) -> None:
        self._round = name
        self._origin: Key | None = None  # the step in memory that it restores
        self._source = ""  # what the ranks of the round have restored; "": not known yet
        self._refusal = ""  # why all ranks get nothing
        self._is_lost = False  # what was used by the step that they have restored is not known
        self._is_inherited = False  # another master has formed it
        self._is_recorded = False  # where the round starts from
        self._unrecorded = 0  # leases granted since the last record
        self._settled = -1  # the newest settled step of the round
        self._pools: dict[Dataset, Pool] = {}
        self._takers: dict[int, Taker] = {}  # by rank
        self._early: dict[int, tuple[str, m.WorkState]] = {}  # by rank: before `_source` is known
        self._marks = Marks()
        self.has_heard_all = True
        """Whether every member has reported what its ranks have."""

    # ------------------------------------------------------------ rounds

    def _follow(self, info: m.RoundInfo, inherited: bool) -> None:
        """Begin this round, if it is new: all leases of the last one are void."""
        if info.name == self._round:
            return
        self._kept = self._kept_by_now()
        self._begin(info.name)
        self._origin = None if info.restore is None else key_of(info.restore)
        kept = (info.name, self._origin[0] if self._origin else None)
        self._known = {key: used for key, used in self._known.items() if key[0] in kept}
        self._is_inherited, self.has_heard_all = inherited, not inherited
        facts, self._facts = self._facts, WorkFacts()
        if inherited and facts.round == info.name and facts.source:
            self._start_from(facts.source, facts.used)
            self._is_recorded = True
            self._settled = max(
                (step for name, step in self._known if name == info.name), default=-1
            )

    def heard_all(self) -> None:
        """Every member of the round has reported: grant what ranks wait for."""
        self.has_heard_all = True
        for rank in self._takers:
            self._serve(rank)

    def on_base(self, report: m.WorkBase, info: m.RoundInfo, *, inherited: bool) -> WorkNews:
        """Process what the ranks have restored. `info`: of the running round; `inherited`: another
        master has formed it."""
        self._follow(info, inherited)
        if report.round != self._round or self._source or self._is_lost:
            return WorkNews.NOTHING
        used: str | None = report.used
        if report.source == "memory" and self._origin is not None:
            if self._was_unused:  # a record precedes the first grant
                self._known.setdefault(self._origin, "")
            used = self._known.get(self._origin)
        self.is_used = self.is_used or bool(used)
        if used is None:
            self._is_lost = True
            return WorkNews.UNKNOWN if self.is_used else WorkNews.NOTHING
        self._start_from(report.source, used)
        self._settled = report.step
        self._known[report.round, report.step] = used
        for node, state in self._early.values():
            self._take(node, state)
        self._early.clear()
        return WorkNews.NEWS

    def note_use(self, running: RoundName | None) -> WorkNews:
        """Ranks have taken work, in the running round or before."""
        is_new, self.is_used = not self.is_used, True
        is_lost = is_new and self._is_lost and self._round == running
        return WorkNews.UNKNOWN if is_lost else WorkNews.NOTHING

    def needs(self, *, done: bool) -> bool:
        """Whether a member has to report what it has, although it is gone. `done`: all its ranks
        had exited with 0; without marks, a record of that has all that they had used."""
        return not (self._was_unused or (done and self._source == KEPT))

    def lose(self) -> WorkNews:
        """What was used before this master came cannot be known, because a member is gone that has
        not reported it, or because it was recorded later than what we have loaded."""
        self.has_heard_all = True
        self._source, self._is_lost = "", True
        self._takers.clear()
        self._early.clear()
        return WorkNews.UNKNOWN if self.is_used else WorkNews.NOTHING

    def _start_from(self, source: str, used: str) -> None:
        """Start the round from what was used before."""
        self._source = source
        try:
            found = decode_used(used)
        except ValueError as error:
            self._refusal = f"what was used before cannot be read: {error}"
            return
        self._pools = {name: Pool(spec, spans) for name, (spec, spans) in found.items()}

    # ------------------------------------------------------------ ranks

    def on_state(
        self, node: str, report: m.WorkState, info: m.RoundInfo, *, inherited: bool
    ) -> WorkNews:
        """Process what a rank has, and grant what it wants. `info`, `inherited`: as in
        `on_base`."""
        self._follow(info, inherited)
        if report.round != self._round:
            return WorkNews.NOTHING
        self.is_used = True
        is_new = report.rank not in self._takers
        if self._is_lost or (is_new and report.record > self._loaded):
            return self.lose()  # our record is older than what its ranks have dropped
        if not self._source and report.restored:
            self._early[report.rank] = (node, report)
            return WorkNews.NOTHING
        if not self._source:
            if self._is_inherited and any(one.leases for one in report.shares):
                return self.lose()
            self._start_from(KEPT, self._kept)
        return self._take(node, report)

    def _take(self, node: str, report: m.WorkState) -> WorkNews:
        taker = self._takers.get(report.rank)
        before = ((), ()) if taker is None else (taker.marked, taker.idle_after)
        if taker is None:
            taker = self._takers[report.rank] = Taker(node, report.since)
        else:
            self._marks.count(taker, -1)
        taker.node, taker.since, taker.marked = node, report.since, report.marked
        self._update(report, taker)
        self._marks.count(taker, 1)
        self._serve(report.rank)
        is_news = (taker.marked, taker.idle_after) != before
        return WorkNews.NEWS if is_news else WorkNews.NOTHING

    def _update(self, report: m.WorkState, taker: Taker) -> None:
        named = {one.spec.name for one in report.shares}
        for name in [name for name in taker.shares if name not in named]:
            if taker.shares[name].granted <= taker.shares[name].dropped:
                del taker.shares[name]  # all of it is recorded as used
        for one in report.shares:
            if why := self._why_refused(one.spec, restored=report.restored):
                order = m.WorkGrant(
                    *(report.round, report.rank, one.spec.name, 0, (), 0), refused=why
                )
                self._outbox.send(order, taker.node)
                continue
            share = taker.shares.setdefault(one.spec.name, LeaseList())
            share.update(one)
        for share in taker.shares.values():  # of a dataset that this report does not name
            share.marks = (*share.marks, *(share.used for _ in taker.marked))[: len(taker.marked)]

    def _why_refused(self, spec: m.DatasetSpec, *, restored: bool) -> str:
        """Why ranks get nothing of this dataset, as a sentence; "" if they do. Adds the dataset if
        it is new."""
        if self._refusal:
            return self._refusal
        if self._source and (self._source == KEPT) == restored:
            return "some ranks have restored a step with a Checkpointer, and others have not"
        pool = self._pools.get(spec.name)
        if pool is None:
            if len(self._pools) >= MAX_DATASETS:
                return f"a job can hand out at most {MAX_DATASETS} datasets"
            pool = self._pools[spec.name] = Pool(spec, Spans())
        if not pool.is_open:  # a resumed job may add epochs
            pool.spec = replace(pool.spec, epochs=spec.epochs)
        if pool.spec != spec:
            was = f"{_words(pool.spec)} {'by another rank' if pool.is_open else 'before'}"
            return f"dataset {spec.name!r} is opened with {_words(spec)}, and was with {was}"
        pool.is_open = True
        return ""

    def _serve(self, rank: int) -> None:
        """Grant what this rank wants, or send it again what it has not received."""
        if not (self._source and self.has_heard_all and self._round is not None):
            return
        taker = self._takers[rank]
        for name, share in taker.shares.items():
            if not share.wants:
                continue
            often = self._source == KEPT and self._unrecorded >= max(RECORD_KEPT, len(self._takers))
            if often or not self._is_recorded or len(share.leases) >= share.record_at:
                self._is_recorded = True
                share.record_at, self._unrecorded = 2 * len(share.leases), 0
                self._outbox.record()
            pool, refused = self._pools[name], ""
            if share.received == share.granted:
                if sum(len(one.leases) for one in taker.shares.values()) >= MAX_LEASES:
                    refused = (
                        f"more than {MAX_LEASES} shards were used since the newest snapshot that "
                        "all ranks have taken: use larger shards, or take snapshots more often"
                    )
                elif (lease := self._next_lease(name, pool)) is not None:
                    share.grant(lease)
                    self._unrecorded += 1
            rest = share.after(share.received)
            order = m.WorkGrant(
                *(self._round, rank, name, share.received, rest, share.dropped),
                over=not rest and not refused,
                refused=refused,
                record=self._records,
            )
            share.wants = False
            self._outbox.send(order, taker.node)

    def _next_lease(self, name: Dataset, pool: Pool) -> tuple[int, int] | None:
        if pool.free is None:
            taken = pool.used.copy()
            for taker in self._takers.values():
                if (share := taker.shares.get(name)) is not None:
                    for start, stop in share.leases:
                        taken.add(start, stop)
            pool.free = deque(taken.gaps(pool.end))
        return pool.take()

    # ------------------------------------------------------------ steps

    def knows(self, key: Key) -> bool:
        """Whether it is known what was used by this step, so that it can be restored."""
        return not self.is_used or key in self._known

    def used_by(self, key: Key) -> str:
        """What was used by this step, as a text; "" if nothing was."""
        return self._known.get(key, "")

    def settle(self, key: Key) -> bool:
        """Settle a step of the running round that is whole, if every rank has marked it, and ask
        for a record. Return whether it is settled."""
        name, step = key
        if key in self._known:
            return True
        if name != self._round or not self._source:
            return not self.is_used
        if step <= self._settled or not self.has_heard_all or not self._has_all_marks(step):
            return False
        used = encode_used(self._used(step))
        if len(used) > MAX_USED:
            if not self._is_too_long:
                self._is_too_long = True
                what = f"what was used by step {step} takes {len(used)} characters"
                self._outbox.log(f"no step can be restored: {what}, and {MAX_USED} fit", "error")
            return False
        self._known[key] = used
        self._settled = step
        while len(self._known) > MAX_KNOWN:
            del self._known[min(self._known, key=sort_key)]
        if self.is_used:
            self._outbox.record()
        return True

    def can_settle(self, key: Key) -> bool:
        """Whether this step is settled or may be. It cannot be if all ranks have marked a later
        one."""
        name, step = key
        if self.knows(key) or name != self._round or not self._source:
            return True
        is_passed = any(self._has_all_marks(one) for one in self._marks.above(step))
        return step > self._settled and (self._has_all_marks(step) or not is_passed)

    def _has_all_marks(self, step: int) -> bool:
        return self._marks.at(step) == len(self._takers)

    def _used(self, step: int) -> dict[Dataset, tuple[m.DatasetSpec, Spans]]:
        """What was used by a step that every rank has marked; O(leases)."""
        return self._merged(
            (name, share.first(taker.counts_at(step, share)))
            for taker in self._takers.values()
            for name, share in taker.shares.items()
        )

    def _used_now(self) -> dict[Dataset, tuple[m.DatasetSpec, Spans]]:
        return self._merged(
            (name, share.first(share.used))
            for taker in self._takers.values()
            for name, share in taker.shares.items()
        )

    def _kept_by_now(self) -> str:
        """What was used, if no step is restored."""
        if self._source == KEPT:
            return encode_used(self._used_now())
        return "" if self._source else self._kept

    def _merged(
        self, more: Iterable[tuple[Dataset, Iterator[tuple[int, int]]]]
    ) -> dict[Dataset, tuple[m.DatasetSpec, Spans]]:
        found = {name: (pool.spec, pool.used.copy()) for name, pool in self._pools.items()}
        for name, spans in more:
            for start, stop in spans:
                found[name][1].add(start, stop)
        return found

    # ------------------------------------------------------------ the record

    def facts(self) -> WorkFacts:
        """What the next master needs. Merges what is used whatever step is restored; ranks drop it
        from their reports with the next grant, which follows this record."""
        if self._round is None:
            return replace(self._facts, is_used=self.is_used)
        for taker in self._takers.values():
            for name, share in taker.shares.items():
                is_kept = self._source == KEPT
                count = share.used if is_kept else taker.surely_used(share, self._settled)
                for start, stop in share.first(count):
                    self._pools[name].used.add(start, stop)
                share.drop(count)
                share.record_at = max(RECORD_AFTER, 2 * len(share.leases))
        self._unrecorded = 0
        self._records += 1
        pools = {name: (pool.spec, pool.used) for name, pool in self._pools.items()}
        used = encode_used(pools) if self._source else ""
        return WorkFacts(
            is_used=self.is_used,
            round=self._round if self._source else None,
            source=self._source,
            used=used,
            kept=self._kept_by_now(),
            known=tuple(KnownUse(*key, text) for key, text in self._known.items()),
            number=self._records,
        )

    def restore(self, facts: WorkFacts) -> None:
        """Restore what the previous master knew."""
        self._facts = facts
        self._records = self._loaded = facts.number
        self.is_used, self._kept = facts.is_used, facts.kept
        self._was_unused = not facts.is_used
        self._known = {(one.round, one.step): one.used for one in facts.known}


def _words(spec: m.DatasetSpec) -> str:
    order = f"shuffle={spec.shuffle}" if spec.shuffle >= 0 else "no shuffle"
    return f"total={spec.total}, size={spec.size}, epochs={spec.epochs}, {order}"
