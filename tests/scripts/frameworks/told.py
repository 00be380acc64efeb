"""What the scripts of this folder have in common: how they end, and how a rank of them is killed.

argv of those that take snapshots: a folder for them, and the step after which rank 1 of the first
life is killed (0: never).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FOLDER = sys.argv[1] if len(sys.argv) > 1 else "out"
SNAPSHOTS = len(sys.argv) > 2


class Steps:
    """The steps that this life has done: the first of them, and the one after which it ends."""

    def __init__(self) -> None:
        self.first = 0
        self._last = int(sys.argv[2]) if SNAPSHOTS else 0

    def seen(self, rank: int, step: int) -> None:
        self.first = self.first or step
        if (LIFE, rank, step) == (0, 1, self._last):
            os.kill(os.getpid(), signal.SIGKILL)


def tell(main: Callable[[], dict[str, Any]]) -> None:
    """Print what `main` returns. What DDP holds of gloo must be gone before the interpreter is, or
    torch 2.13 may abort in its threads (seen under torchrun on a busy machine, one run of nine):
    main's own variables are."""
    sys.stdout.write("RESULT " + json.dumps(main()) + "\n")
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
