"""The wait-for graph of one sample: which ranks wait for which, and why none makes progress.

In a process group a rank that has entered more collectives than it has completed is *in* the first
of these, number s, and waits for every member that has entered fewer than s. Following this from
group to group leads either to ranks that others wait for and that wait for nobody (the culprits),
or to a cycle. O(ranks), without a table of pairs: it is enough to know each group's last member.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from elasticrun.core.words import Lasting, plural, rank_names, render_lasting
from elasticrun.wire.messages import Being, GroupSeen, Position, RankSeen
from elasticrun.wire.types import read_ranges, write_ranges

CPU_STILL: Final = 0.02
"""Cores below which a rank is idle: the threads of an idle torch use a third of that."""

IO_STILL: Final = 16 * 1024
"""Bytes per second below which a rank's I/O is negligible."""

GPU_STILL: Final = 5
"""Percent below which a device is idle."""

IDLE_GRAIN: Final = 5.0
"""Seconds by which one rank must have been idle longer than others to be named first."""

EDGES_NAMED: Final = 8
"""Maximum number of ranks of a cycle, or of sides of a mismatch, that a sentence names."""

SIZED: Final = frozenset({"all_reduce", "allreduce", "broadcast", "barrier"})
"""Collectives in which all ranks have buffers of one size; in the others they may differ."""

FAMILIES: Final = ("allgather", "allreduce", "alltoall", "reducescatter")
"""Collectives with several calls in torch: ranks in different calls of one family match."""

WHOLE: Final = (*FAMILIES, "barrier")
"""Collectives that no rank can complete before all members have entered them."""

PAIRED: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "coalesced")
"""Calls between two ranks: their numbers say nothing about other ranks."""

COLLECTIVES: Final = "torch.distributed"
"""The library that the main thread is in while it waits in a collective."""

_ELEMENTS: Final = re.compile(r"\[([\d, ]*)\]")

DEBUGGERS: Final = ("pdb", "bdb", "debugpy", "pydevd", "IPython", "ipdb")
"""Libraries in which a rank waits for a person."""


DECLARED: Final = "said"
"""The kind of a verdict about a rank in a long operation that its script has declared: no hang."""


class Klass(StrEnum):
    """How certain a verdict is."""

    CERTAIN = "certain"  # it cannot continue
    STRONG = "strong"  # all evidence suggests so
    WEAK = "weak"  # an awaited rank works, or a person is debugging it
    STILL = "still"  # no rank does anything, and none waits for another


