"""A fork of the caller ends nothing of the caller's, and a store host that crashes is executed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.further import cases
from tests.harness import program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent

WAITS = """
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


IN_A_THREAD = """
import os, threading
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from elasticrun.launcher import LaunchConfig, elastic_launch

mine = threading.local()  # of the main thread: a fork of another one drops what is in it
mine.mesh = DeviceMesh.__new__(DeviceMesh)
mine.mesh._pg_registry = {"0": dist.ProcessGroupGloo(dist.HashStore(), 0, 1)}

def launch():
    config = LaunchConfig(1, 1, 2, run_id="job", start_method="fork", max_restarts=0)
    print(elastic_launch(config, lambda: "here")(), flush=True)

thread = threading.Thread(target=launch)
thread.start()
thread.join()
os._exit(0)
"""

CRASHES = """
import os, signal, threading
import torch
from elasticrun.launcher import LaunchConfig, elastic_launch

forks = []
os.register_at_fork(
    before=lambda: forks.append(0),
    after_in_child=lambda: len(forks) > 1 or os.kill(os.getpid(), signal.SIGKILL),
)
config = LaunchConfig(1, 1, 1, run_id="job", start_method="fork", max_restarts=0)
print(elastic_launch(config, lambda: "here")(), len(forks), flush=True)
os._exit(0)
"""


PROGRAMS = {
    "what waits for a thread is not collected": (
        *(WAITS, "{0: (True, True), 1: (True, True)} True\n", ""),
    ),
    "what another thread keeps is not ended": (IN_A_THREAD, "{0: 'here', 1: 'here'}\n", ""),
    # the store host was forked once, and the rank
    "a store host that dies as a fork is executed": (
        *(CRASHES, "{0: 'here'} 2\n", "it exited before it listened"),
    ),
}


@pytest.mark.parametrize("name", cases(PROGRAMS, soaked=["what another thread keeps is not ended"]))
def test_what_forks_of_a_caller_leave_to_it(name: str) -> None:
    code, said, told = PROGRAMS[name]
    done = program("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == said, done.stderr
    assert told in done.stderr
