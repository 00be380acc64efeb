"""When snapshots are due: the same for all ranks, whatever their clocks say."""

from __future__ import annotations

from itertools import pairwise

from elasticrun.training.checkpointing.pace import FLOOR, DueSnapshot, Pace, Schedule


class Words:
    """A store that knows what is waited for in vain."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def publish(self, key: str, text: str) -> None:
        self.kept[key] = text

    def wait_for(self, key: str, limit: float) -> str:
        return self.kept[key]


def run(
    pace: list[Pace], steps: int, seconds: list[float], stall: float = 0.0, start: int = 0
) -> list[list[DueSnapshot]]:
    """Ranks that do `steps` steps at their own speeds; what each takes."""
    words = Words()
    taken: list[list[DueSnapshot]] = [[] for _ in pace]
    schedules = [Schedule(one, words, rank, 0.0, start) for rank, one in enumerate(pace)]
    for step in range(start + 1, start + steps + 1):
        for rank, schedule in enumerate(schedules):
            due = schedule.due(step)
            if due is not None:
                taken[rank].append(due)
                schedule.advance((step - start) * seconds[rank], due, stall)
    return taken


def test_by_steps() -> None:
    (taken,) = run([Pace(5, 20, 3)], 40, [1.0], start=3)
    assert [due.step for due in taken] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [due.step for due in taken if due.persist] == [20, 40]


def test_what_is_written_out_need_not_be_a_multiple_of_the_other() -> None:
    (taken,) = run([Pace(4, 6, 0)], 12, [1.0])
    assert taken == [
        DueSnapshot(4, False),
        DueSnapshot(6, True),
        DueSnapshot(8, False),
        DueSnapshot(12, True),
    ]


def test_by_time_all_ranks_take_the_same_steps_though_their_clocks_differ() -> None:
    paces = [Pace(2.0, 10.0, 0) for _ in range(3)]
    first, *others = run(paces, 3000, [0.01, 0.02, 0.005])
    assert others == [first, first]
    gaps = [b.step - a.step for a, b in pairwise(first[8:])]
    assert set(gaps) == {200}
    persisted = [due.step for due in first if due.persist]
    assert len(persisted) == 2
    assert 1000 <= persisted[0] <= 1300


def test_auto_weighs_the_stall() -> None:
    cheap = run([Pace("auto", None, 0)], 20_000, [0.01], stall=0.001)[0]
    dear = run([Pace("auto", None, 0)], 20_000, [0.01], stall=0.2)[0]
    assert cheap[-1].step - cheap[-2].step == round(FLOOR / 0.01)
    assert len(dear) < len(cheap)
    assert dear[-1].step - dear[-2].step >= 0.2 / 0.01 / 0.01


def test_a_script_that_calls_for_some_steps_only_is_served() -> None:
    schedule = Schedule(Pace(5, None, 0), Words(), 0, 0.0, 0)
    assert schedule.due(4) is None
    due = schedule.due(8)
    assert due == DueSnapshot(8, False)
    schedule.advance(1.0, due, 0.0)
    assert schedule.next == DueSnapshot(10, False)
