"""Entries of torch's flight recorder, divided into own part and waiting; by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elasticrun.training.monitor.recorders import FlightRecorder
from elasticrun.training.recorder import (
    ACCELERATORS,
    SMALL_RING,
    Collective,
    RecorderState,
    _entries,
    prepare,
    split,
)
from elasticrun.wire.progress import Own

MS = 10**6
S = 10**9


def entered(*moments: int, first: int = 0) -> RecorderState:
    """Collectives as gloo's recorder has them: only when they were entered."""
    seen = [Collective(first + number, at, None) for number, at in enumerate(moments)]
    return RecorderState(Own.KNOWN, tuple(seen), timed=False)


def timed(*entries: tuple[int, float | None], first: int = 0) -> RecorderState:
    """Collectives as NCCL's recorder has them: (when they were called, seconds they took)."""
    seen = [Collective(first + number, at, took) for number, (at, took) in enumerate(entries)]
    return RecorderState(Own.KNOWN, tuple(seen), timed=True)


def test_a_step_is_its_own_until_its_last_collective_is_entered() -> None:
    marks = [0, 100 * MS, 200 * MS]
    found = split(marks, entered(30 * MS, 60 * MS, 190 * MS))
    assert found.steps == 2
    assert found.own == pytest.approx(0.06 + 0.09)
    assert found.waited == pytest.approx(0.04 + 0.01)
    assert found.used == 2


def test_steps_without_a_collective_or_whose_entries_have_left_the_ring_are_skipped() -> None:
    marks = [0, 100 * MS, 200 * MS, 300 * MS]
    found = split(marks, entered(290 * MS, first=17))
    assert (found.steps, found.used) == (1, 3)
    assert found.own == pytest.approx(0.09)


@pytest.mark.parametrize("marks", [[], [5]])
def test_no_step_no_split(marks: list[int]) -> None:
    for looked in (entered(1, 2), timed((1, 0.1))):
        assert split(marks, looked).steps == 0


def test_of_timed_collectives_what_they_took_is_waiting() -> None:
    """The fast rank's take long, since they begin when it is there; the last comer's do not."""
    marks = [0, S, 2 * S]
    later = (4 * S, 0.1)
    fast = split(marks, timed((S // 2, 0.3), (S - 1, 0.3), (3 * S // 2, 0.6), later))
    slow = split(marks, timed((S // 2, 0.01), (S - 1, 0.01), (3 * S // 2, 0.02), later))
    assert (fast.steps, slow.steps) == (2, 2)
    assert fast.own == pytest.approx(0.8)
    assert fast.waited == pytest.approx(1.2)
    assert slow.own == pytest.approx(1.96)


def test_steps_whose_collectives_may_not_be_finished_are_left_for_the_next_look() -> None:
    marks = [0, S, 2 * S]
    assert split(marks, timed((S // 2, 0.3), (3 * S // 2, None))).used == 0
    found = split(marks, timed((S // 2, 0.3), (3 * S // 2, 0.2), (2 * S + 1, 0.1)))
    assert (found.used, found.steps) == (1, 1)


def test_a_part_of_a_coalesced_collective_never_gets_its_seconds_and_holds_up_nothing() -> None:
    marks = [0, S]
    found = split(marks, timed((S // 4, None), (S // 3, None), (S // 2, 0.3), (3 * S, 0.1)))
    assert (found.steps, found.used) == (1, 1)
    assert found.waited == pytest.approx(0.3)


def test_a_step_that_the_ring_does_not_hold_whole_is_skipped() -> None:
    marks = [0, S, 2 * S]
    found = split(marks, timed((S // 2, 0.1), (3 * S // 2, 0.2), (4 * S, 0.1), first=900))
    assert (found.steps, found.used) == (1, 2)
    assert found.waited == pytest.approx(0.2)


def test_collectives_that_overlap_never_take_longer_than_the_step() -> None:
    found = split([0, S], timed((S // 4, 0.9), (S // 2, 0.9), (4 * S, 0.1)))
    assert found.waited == pytest.approx(1.0)
    assert found.own == 0.0


def test_entries_are_read_as_torch_writes_them() -> None:
    """The keys of version 2.10 of the recorder's JSON; `duration_ms` is there when NCCL timed it
    and the watchdog has seen the end."""
    entry: dict[str, Any] = {
        "record_id": 41,
        "time_created_ns": 1795301082038343688,
        "profiling_name": "nccl:all_reduce",
        "state": "completed",
        "duration_ms": 12.5,
        "is_p2p": False,
    }
    scheduled = {**entry, "record_id": 42, "state": "scheduled"}
    del scheduled["duration_ms"]
    asked: list[tuple[bool, bool]] = []

    def dump(collectives: bool, active: bool) -> bytes:
        asked.append((collectives, active))
        return json.dumps({"version": "2.10", "entries": [entry, scheduled]}).encode()

    assert _entries(FlightRecorder("nccl", frozenset({"nccl"}), dump)) == (
        Collective(41, 1795301082038343688, 0.0125),
        Collective(42, 1795301082038343688, None),
    )
    assert asked == [(True, False)]
    assert (
        _entries(FlightRecorder("", frozenset({"gloo"}), lambda *_: b'{"version": "2.10"}')) == ()
    )


def test_what_the_user_has_set_stands(monkeypatch) -> None:
    mine = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_NCCL_ENABLE_TIMING": "0"}
    environ = dict(mine)
    prepare(environ)
    assert environ == mine


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_ring_is_small_only_where_no_accelerator_is(accelerated: bool, monkeypatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: accelerated and path in ACCELERATORS)
    environ: dict[str, str] = {}
    prepare(environ)
    ring = {} if accelerated else {"TORCH_FR_BUFFER_SIZE": SMALL_RING}
    assert environ == {**ring, "TORCH_NCCL_ENABLE_TIMING": "1"}
