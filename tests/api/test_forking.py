"""A fork of the caller leaves the caller's garbage alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import LIMIT

ROOT = Path(__file__).parent.parent.parent

CALLER = """
import gc, os
import torch.distributed as dist
from elasticrun.launcher import LaunchConfig, elastic_launch

class Cycle:
    def __init__(self):
        self.itself = self
        self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # its end waits for its threads

held = []

def becomes_garbage():
    held.clear()

def is_collected_at_once():
    gc.set_threshold(1)

os.register_at_fork(
    before=becomes_garbage,
    after_in_child=is_collected_at_once,
    after_in_parent=lambda: held.append(Cycle()),
)

def rank():
    own = []
    own.append(own)
    del own
    return gc.isenabled(), gc.collect() > 0

held.append(Cycle())
config = LaunchConfig(1, 1, 2, run_id="job", start_method="fork", max_restarts=0)
print(elastic_launch(config, rank)(), gc.isenabled(), flush=True)
os._exit(0)
"""


def test_what_waits_for_a_thread_of_the_caller_is_not_collected_in_its_forks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLER], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.stdout == "{0: (True, True), 1: (True, True)} True\n", done.stderr
