"""What an agent tells its ranks when a node leaves, and what it reads from them."""

from __future__ import annotations

import mmap
import signal
from dataclasses import replace

import pytest
from msgspec import structs

from elasticrun.agent.snapshots.drain import LEAST_MARGIN, MOST_MISSED, Departing
from elasticrun.agent.snapshots.segments import Held, Sizes
from elasticrun.config import AgentConfig
from elasticrun.shm.layout import PAGE
from elasticrun.shm.segment import NONE, Segment, begin, segment_bytes
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.configs import agent_config as made_config

ROUND, OTHER = RoundName(1, 1, "aa"), RoundName(1, 2, "bb")
START = m.Start(ROUND, 0, 1, 0, 2, 0, 2, 0, Endpoint("here", 1), True)


def held(local_rank: int) -> Held:
    """A segment of its own, of one page a slot."""
    sizes = Sizes(1, 10, PAGE, 2)
    size = segment_bytes(10, PAGE, 2)
    memory = mmap.mmap(-1, size)
    begin(memoryview(memory), layout_length=10, slot_bytes=PAGE, slots=2)
    return Held(local_rank, local_rank, sizes, 1, "", -1, memory, Segment(memoryview(memory)))


def made(config: AgentConfig | None = None) -> tuple[Departing, dict[int, Held], list[m.Report]]:
    current = {0: held(0), 1: held(1)}
    said: list[m.Report] = []
    departing = Departing(config or made_config(), current, current.values, said.append)
    departing.begin(START)
    return departing, current, said


def test_the_newest_step_of_its_ranks_counts() -> None:
    departing, current, _ = made()
    assert departing.step() == NONE
    departing.committed(3)
    assert departing.step() == 3
    current[1].segment.current = 5
    signalled = departing.signalled(15, death=True)
    assert (signalled.name, signalled.step) == ("SIGTERM", 5)
    assert departing.signalled(10, death=False).step == NONE


def test_snapshots_that_lie_here_are_told_of() -> None:
    departing, current, _ = made()
    assert departing.signalled(15, death=True).held == NONE
    current[1].segment.commit(0, round=ROUND, sequence=1, step=3, layout=1, values=0)
    assert departing.signalled(15, death=True).held == 3


def test_fast_steps_are_given_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    departing, current, _ = made()
    now = [100.0]
    monkeypatch.setattr("elasticrun.agent.snapshots.drain.time.monotonic", lambda: now[0])
    assert departing.margin() == LEAST_MARGIN
    departing.committed(10)
    now[0] += 2.0
    assert departing.margin() == LEAST_MARGIN
    current[0].segment.current = 410
    assert departing.margin() == 100  # half a second of 200 steps each


def test_the_pace_is_known_before_the_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a life that goes on from an older one; of two steps more, ranks would be past them."""
    departing, current, _ = made()
    now = [100.0]
    monkeypatch.setattr("elasticrun.agent.snapshots.drain.time.monotonic", lambda: now[0])
    departing.began(1000)
    now[0] += 2.0
    departing.began(1000)  # another rank, later
    current[0].segment.current = 1400
    assert departing.margin() == 100
    now[0] += 1.0
    departing.committed(1500)
    now[0] += 1.0
    current[0].segment.current = 1600
    assert departing.margin() == 50  # warming up does not count any more
    departing.begin(START)
    assert departing.margin() == LEAST_MARGIN


def test_every_segment_is_told_and_later_ones_too() -> None:
    departing, current, _ = made()
    departing.ask(m.SaveAt(OTHER, 9, "node a is to leave"))
    assert current[0].segment.save_at == NONE
    departing.ask(m.SaveAt(ROUND, 9, "node a is to leave"))
    assert [one.segment.save_at for one in current.values()] == [9, 9]
    late = held(1)
    departing.show(late)
    assert late.segment.save_at == 9
    departing.begin(structs.replace(START, round=OTHER))
    departing.show(late)
    assert late.segment.save_at == NONE


def test_that_a_step_was_missed_is_told_once() -> None:
    departing, _, said = made()
    for at in (10, 11):
        departing.missed(s.Missed(9, at))
    departing.missed(s.Missed(13, 14))
    departing.missed(s.Missed(NONE, 15))
    assert said == [m.Missed(ROUND, 9, 10), m.Missed(ROUND, 13, 14)]


def test_an_order_that_comes_again_is_answered_again() -> None:
    """The master has died meanwhile, or the word was lost with its stream."""
    departing, _, said = made()
    order = m.SaveAt(ROUND, 9, "node a is to leave")
    departing.ask(order)
    departing.missed(s.Missed(9, 10))
    departing.ask(m.SaveAt(ROUND, 12, "node a is to leave"))
    departing.ask(order)
    assert said == [m.Missed(ROUND, 9, 10)] * 2


def test_a_rank_may_not_miss_steps_for_ever() -> None:
    departing, _, said = made()
    for step in range(1000):
        departing.missed(s.Missed(step, 1000))
    assert len(said) == MOST_MISSED


def test_ranks_that_speak_no_more_are_not_waited_for() -> None:
    """Their training is over: no step comes."""
    departing, current, _ = made()
    departing.committed(3)
    current[0].segment.current = 5
    departing.lost(0)
    assert departing.step() == 3
    departing.lost(1)
    assert departing.signalled(15, death=True).step == NONE
    departing.show(current[0])
    assert departing.step() == 5
    departing.lost(0)
    departing.begin(START)
    assert departing.step() == 5


def test_who_puts_a_signal_off() -> None:
    departing, _, _ = made()
    departing.puts_off(1, (15,))
    assert departing.is_put_off(1, 15)
    assert not departing.is_put_off(1, 1)
    assert not departing.is_put_off(0, 15)
    departing.begin(START)
    assert not departing.is_put_off(1, 15)


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
    config = replace(made_config(), signals_to_handle=signals, departure_grace=grace)
    assert made(config)[0].signals == expected
