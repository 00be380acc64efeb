"""SIGKILL at random moments of copy, commit, persist and marker, and of each process while a
checkpoint is written: the step before is always whole.

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
from contextlib import ExitStack, suppress

import psutil
import pytest

from elasticrun.snapshots.shm.segment import Segment
from elasticrun.testing import processes
from elasticrun.testing.processes import Deadline, Waiter
from tests import needs
from tests.further import further
from tests.harness import LIMIT, await_exit
from tests.snapshots.conftest import Training, fork_server, saver
from tests.snapshots.steadily import Life, Steadily, freeze

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROUND = ("0", "saver", "1", "both", "0", "fork server", "1", "saver", "0", "node")
"""Victims of one job, in turn. A saver is started four times in ten minutes, no more."""

EACH_ONCE = ("saver", "both", "fork server", "node")
"""The same in `make test`; training/checkpointing/test_ranks.py has a rank that dies alone."""


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
        if self._moments.random() < 0.5:
            process = self._jobs.freeze_in_mid_persist()
        else:
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


# ---------------------------------------------------------------- while a checkpoint is written


@further("agent/snapshots/test_snapshots::test_a_saver_that_answers_no_ping_is_killed")
@pytest.mark.parametrize("how", ["it is stopped", "its cgroup is frozen"])
def test_a_saver_that_stands_still_is_replaced(training: Training, how: str) -> None:
    """In the middle of a file: its agent kills it, and the next one writes a checkpoint."""
    jobs = Steadily(training)
    jobs.begin()
    jobs.trains()
    process = jobs.freeze_in_mid_persist()
    newest = max(training.checkpoints(), default=-1)
    with ExitStack() as stack:
        if "frozen" in how:
            stack.enter_context(needs.freezer())(process.pid)
            process.send_signal(signal.SIGCONT)
        assert not await_exit([process.pid])
    jobs.await_checkpoint(newest)
    assert len({life.number for life in jobs.present()}) == 1  # training was not disturbed
    assert training.said(rf"the saver has not answered for 20 s: {how}")
    jobs.end()


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "snapshots/saver/test_saver::test_one_killed_in_mid_persist_leaves_no_checkpoint",
)
def test_each_process_is_killed_in_mid_persist(training: Training) -> None:
    """One after the other, while the saver stands in the middle of a file: the snapshot outlives
    each of them, nothing torn is ever a checkpoint, and another attempt is made."""
    jobs = Steadily(training)
    jobs.begin()

    def in_mid_persist() -> tuple[psutil.Process, int]:
        jobs.trains()
        process = jobs.freeze_in_mid_persist()
        jobs.look_at_storage()
        return process, max(training.checkpoints(), default=-1)

    process, newest = in_mid_persist()
    process.kill()
    jobs.await_checkpoint(newest)
    assert len({life.number for life in jobs.present()}) == 1  # training was not disturbed

    process, newest = in_mid_persist()
    ranks = [life.number for life in jobs.present()]
    training.job.kill_master()
    training.job.wait_for(phase="running")
    process.send_signal(signal.SIGCONT)
    jobs.await_checkpoint(newest)
    assert [life.number for life in jobs.present()] == ranks

    _, newest = in_mid_persist()
    before = jobs.present()
    fork_server(training.job).kill()
    jobs.goes_on(before)
    jobs.await_checkpoint(newest)

    _, newest = in_mid_persist()
    over = {life.pid for life in jobs.present()}
    training.job.kill_agent(0)
    training.job.restart_node(0)
    training.until(lambda: over.isdisjoint(life.pid for life in jobs.present()), "another life")
    # its master went with it, and nobody remembers the round that the memory is of
    assert {life.start >= newest for life in jobs.present()} == {True}
    jobs.await_checkpoint(newest)
    jobs.end()


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "training/checkpointing/test_checkpointer::test_what_is_written_out_is_pinned_and_never_in_the_way",
)
def test_ranks_are_killed_in_mid_persist(training: Training) -> None:
    """All at once. What is being written is pinned: the ranks of the next life write beside it, not
    over it, and what stands in storage in the end is what there was."""
    jobs = Steadily(training, mib=24, keep=0)
    jobs.begin()
    before = jobs.trains()
    process = jobs.freeze_in_mid_persist()
    written = int(max(training.ckpt.glob("step-*")).name.removeprefix("step-"))
    both = [training.job.rank_pid(rank) for rank in (0, 1)]
    processes.signal_all(lambda: both, signal.SIGKILL)
    training.job.wait_for(round=2, phase="running")
    process.send_signal(signal.SIGCONT)  # it writes on, and ranks begin to copy
    jobs.goes_on(before)
    training.until(lambda: written in training.checkpoints(), f"checkpoint of step {written}")
    jobs.check(training.ckpt / f"step-{written:09d}")
    jobs.trains()
    jobs.end()


@further(
    "snapshots/saver/test_timelines::test_a_checkpoint_counts_though_the_old_files_cannot_be_removed"
)
def test_killed_between_the_marker_and_the_sweep(training: Training) -> None:
    """The checkpoint counts; what it makes superfluous lies there until the next one is written."""
    jobs = Steadily(training, keep=1)
    jobs.begin()
    process = freeze_after_the_marker(training)
    left = training.checkpoints()
    assert len(left) == 2
    jobs.look_at_storage()
    process.kill()
    jobs.await_checkpoint(left[-1])
    training.until(lambda: left[0] not in training.checkpoints(), "end of the superfluous one")
    jobs.end()
    assert left[0] not in training.checkpoints()


def freeze_after_the_marker(training: Training) -> psutil.Process:
    """The saver, stopped when a marker stands and what is no longer kept does so, too."""
    training.until(lambda: len(training.checkpoints()) == 1, "checkpoint")
    process = saver(training.job)
    watch, deadline = Waiter(), Deadline(LIMIT)
    watched = set()
    try:
        watch.folder(str(training.ckpt))
        while not deadline.over():
            for path in set(training.ckpt.glob("step-*")) - watched:
                watched.add(path)
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    watch.folder(str(path))
            watch.wait(deadline.left())
            if len(training.checkpoints()) > 1:
                freeze(training, process)
                if len(training.checkpoints()) > 1:
                    return process
                process.send_signal(signal.SIGCONT)
    finally:
        watch.close()
    raise AssertionError("the sweep was always quicker")
