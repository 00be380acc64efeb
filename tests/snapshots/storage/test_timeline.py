"""Which checkpoints were left behind when training was taken back, and which are kept."""

from __future__ import annotations

import pytest

from elasticrun.snapshots.storage.timeline import (
    PERIODIC,
    ListedCheckpoint,
    Timeline,
    abandoned,
    not_kept,
    restorable_steps,
    surplus,
    timeline_for,
    timeline_of,
)


def found(
    step: int,
    number: int = 0,
    start: int = 0,
    *,
    ours: bool = True,
    at: float = 0.0,
    marker: bool = True,
    condemned: bool = False,
) -> ListedCheckpoint:
    line = Timeline(number, start)
    return ListedCheckpoint(
        step, marker, condemned, False, ours, True, line, at or step, at or step
    )


FIRST = [found(4), found(8), found(12)]


def test_the_name_of_the_file_comes_back() -> None:
    assert Timeline().file == ""
    line = Timeline(3, 12)
    assert timeline_of(line.file) == line
    assert "below 12" in line.sentence
    for name in ("elasticrun.timeline.0.from.3", "elasticrun.timeline.3", "elasticrun.json", ""):
        assert timeline_of(name) is None


@pytest.mark.parametrize(
    ("step", "rewound_from", "line"),
    [
        (16, -1, Timeline()),
        (10, -1, Timeline()),  # written late, and nothing was taken back
        (10, 12, Timeline(1, 12)),
        (16, 12, Timeline(1, 12)),  # it has passed the poison before its first checkpoint
        (12, 12, Timeline()),  # the very step is replaced
        (13, 13, Timeline()),  # poison that never came to storage
    ],
)
def test_a_commit_joins_the_newest_or_begins_one(
    step: int, rewound_from: int, line: Timeline
) -> None:
    assert timeline_for(FIRST, step, rewound_from) == line


def test_it_is_begun_once() -> None:
    """The master that has heard of the commit too late says again what it had said."""
    after = [*FIRST, found(10, 1, 12)]
    assert timeline_for(after, 11, 12) == Timeline(1, 12)
    assert timeline_for(after, 14, -1) == Timeline(1, 12)
    assert timeline_for(after, 9, 10) == Timeline(2, 10)


def test_what_was_left_is_not_gone_on_from() -> None:
    after = [*FIRST, found(10, 1, 9)]
    assert abandoned(after) == {12}
    assert restorable_steps(after) == [4, 8, 10]
    assert restorable_steps([*after[:3], found(10, 1, 9, condemned=True)]) == [4, 8], (
        "not to the poison"
    )
    assert restorable_steps([*after, found(9, 0), found(11, 2, 7)]) == [4, 11]
    assert restorable_steps([*FIRST, found(10, 1, 9, marker=False)]) == [4, 8, 12], (
        "it never came to that"
    )


def test_what_torch_alone_writes_is_judged_by_its_time() -> None:
    line = found(10, 1, 9, at=50.0)
    assert restorable_steps(
        [line, found(12, ours=False, at=40.0), found(20, ours=False, at=60.0)]
    ) == [10, 20]


TWO = [found(10, 1, 9), found(14, 1, 9)]


@pytest.mark.parametrize(
    ("more", "last", "every", "in_use", "gone"),
    [
        (TWO[:1], 1, 0, (), [4, 8]),  # 12 stays until training has passed it
        (TWO, 1, 0, (), [4, 8, 10, 12]),
        (TWO, 2, 0, (), [4, 8, 12]),
        (TWO, 1, 6, (), [4, 8, 10]),  # every sixth for good
        (TWO, 0, 0, (), []),
        (TWO, 1, 0, (8, 12), [4, 10]),
        ([found(10, 1, 9, condemned=True)], 1, 0, (), [4]),
    ],
)
def test_the_newer_timeline_is_never_pushed_out(
    more: list[ListedCheckpoint], last: int, every: int, in_use: tuple[int, ...], gone: list[int]
) -> None:
    all_ = [*FIRST, *more]
    told = [(step, PERIODIC) for step in restorable_steps(all_)]
    assert sorted(not_kept(all_, told, last=last, every=every, in_use=in_use)) == gone


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
        # a save at a breakpoint counts among the last, and never pushes out the newest periodic one
        ([*periodic(10, 20), (25, "breakpoint")], 2, 0, (), [10]),
        (
            [*periodic(10, 20), (21, "breakpoint"), (25, "asked"), (27, "breakpoint")],
            *(2, 0, (), [10, 21]),
        ),
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
