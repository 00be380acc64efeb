"""One of the examples; in its first life one rank stands still when a step is done, and says so.

Arguments: the rank, the step, the example and what it is to be told.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from elasticrun.training import Checkpointer

from stage import Stage  # isort: skip

RANK, STEP = sys.argv[1], int(sys.argv[2])
del sys.argv[:3]

done = Checkpointer.step


def hold(checkpointer: Checkpointer, number: int, *, healthy: bool = True) -> None:
    """In the place of `Checkpointer.step`."""
    done(checkpointer, number, healthy=healthy)
    if number == STEP:
        Stage()
        while True:
            signal.pause()


if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (RANK, "0"):
    Checkpointer.step = hold
runpy.run_path(sys.argv[0], run_name="__main__")
