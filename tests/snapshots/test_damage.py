"""What is not what was written: found, said, and the next best taken. A disk without room; a folder
of checkpoints that two jobs name."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticrun.agent.claims.folder_claim import NAME
from elasticrun.snapshots.shm.segment import Segment
from elasticrun.testing import processes
from tests import hanging, needs
from tests.further import further
from tests.harness import ELASTICRUN, Launched, World, await_true, processes_of
from tests.snapshots.conftest import (
    SILENCE,
    STEPS,
    TRAIN,
    Training,
    ends,
    flip,
    starts,
    told,
    undisturbed,
    until_printed,
)

pytestmark = pytest.mark.slow


@further("snapshots/saver/test_saver::test_a_flipped_byte_is_found")
def test_a_flipped_bit_in_memory(training: Training) -> None:
    """What does not have its hash counts as absent: the older slot is taken, and it is said."""
    job = training.start(gated=True, max_restarts=1)
    training.comes_to(7)
    for path in training.segments():
        training.until(lambda path=path: hashed(path, 7), "hashes of step 7")
        flip(path, 7)
    job.kill_rank(1)
    training.go_on()
    training.finish()
    assert training.starts(0)[-1] == 6
    assert training.said("is unusable")
    training.is_as_if_nothing_happened()


@further(
    "agent/snapshots/test_segments::test_a_segment_that_another_process_has_overwritten_is_not_lent_again",
    "agent/snapshots/test_segments::test_a_truncated_segment_does_not_end_the_agent",
)
@pytest.mark.parametrize("how", ["its control page is overwritten", "its file is truncated"])
def test_a_segment_that_another_process_spoils(training: Training, how: str) -> None:
    """The rank whose segment it is dies once; what the other one holds is the same state."""
    job = training.start(gated=True, max_restarts=1)
    training.comes_to(7)
    (path,) = (one for one in training.segments() if one.name.startswith("1-"))
    if how == "its file is truncated":
        os.truncate(path, 0)
    else:
        with path.open("r+b") as file:
            file.write(b"\0" * 48)
    job.kill_rank(1)
    training.go_on()
    training.finish()
    assert [training.starts(rank)[-1] for rank in range(2)] == [7, 7]
    assert training.said("local rank 1 in this node's memory are lost: another process has")
    training.is_as_if_nothing_happened()


def hashed(path: Path, step: int) -> bool:
    """Whether the saver has hashed this step of a segment."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        segment = Segment(memoryview(memory))
        found = any(segment.hashes(s) for s in segment.snapshots() if s.step == step)
        segment.close()
        return found


