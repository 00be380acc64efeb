"""How long a stream was silent is known only while others were heard."""

from __future__ import annotations

import pytest

from elasticrun.master.server import DEAF, Listening


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beats(listening: Listening, clock: Clock, until: float, every: float = 1.0) -> None:
    """Somebody is heard again and again."""
    while clock.now < until:
        clock.now = min(until, clock.now + every)
        listening.heard()


def test_a_stream_that_others_outlived_was_silent() -> None:
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    beats(listening, clock, 105.0)
    assert listening.silence(last, 3) == pytest.approx(5.0)


def test_a_stream_that_was_reset_was_not() -> None:
    clock = Clock()
    listening = Listening(clock)
    beats(listening, clock, 105.0)
    clock.now += 0.2
    assert listening.silence(105.0, 3) == pytest.approx(0.2)


def test_who_heard_nobody_knows_nothing() -> None:
    """The master itself stood still, or there is nobody else: what breaks then proves nothing."""
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    clock.now += 10.0
    assert listening.silence(last, 3) == 0.0


def test_what_was_missed_while_nobody_listened_does_not_count() -> None:
    """The loop stood still for 10 s; others are read again before this stream is seen broken."""
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    clock.now += 10.0
    listening.heard()
    clock.now += 0.1
    assert listening.silence(last, 3) == pytest.approx(0.1)
    beats(listening, clock, 113.0)
    assert listening.silence(last, 3) == pytest.approx(3.0)


def test_in_a_large_job_nodes_beat_less_often() -> None:
    """5,000 nodes beat every 10 s: 5 s without a word of one of them are nothing."""
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    beats(listening, clock, 105.0, every=0.1)
    assert listening.silence(last, 5000) == 0.0
    beats(listening, clock, 114.0, every=0.1)
    assert listening.silence(last, 5000) == pytest.approx(5.0)


def test_a_gap_of_a_beat_is_none() -> None:
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    beats(listening, clock, 110.0, every=DEAF)
    assert listening.silence(last, 2) == pytest.approx(10.0)


def test_the_only_stream_of_all_was_quiet_however_little_that_proves() -> None:
    clock = Clock()
    listening = Listening(clock)
    last = listening.heard()
    clock.now += 5.0
    assert listening.silence(last, 1) == 0.0
    assert listening.quiet(last) == pytest.approx(5.0)
