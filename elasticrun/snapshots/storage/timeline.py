"""Finds checkpoints that a rewind has abandoned, and checkpoints to remove. Pure.

A *timeline* is a stretch of training without a rewind. When training is rewound to an older step
because a state turned out to be bad, checkpoints of later steps may remain. Those are on an
abandoned timeline; they are neither renamed nor condemned. Each checkpoint of the new timeline has
a file `elasticrun.timeline.N.from.S` beside its marker: it is on timeline N, and checkpoints of
older timelines with step S or later are abandoned. Checkpoints of timeline 0 have no such file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"elasticrun\.timeline\.(\d{1,9})\.from\.(\d{1,16})\Z")


@dataclass(frozen=True, slots=True, order=True)
class Timeline:
    """A timeline. `start`: its first step that older timelines do not share."""

    number: int = 0
    start: int = 0

    @property
    def file(self) -> str:
        """Name of the file that declares it; "" for timeline 0."""
        return f"elasticrun.timeline.{self.number}.from.{self.start}" if self.number else ""

    @property
    def sentence(self) -> str:
        """The content of that file, for people."""
        return (
            f"Training was rewound to a step below {self.start}. Checkpoints of step {self.start} "
            f"and later ones whose timeline is below {self.number} are intact, but no start "
            "restores them.\n"
        )


def timeline_of(name: str) -> Timeline | None:
    """The timeline that a file of this name declares; None for any other file."""
    found = _NAME.match(name)
    return Timeline(int(found[1]), int(found[2])) if found and int(found[1]) else None


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """What the listing of a checkpoint's folder shows. Times are the storage's, 0 if unknown."""

    step: int
    marker: bool  # it was committed
    condemned: bool  # and found to be corrupt
    removed: bool  # its removal has begun
    ours: bool  # it has a manifest, which torch alone does not write
    only_ours: bool  # it contains only our files
    timeline: Timeline
    marked: float  # when its marker was written
    changed: float  # the newest change of anything in it

    @property
    def committed(self) -> bool:
        return self.marker and not self.condemned


def abandoned(found: Iterable[ListedCheckpoint]) -> set[int]:
    """Steps whose checkpoints are abandoned: a later timeline starts at that step or below.

    Checkpoints written by torch alone state no timeline; they are abandoned if they are older than
    the newest checkpoint of the later timeline."""
    marked = [one for one in found if one.marker]
    newest: dict[Timeline, float] = {}  # when each timeline was last continued
    for one in marked:
        newest[one.timeline] = max(one.marked, newest.get(one.timeline, 0.0))
    return {
        one.step
        for one in marked
        for line, when in newest.items()
        if line.number > one.timeline.number and one.step >= line.start
        if one.ours or one.marked < when
    }


def restorable_steps(found: Iterable[ListedCheckpoint]) -> list[int]:
    """Steps that a start may restore, ascending: committed, not corrupt, not abandoned."""
    found = list(found)
    dropped = abandoned(found)
    return sorted(one.step for one in found if one.committed and one.step not in dropped)


def timeline_for(found: Iterable[ListedCheckpoint], step: int, rewound_from: int) -> Timeline:
    """The timeline of the checkpoint of `step`, which is about to be committed. `rewound_from`: the
    lowest step that a rewind has abandoned; -1: there was no rewind."""
    found = list(found)
    now = max((one.timeline for one in found if one.marker), default=Timeline())
    above = [one for one in restorable_steps(found) if one >= rewound_from and one != step]
    if rewound_from < 0 or not above:
        return now
    return Timeline(now.number + 1, rewound_from)


PERIODIC: Final = "periodic"
"""Reason of a scheduled checkpoint; others are `breakpoint` and `asked`."""


def surplus(
    committed: Iterable[tuple[int, str]],
    *,
    last: int,
    every: int,
    in_use: Collection[int] = (),
) -> list[int]:
    """Steps to remove, oldest first, from `committed`: steps with the reasons of their checkpoints.

    Keeps the `last` newest of any reason (0: all); the newest periodic one, which saves at
    breakpoints must not displace; every multiple of `every` (0: none); and those `in_use`.
    """
    steps = dict(committed)
    if last <= 0:
        return []
    periodic = (step for step, reason in steps.items() if reason == PERIODIC)
    kept = {*sorted(steps)[-last:], *in_use, max(periodic, default=-1)}
    if every > 0:
        kept |= {step for step in steps if step % every == 0}
    return sorted(steps.keys() - kept)


def not_kept(
    found: Iterable[ListedCheckpoint],
    restorable: Sequence[tuple[int, str]],
    *,
    last: int,
    every: int,
    in_use: Collection[int] = (),
) -> list[int]:
    """Steps to remove from all that were `found`. `restorable`: steps that a start may restore,
    with their reasons; `surplus` decides on these. Abandoned checkpoints are removed once training
    has passed their step again, unless they are kept by `every` or `in_use`; condemned ones, which
    people may inspect, once they are older than all that are kept."""
    removed = surplus(restorable, last=last, every=every, in_use=in_use)
    steps = {step for step, _ in restorable}
    kept = sorted(steps.difference(removed))
    if not kept:
        return removed
    for one in found:
        passed = one.committed and one.step not in steps and last > 0 and one.step < kept[-1]
        forever = one.step in in_use or (every > 0 and one.step % every == 0)
        if (passed and not forever) or (one.condemned and one.step < kept[0]):
            removed.append(one.step)
    return removed
