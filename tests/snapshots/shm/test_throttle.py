"""A thread in the background leaves the cores to those that train."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from elasticrun.host.doctor.resources import CpuQuota
from elasticrun.snapshots.shm import throttle as throttling
from elasticrun.snapshots.shm.throttle import (
    LONGEST,
    PATIENCE,
    Throttle,
    Usage,
    leaves_a_core,
)


class Clock:
    """In the place of `time`, and of the event that ends pauses: notes them instead of waiting."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(round(seconds, 6))


def pauses(
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[float],
    *,
    busy: bool,
    quota: CpuQuota | None = None,
    others: float = 0.0,
) -> list[float]:
    """The pauses of a thread whose pieces take these seconds of CPU. `others`: cores that other
    threads use meanwhile, in the cgroup with this quota."""
    clock = Clock()
    monkeypatch.setattr(throttling, "time", clock)
    monkeypatch.setattr(throttling, "are_cores_busy", lambda: busy)
    monkeypatch.setattr(throttling, "lowest_quota", lambda: quota)
    throttle = Throttle()
    throttle._hurry = clock  # type: ignore[assignment]
    for seconds in throttle.spread(pieces):
        clock.used += seconds
        if quota is not None:
            clock.now += seconds
            used = clock.used + others * clock.now
            (quota.folder / "cpu.stat").write_text(f"usage_usec {int(used * 1e6)}\n")
    return clock.pauses


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([0.02, 0.01], [0.18, 0.09], id="nine times as long as what was computed"),
        pytest.param([0.0006] * 4, [0.0108] * 2, id="short pieces share a pause"),
        pytest.param([0.2], [LONGEST], id="bounded"),
        pytest.param([0.2] * 400, [LONGEST] * int(PATIENCE), id="none after a while"),
    ],
)
def test_pauses_while_all_cores_are_busy(monkeypatch, pieces, expected) -> None:
    assert pauses(monkeypatch, pieces, busy=True) == expected


def test_idle_cores_are_used(monkeypatch) -> None:
    assert pauses(monkeypatch, [0.01] * 3, busy=False) == []


@pytest.mark.parametrize(
    ("cores", "others", "is_throttled"),
    [
        pytest.param(4.0, 2.5, False, id="a core is left"),
        pytest.param(4.0, 3.5, True, id="less than a core is left"),
        pytest.param(0.5, 0.2, True, id="a quota of less than a core"),
    ],
)
def test_pauses_while_the_quota_leaves_no_core(
    monkeypatch, tmp_path: Path, cores: float, others: float, is_throttled: bool
) -> None:
    """Although cores are idle. What the thread itself uses does not count; it pauses until the
    first measurement."""
    quota = CpuQuota(cores, tmp_path)
    (tmp_path / "cpu.stat").write_text("usage_usec 0\n")
    found = pauses(monkeypatch, [0.01] * 60, busy=False, quota=quota, others=others)
    assert len(found) == (60 if is_throttled else 2)


def test_a_quota_that_is_left_again(monkeypatch, tmp_path: Path) -> None:
    clock = Clock()
    monkeypatch.setattr(throttling, "time", clock)
    quota = CpuQuota(2.0, tmp_path)
    found = []
    watch = None
    for at, used in ((0.0, 0.0), (0.1, 0.9), (0.3, 0.6), (1.2, 0.6), (1.4, 0.6), (1.6, 1.0)):
        clock.now = at
        (tmp_path / "cpu.stat").write_text(f"nr_periods 0\nusage_usec {int(used * 1e6)}\n")
        watch = watch or throttling.QuotaWatch(quota)
        found.append(watch.is_used_up())
    assert found == [True, True, True, True, False, True]


def test_a_quota_whose_use_is_unknown_does_not_count(tmp_path: Path) -> None:
    assert not throttling.QuotaWatch(CpuQuota(0.1, tmp_path)).is_used_up()
    assert not throttling.QuotaWatch(None).is_used_up()


@pytest.mark.parametrize(("used", "left"), [(3.0, True), (4.0, True), (4.1, False)])
def test_what_a_quota_leaves(used: float, left: bool) -> None:
    """Two cores for two seconds, of which the thread itself has used two seconds."""
    before, now = Usage(10.0, 100.0, 7.0), Usage(12.0, 100.0 + used, 9.0)
    assert leaves_a_core(2.0, before, now) == left


def test_who_waits_ends_a_pause_and_all_later_ones(monkeypatch) -> None:
    monkeypatch.setattr(throttling, "are_cores_busy", lambda: True)
    monkeypatch.setattr(throttling, "LONGEST", 300.0)
    monkeypatch.setattr(throttling, "SHARE", 1e-9)
    monkeypatch.setattr(throttling, "LEAST", 0.0)
    throttle, begun = Throttle(), threading.Event()

    def work() -> None:
        for _ in throttle.spread(range(10)):
            begun.set()

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    assert begun.wait(60)
    throttle.hurry()
    thread.join(200)
    assert not thread.is_alive(), time.monotonic() - began


@pytest.mark.parametrize(("ready", "busy"), [(0, False), (1, False), (2, True)])
def test_busy_is_more_threads_than_cores(tmp_path: Path, ready: int, busy: bool) -> None:
    """`ready`: how many more threads than cores, less one."""
    count = len(os.sched_getaffinity(0)) - 1 + ready
    loads = tmp_path / "loadavg"
    loads.write_text(f"0.50 0.40 0.30 {count}/400 12345\n")
    assert throttling.are_cores_busy(loads) == busy


def test_who_does_not_know_leaves_the_cores_to_others(tmp_path: Path) -> None:
    assert throttling.are_cores_busy(tmp_path / "none")
