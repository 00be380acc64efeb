"""A training script with the one line by which stragglers are found: counts its steps like
`counts.py`, with a part of its own in each, and says its progress.

Argument: a folder, with `stop` when the script is to end. $PACES_OWN: seconds of the part of a step
that a rank does by itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrun.testing import step
from elasticrun.training import progress

FOLDER = Path(sys.argv[1])
OWN = float(os.environ.get("PACES_OWN", "0.05"))
SAVED = FOLDER / "checkpoint"

dist.init_process_group("gloo")
number, stop = 0, False
if SAVED.exists():
    number = int(SAVED.read_text())
agreed = torch.tensor([number])
dist.broadcast(agreed, 0)
number = int(agreed[0])
while not stop:
    time.sleep(OWN)
    word = torch.tensor([1, int((FOLDER / "stop").exists())])
    dist.all_reduce(word)
    assert int(word[0]) == dist.get_world_size()
    stop = bool(word[1])
    step(number + 1)
    if dist.get_rank() == 0:
        draft = FOLDER / f"checkpoint.{os.getpid()}"
        draft.write_text(str(number))  # that of this step follows when all ranks have said it
        draft.rename(SAVED)
    number += 1
    progress(number)
dist.barrier()
dist.destroy_process_group()
