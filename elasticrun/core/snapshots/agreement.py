"""Whether replicas are equal, bit by bit: finds silent corruption where copies exist.

Ranks whose snapshots have the same content (`Layout.content`: the same chunks of the same tensors)
are replicas: all ranks with DDP, those of one shard with HSDP. From time to time their nodes are
ordered to hash the first snapshot after a step, and send one digest for each rank. The step is a
little ahead, so that the order arrives in time everywhere; if some ranks had passed it, the next
one is further ahead. If the digests of replicas are equal, all *agree*. Otherwise, a few ranks, one
for each digest, send digests of parts of their tensors, until the tensors that differ are known.

A strict majority of the replicas is right, and the others *differ*. Without one, nobody knows who
is right, so all of them may differ.

*By design*: until replicas have agreed once, what differs is intended (adapters of one rank, local
SGD). It is logged once and left out from then on. If that is too much, comparing ends. Buffers are
never compared (the rank's layout marks them).

The hashing takes at most one part in SHARE of one core on each node, so the next comparison waits
accordingly. A rank that differs is not compared again in its round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from elasticrun.core.persisted import AgreementFacts
from elasticrun.core.snapshots.ledger import Ledger, in_spans
from elasticrun.core.snapshots.types import Outbox, sort_key
from elasticrun.core.words import plural
from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_PARTS, RoundName, key_of_name, parts_of

APART = 10.0
"""Minimum seconds between two comparisons."""

RETRY = 2.0
"""The same after a comparison for which an answer was missing, and seconds until it is looked
again whether one can begin."""

SHARE = 100.0
"""Hashing takes at most one part in SHARE of the time."""

LIMIT = 60.0
"""Seconds until the answers that are missing are no longer awaited."""

MAX_ASKED = 256
"""Maximum number of parts of tensors that one comparison examines."""

MAX_SAMPLED = 4
"""Maximum number of different replicas whose parts are examined."""

MAX_GROUPS = 8
"""Maximum number of contents whose differences one comparison examines."""

MAX_LEARNING = 8
"""Comparisons without agreement after which comparing ends."""

MAX_NAMED = 3
"""Maximum number of tensors that one line names."""


class Difference(NamedTuple):
    """Replicas that are not equal at a step. `tensor`: the first one that differs, by name; "":
    unknown."""

    step: int
    agreed: int  # the newest step of this round at which all were equal; -1: none
    ranks: tuple[int, ...]  # those that differ from the majority; without one, all
    majority: tuple[int, ...]  # (): there is none
    sides: tuple[tuple[int, ...], ...]  # ranks that are equal, the most first
    tensor: str
    nodes: tuple[str, ...]  # of `ranks`
    devices: tuple[str, ...]  # of `ranks`; "" if unknown


@dataclass(slots=True)
class ReplicaGroup:
    """The replicas of one content that are compared, and how they differ."""

    places: dict[int, str]  # rank -> its node
    sides: list[list[m.RankDigests]] = field(default_factory=list)  # by digest
    samples: tuple[int, ...] = ()  # a rank of each digest, the most frequent digest first
    tensors: list[str] = field(default_factory=list)  # that differ, as far as examined
    spans: list[tuple[int, int]] = field(default_factory=list)  # parts to examine, the next last
    asked: tuple[int, int] = (0, 0)  # the part that is being examined


@dataclass(slots=True)
class Comparison:
    """A comparison that runs."""

    round: RoundName
    groups: list[ReplicaGroup]
    group_of: dict[int, ReplicaGroup]  # by rank
    awaited: set[int]  # ranks
    step: int = -1  # that is compared; -1: not known yet
    until: float | None = None  # None: no rank has answered yet
    steps: dict[int, int] = field(default_factory=dict)  # rank -> its first step that was hashed
    answers: dict[int, m.RankDigests] = field(default_factory=dict)
    differ: list[ReplicaGroup] | None = None  # whose replicas differ; None: not known yet
    at: int = 0  # index in `differ` of the group that is examined
    count: int = 0  # number of parts examined
    is_complete: bool = True  # all that was asked for has been answered


class Agreement:
    """Compares replicas, and knows the newest step at which all were equal."""

    def __init__(self, mode: str, outbox: Outbox) -> None:
        """`mode`: as in SaveSpec.on_corruption."""
        self._keeps = mode in ("restart", "exclude")  # nodes keep the step to return to
        self._outbox = outbox
        self.running: Comparison | None = None
        self.is_used = False
        """Whether there are facts."""
        self._number = 0
        self._due = 0.0
        self._seconds = 0.0  # CPU time of the slowest answer to the running comparison
        self._patience = 0.0  # until when nodes may not have reported what they hold
        self._ahead = 0  # steps from the newest one known to the one after which ranks hash
        self._settled: set[int] = set()  # ranks that differ without a majority; not compared again
        self._learning = 0  # comparisons that found what differs by design
        self._kept: m.KeepStep | None = None  # the newest step at which all replicas were equal
        self.first = -1
        """The first step of the current round that could be compared; -1: none."""
        self._has_agreed = False  # in this job
        self._left_out: dict[int, None] = {}
        self._is_wanted = mode != "off"
        self._is_off = False
        self._round: RoundName | None = None
        self._accused: tuple[str, ...] = ()  # nodes whose ranks have differed from a majority
        self.returns = 0
        """Number of rounds that ended because replicas differed."""

    def facts(self) -> AgreementFacts:
        """What the next master needs."""
        left_out = tuple(self._left_out)
        return AgreementFacts(
            *(self._has_agreed, left_out, self._is_off, self._accused, self.returns)
        )

    def restore(self, facts: AgreementFacts) -> None:
        """Restore what the previous master knew."""
        self._has_agreed, self._is_off = facts.has_agreed, facts.is_off
        self._left_out = dict.fromkeys(facts.left_out)
        self.is_used = facts != AgreementFacts()
        self._accused, self.returns = facts.accused, facts.returns

    @property
    def agreed(self) -> int:
        """The newest step of the current round at which all replicas were equal; -1: none."""
        kept = self._kept
        return kept.step if kept is not None and kept.round == self._round else -1

    def remember(self, kept: m.KeepStep) -> None:
        """A node was ordered to keep this step, perhaps by the previous master."""
        before = self._kept
        if before is None or _age(kept) > _age(before):
            self._kept = kept

    def accuse(self, node: str) -> bool:
        """A rank of this node differs from the majority; return whether one has before."""
        others = [one for one in self._accused if one != node]
        before = len(others) < len(self._accused)
        self._accused = (*others, node)[-m.MAX_EXCLUDED :]
        return before

    # ------------------------------------------------------------ time

    def proceed(self, ledger: Ledger, here: Collection[str], now: float) -> list[Difference]:
        """Begin a comparison of the current round, if that is due; end one whose time is over.
        `here`: the connected nodes. Return what differs."""
        if ledger.name != self._round:
            self._round, self.running = ledger.name, None
            self._ahead = 0
            self._settled.clear()
            self.first = max(ledger.steps(), default=-1)
            self._patience = now + LIMIT
        run = self.running
        if run is not None and (not run.awaited or (run.until is not None and now >= run.until)):
            run.awaited.clear()
            return self._answered(run, now)
        if run is None and self._is_wanted and not self._is_off and now >= self._due:
            self._due = now + RETRY
            if ledger.is_all_reported(here) or now >= self._patience:
                self._begin(ledger, now)
        return []

    def next_deadline(self) -> float | None:
        """When `proceed` is due at the latest."""
        if self.running is not None:
            return self.running.until
        return self._due if self._is_wanted and not self._is_off else None

    def overslept(self, by: float) -> None:
        """The master was not listening for `by` seconds."""
        if self.running is not None and self.running.until is not None:
            self.running.until += by

    def _begin(self, ledger: Ledger, now: float) -> None:
        self._due = now + APART
        groups = [
            ReplicaGroup(places)
            for places in ledger.replicas()
            if not self._settled & places.keys()
        ]
        if not groups:
            return
        group_of = {rank: one for one in groups for rank in one.places}
        self.running = Comparison(ledger.name, groups, group_of, set(group_of))
        self._seconds = 0.0
        newest = max(ledger.steps(), default=-1)
        nodes = dict.fromkeys(node for one in groups for node in one.places.values())
        order = m.CompareReplicas(ledger.name, newest + self._ahead, self._next_number())
        self._outbox.send(replace(order, left_out=tuple(self._left_out)), *nodes)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    # ------------------------------------------------------------ answers

    def on_digests(self, node: str, report: m.Digests, now: float) -> list[Difference]:
        """Process a node's answer; return what differs."""
        run = self.running
        if run is None or report.round != run.round or report.number != self._number:
            return []
        self._seconds = max(self._seconds, report.seconds)
        for one in report.ranks:
            if one.rank in run.awaited and run.group_of[one.rank].places[one.rank] == node:
                run.awaited.discard(one.rank)
                run.until = now + LIMIT if run.until is None else run.until
                if one.digests:
                    run.answers[one.rank] = one
                    run.steps[one.rank] = report.step
        return [] if run.awaited else self._answered(run, now)

    def forget(self, node: str) -> None:
        """This node is not connected, so its answers are not awaited."""
        if (run := self.running) is not None:
            run.awaited = {one for one in run.awaited if run.group_of[one].places[one] != node}

    def _settle_step(self, run: Comparison) -> None:
        """All ranks have sent one digest: choose the step that most have hashed."""
        counts = Counter(run.steps.values())
        run.step = max(counts, key=lambda step: (counts[step], step), default=-1)
        if len(counts) > 1:  # some had passed it when the order arrived
            run.is_complete = False
            self._ahead = min(max(2 * self._ahead, max(counts) - min(counts)), m.MAX_MARGIN)
        run.answers = {r: one for r, one in run.answers.items() if run.steps[r] == run.step}

    def _answered(self, run: Comparison, now: float) -> list[Difference]:
        """All answers are here: ask for the next parts, or end the comparison. Return what
        differs."""
        if run.differ is None:
            self._settle_step(run)
            run.differ = _divide(run)
        else:
            self._examined(run, run.differ[run.at])
        run.answers.clear()
        while run.at < len(run.differ):
            group = run.differ[run.at]
            if group.spans and run.count < MAX_ASKED:
                run.count += 1
                group.asked = group.spans.pop()
                run.awaited = set(group.samples)
                run.until = now + LIMIT
                self._ask(run, group)
                return []
            run.at += 1
        self.running = None
        self._due = now + max(APART if run.is_complete else RETRY, SHARE * self._seconds)
        if run.differ and self._has_agreed:
            return [self._difference(run.step, group) for group in run.differ]
        if run.differ:
            self._learn(run.differ, run)
        elif run.is_complete:
            self._agree(run)
        return []

    def _examined(self, run: Comparison, group: ReplicaGroup) -> None:
        """The sampled ranks have sent digests of parts: note the tensors that differ, and which
        parts to examine next."""
        found = [run.answers[rank] for rank in group.samples if rank in run.answers]
        parts = parts_of(*group.asked, MAX_PARTS)
        if len(found) < 2 or any(len(one.digests) != len(parts) for one in found):
            run.is_complete = False
            return
        differ = [at for at in range(len(parts)) if len({one.digests[at] for one in found}) > 1]
        if self._has_agreed:
            differ = differ[:1]  # only the first tensor is named
        if len(found[0].names) == len(parts):
            group.tensors += [found[0].names[at] for at in differ]
        else:
            group.spans += [parts[at] for at in reversed(differ)]

    def _ask(self, run: Comparison, group: ReplicaGroup) -> None:
        """Ask the sampled ranks of a group for digests of parts of their tensors."""
        nodes = {group.places[rank]: None for rank in group.samples}
        order = m.CompareReplicas(
            *(run.round, run.step, self._next_number(), group.samples, *group.asked),
            left_out=tuple(self._left_out),
        )
        self._outbox.send(order, *nodes)

    def _agree(self, run: Comparison) -> None:
        if not self._has_agreed:
            self._has_agreed = True
            self.is_used = True
            self._outbox.record()
            ranks = in_spans(sorted(run.group_of))
            self._outbox.log(f"the replicas on {ranks} are equal at step {run.step}")
        self._kept = m.KeepStep(run.round, run.step)
        if self._keeps:
            nodes = {node: None for one in run.groups for node in one.places.values()}
            self._outbox.send(self._kept, *nodes)

    # ------------------------------------------------------------ what differs

    def _learn(self, groups: list[ReplicaGroup], run: Comparison) -> None:
        """Replicas have not been equal yet: what differs is intended."""
        if not run.is_complete:
            return
        tensors = dict.fromkeys(name for one in groups for name in one.tensors)
        self._left_out |= {key_of_name(name): None for name in tensors}
        self._learning += 1
        self.is_used = True
        self._outbox.record()
        is_cut = any(one.spans for one in groups) or len(self._left_out) > m.MAX_LEFT_OUT
        ranks = in_spans(sorted(rank for one in groups for rank in one.places))
        if is_cut or self._learning >= MAX_LEARNING:
            self._is_off = True
            self._left_out.clear()
            what = "differ from the start in too many tensors: they are not compared"
            self._outbox.log(f"the replicas on {ranks} {what}")
        elif tensors:
            listed = ", ".join(list(tensors)[:MAX_NAMED])
            more = f" and {len(tensors) - MAX_NAMED} more" if len(tensors) > MAX_NAMED else ""
            what = f"differ from the start in {plural(len(tensors), 'tensor')} ({listed}{more})"
            then = "this counts as intended, and is not compared"
            self._outbox.log(f"the replicas on {ranks} {what}: {then}")

    def _difference(self, step: int, group: ReplicaGroup) -> Difference:
        everyone = [one for side in group.sides for one in side]
        right, wrong = group.sides[0], everyone[len(group.sides[0]) :]
        if 2 * len(right) <= len(everyone) or len(wrong) > m.MAX_DISTRUSTED:
            right, wrong = [], everyone
            self._settled.update(one.rank for one in wrong)
        wrong.sort(key=lambda one: one.rank)
        return Difference(
            step,
            self.agreed,
            tuple(one.rank for one in wrong),
            tuple(one.rank for one in right),
            tuple(tuple(one.rank for one in side) for side in group.sides),
            group.tensors[0] if group.tensors else "",
            tuple(group.places[one.rank] for one in wrong),
            tuple(one.device for one in wrong),
        )