@dataclass(frozen=True, slots=True)
class Sighting:
    """One rank in one sample: its node, its state, and the groups that its positions refer to."""

    node: str
    seen: RankSeen
    groups: tuple[GroupSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class Impasse:
    """What one sample shows. Two alike (`is_like`), with no movement in between, are a verdict.

    `odd`: the ranks concerned, the first of them named in the sentence; `waiting`: ranks that wait
    for them. `of_node`: the node at fault, "" for the script. `place`, `library`: where the first
    odd rank is, in the user's source and below. `pieces`: for `words.render_lasting`.
    """

    klass: Klass
    kind: str
    odd: tuple[int, ...]
    waiting: tuple[int, ...]
    pieces: Lasting
    group: str = ""
    number: int = 0
    node: str = ""
    of_node: str = ""
    place: str = ""
    library: str = ""
    held: bool = False  # by a debugger or a person, or declared: shown but never ended
    says: str = ""  # the long operation that a rank has declared

    @property
    def sentence(self) -> str:
        """The sentence with the durations as of the sample."""
        return render_lasting(self.pieces)

    def is_like(self, other: Impasse) -> bool:
        """Whether both describe the same condition of the same ranks."""
        mine = (self.klass, self.kind, self.odd, self.group, self.number)
        return mine == (other.klass, other.kind, other.odd, other.group, other.number)


@dataclass(slots=True)
class _At:
    """The position of a rank in a group."""

    entered: int
    done: int
    started: int
    call: str

    @property
    def is_in(self) -> bool:
        return self.entered > self.done


@dataclass(slots=True)
class _Group:
    """A process group, with the members whose state is known."""

    name: str
    title: str
    at: dict[int, _At] = field(default_factory=dict)  # by rank
    whole: bool = True  # the positions of all members are known
    least: int = 0  # number of collectives that the last member has entered
    laggard: int = -1  # the last member
    unbegun: int = -1  # the rank whose device is behind, if all have entered; -1: none
    unbegun_at: int = 0  # number of collectives that this device has started

    def finish(self) -> None:
        """Compute the last member and the last device. Call once all positions are set."""
        self.laggard = min(self.at, key=lambda rank: (self.at[rank].entered, rank), default=-1)
        self.least = self.at[self.laggard].entered if self.at else 0
        started = [(one.started, rank) for rank, one in self.at.items() if one.started >= 0]
        if started:
            self.unbegun_at, self.unbegun = min(started)

    def blocker(self, rank: int) -> int:
        """A member that this one waits for; -1: none known."""
        one = self.at[rank]
        if not one.is_in or is_paired(one.call):
            return -1
        if self.least <= one.done:
            return self.laggard
        behind = self.unbegun >= 0 and self.unbegun != rank and self.unbegun_at <= one.done
        return self.unbegun if behind and one.started > one.done else -1

    @property
    def top(self) -> int:
        """The highest number that a member is in; 0: none is in any."""
        inside = (at.done + 1 for at in self.at.values() if at.is_in and not is_paired(at.call))
        return max(inside, default=0)

    @property
    def words(self) -> str:
        return f"group {self.title or self.name}"


class Scene:
    """All ranks of one sample, with the queries on them."""

    def __init__(self, sightings: Iterable[Sighting], seconds: float) -> None:
        """`seconds`: since anything moved."""
        self.ranks = {one.seen.rank: one for one in sightings}
        self.seconds = seconds
        idle = [one.seen.idle for one in self.living]
        self.idle = min([seconds, *idle]) if all(idle) else seconds
        """Seconds since any rank has done anything at all."""
        self.groups = _gather(self.ranks)
        self._waits: dict[int, tuple[_Group, int]] = {}  # rank -> the group, and the awaited rank
        self._engaged: set[int] = set()  # in a call, but the awaited rank is unknown
        self._open: dict[int, int] = defaultdict(int)  # groups in which a rank is in a call
        awaited: dict[int, _Group] = {}
        for group in self.groups:
            top = group.top
            for rank, one in group.at.items():
                if top and one.entered < top:
                    awaited.setdefault(rank, group)
                self._open[rank] += one.is_in
                blocker = group.blocker(rank)
                if one.is_in and blocker < 0 and rank != group.unbegun:
                    self._engaged.add(rank)
                if blocker >= 0:
                    self._waits.setdefault(rank, (group, blocker))
        for group, blocker in self._waits.values():
            awaited.setdefault(blocker, group)
        self.awaited: Mapping[int, _Group] = awaited

    @property
    def living(self) -> list[Sighting]:
        """The ranks that have not exited."""
        return [one for one in self.ranks.values() if one.seen.being is not Being.ENDED]

    def waits_for(self, rank: int) -> tuple[_Group, int] | None:
        """The group in which a rank waits, and one rank that it waits for; None: it does not."""
        return self._waits.get(rank)

    def is_blocked(self, rank: int) -> bool:
        """Whether the main thread of a rank is in its only open call, so it can do nothing else
        before that ends; a separate thread may be in a collective while the rank works."""
        seen = self.ranks[rank].seen
        alone = self._open[rank] == 1 and not seen.partial
        return alone and seen.library.startswith(COLLECTIVES) and seen.io < IO_STILL

    def calls_with(self, rank: int) -> list[str]:
        """The open calls in the groups of this rank."""
        mine = (group for group in self.groups if rank in group.at)
        return [at.call for group in mine for at in group.at.values() if at.is_in]

    def call(self, rank: int) -> str:
        """The collective that a rank is in: "all_reduce #31 [1000] of group dp"; "" for none."""
        waits = self._waits.get(rank)
        for group in [waits[0]] if waits else self.groups:
            at = group.at.get(rank)
            if at is not None and at.is_in:
                return _call_words(group, at)
        return ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait for another rank."""
        return tuple(self._waits)

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that others wait for and that wait for none; exited ones only if there is no
        other. A rank in a call without a known laggard is not included: it waits for something."""
        found = [
            rank
            for rank in self.awaited
            if rank not in self._waits
            and (rank not in self._engaged or not self.ranks[rank].seen.answers)
        ]
        living = [rank for rank in found if self.ranks[rank].seen.being is not Being.ENDED]
        return tuple(sorted(living or found))

    def name(self, rank: int) -> str:
        """The name of a rank, with its node if there is more than one."""
        node = self.ranks[rank].node
        alone = all(one.node == node for one in self.ranks.values())
        return f"rank {rank}" if alone else f"rank {rank} (node {node})"

    def at(self, rank: int) -> str:
        """Where a rank is in the user's source: " at train.py:88 step"; "" if unknown."""
        place = self.ranks[rank].seen.place
        return f" at {place}" if place else ""


def fingerprint(sightings: Iterable[Sighting]) -> tuple[object, ...]:
    """All counters and steps of a sample: two samples have equal ones if nothing has moved."""
    return tuple(
        sorted(
            (
                one.seen.rank,
                one.seen.step,
                tuple((one.groups[at.group].name, at.entered, at.done) for at in _positions(one)),
            )
            for one in sightings
        )
    )


def is_busy(seen: RankSeen) -> bool:
    """Whether a rank uses CPU, I/O or its device."""
    return seen.cpu >= CPU_STILL or seen.io >= IO_STILL or seen.gpu >= GPU_STILL


def is_held(seen: RankSeen) -> bool:
    """Whether a person is debugging a rank."""
    return seen.being is Being.TRACED or seen.library.partition(".")[0] in DEBUGGERS


def is_paired(call: str) -> bool:
    """Whether a call is between two ranks."""
    name = _name(call)
    return name in PAIRED or name.startswith(("send", "recv"))


def judge(scene: Scene) -> Impasse | None:
    """What blocks the job; None if that cannot be recognised."""
    sure = _find_mismatch(scene) or _find_awaited(scene) or _find_cycle(scene)
    return sure or _mark_declared(
        scene, _find_stuck_call(scene) or _find_halted(scene) or _find_still(scene)
    )


# ---------------------------------------------------------------- verdicts


def _find_mismatch(scene: Scene) -> Impasse | None:
    """Ranks are in different collectives as the same number of one group."""
    for group in scene.groups:
        calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, one in group.at.items():
            if one.is_in and (signature := _signature(one.call)):
                calls[one.done + 1][signature].append(rank)
        for number, parties in sorted(calls.items()):
            if _differ(parties):
                return _describe_mismatch(scene, group, number, parties)
    return None


def _describe_mismatch(
    scene: Scene, group: _Group, number: int, parties: Mapping[str, list[int]]
) -> Impasse:
    """The minority deviates. A rank that has completed this number was not in a collective that all
    must enter first; if exactly one other collective is known, it was in that one."""
    past = [rank for rank, at in group.at.items() if at.done >= number]
    partial = [signature for signature in parties if not signature.startswith(WHOLE)]
    more = {partial[0]: past} if len(partial) == 1 and past else {}
    votes = {one: len(ranks) + len(more.get(one, ())) for one, ranks in parties.items()}
    by_size = sorted(parties.items(), key=lambda party: (-votes[party[0]], party[1]))
    clauses = [
        f"{_who(scene, ranks)} in {group.at[min(ranks)].call}{scene.at(min(ranks))}"
        for _, ranks in by_size[:EDGES_NAMED]
    ]
    clear = votes[by_size[0][0]] > votes[by_size[1][0]]
    odd = tuple(sorted(rank for _, ranks in by_size[1:] for rank in ranks)) if clear else ()
    blamed = odd or tuple(sorted(rank for _, ranks in by_size for rank in ranks))
    first = scene.ranks[blamed[0]]
    went = f"; {rank_names(past)} went on from {partial[0].split()[0]}" if more else ""
    whose = f", and {rank_names(odd)} deviate{'s' * (len(odd) == 1)}" if odd else ""
    return Impasse(
        Klass.CERTAIN,
        "mismatch",
        blamed,
        tuple(sorted(set(group.at) - set(blamed))),
        (
            f"{', '.join(clauses[:-1])} and {clauses[-1]}, each as #{number} of {group.words}"
            f"{went}: the collectives do not match{whose}",
        ),
        group.name,
        number,
        node=first.node,
        place=first.seen.place,
        library=first.seen.library,
        held=any(is_held(scene.ranks[rank].seen) for rank in group.at),
    )


def _find_awaited(scene: Scene) -> Impasse | None:
    """The ranks that others wait for and that wait for nobody, classified by what they do."""
    odd = scene.odd
    if not odd:
        return None
    classed = [(rank, _class_of(scene, rank)) for rank in odd]
    held = [one for one in classed if one[1].kind == "traced"]
    certain = [one for one in classed if one[1].klass is Klass.CERTAIN]
    weak = [one for one in classed if one[1].klass is Klass.WEAK]
    rank, does = (held or certain or weak or classed)[0]
    klass, kind = does.klass, does.kind
    same = [other for other, doing in classed if doing.kind == kind]
    one, group = scene.ranks[rank], scene.awaited[rank]
    waiting = tuple(other for other in scene.waiting if other not in odd)
    top = group.top
    sample = next((at for at in group.at.values() if at.is_in and at.done + 1 == top), None)
    what = f" in {_call_words(group, sample)}" if sample else ""
    more = f", like {rank_names(same[1:])}" if len(same) > 1 else ""
    who = "them" if more else "it"
    return Impasse(
        klass,
        kind,
        (rank, *(other for other in same if other != rank)),
        waiting,
        (
            f"{scene.name(rank)} {does.what}",
            *does.span,
            f"{does.more}{more}; {_count(len(waiting))} for {who}{what}",
        ),
        group.name,
        top,
        node=one.node,
        of_node=one.node if kind in ("disk", "frozen") else "",
        place=one.seen.place if kind != DECLARED else "",  # its duration is no rule for others
        library=one.seen.library if kind != DECLARED else "",
        held=kind in ("traced", DECLARED),
        says=one.seen.says if kind == DECLARED else "",
    )


class _Doing(NamedTuple):
    """What an awaited rank does: class, kind, a clause; `span`: for how long, if known; and the
    text after it."""

    klass: Klass
    kind: str
    what: str
    span: tuple[int, ...] = ()
    more: str = ""


def _class_of(scene: Scene, rank: int) -> _Doing:
    seen = scene.ranks[rank].seen
    place, span = scene.at(rank), (round(scene.seconds),)
    if is_held(seen):
        return _Doing(Klass.WEAK, "traced", f"is held by a debugger{place}", span)
    if seen.being is Being.ENDED:  # it may have done its part, of a broadcast say
        sure = any(_family(call).startswith(WHOLE) for call in scene.calls_with(rank))
        return _Doing(Klass.CERTAIN if sure else Klass.STRONG, "ended", "has exited with 0")
    if seen.being is Being.STOPPED:
        return _Doing(Klass.STRONG, "stopped", f"is stopped by a signal{place}", span)
    if seen.being is Being.FROZEN:
        return _Doing(Klass.STRONG, "frozen", f"is frozen with its cgroup{place}", span)
    if seen.says:
        return _Doing(Klass.WEAK, DECLARED, _declared_words(seen))
    if seen.io >= IO_STILL or (is_busy(seen) and not seen.holds):
        return _Doing(Klass.WEAK, "busy", f"is busy{place}", span, f" ({_load(seen)})")
    if seen.being is Being.DISK:
        kernel = f" ({seen.kernel})" if seen.kernel else ""
        return _Doing(Klass.STRONG, "disk", f"is in uninterruptible sleep{kernel}{place}", span)
    if seen.holds:
        how = f"and uses {seen.cpu:.1f} cores" if is_busy(seen) else "asleep"
        what = f"has its interpreter lock held by C code, {how}{place}"
        return _Doing(Klass.STRONG, "held", what, span)
    silent = "does not answer and " if seen.forked and not seen.answers else ""
    return _Doing(Klass.STRONG, "idle", f"{silent}is idle{place}", span)


def _find_cycle(scene: Scene) -> Impasse | None:
    """Every awaited rank waits too, so the chain closes into a cycle."""
    start = min(scene.waiting, default=-1)
    if start < 0:
        return None
    order: dict[int, int] = {}
    rank = start
    while rank not in order:
        order[rank] = len(order)
        waits = scene.waits_for(rank)
        if waits is None:
            return None
        rank = waits[1]
    ring = list(order)[order[rank] :]
    lowest = ring.index(min(ring))
    ring = ring[lowest:] + ring[:lowest]
    clauses = []
    for number, one in enumerate(ring[:EDGES_NAMED]):
        after = ring[(number + 1) % len(ring)]
        who = f"rank {one}" if number else scene.name(one)
        clauses.append(f"{who} waits for rank {after} in {scene.call(one)}{scene.at(one)}")
    rest = f", and so on over {plural(len(ring), 'rank')}" if len(ring) > EDGES_NAMED else ""
    seen = [scene.ranks[one].seen for one in ring]
    works = any(is_busy(one) for one in seen)
    counted = any(at.started >= 0 for one in seen for at in one.at)  # waiting for a device spins
    sure = Klass.CERTAIN if all(map(scene.is_blocked, ring)) else Klass.STRONG
    first = scene.ranks[ring[0]]
    return Impasse(
        sure if counted or not works else Klass.WEAK,
        "deadlock",
        tuple(ring),
        tuple(sorted(set(scene.waiting) - set(ring))),
        (f"deadlock: {', '.join(clauses)}{rest}",),
        node=first.node,
        place=first.seen.place,
        library=first.seen.library,
        held=any(map(is_held, seen)),
    )


def _find_stuck_call(scene: Scene) -> Impasse | None:
    """All members are in a collective, and it does not end."""
    for group in scene.groups:
        number = group.top
        if not number or group.least < number or len(group.at) < 2 or not group.whole:
            continue
        inside = sorted(rank for rank, at in group.at.items() if at.is_in)
        nodes = sorted({scene.ranks[rank].node for rank in group.at})
        first = scene.ranks[inside[0]]
        where = f"on {plural(len(nodes), 'node')}"
        return Impasse(
            Klass.STRONG,
            "fabric",
            tuple(inside),
            (),
            (
                f"all {len(group.at)} members of {group.words} {where} are in "
                f"{group.at[inside[0]].call or 'a collective'} as #{number}",
                round(scene.seconds),
                ", and it does not finish: check the network between them",
            ),
            group.name,
            number,
            node=first.node,
            of_node=nodes[0] if len(nodes) == 1 else "",
            place=first.seen.place,
            library=first.seen.library,
        )
    return None


def _find_halted(scene: Scene) -> Impasse | None:
    """No rank reports what it waits for (ranks started by exec cannot), but the kernel shows why
    some are halted. A rank in uninterruptible sleep may only be reading, unless all are idle."""
    idle = not any(is_busy(one.seen) for one in scene.ranks.values())
    beings = {Being.STOPPED, Being.FROZEN, *([Being.DISK] if idle else [])}
    halted = sorted(
        rank for rank, one in scene.ranks.items() if one.seen.being in beings and not one.seen.says
    )
    if not halted:
        return None
    one = scene.ranks[halted[0]]
    does = _class_of(scene, halted[0])
    klass, kind = does.klass, does.kind
    same = [rank for rank in halted if scene.ranks[rank].seen.being is one.seen.being]
    more = f", like {rank_names(same[1:])}" if same[1:] else ""
    return Impasse(
        klass,
        kind,
        tuple(same),
        (),
        (f"{scene.name(same[0])} {does.what}{more}; it is unknown who waits for it",),
        node=one.node,
        of_node=one.node if kind in ("disk", "frozen") else "",
        place=one.seen.place,
        library=one.seen.library,
        held=any(is_held(other.seen) for other in scene.ranks.values()),
    )


def _find_still(scene: Scene) -> Impasse | None:
    """No rank is in a known collective, and none does anything. If torch counts no collectives (its
    recorder is off, or does not know the backend), the stacks show which ranks are in one, and so
    which may be the odd one."""
    living = scene.living
    if not living or any(is_busy(one.seen) for one in living):
        return None
    inside, outside = 0, []
    for one in () if any(one.seen.at for one in living) else living:
        if one.seen.library.startswith(COLLECTIVES):
            inside += 1
        elif one.seen.place and one.seen.answers:
            outside.append(one)
    named = outside if inside and outside else living
    first = min(named, key=lambda one: (-(one.seen.idle // IDLE_GRAIN), one.seen.rank))
    longest = first.seen.idle - scene.idle >= IDLE_GRAIN
    who, at = f"; {scene.name(first.seen.rank)}", f" is{scene.at(first.seen.rank)}"
    since: Lasting = (" has been idle longest,", round(first.seen.idle), ", and") if longest else ()
    where: Lasting = (who, *since, at) if first.seen.place else ()
    what = "and none waits for another"
    if inside:
        what = f"and {plural(inside, 'rank')} may wait in torch.distributed for another"
    return Impasse(
        Klass.STILL,
        "still",
        tuple(sorted(one.seen.rank for one in named)),
        (),
        (
            "no rank has used its CPU or read or written anything",
            round(scene.idle),
            f", {what}",
            *where,
        ),
        node=first.node,
        place=first.seen.place,
        library=first.seen.library,
        held=any(is_held(one.seen) for one in living),
    )


def _mark_declared(scene: Scene, found: Impasse | None) -> Impasse | None:
    """The same verdict, marked as declared if a rank in it has declared a long operation."""
    for rank in found.odd if found is not None else ():
        seen = scene.ranks[rank].seen
        if found is not None and seen.says:
            return replace(
                found,
                klass=Klass.WEAK,
                kind=DECLARED,
                pieces=(f"{scene.name(rank)} {_declared_words(seen)}; ", *found.pieces),
                of_node="",
                place="",
                library="",
                held=True,
                says=seen.says,
            )
    return found


# ---------------------------------------------------------------- helpers


def _gather(ranks: Mapping[int, Sighting]) -> list[_Group]:
    """The groups with the positions of their members. A member that answers but does not report a
    group has entered nothing in it. A member that does not answer counts as behind all others if
    the kernel shows what holds it; otherwise it is omitted."""
    groups: dict[tuple[str, str], _Group] = {}
    for one in ranks.values():
        for at in _positions(one):
            seen = one.groups[at.group]
            key = (seen.name, seen.members)
            group = groups.setdefault(key, _Group(seen.name, seen.title))
            group.at[one.seen.rank] = _At(at.entered, at.done, at.started, at.call)
    every = tuple(ranks)
    limit = max(every, default=0) + 1
    for (_, text), group in groups.items():
        for rank in _members(text, limit) or every:
            if rank in group.at:
                continue
            absent = _absent(ranks[rank].seen) if rank in ranks else None
            group.whole = group.whole and absent is not None
            if absent is not None:
                group.at[rank] = absent
        group.finish()
    return [group for _, group in sorted(groups.items())]


def _members(text: str, limit: int) -> tuple[int, ...]:
    try:
        return read_ranges(text, limit)
    except ValueError:
        return ()


def _absent(seen: RankSeen) -> _At | None:
    """The position of a member that has reported none in a group; None if it is unknown."""
    if seen.answers:
        return None if seen.partial else _At(0, 0, -1, "")
    runs_on = seen.being in (Being.RUNS, Being.SLEEPS) and not seen.forked
    return None if runs_on else _At(-1, -1, -1, "")


def _positions(one: Sighting) -> list[Position]:
    return [at for at in one.seen.at if at.group < len(one.groups)]


def _name(call: str) -> str:
    """The name of a collective: all_reduce for "nccl:all_reduce [4]"."""
    return call.partition(" ")[0].rpartition(":")[2]


def _family(call: str) -> str:
    """The name of a collective without variants: "allgather" for "nccl:_all_gather_base [4]"."""
    name = _name(call).replace("_", "")
    return next((family for family in FAMILIES if name.startswith(family)), name)


def _signature(call: str) -> str:
    """The part of a call that must be equal on all ranks; "" if nothing must. Sizes count as the
    number of elements, because ranks may use different shapes."""
    name = _name(call)
    if not name or is_paired(call):
        return ""
    sizes = call.partition(" ")[2] if name in SIZED else ""
    return f"{_family(call)} {_ELEMENTS.sub(_count_elements, sizes)}".strip()


def _count_elements(sizes: re.Match[str]) -> str:
    return str(math.prod(int(one) for one in sizes[1].split(",") if one.strip()))


def _differ(parties: Iterable[str]) -> bool:
    """Whether these signatures cannot be of one collective; one without sizes matches any sizes."""
    names = {one.partition(" ")[0] for one in parties}
    return len(names) > 1 or len([one for one in parties if " " in one]) > 1


def _call_words(group: _Group, at: _At) -> str:
    name, _, rest = at.call.partition(" ")
    what = f"{name or 'collective'} #{at.done + 1}"
    return f"{what}{f' {rest}' if rest else ''} of {group.words}"


def _who(scene: Scene, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"{scene.name(ranks[0])} is"
    return f"ranks {write_ranges(ranks)} are"


def _count(waiting: int) -> str:
    return "1 rank waits" if waiting == 1 else f"{waiting} ranks wait"


def _declared_words(seen: RankSeen) -> str:
    left = seen.says_left
    span = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"reports {seen.says}, for at most {span} more"


def _load(seen: RankSeen) -> str:
    parts = [f"{seen.cpu:.1f} cores"]
    if seen.io >= IO_STILL:
        parts.append(f"{seen.io / 1e6:.1f} MB/s")
    if seen.gpu >= GPU_STILL:
        parts.append(f"GPU {seen.gpu} %")
    return ", ".join(parts)
