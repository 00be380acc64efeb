"""SIGKILL at random moments of copy, commit, persist and marker: the step before is always whole.

The victim is frozen first (SIGSTOP), so that where it was hit can be told; then it is killed where
it stands. What is restored must be of one life and one step, and bit by bit what that life had at
that step (`steady.py` looks); and it must be the newest step that all ranks had. Every checkpoint
with a marker is read by plain torch at these moments; those without one count for nothing.
"""

from __future__ import annotations

import mmap
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence

import psutil
import pytest

from elasticrun.shm.segment import Segment
from elasticrun.testing import processes
from tests.further import further
from tests.snapshots.conftest import Training, fork_server, saver
from tests.snapshots.steadily import Life, Steadily, freeze

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROUND = ("0", "saver", "1", "both", "0", "fork server", "1", "saver", "0", "node")
"""Victims of one job, in turn. A saver is started four times in ten minutes, no more."""

EACH_ONCE = ("saver", "both", "fork server", "1", "node")
"""The same in `make test`."""


class Killing:
    """What befalls the jobs."""

    def __init__(self, jobs: Steadily, seed: int) -> None:
        self._jobs = jobs
        self._training = jobs.training
        self._moments = random.Random(seed)
        self.hits: Counter[str] = Counter()

    def kill(self, victim: str) -> None:
        before = self._jobs.trains()
        if victim == "saver":
            self._kill_saver()
            assert [a.number for a in self._jobs.present()] == [b.number for b in before]
        elif victim == "node":
            self._pause(0.1)
            self._training.job.kill_node(0)
            self.hits["all processes at once"] += 1
            self._jobs.look_at_storage()
            self._training.lose_memory()
        else:
            self._kill_ranks(victim, before)
            self._jobs.goes_on(before)

    def _pause(self, most: float) -> None:
        time.sleep(self._moments.uniform(0.0, most))  # the moment is what is tested

    def _kill_ranks(self, victim: str, before: list[Life]) -> None:
        server = fork_server(self._training.job)
        ranks = [0, 1] if victim == "both" else [] if victim == "fork server" else [int(victim)]
        found = [psutil.Process(before[rank].pid) for rank in ranks] or [server]
        self._pause(0.1)
        for process in found:
            freeze(self._training, process)
        if not ranks:
            self.hits["fork server with ranks and saver"] += 1
        for rank in ranks:
            self.hits[self._where(rank)] += 1
        pids = [process.pid for process in found]
        processes.signal_all(lambda: pids, signal.SIGKILL)

    def _where(self, rank: int) -> str:
        """What a frozen rank was about."""
        if any(self._written(rank)):
            return "rank in mid-copy"
        life = self._jobs.present()[rank]
        return "rank at its commit" if life.begun > life.done else "rank between two snapshots"

    def _written(self, rank: int) -> list[bool]:
        """By slot, whether it is being written: all have held something in this life."""
        (path,) = (p for p in self._training.segments() if p.name.startswith(f"{rank}-"))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            segment = Segment(memoryview(memory))
            found = [segment.committed(slot) == 0 for slot in range(segment.slots)]
            segment.close()
            return found

    def _kill_saver(self) -> None:
        self._jobs.await_begin()
        self._pause(0.08)
        process = saver(self._training.job)
        freeze(self._training, process)
        self.hits[self._jobs.stage()] += 1
        self._jobs.look_at_storage()
        newest = max(self._training.checkpoints(), default=-1)
        process.kill()
        self._jobs.await_checkpoint(newest)


def kill(
    training: Training, *, jobs: int, seed: int, victims: Sequence[str] = ROUND
) -> Counter[str]:
    steadily = Steadily(training)
    killing = Killing(steadily, seed)
    for _ in range(jobs):
        steadily.begin()
        for victim in victims:
            killing.kill(victim)
        print(", ".join(f"{what}: {times}" for what, times in sorted(killing.hits.items())))
    steadily.begin()
    steadily.end()
    return killing.hits


def test_killed_at_random_moments(training: Training) -> None:
    """One job with a kill of each kind, the last of them of everything, and the job after it."""
    hits = kill(training, jobs=1, seed=5, victims=EACH_ONCE)
    assert hits.total() == len(EACH_ONCE) + 1  # both ranks are two


@further("test_killed_at_random_moments")
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times(training: Training) -> None:
    hits = kill(training, jobs=20, seed=200)
    assert hits["rank in mid-copy"] > 5
    assert hits["saver in mid-persist"] > 5
