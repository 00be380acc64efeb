"""Whatever is killed while a checkpoint is written: what was whole stays whole, and is written."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest

from elasticrun.testing import processes
from elasticrun.testing.processes import Deadline, Watch
from tests.further import further
from tests.harness import LIMIT
from tests.snapshots.conftest import Training, fork_server, saver
from tests.snapshots.steadily import Steadily, freeze

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "forkserver/test_saver::test_one_killed_in_mid_persist_leaves_no_checkpoint",
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
    "checkpointing/test_checkpointer::test_what_is_written_out_is_pinned_and_never_in_the_way",
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
    "forkserver/test_timelines::test_a_checkpoint_counts_though_the_old_files_cannot_be_removed"
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
    watch, deadline = Watch(), Deadline(LIMIT)
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