def _age(kept: m.KeepStep) -> tuple[int, int, int]:
    """Sort key: the newest is the last."""
    return sort_key((kept.round, kept.step))


def _divide(run: Comparison) -> list[ReplicaGroup]:
    """The groups whose replicas have sent different digests, with what to examine."""
    differ: list[ReplicaGroup] = []
    for group in run.groups:
        found = [run.answers[rank] for rank in group.places if rank in run.answers]
        run.is_complete = run.is_complete and len(found) > 1
        group.sides = _sides(found)
        if len(group.sides) > 1 and len(differ) < MAX_GROUPS:
            differ.append(group)
            group.samples = tuple(side[0].rank for side in group.sides[:MAX_SAMPLED])
            if len({one.count for one in found}) == 1:  # else the tensors cannot be matched
                group.spans = [(0, found[0].count)]
    return differ


def _sides(found: Iterable[m.RankDigests]) -> list[list[m.RankDigests]]:
    """Ranks with equal digests, the largest side first; of equal ones, that of the lowest rank."""
    sides: dict[tuple[int, tuple[int, ...]], list[m.RankDigests]] = {}
    for one in sorted(found, key=lambda one: one.rank):
        sides.setdefault((one.count, one.digests), []).append(one)
    return sorted(sides.values(), key=lambda side: (-len(side), side[0].rank))
