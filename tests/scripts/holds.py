"""A rank whose state is one large tensor, which is all of the number of its step; it dies once.

Arguments: a folder for checkpoints, MiB of state, the last step, after which step to die. Each life
tells the test at which step it began, and whether the state was that step's.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from stage import Stage

from elasticrun.training import Checkpointer

FOLDER, MIB, LAST, DIES = sys.argv[1], *map(int, sys.argv[2:])

state = {"tensor": torch.zeros(MIB << 18, dtype=torch.int32)}
checkpointer = Checkpointer(FOLDER, state=state, every_steps=1, on_busy="wait")
start = checkpointer.restore()
right = bool((state["tensor"] == start).all())
Stage(start=start, right=right, source=checkpointer.stats.source)
for step in range(start + 1, LAST + 1):
    state["tensor"].fill_(step)
    checkpointer.step(step)
    if step == DIES and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
