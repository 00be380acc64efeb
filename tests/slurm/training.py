"""A training with a Checkpointer as a batch job, and what must come of it."""

from __future__ import annotations

import re

from tests.harness import until_file
from tests.slurm.conftest import Batch, Slurm, meeting
from tests.snapshots.conftest import TRAIN, ends, starts, until_printed

ASKED = re.compile(r"every rank is asked to save step (\d+)")

RANKS = (0, 1)

UNHURRIED = "--departure-grace=100"
"""Less than KillWait and GraceTime; that a save is quick is nothing that this machine promises."""

LIVES = """
import os, runpy, sys
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
sys.argv += ["--steps", str(10**9 if first else 1)]
runpy.run_path({train!r}, run_name="__main__")
"""
"""The first life is without an end, which somebody must make; the second has nothing left to do."""


def two_lives(slurm: Slurm, persist_every: int = 0) -> list[str]:
    """A training that ends in its second life: a script and its arguments."""
    script = slurm.folder / "train.py"
    script.write_text(LIVES.format(train=str(TRAIN)))
    out, ckpt = slurm.folder / "out", slurm.folder / "ckpt"
    out.mkdir()
    persist = ("--persist-every", str(persist_every)) if persist_every else ()
    every = ("--every", "5", "--print-at", "5")
    return [str(script), *every, *persist, "--out", str(out), "--ckpt", str(ckpt)]


def trains(slurm: Slurm, *options: str, flags: str = "", persist_every: int = 0) -> Batch:
    """Such a training on two nodes, whose script requeues it; returns when it has begun."""
    job = slurm.sbatch(
        f"srun --ntasks-per-node=1 --no-kill {meeting('2', '$(hostname)')} {UNHURRIED} {flags} "
        f"{' '.join(two_lives(slurm, persist_every))}\n"
        'code=$?; echo "over $code"\n'
        '[ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"',
        *("-N2", "--requeue", *options),
    )
    begun(slurm)
    return job


def begun(slurm: Slurm) -> None:
    """Wait until every rank has taken a snapshot: before its first step it has nothing to save."""
    for rank in RANKS:
        until_printed(slurm.folder / "out", rank)


def markers(slurm: Slurm) -> list[int]:
    """The steps that are in storage."""
    found = (slurm.folder / "ckpt").glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def saved(slurm: Slurm, job: Batch) -> int:
    """The step that all ranks were asked for; it is the only one in storage."""
    step = int(ASKED.findall(job.console.read_text())[-1])
    assert markers(slurm) == [step]
    return step


def second_life(slurm: Slurm) -> None:
    """Wait until every rank has begun it."""
    for rank in RANKS:
        told = slurm.folder / "out" / f"rank-{rank}.jsonl"
        until_file(told, lambda text: text.count('"start"') == 2)


def goes_on_from(slurm: Slurm, job: Batch, step: int) -> None:
    """The second life takes up this step, on whatever nodes it is given, and ends well."""
    slurm.await_end(job)
    assert slurm.told(job, "JobState") == "COMPLETED"
    assert slurm.told(job, "Restarts") == "1"
    for rank in RANKS:
        assert starts(slurm.folder / "out", rank) == [0, step]
        assert len(ends(slurm.folder / "out", rank)) == 1
