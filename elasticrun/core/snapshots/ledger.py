"""Which nodes hold which snapshots of one round, which steps are whole, and what the others lack.

A step is *whole* when every content of the round's ranks has a living holder at that step. A rank's
content is the one reported at that step, else the last one reported for that rank in the round; a
rank without any report makes a step not whole. Ranks with the same content can replace each other,
so the state of a DDP job survives any of its nodes. The state of a sharded job does if nodes hold
*replicas*: copies of what another node's ranks hold, which count in the same way.

Whether a step is whole costs O(1); processing a report costs O(its size).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from elasticrun.core.words import rank_names
from elasticrun.wire.messages import Holding
from elasticrun.wire.types import RoundName, spans_of

MAX_STEP = 2**63
"""Greater than any step."""

MAX_FAILED_STEPS = 64
"""Maximum number of remembered steps per round that a rank could not save."""

MAX_SPANS = 4
"""Maximum number of spans of ranks in a sentence."""

Place = tuple[str, int]
"""A node and the rank whose shard it holds."""


@dataclass(slots=True)
class Snap:
    """One step of one round: what its ranks need, and which nodes hold it."""

    step: int
    expected: dict[int, int]  # rank -> its content at this step
    need: Counter[int] = field(default_factory=Counter)  # content -> ranks that need it
    holders: dict[int, dict[Place, None]] = field(default_factory=dict)  # content -> its holders
    homes: dict[int, Counter[str]] = field(default_factory=dict)  # content -> node -> ranks
    held: dict[str, dict[int, int]] = field(default_factory=dict)  # node -> rank -> content
    copies: dict[str, frozenset[int]] = field(default_factory=dict)  # node -> ranks of replicas
    wanted: dict[str, None] = field(default_factory=dict)  # nodes whose ranks want it written
    missing: int = 0  # contents without a holder
    lone: int = 0  # contents that only one node holds
    ranks: int = 0  # number of ranks whose own node holds them

    def __post_init__(self) -> None:
        self.need.update(self.expected.values())
        self.missing = len(self.need)

    def is_whole(self, world_size: int) -> bool:
        """Whether every rank's content has a living holder."""
        return not self.missing and len(self.expected) == world_size

    def expect(self, rank: int, content: int) -> None:
        """Set the content of `rank` at this step."""
        old = self.expected.get(rank)
        if old == content:
            return
        if old is not None:
            self.need[old] -= 1
            if not self.need[old]:
                del self.need[old]
                self.missing -= not self.holders.get(old)
                self.lone -= self._has_one_holder(old)
        self.expected[rank] = content
        self.need[content] += 1
        if self.need[content] == 1:
            self.missing += not self.holders.get(content)
            self.lone += self._has_one_holder(content)

    def put(
        self,
        node: str,
        contents: dict[int, int],
        *,
        wanted: bool,
        copies: frozenset[int] = frozenset(),
    ) -> None:
        """Record what a living node holds, in place of what it held before; `copies`: the ranks of
        which it holds replicas."""
        self.remove(node)
        for rank, content in contents.items():
            self.expect(rank, content)
            places = self.holders.setdefault(content, {})
            self.missing -= not places
            self.lone -= self._has_one_holder(content)
            places[node, rank] = None
            self.homes.setdefault(content, Counter())[node] += 1
            self.lone += self._has_one_holder(content)
        self.held[node] = contents
        self.ranks += len(contents) - len(copies)
        if copies:
            self.copies[node] = copies
        if wanted:
            self.wanted[node] = None

    def remove(self, node: str) -> None:
        """Record that the node no longer holds anything of this step."""
        self.wanted.pop(node, None)
        self.ranks += len(self.copies.pop(node, ()))
        for rank, content in self.held.pop(node, {}).items():
            self.ranks -= 1
            places, homes = self.holders[content], self.homes[content]
            lone = self._has_one_holder(content)
            del places[node, rank]
            homes[node] -= 1
            if not homes[node]:
                del homes[node]
            if not places:
                del self.holders[content], self.homes[content]
                self.missing += bool(self.need.get(content))
            if self.need.get(content):
                self.lone += self._has_one_holder(content) - lone

    def _has_one_holder(self, content: int) -> bool:
        return len(self.homes.get(content, ())) == 1

    def missing_ranks(self) -> Iterator[int]:
        """Ranks whose content is known but has no holder; O(ranks)."""
        return (rank for rank, one in self.expected.items() if not self.holders.get(one))

    def sole_copies(self) -> dict[str, dict[int, int]]:
        """Needed contents that only one node holds, by node, each with a rank there that has it;
        O(ranks)."""
        found: dict[str, dict[int, int]] = {}
        for content, places in self.holders.items():
            if self.need.get(content) and self._has_one_holder(content):
                node, rank = next(iter(places))
                found.setdefault(node, {})[content] = rank
        return found

    def own_contents(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Each node with what it holds of its own ranks; O(ranks)."""
        for node, contents in self.held.items():
            copies = self.copies.get(node, ())
            yield node, {rank: one for rank, one in contents.items() if rank not in copies}


class Ledger:
    """The snapshots of one round, over all nodes."""

    def __init__(self, name: RoundName, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.upto: int | None = None  # later steps were discarded; None: the round may still run
        self.passed = -1  # the newest step that can never be whole because a node skipped it
        self.given_up = (-1, -1)  # steps above the first, up to the second, do not count
        self.snaps: dict[int, Snap] = {}
        self.failed: dict[int, dict[int, str]] = {}  # step -> ranks that could not save it, and why
        self._last: dict[int, int] = {}  # rank -> its last content
        self._home: dict[int, str] = {}  # rank -> the node that held it last
        self._reported: dict[str, dict[int, tuple[Holding, ...]]] = {}  # node -> step -> report
        self._bad: dict[tuple[int, str, int], None] = {}  # step, node, rank
        self._distrusted: dict[int, int] = {}  # rank -> from which step on it counts as absent

    def steps(self) -> list[int]:
        """Steps with any snapshot in memory, newest first."""
        return sorted((step for step, snap in self.snaps.items() if snap.held), reverse=True)

    def is_whole(self, step: int) -> bool:
        """Whether every content of the round's ranks has a living holder at this step."""
        snap = self.snaps.get(step)
        return snap is not None and snap.is_whole(self.world_size)

    def is_paired(self, step: int) -> bool:
        """Whether this step is whole, and would remain so after the loss of any one node."""
        return self.is_whole(step) and not self.snaps[step].lone

    def count_single_copies(self, step: int) -> int:
        """Number of contents of this step that only one node holds."""
        snap = self.snaps.get(step)
        return snap.lone if snap is not None else 0

    def is_full(self, step: int) -> bool:
        """Whether each rank's own node holds it at this step, except ranks that could not save
        it."""
        snap = self.snaps.get(step)
        lacking = len({*self.failed.get(step, ()), *self.distrusted(step)})
        return snap is not None and snap.ranks + lacking >= self.world_size

    def save_failed(self, step: int, rank: int, reason: str) -> None:
        """A rank of this round could not save a step that others may still save, or could not
        either."""
        is_known = self._is_open(step) or step in self.failed
        if not is_known or rank >= self.world_size or rank in self.failed.get(step, ()):
            return
        self.failed.setdefault(step, {})[rank] = reason
        while len(self.failed) > MAX_FAILED_STEPS:
            del self.failed[min(self.failed)]

    def why_never(self, step: int) -> str:
        """Why a step can never be whole, as a clause: every rank with a certain content failed to
        save it. "" if the step may become whole, or is. O(ranks) if a rank failed to save it."""
        snap, failed = self.snaps.get(step), self.failed.get(step, {})
        able = {content for rank, content in self._last.items() if rank not in failed}
        held = snap.holders if snap is not None else {}
        lost = [
            rank
            for rank in failed
            if (content := self._last.get(rank, 0)) not in able and not held.get(content)
        ]
        if not lost:
            return ""
        return f"{rank_names(lost, pairs=True)} could not save it: {failed[lost[0]]}"

    def newest_never_whole(self, above: int) -> int:
        """The newest step above `above` that can never be whole; -1: none."""
        return max((one for one in self.failed if one > above and self.why_never(one)), default=-1)

    def is_all_reported(self, living: Collection[str]) -> bool:
        """Whether every rank was reported by its own node, and all these nodes are present. Until
        then, a node that has yet to report may hold what seems lost. O(ranks)."""
        homes = self._home.values()
        return len(homes) == self.world_size and all(node in living for node in homes)

    def update(self, node: str, held: Iterable[Holding]) -> None:
        """Process all that a living node holds of this round."""
        now: dict[int, tuple[Holding, ...]] = {}
        for one in held:
            if self._is_ours(one):
                now[one.step] = (*now.get(one.step, ()), one)
        before = self._reported.pop(node, {})
        for step in before.keys() - now.keys():
            self._remove_holdings(node, step)
        for step, holdings in now.items():
            if before.get(step) != holdings:
                self._put(node, holdings)
        if now:
            self._reported[node] = now
            own = {
                one.step: one for holdings in now.values() for one in holdings if not one.replica
            }
            if own:
                self._pass_over(own)

    def _pass_over(self, own: dict[int, Holding]) -> None:
        """A node that holds a newer step will not return to those that it does not hold. If no
        other node has its content either, they will never be whole."""
        newest = max(own)
        mine = {content for content in own[newest].contents if content}
        for step, snap in self.snaps.items():
            is_skipped = self.passed < step < newest and step not in own
            if is_skipped and not all(snap.holders.get(content) for content in mine):
                self.passed = step

    def give_up(self, above: int, upto: int = -1) -> None:
        """Exclude the steps above `above` up to `upto`; -1: up to the newest one held now."""
        upto = max(self.snaps, default=-1) if upto < 0 else upto
        self.given_up = (above, max(upto, self.given_up[1]))
        self._drop(above, upto)

    def keep_only(self, node: str, step: int | None) -> None:
        """Count only this step of this node from now on; None: no step."""
        holdings = self._reported.get(node, {})
        self.update(node, holdings.get(step, ()) if step is not None else ())

    def end_at(self, step: int) -> None:
        """End the round at `step`: discard later steps."""
        self.upto = step
        self._drop(step)

    def _drop(self, above: int, upto: int = MAX_STEP) -> None:
        kept = {step: snap for step, snap in self.snaps.items() if not above < step <= upto}
        self.snaps = kept
        for node, holdings in self._reported.items():
            self._reported[node] = {s: one for s, one in holdings.items() if not above < s <= upto}

    def spoil(self, node: str, step: int, rank: int) -> bool:
        """Count this node's snapshot of a rank as absent, because it is bad. Return whether that
        changes anything."""
        snap, holdings = self.snaps.get(step), self._reported.get(node, {}).get(step)
        if snap is None or holdings is None or rank not in snap.held.get(node, {}):
            return False
        self._bad[step, node, rank] = None
        self._put(node, holdings)
        return True

    def distrust(self, ranks: Collection[int], since: int) -> None:
        """Count what these ranks save from this step on as absent, wherever it is: it differs from
        its replicas."""
        for rank in ranks:
            self._distrusted[rank] = min(since, self._distrusted.get(rank, since))
        for node, steps in self._reported.items():
            for step, holdings in steps.items():
                if step >= since:
                    self._put(node, holdings)

    def distrusted(self, step: int) -> tuple[int, ...]:
        """The ranks whose own snapshot of this step differs from its replicas."""
        return tuple(sorted(rank for rank, since in self._distrusted.items() if step >= since))

    def replicas(self) -> list[dict[int, str]]:
        """The ranks of each content that several have, with their nodes, without ranks that differ;
        O(ranks)."""
        found: dict[int, dict[int, str]] = {}
        for rank, node in sorted(self._home.items()):
            if rank not in self._distrusted:
                found.setdefault(self._last[rank], {})[rank] = node
        return [places for places in found.values() if len(places) > 1]

    def needs(self, step: int, nodes: Collection[str]) -> bool:
        """Whether these nodes are the only holders of some content of this step."""
        snap = self.snaps.get(step)
        return snap is not None and any(
            all(place[0] in nodes for place in snap.holders.get(content, ()))
            for node in nodes
            for content in snap.held.get(node, {}).values()
        )

    def find_places(self, step: int, rank: int) -> list[Place]:
        """The places that hold this rank's shard at this step, or one with the same content: the
        rank's own place first."""
        snap = self.snaps.get(step)
        if snap is None or rank not in snap.expected:
            return []
        places = snap.holders.get(snap.expected[rank], {})
        own = (self._home.get(rank, ""), rank)
        return [own, *(one for one in places if one != own)] if own in places else list(places)

    def why_not_whole(self, step: int) -> str:
        """What a step lacks, as a clause; O(ranks)."""
        snap = self.snaps.get(step)
        if snap is None or not snap.held:
            return "no node holds it"
        lost: dict[str, list[int]] = {}
        for rank in snap.missing_ranks():
            lost.setdefault(self._home.get(rank, ""), []).append(rank)
        if lost:
            node = min(lost, key=lambda one: lost[one][0])
            others = f", and {len(lost) - 1} more nodes that of others" if len(lost) > 1 else ""
            return f"node {node} held the only copy of {in_spans(lost[node])}{others}"
        unknown = [rank for rank in range(self.world_size) if rank not in snap.expected]
        return f"{in_spans(unknown)} never had a snapshot" if unknown else ""

    # ------------------------------------------------------------ helpers

    def _is_open(self, step: int) -> bool:
        """Whether this step counts."""
        late = self.upto is not None and step > self.upto
        return not late and not self.given_up[0] < step <= self.given_up[1]

    def _is_ours(self, one: Holding) -> bool:
        if not self._is_open(one.step):
            return False
        return one.round == self.name and one.world_size == self.world_size

    def _put(self, node: str, holdings: tuple[Holding, ...]) -> None:
        step = holdings[0].step
        snap = self.snaps.get(step)
        if snap is None:
            snap = self.snaps[step] = Snap(step, dict(self._last))
        contents: dict[int, int] = {}
        copies = set()
        for one in sorted(holdings, key=lambda one: one.replica):
            for rank, content in enumerate(one.contents, one.first_rank):
                if not content or rank in contents:
                    continue
                self._set_content(rank, content)
                if not one.replica:
                    self._home[rank] = node
                if (step, node, rank) in self._bad or step >= self._distrusted.get(rank, MAX_STEP):
                    snap.expect(rank, content)
                    continue
                contents[rank] = content
                if one.replica:
                    copies.add(rank)
        wanted = any(one.wanted for one in holdings)
        snap.put(node, contents, wanted=wanted, copies=frozenset(copies))

    def _set_content(self, rank: int, content: int) -> None:
        """Record the content that the rank has."""
        if rank not in self._last:
            for other in self.snaps.values():
                if rank not in other.expected:
                    other.expect(rank, content)
        self._last[rank] = content

    def _remove_holdings(self, node: str, step: int) -> None:
        snap = self.snaps.get(step)
        if snap is not None:
            snap.remove(node)
            if not snap.held:  # its ranks' needs are known, or will be reported again
                del self.snaps[step]


def in_spans(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3 and 8`; a few spans, and whether there are more."""
    spans = spans_of(ranks)
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:MAX_SPANS]]
    more = " and more" if len(spans) > MAX_SPANS else ""
    alone = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'rank' if alone else 'ranks'} {', '.join(words)}{more}"
