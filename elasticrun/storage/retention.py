"""Which checkpoints are no longer kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

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
