"""When a node says that nothing moves on it: beats folded by a made-up clock."""

from __future__ import annotations

import pytest

from elasticrun.agent.sight.pulse import PULSE_EVERY, QuietTracker, RankBeat
from elasticrun.wire.messages import Quiet
from elasticrun.wire.progress import GroupAnswer
from elasticrun.wire.types import RoundName

ROUND = RoundName(3, 1, "nonce")


def beat(
    entered: int = 0, done: int | None = None, *, step: int = -1, cpu: float = 0.0
) -> RankBeat:
    """A rank of one group; of none before it has entered anything."""
    row = GroupAnswer("0", entered, -1, entered if done is None else done)
    return RankBeat((row,) if entered else (), step, cpu)


def said(beats: list[dict[int, RankBeat]], quiet: QuietTracker | None = None) -> list[Quiet | None]:
    """What is told after each of these, PULSE_EVERY seconds apart, if all of it is sent."""
    quiet = quiet or QuietTracker(ROUND, (0, 1), 0.0)
    found = []
    for number, one in enumerate(beats, start=1):
        now = number * PULSE_EVERY
        quiet.beat(one, now)
        found.append(quiet.news(now))
        quiet.mark_sent()
    return found


STILL = {0: beat(5, 4), 1: beat(4)}
BUSY = {0: beat(5, 4), 1: beat(4, cpu=1.0)}
NONE = {0: beat(), 1: beat()}
FIRST = Quiet(ROUND, 0.0, first=2.5, counted=True)
WAITS = Quiet(ROUND, 5.0, counted=True, waiting=1)
MOVES = Quiet(ROUND, 0.0, counted=True)


@pytest.mark.parametrize(
    ("beats", "news"),
    [
        ([{0: beat(n), 1: beat(n)} for n in range(1, 6)], [FIRST, *[None] * 4]),
        (
            [STILL, STILL, STILL, STILL, {0: beat(5), 1: beat(5)}, STILL],
            [FIRST, None, WAITS, None, MOVES, None],
        ),
        (
            [STILL, STILL, BUSY, STILL],
            [FIRST, None, Quiet(ROUND, 5.0, 0.0, True, 1, True), Quiet(ROUND, 7.5, 0.0, True, 1)],
        ),
        ([NONE, NONE, NONE], [None, Quiet(ROUND, 5.0), None]),  # nothing has begun
        ([{0: RankBeat(), 1: RankBeat()}] * 3, [None, Quiet(ROUND, 5.0), None]),  # nobody answers
        # a rank that does not answer has not moved, and has not when it answers as before
        ([STILL, {0: beat(5, 4), 1: RankBeat()}, STILL][:2], [FIRST, None]),
        # the last one is counted late, as gloo does; much later it is a move
        ([{0: beat(5, 3), 1: beat(4)}, STILL, STILL], [FIRST, None, WAITS]),
        (
            [{0: beat(5, 3), 1: beat(4)}] * 2 + [STILL] * 3,
            [FIRST, None, None, None, WAITS],
        ),
        # without torch's counters, steps tell
        (
            [{0: beat(step=n), 1: beat()} for n in (0, 0, 0, 1)],
            [
                Quiet(ROUND, 0.0, first=2.5),
                None,
                Quiet(ROUND, 5.0),
                Quiet(ROUND, 0.0),
            ],
        ),
    ],
)
def test_told_is_what_changes(beats: list[dict[int, RankBeat]], news: list[Quiet | None]) -> None:
    assert said(beats) == news


def test_what_was_not_looked_at_is_not_quiet() -> None:
    """The agent stood still for a minute, and so may have its ranks."""
    quiet = QuietTracker(ROUND, (0, 1), 0.0)
    quiet.beat(STILL, 2.5)
    quiet.beat(STILL, 62.5)
    assert quiet.seconds(62.5) == pytest.approx(PULSE_EVERY)
    quiet.beat(STILL, 65.0)
    assert quiet.seconds(65.0) == quiet.rank_seconds(0, 65.0) == pytest.approx(2 * PULSE_EVERY)


def test_what_was_not_sent_is_said_again_and_a_new_master_hears_all() -> None:
    quiet = QuietTracker(ROUND, (0, 1), 0.0)
    quiet.beat(STILL, 2.5)
    assert quiet.news(2.5) == quiet.news(2.5) == FIRST
    quiet.mark_sent()
    assert quiet.news(2.5) is None
    quiet.mark_unsent()
    assert quiet.news(2.5) == FIRST