@further(
    "training/checkpointing/test_stored::test_a_short_file_is_spoiled_and_the_one_before_is_taken",
    "training/checkpointing/test_ranks::test_what_one_rank_finds_spoiled_all_pass_over_in_the_same_life",
)
def test_changed_bytes_in_storage(training: Training) -> None:
    """In a file of the newest checkpoint, and in the manifest of the one before: the third is
    taken, each is said, and neither is looked at again."""
    training.start("--persist-every", "3", gated=True, steps=9)
    for step in (3, 6):  # before a saver is there, a later one takes the place of an earlier one
        training.open_gate(step)
        training.until(lambda step=step: step in training.checkpoints(), f"checkpoint {step}")
    training.open_gate()
    training.finish()
    assert training.checkpoints() == [3, 6, 9]
    part = max((training.ckpt / "step-000000009").glob("*.distcp"), key=os.path.getsize)
    for path in (part, training.ckpt / "step-000000006" / "elasticrun.json"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    training.start(max_restarts=2)
    training.finish()
    assert training.starts(0)[-1] == 3
    assert training.said("step 9 in .* is spoiled: .* was changed")
    assert training.said("step 6 in .* is spoiled: .*manifest")
    assert {path.parent.name for path in training.ckpt.glob("*/elasticrun.bad")} == {
        "step-000000006",
        "step-000000009",
    }
    expected = undisturbed("ddp", 2, STEPS)
    assert [ends(training.out, rank)[-1] for rank in range(2)] == list(expected)


# ---------------------------------------------------------------- a disk without room

FILL = 'head -c 2m /dev/zero > "$0/ballast" 2>/dev/null; exec "$@"'


@further("snapshots/storage/test_writing::test_a_full_disk_is_said_and_nothing_is_left_on_it")
def test_a_full_disk(training: Training) -> None:
    """A real one, mounted for the job alone: training goes on, it is said, and once there is room
    the checkpoint is written."""
    training.ckpt.mkdir()
    inside = (*needs.tmpfs(training.ckpt, "1m"), "sh", "-c", FILL, str(training.ckpt))
    command = [
        *(*inside, sys.executable, "-m", "elasticrun", "--standalone", "--nproc-per-node=2"),
        f"--rdzv-conf=heartbeat_timeout={SILENCE}",
        *(str(TRAIN), "--steps", str(STEPS), "--persist-every", "2", "--gate", str(training.gate)),
        *("--out", str(training.out), "--ckpt", str(training.ckpt)),
    ]
    training.open_gate(3)
    said = training.out / "said"
    environ = {**os.environ, "ELASTICRUN_SHM_DIR": str(training.shm), "LOGLEVEL": "INFO"}
    with said.open("wb") as log:
        job = subprocess.Popen(command, stderr=log, env=environ)
    try:
        training.until(lambda: "the disk is full" in said.read_text(), "word of the full disk")
        disk = Path(f"/proc/{job.pid}/root{training.ckpt}")
        (disk / "ballast").unlink()
        training.open_gate(STEPS - 1)  # however often step 2 was tried meanwhile, others follow
        training.until(lambda: any(disk.glob("*/.metadata")), "checkpoint")
        training.open_gate()
        assert job.wait(240) == 0
    finally:
        end(job)
    assert starts(training.out, 0) == [0]
    assert "; retrying in" in said.read_text()


@further(
    "training/checkpointing/test_stored::test_a_folder_that_hangs_holds_nobody_up_without_limit"
)
def test_storage_hangs_while_a_rank_dies(training: Training) -> None:
    """Every call into the folder hangs, as with a network file system whose server is away: ranks
    go on from memory, one line says so, and checkpoints are written once the folder answers."""
    hanging.require()
    training.ckpt.mkdir()
    command = [
        *(*hanging.APART, sys.executable, "-m", "elasticrun", "--standalone"),
        *("--nproc-per-node=2", "--max-restarts=1", f"--rdzv-conf=heartbeat_timeout={SILENCE}"),
        *(str(TRAIN), "--steps", str(STEPS), "--persist-every", "2", "--gate", str(training.gate)),
        *("--out", str(training.out), "--ckpt", str(training.ckpt), "--print-at", "3"),
    ]
    training.open_gate(3)
    said = training.out / "said"
    environ = {**os.environ, "ELASTICRUN_SHM_DIR": str(training.shm), "LOGLEVEL": "INFO"}
    with said.open("wb") as log:
        job = subprocess.Popen(command, stderr=log, env=environ)
    try:
        for rank in range(2):
            until_printed(training.out, rank)
        training.until(training.checkpoints, "checkpoint")
        with hanging.hanging(training.ckpt, job.pid):
            os.kill(told(training.out, 1)[0]["pid"], signal.SIGKILL)
            for rank in range(2):
                training.until(lambda rank=rank: len(training.starts(rank)) == 2, "restart")
        training.open_gate()
        assert job.wait(240) == 0
    finally:
        end(job)
    assert [training.starts(rank) for rank in range(2)] == [[0, 3]] * 2
    assert "step 3 is restored from memory; storage was not queried" in said.read_text()
    assert training.checkpoints()[-1] == STEPS
    training.is_as_if_nothing_happened()


def end(job: subprocess.Popen[bytes]) -> None:
    """What is below an agent goes with it."""
    below = processes_of(processes.below(job.pid)) if job.poll() is None else []
    job.kill()
    job.wait()
    assert not psutil.wait_procs(below, timeout=240)[1]


# ---------------------------------------------------------------- two jobs that name one folder


WRITES = """
import sys, time
from pathlib import Path
import torch
from elasticrun.training import Checkpointer

stop = Path(sys.argv[2])
weights = torch.zeros(10)
ckpt = Checkpointer(
    sys.argv[1], weights=weights, every_steps=1, persist_every_steps=1, on_busy="wait"
)
step = ckpt.restore()
while not stop.exists():
    step += 1
    weights += 1
    ckpt.step(step)
    time.sleep(float(sys.argv[3]))
"""


@further("agent/claims/test_claim_file")
def test_the_second_job_writes_nothing_until_the_first_ends(world: World, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "ckpt"
    script.write_text(WRITES)

    def job(name: str) -> tuple[Path, Launched]:
        stop = tmp_path / f"stop-{name}"
        words = ("--standalone", f"--rdzv-id={name}", str(script), str(folder), str(stop), "0.2")
        return stop, world.launch(ELASTICRUN, *words)

    stop_one, one = job("one")
    await_true(lambda: list(folder.glob("step-*/.metadata")), "checkpoint of the first job")
    stop_two, two = job("two")
    two.until_text(f"no checkpoint is written: {folder} is claimed by job one on ")
    stop_one.touch()
    assert one.wait() == 0, one.stderr
    before = set(folder.glob("step-*/.metadata"))
    await_true(lambda: set(folder.glob("step-*/.metadata")) - before, "checkpoint of the second")
    stop_two.touch()
    assert two.wait() == 0, two.stderr
    assert not (folder / NAME).exists(), "left clean"


@further(
    "snapshots/saver/test_timelines::test_nothing_older_replaces_what_another_job_has_written_since"
)
def test_an_older_history_does_not_replace_newer_steps(world: World, tmp_path: Path) -> None:
    """Two starts of one job: the first one stands still until the second one has the folder, and
    would write older steps once that has ended."""
    script, folder = tmp_path / "train.py", tmp_path / "ckpt"
    script.write_text(WRITES)

    def job(name: str, pace: float) -> tuple[Path, Launched]:
        stop = tmp_path / f"stop-{name}"
        words = ("--standalone", "--rdzv-id=one", "--rdzv-conf=heartbeat_timeout=600", str(script))
        return stop, world.launch(ELASTICRUN, *words, str(folder), str(stop), str(pace))

    def newest() -> int:
        found = folder.glob("step-*/.metadata")
        return max((int(p.parent.name.removeprefix("step-")) for p in found), default=0)

    stop_one, one = job("one", 2.0)
    await_true(newest, "checkpoint of the first job")
    agent = psutil.Process(one.pid)
    agent.suspend()
    stop_two, two = job("two", 0.05)
    await_true(lambda: newest() > 60, "sixty steps of the second job")
    agent.resume()
    one.until_text(f"{folder} is claimed by another master of this job")
    stop_two.touch()
    assert two.wait() == 0, two.stderr
    last = newest()
    written = (folder / f"step-{last:09d}/elasticrun.json").read_bytes()
    one.until_text(f"another job has written step {last} in {folder} since this job restored")
    stop_one.touch()
    assert one.wait() == 1, one.stderr
    assert newest() == last
    assert (folder / f"step-{last:09d}/elasticrun.json").read_bytes() == written
