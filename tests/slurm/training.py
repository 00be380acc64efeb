"""A training with a Checkpointer as a batch job, and what must come of it."""

from __future__ import annotations

import re

from tests.harness import until_file
from tests.slurm.conftest import Batch, Slurm, meeting
from tests.snapshots.conftest import TRAIN, starts

ASKED = re.compile(r"every rank is asked to save step (\d+)")

ENDLESS = 10**9
"""Steps of a first life, which somebody must end."""


def trains(slurm: Slurm, *options: str, flags: str = "", persist_every: int = 0) -> Batch:
    """A training on two nodes that ends in its second life; returns when it has begun."""
    out, ckpt = slurm.folder / "out", slurm.folder / "ckpt"
    out.mkdir()
    steps = f"$([ ${{SLURM_RESTART_COUNT:-0}} = 0 ] && echo {ENDLESS} || echo 1)"
    persist = f"--persist-every {persist_every}" if persist_every else ""
    job = slurm.sbatch(
        f"echo attempt ${{SLURM_RESTART_COUNT:-0}}\n"
        f"srun --ntasks-per-node=1 --no-kill {meeting('2', '$(hostname)')} {flags} "
        f"{TRAIN} --steps {steps} --every 5 {persist} --out {out} --ckpt {ckpt}\n"
        'code=$?; echo "over $code"\n'
        '[ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"',
        *("-N2", "--requeue", *options),
        env={"OMP_NUM_THREADS": "1"},
    )
    until_file(job.console, lambda shown: shown.count("snapshots take") == 2)
    return job


def markers(slurm: Slurm) -> list[int]:
    """The steps that are in storage."""
    found = (slurm.folder / "ckpt").glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def saved(slurm: Slurm, shown: str) -> int:
    """The step that all ranks were asked for; it is the only one in storage."""
    step = int(ASKED.findall(shown)[-1])
    assert markers(slurm) == [step]
    return step


def second_life(slurm: Slurm, job: Batch) -> str:
    """Wait for the next attempt; what the console showed when it began."""
    return until_file(job.console, lambda shown: "attempt 1\n" in shown, 200)


def goes_on_from(slurm: Slurm, job: Batch, step: int) -> None:
    """The second attempt takes up this step, on whatever nodes it is given, and ends well."""
    job.until_text("over 0\n")
    for rank in (0, 1):
        assert starts(slurm.folder / "out", rank) == [0, step]
