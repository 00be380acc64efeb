"""One sample of every rank of a round: which nodes were asked, and what they answered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.core.sight.hangs.waiting import Scene, Sighting, is_busy
from elasticrun.core.sight.picture import RankRow, StackRow
from elasticrun.core.words import names
from elasticrun.wire import messages as m
from elasticrun.wire.types import read_ranges, write_ranges

ANSWER_LIMIT: Final = 4.0
"""Seconds that a sample waits for answers: a node needs 2 s for a rank that does not respond."""

ANSWER_LIMIT_WITH_STACKS: Final = 10.0
"""The same for a sample with stacks: if ranks do not answer, external programs read them."""

MAX_LAST_LINES: Final = 100
"""Maximum number of lines of the ranks' output that are shown."""

OWN_LINE: Final = re.compile(r"^\S+:\d+ .+$", re.MULTILINE)
"""A line of a stack in the user's own source; lines of libraries have no line numbers."""

SLOW_STEP: Final = 5.0
"""Seconds without movement after which a rank may be shown as waiting or busy."""


@dataclass(slots=True)
class _Answer:
    """The answer of one node."""

    seen: list[Sighting] = field(default_factory=list)
    stacks: m.Stacks | None = None


class Sample:
    """The answers of one sample. `at`, `until`: monotonic seconds. `ended`: ranks that have exited
    with 0 on nodes that are not asked any more. `final`: the round ends if this sample confirms the
    verdict."""

    def __init__(
        self,
        order: m.Inspect,
        nodes: Iterable[str],
        now: float,
        ended: Iterable[Sighting] = (),
        *,
        final: bool = False,
    ) -> None:
        self.order = order
        self.final = final
        self.at = now
        self.until = now + (ANSWER_LIMIT_WITH_STACKS if order.stacks else ANSWER_LIMIT)
        self.answers: dict[str, _Answer] = {node: _Answer() for node in nodes}
        self._ended = tuple(ended)
        self._last_lines: list[m.StackGroup] = []
        self._lines: dict[int, dict[str, str]] = {}  # of the requested ranks
        self._incomplete = set(self.answers)  # nodes that have not reported all of their ranks
        self._no_stacks = set(self.answers) if order.stacks else set[str]()

    def take(self, node: str, report: m.Inspected | m.Stacks) -> None:
        """Process a node's answer."""
        answer = self.answers.get(node)
        if answer is None:
            return
        if isinstance(report, m.Stacks):
            answer.stacks = report
            self._lines.clear()
            self._no_stacks.discard(node)
            return
        answer.seen += [Sighting(node, seen, report.groups) for seen in report.ranks]
        if not report.left:
            self._incomplete.discard(node)
            self._last_lines += report.said

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of all nodes are reported."""
        return not self._incomplete

    @property
    def is_done(self) -> bool:
        """Whether nothing is missing."""
        return self.is_complete and not self._no_stacks

    @property
    def sightings(self) -> list[Sighting]:
        """All ranks that have been reported, and those that have exited."""
        found = list(self._ended)
        for one in self.answers.values():
            found += one.seen
        return found

    def folder(self, of: str) -> tuple[str, str]:
        """Where the dump was written ("": nowhere), and by which node: node `of` if it wrote
        one."""
        folders = {node: one.stacks.folder for node, one in self.answers.items() if one.stacks}
        nodes = [node for node in (of, *folders) if folders.get(node)]
        return (folders[nodes[0]], nodes[0]) if nodes else ("", "")

    def missing(self) -> str:
        """Which stacks are missing, and why; "" if none."""
        reported = [one.stacks.missing for one in self.answers.values() if one.stacks]
        silent = [node for node, one in self.answers.items() if one.stacks is None]
        parts = [text for text in reported if text]
        return "; ".join([*parts, *([f"no answer from {names(silent)}"] if silent else [])])

    def stacks(self) -> tuple[StackRow, ...]:
        """Groups of equal stacks over all nodes, the rarest first."""
        answers = self.answers.values()
        rows = _together(group for one in answers if one.stacks for group in one.stacks.groups)
        return tuple(sorted(rows, key=lambda row: (row.count, row.ranks)))

    def last_lines(self) -> tuple[StackRow, ...]:
        """The last lines that ranks have written, equal lines of several nodes in one row; the
        newest last."""
        return tuple(_together(self._last_lines)[-MAX_LAST_LINES:])

    def last_lines_of(self, rank: int) -> str:
        """The last lines of output of this rank; "" if unknown."""
        return "\n".join(group.text for group in self._last_lines if rank in _ranks(group.ranks))

    def lines_of(self, rank: int) -> dict[str, str]:
        """Where the threads of a rank and its loaders are in the user's source, by thread name; ""
        is the main thread."""
        if rank not in self._lines:  # called at each event, and merges all stacks of all nodes
            rows = [row for row in self.stacks() if rank in _ranks(row.ranks)]
            lines = {row.thread: OWN_LINE.search(row.text) for row in rows}
            found = {thread: line[0] for thread, line in lines.items() if line is not None}
            self._lines[rank] = found
        return self._lines[rank]

    def stack_of(self, rank: int) -> str:
        """The main thread's stack of a rank, one line per frame; "" if unknown."""
        for row in self.stacks():
            if not row.thread and rank in _ranks(row.ranks):
                return row.text
        return ""


def rows(scene: Scene, odd: Mapping[int, str]) -> tuple[RankRow, ...]:
    """The ranks as rows for display. `odd`: the state to show for ranks that the verdict names."""
    return tuple(_row(scene, one, odd) for _, one in sorted(scene.ranks.items()))


def _row(scene: Scene, one: Sighting, odd: Mapping[int, str]) -> RankRow:
    seen = one.seen
    waits = scene.waits_for(seen.rank) if seen.quiet >= SLOW_STEP else None
    return RankRow(
        rank=seen.rank,
        node=one.node,
        state=_state(seen, odd, waits=waits is not None),
        waits_for=str(waits[1]) if waits else "",
        place=seen.place,
        call=scene.call(seen.rank),
        step=seen.step,
        step_seconds=seen.step_seconds,
        quiet=seen.quiet,
        cpu=seen.cpu,
        io=seen.io,
        rss=seen.rss,
        gpu=seen.gpu,
        gpu_mib=seen.gpu_mib,
    )


def _state(seen: m.RankSeen, odd: Mapping[int, str], *, waits: bool) -> str:
    match seen.being:
        case m.Being.ENDED:
            return "ended"
        case m.Being.STOPPED | m.Being.TRACED | m.Being.FROZEN:
            return "stopped"
    if seen.rank in odd:
        return odd[seen.rank]
    if waits:
        return "waiting"
    if seen.forked and not seen.answers:
        return "silent"
    if not seen.at and seen.step < 0:
        return "starting"
    return "busy" if seen.quiet >= SLOW_STEP and is_busy(seen) else "stepping"


def _together(groups: Iterable[m.StackGroup]) -> list[StackRow]:
    """Merge the groups of several nodes that have the same key and thread, in order of arrival."""
    by_key: dict[tuple[str, str], list[m.StackGroup]] = {}
    for group in groups:
        by_key.setdefault((group.key, group.thread), []).append(group)
    rows = []
    for alike in by_key.values():
        ranks = {rank for group in alike for rank in _ranks(group.ranks)}
        count = sum(group.count for group in alike)
        rows.append(StackRow(write_ranges(ranks), count, alike[0].thread, alike[0].text))
    return rows


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return read_ranges(text, m.MAX_RANKS)
    except ValueError:
        return ()
