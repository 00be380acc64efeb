"""What is kept and what is not."""

from __future__ import annotations

import pytest

from elasticrun.storage.timeline import PERIODIC, surplus


def periodic(*steps: int) -> list[tuple[int, str]]:
    return [(step, PERIODIC) for step in steps]


@pytest.mark.parametrize(
    ("committed", "last", "every", "in_use", "gone"),
    [
        (periodic(10, 20, 30, 40), 3, 0, (), [10]),
        (periodic(10, 20, 30, 40), 0, 0, (), []),
        (periodic(10, 20, 30, 40), 9, 0, (), []),
        (periodic(40, 10, 30, 20), 1, 20, (), [10, 30]),
        (periodic(10, 20, 30, 40), 1, 0, (10,), [20, 30]),
        ([], 3, 10, (), []),
    ],
)
def test_the_newest_and_every_nth_are_kept(
    committed: list[tuple[int, str]],
    last: int,
    every: int,
    in_use: tuple[int, ...],
    gone: list[int],
) -> None:
    assert surplus(committed, last=last, every=every, in_use=in_use) == gone


def test_saves_at_breakpoints_never_push_out_the_newest_periodic_one() -> None:
    committed = [*periodic(10, 20), (21, "breakpoint"), (25, "asked"), (27, "breakpoint")]
    assert surplus(committed, last=2, every=0) == [10, 21]


def test_a_save_at_a_breakpoint_counts_among_the_last() -> None:
    committed = [*periodic(10, 20), (25, "breakpoint")]
    assert surplus(committed, last=2, every=0) == [10]
