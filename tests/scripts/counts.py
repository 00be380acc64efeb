"""A training script as a team has one: counts its steps on gloo and goes on from its checkpoint.

Argument: a folder, with `checkpoint`, and `stop` when the script is to end. The checkpoint of a
step is written after the all-reduce of the next one, when every rank has said its step.

$COUNTS_PAUSE: seconds between two steps. $COUNTS_TELLS: set where each step is told to the agent as
progress, by which stragglers are found. $COUNTS_PRINTS: set where each is printed, at length.
$COUNTS_FAILS: set for a node whose ranks die right after their first step. $COUNTS_FAILING_RANKS:
group ranks one of which does, wherever it is: they take turns with every restart.
$COUNTS_FAILS_LATER: set where all that waits until the file `fails` is in the folder. $COUNTS_ENDS:
how ranks obey SIGTERM: `never`, after so many seconds, or `later`: when `may-end` is in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrun.testing import step

FOLDER = Path(sys.argv[1])
PAUSE = float(os.environ.get("COUNTS_PAUSE", "0.02"))
FAILING = os.environ.get("COUNTS_FAILING_RANKS", "").split(",")
TURN = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) % len(FAILING)
FAILS = "COUNTS_FAILS" in os.environ or os.environ["GROUP_RANK"] == FAILING[TURN]
LATER = "COUNTS_FAILS_LATER" in os.environ
TELLS = "COUNTS_TELLS" in os.environ
ENDS = os.environ.get("COUNTS_ENDS", "")


def end_late(*_: object) -> None:
    time.sleep(0 if ENDS == "later" else float(ENDS))
    while ENDS == "later" and not (FOLDER / "may-end").exists():
        time.sleep(0.02)
    os._exit(0)


def sum_up(word: torch.Tensor) -> None:
    try:
        dist.all_reduce(word)
    except RuntimeError:
        while ENDS:  # a peer has gone; this one ends when it is told to, and not before
            signal.pause()
        raise


def resume() -> int:
    """The step to go on from, which rank 0 knows."""
    saved = FOLDER / "checkpoint"
    word = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0 and saved.exists():
        word[0] = int(saved.read_text())
    dist.all_reduce(word)
    return int(word[0])


def save(number: int) -> None:
    """Rank 0 alone; a reader never sees half of it."""
    if dist.get_rank() == 0:
        draft = FOLDER / f"checkpoint.{os.getpid()}"
        draft.write_text(str(number))
        draft.rename(FOLDER / "checkpoint")


if ENDS:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ENDS == "never" else end_late)
if TELLS:
    from elasticrun.training import progress
dist.init_process_group("gloo")
number, stop = resume(), False
while not stop:
    word = torch.tensor([1, int((FOLDER / "stop").exists())])
    sum_up(word)
    assert int(word[0]) == dist.get_world_size()
    stop = bool(word[1])
    step(number + 1)
    save(number)
    number += 1
    if TELLS:
        progress(number)
    if "COUNTS_PRINTS" in os.environ:
        print(f"rank {dist.get_rank()} step {number} " + "x" * 2000, flush=True)
    if FAILS and (not LATER or (FOLDER / "fails").exists()):
        os._exit(13)
    time.sleep(PAUSE)
dist.barrier()
save(number)
dist.destroy_process_group()
