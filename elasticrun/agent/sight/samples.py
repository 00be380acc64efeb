"""Converts a sample of the ranks into wire messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from elasticrun.agent.logs.folded import fold_texts
from elasticrun.agent.logs.masks import moment_of
from elasticrun.agent.sight import dump, outside
from elasticrun.agent.sight.activity import Activity
from elasticrun.agent.sight.outside import Threads
from elasticrun.agent.sight.pulse import RankBeat
from elasticrun.agent.sight.stacks import Frame, group_stacks, place_of
from elasticrun.core.words import rank_names
from elasticrun.host.accelerators import Load
from elasticrun.wire import messages as m
from elasticrun.wire.progress import MAX_ANSWER_GROUPS, GroupAnswer, RankAnswer
from elasticrun.wire.types import MAX_SECONDS, MAX_TEXT, RoundName, write_ranges

MIB = 1024 * 1024

UNKNOWN_LOAD = Load()

_Group = tuple[str, str]
"""Name and members of a process group."""

MOST_OF_A_LINE = 200
"""Maximum characters of an output line that is sent."""

ROOM = m.MAX_MESSAGE_BYTES * 3 // 4
"""Maximum bytes of all stacks in one message, which also contains names. The groups at the end, the
most common ones, are dropped if they do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """One rank in one sample, with all facts that this node has about it."""

    rank: int  # global
    pid: int
    forked: bool
    queried: bool  # its answering thread exists and was queried
    answer: RankAnswer | None  # None: no answer
    activity: Activity
    beat: RankBeat  # of the last pulse
    quiet: float  # this and `idle` as in RankSeen
    idle: float
    progress: tuple[int, float]  # newest step, and its seconds
    quiet_phase: tuple[str, float] = ("", 0.0)  # its reported quiet phase, and the seconds left
    device: Load = UNKNOWN_LOAD  # load of the device that it computes on
    outside: Threads = field(default_factory=dict)  # stacks read from outside the process
    unread: str = ""  # why they could not be read from outside

    @property
    def threads(self) -> Mapping[str, Sequence[Frame]]:
        """All its known stacks."""
        return {**(_threads(self.answer) if self.answer is not None else {}), **self.outside}

    @property
    def is_waiting(self) -> bool:
        """Whether it reports that it is in a collective."""
        return self.answer is not None and any(at.entered > at.done for at in self.answer.groups)

    @property
    def holds_lock(self) -> bool:
        """Whether C code holds the interpreter lock, because nothing else prevents its thread from
        answering."""
        return self.queried and self.answer is None and self.activity.may_answer


def rates(before: Activity | None, now: Activity, seconds: float) -> tuple[float, float]:
    """Cores, and bytes per second, between two samples."""
    if before is None or seconds <= 0.0:
        return 0.0, 0.0
    cpu, io = now.cpu - before.cpu, now.io - before.io
    return max(0.0, cpu / seconds), max(0.0, io / seconds)


def reports(
    round_name: RoundName,
    number: int,
    found: Sequence[RankSample],
    lines: Sequence[m.StackGroup] = (),
) -> Iterator[m.Inspected]:
    """Inspected messages, as many as needed, at least one. The last one has `lines`."""
    for first in range(0, max(1, len(found)), m.MAX_INSPECTED):
        part = found[first : first + m.MAX_INSPECTED]
        groups = _groups(part)
        seen = tuple(_seen(one, list(groups)) for one in part)
        left = max(0, len(found) - first - len(part))
        last = () if left else tuple(lines)
        yield m.Inspected(round_name, number, left, tuple(groups.values()), seen, last)


def last_output(texts: Mapping[int, str]) -> tuple[m.StackGroup, ...]:
    """The last output lines of these ranks. A line's key is its text without measured values, with
    the number of later lines with the same text. So lines of the same moment of training match
    across nodes.
    """
    after: Counter[str] = Counter()
    rows = []
    for ranks, line in fold_texts(texts)[: -m.MAX_SAID - 1 : -1]:
        key = blake2b(moment_of(line.encode()), digest_size=8).hexdigest()
        after[key] += 1
        name = f"{key}-{after[key]}"
        text = line[:MOST_OF_A_LINE]
        rows.append(m.StackGroup(name, write_ranges(ranks), len(ranks), "", text))
    return tuple(reversed(rows))


