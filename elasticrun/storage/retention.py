"""Which checkpoints are no longer kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from elasticrun.storage.timeline import Found

PERIODIC: Final = "periodic"
"""Reason of a checkpoint that was due; others are `breakpoint` and `asked`."""


def surplus(
    committed: Iterable[tuple[int, str]],
    *,
    last: int,
    every: int,
    in_use: Collection[int] = (),
) -> list[int]:
    """Steps to remove, the oldest first, out of all committed ones with their reasons.

    Kept are the `last` newest of any reason (0: all are kept), the newest periodic one, so that
    saves at breakpoints never push it out, every step that `every` divides (0: none for that), and
    those `in_use`.
    """
    steps = dict(committed)
    if last <= 0:
        return []
    kept = set(sorted(steps)[-last:]) | set(in_use)
    kept |= {max((s for s, reason in steps.items() if reason == PERIODIC), default=-1)}
    if every > 0:
        kept |= {step for step in steps if step % every == 0}
    return sorted(steps.keys() - kept)


def not_kept(
    found: Iterable[Found],
    chain: Sequence[tuple[int, str]],
    *,
    last: int,
    every: int,
    in_use: Collection[int] = (),
) -> list[int]:
    """Steps to remove out of all that was `found`. `chain`: what a start may go on from, with its
    reasons; `surplus` judges that. What was left with its timeline goes once training has passed it
    again, what was condemned once it is older than all that is kept: until then people may want to
    look at it."""
    gone = surplus(chain, last=last, every=every, in_use=in_use)
    kept = sorted({step for step, _ in chain} - set(gone))
    if not kept:
        return gone
    steps = {step for step, _ in chain}
    for one in found:
        passed = one.committed and one.step not in steps and last > 0 and one.step < kept[-1]
        forever = one.step in in_use or (every > 0 and one.step % every == 0)
        if (passed and not forever) or (one.condemned and one.step < kept[0]):
            gone.append(one.step)
    return gone
