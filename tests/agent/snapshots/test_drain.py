"""What an agent tells its ranks when a node leaves, and what it reads from them."""

from __future__ import annotations

import mmap
import os
import signal
from types import SimpleNamespace

import pytest

from elasticrun.agent.snapshots.generation import (
    LEAST_MARGIN,
    MOST_MISSED,
    Drain,
    Generation,
)
from elasticrun.agent.snapshots.segments import Held, Sizes
from elasticrun.config import Launch
from elasticrun.snapshots.shm.layout import PAGE
from elasticrun.snapshots.shm.segment import NONE, Segment, initialize, segment_bytes
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.configs import launched
from tests.starts import changed

ROUND, OTHER = RoundName(1, 1, "aa"), RoundName(1, 2, "bb")
START = m.Start(m.RoundInfo(ROUND, 2), 0, 1, 0, 0, 2, Endpoint("here", 1), True)


def held(local_rank: int) -> Held:
    """A segment of its own, of one page a slot."""
    sizes = Sizes(1, 10, PAGE, 2)
    size = segment_bytes(10, PAGE, 2)
    fd = os.memfd_create("segment", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    initialize(memoryview(memory), layout_length=10, slot_bytes=PAGE, slots=2)
    return Held(local_rank, local_rank, sizes, 1, "", fd, memory, Segment(memoryview(memory)))


def made(launch: Launch | None = None) -> tuple[Drain, Generation, list[m.Report]]:
    """Two ranks of a generation with a segment each."""
    said: list[m.Report] = []
    generation = begun()
    link = SimpleNamespace(send=said.append)
    store = SimpleNamespace(segments=SimpleNamespace(held=generation.held()), link=link)
    drain = Drain(launch or launched(), store)
    drain.start(generation)
    return drain, generation, said


def begun(start: m.Start = START) -> Generation:
    generation = Generation(2, start)
    for local_rank, rank in enumerate(generation.ranks):
        rank.held = held(local_rank)
    return generation


def page(generation: Generation, local_rank: int) -> Segment:
    """The control page of this rank's segment."""
    held = generation.ranks[local_rank].held
    return held.segment


def test_the_newest_step_of_its_ranks_counts() -> None:
    drain, generation, _ = made()
    assert drain.step() == NONE
    drain.committed(3)
    assert drain.step() == 3
    page(generation, 1).current = 5
    signalled = drain.signalled(15, death=True)
    assert (signalled.name, signalled.step) == ("SIGTERM", 5)
    assert drain.signalled(10, death=False).step == NONE


def test_snapshots_that_lie_here_are_told_of() -> None:
    drain, generation, _ = made()
    assert drain.signalled(15, death=True).held == NONE
    page(generation, 1).commit(0, round=ROUND, sequence=1, step=3, layout=1, values=0)
    assert drain.signalled(15, death=True).held == 3


def test_fast_steps_are_given_more_of_them(monkeypatch) -> None:
    drain, generation, _ = made()
    now = [100.0]
    monkeypatch.setattr("elasticrun.agent.snapshots.generation.time.monotonic", lambda: now[0])
    assert drain.margin() == LEAST_MARGIN
    drain.committed(10)
    now[0] += 2.0
    assert drain.margin() == LEAST_MARGIN
    page(generation, 0).current = 410
    assert drain.margin() == 100  # half a second of 200 steps each


def test_the_pace_is_known_before_the_first_snapshot(monkeypatch) -> None:
    """Of a life that goes on from an older one; of two steps more, ranks would be past them."""
    drain, generation, _ = made()
    now = [100.0]
    monkeypatch.setattr("elasticrun.agent.snapshots.generation.time.monotonic", lambda: now[0])
    drain.began(1000)
    now[0] += 2.0
    drain.began(1000)  # another rank, later
    page(generation, 0).current = 1400
    assert drain.margin() == 100
    now[0] += 1.0
    drain.committed(1500)
    now[0] += 1.0
    page(generation, 0).current = 1600
    assert drain.margin() == 50  # warming up does not count any more
    drain.start(begun())
    assert drain.margin() == LEAST_MARGIN


def test_every_segment_is_told_and_later_ones_too() -> None:
    drain, generation, _ = made()
    drain.request_save(m.SaveAt(OTHER, 9, "node a must leave"))
    assert page(generation, 0).save_at == NONE
    drain.request_save(m.SaveAt(ROUND, 9, "node a must leave"))
    assert [page(generation, rank).save_at for rank in (0, 1)] == [9, 9]
    late = held(1)
    drain.show(1, late)
    assert late.segment.save_at == 9
    drain.start(begun(changed(START, OTHER)))
    drain.show(1, late)
    assert late.segment.save_at == NONE


def test_that_a_step_was_missed_is_told_once() -> None:
    drain, _, said = made()
    for at in (10, 11):
        drain.missed(s.StepMissed(9, at))
    drain.missed(s.StepMissed(13, 14))
    drain.missed(s.StepMissed(NONE, 15))
    assert said == [m.Missed(ROUND, 9, 10), m.Missed(ROUND, 13, 14)]


def test_an_order_that_comes_again_is_answered_again() -> None:
    """The master has died meanwhile, or the word was lost with its stream."""
    drain, _, said = made()
    order = m.SaveAt(ROUND, 9, "node a must leave")
    drain.request_save(order)
    drain.missed(s.StepMissed(9, 10))
    drain.request_save(m.SaveAt(ROUND, 12, "node a must leave"))
    drain.request_save(order)
    assert said == [m.Missed(ROUND, 9, 10)] * 2


def test_a_rank_may_not_miss_steps_for_ever() -> None:
    drain, _, said = made()
    for step in range(1000):
        drain.missed(s.StepMissed(step, 1000))
    assert len(said) == MOST_MISSED


def test_ranks_that_speak_no_more_are_not_waited_for() -> None:
    """Their training is over: no step comes."""
    drain, generation, _ = made()
    drain.committed(3)
    page(generation, 0).current = 5
    generation.ranks[0].is_disconnected = True
    assert drain.step() == 3
    generation.ranks[1].is_disconnected = True
    assert drain.signalled(15, death=True).step == NONE
    again = generation.ranks[0].held
    assert again is not None
    drain.show(0, again)
    assert drain.step() == 5


def test_who_puts_a_signal_off() -> None:
    drain, generation, _ = made()
    generation.ranks[1].deferred_signals = (15,)
    assert drain.defers_signal(1, 15)
    assert not drain.defers_signal(1, 1)
    assert not drain.defers_signal(0, 15)
    drain.start(begun())
    assert not drain.defers_signal(1, 15)


@pytest.mark.parametrize(
    ("signals", "grace", "expected"),
    [
        (("SIGTERM", "SIGINT", "SIGQUIT"), 25.0, (signal.SIGTERM,)),
        (("SIGUSR1", "SIGTERM", "SIGHUP"), 25.0, (1, 10, 15)),
        (("SIGUSR2", "SIGTERM"), 25.0, (12, 15)),
        (("SIGTERM",), 0.0, ()),
    ],
)
def test_ranks_are_told_which_ones(
    signals: tuple[str, ...], grace: float, expected: tuple[int, ...]
) -> None:
    launch = launched(signals_to_handle=signals, departure_grace=grace)
    assert made(launch)[0].signals == expected