def stacks(
    round_name: RoundName, number: int, found: Sequence[RankSample], folder: str = ""
) -> m.Stacks:
    """The stacks of all threads, grouped."""
    by_rank = {one.rank: one.threads for one in found}
    missing: dict[str, list[int]] = {}
    for one in found:
        if "" not in one.threads:
            missing.setdefault(_why_missing(one), []).append(one.rank)
    words = [f"{rank_names(ranks, pairs=True)} {why}" for why, ranks in missing.items()]
    groups = list(group_stacks(by_rank))
    while sum(len(one.text.encode()) + len(one.ranks) for one in groups) > ROOM:
        groups.pop()
    return m.Stacks(round_name, number, tuple(groups), "; ".join(words)[:MAX_TEXT], folder)


def from_outside(found: Sequence[RankSample], limit: float) -> list[RankSample]:
    """These samples, plus stacks read from outside: those of ranks that did not answer, and of
    children of ranks that wait for no other rank. Blocks for about `limit` seconds at most."""
    end = time.monotonic() + limit
    rows = []
    for one in sorted(found, key=lambda one: one.answer is not None):
        threads: Threads = {}
        unread = ""
        left = end - time.monotonic()
        if one.answer is None and left > 0:
            threads, unread = outside.stacks_of(one.pid, min(left, limit / 2))
        if not one.is_waiting and (left := end - time.monotonic()) > 0:
            threads = {**outside.stacks_below(one.pid, left), **threads}
        rows.append(replace(one, outside=threads, unread=unread))
    return sorted(rows, key=lambda one: one.rank)


def write_dump(parent: str, number: int, found: Sequence[RankSample]) -> str:
    """Write everything into files; see `dump.write`."""
    groups = _groups(found)
    texts = {}
    for one in found:
        seen = _seen(one, list(groups))
        facts = outside.facts(one.pid)
        texts[one.rank] = dump.describe(seen, [*groups.values()], one.threads, facts, one.unread)
    return dump.write(parent, number, texts)


def _why_missing(one: RankSample) -> str:
    if not one.forked:
        return "started by exec: has no answering thread"
    if one.holds_lock:
        return "does not answer: C code holds its interpreter lock"
    if not one.queried:
        return "has not started, or has exited"
    return f"does not answer: {one.activity.being}"


def _threads(answer: RankAnswer) -> dict[str, Sequence[Frame]]:
    """The stacks of an answer by thread name; a repeated name gets a number."""
    found: dict[str, Sequence[Frame]] = {}
    for thread in answer.threads:
        name = "" if thread.name == "main" else thread.name
        count = 2
        while name in found:
            name = f"{thread.name} {count}"
            count += 1
        found[name] = thread.frames
    return found


def _groups(part: Iterable[RankSample]) -> dict[_Group, m.GroupSeen]:
    """The groups of these ranks, those with an open collective first."""
    rows = [row for one in part if one.answer is not None for row in one.answer.groups if row.name]
    rows.sort(key=lambda row: row.entered <= row.done)
    found: dict[_Group, m.GroupSeen] = {}
    for row in rows:
        if len(found) < m.MAX_GROUPS and _group(row) not in found:
            found[_group(row)] = m.GroupSeen(_line(row.name), _line(row.title), _line(row.members))
    return found


def _group(row: GroupAnswer) -> _Group:
    return row.name, row.members


def _seen(one: RankSample, groups: list[_Group]) -> m.RankSeen:
    answer = one.answer
    place, library = place_of(one.threads.get("", ()))
    step, seconds = one.progress
    at = _places(answer.groups, groups) if answer is not None else ()
    return m.RankSeen(
        rank=one.rank,
        pid=one.pid,
        being=one.activity.being,
        forked=one.forked,
        answers=answer is not None,
        cpu=one.beat.cpu,
        io=one.beat.io,
        rss=one.activity.rss // MIB,
        quiet=one.quiet,
        idle=one.idle,
        kernel=_line(one.activity.kernel),
        place=place,
        library=library,
        holds=one.holds_lock,
        step=step,
        step_seconds=seconds,
        says=one.quiet_phase[0],
        says_left=one.quiet_phase[1],
        gpu=min(one.device.percent, 100),
        gpu_mib=one.device.mib,
        at=at,
        partial=answer is not None and not len(at) == len(answer.groups) < MAX_ANSWER_GROUPS,
    )


def _places(rows: Iterable[GroupAnswer], groups: list[_Group]) -> tuple[m.Position, ...]:
    known = [row for row in rows if _group(row) in groups]
    known.sort(key=lambda row: row.entered <= row.done)
    return tuple(
        m.Position(
            group=groups.index(_group(row)),
            entered=row.entered,
            done=row.done,
            started=max(-1, row.started),
            call=_line(row.call),
            age=min(max(0.0, row.age), MAX_SECONDS),
            limit=row.limit if 0.0 <= row.limit <= MAX_SECONDS else 0.0,
        )
        for row in known[: m.MAX_PLACES]
    )


def _line(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)[:1000]
