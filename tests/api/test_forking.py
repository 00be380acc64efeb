"""A fork of the caller ends nothing of the caller's, and a store host that crashes is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import LIMIT

pytestmark = pytest.mark.slow

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


def run(caller: str) -> subprocess.CompletedProcess[str]:
    """A caller's program, to its end."""
    return subprocess.run(
        [sys.executable, "-c", caller], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip


def test_what_waits_for_a_thread_of_the_caller_is_not_collected_in_its_forks() -> None:
    done = run(CALLER)
    assert done.stdout == "{0: (True, True), 1: (True, True)} True\n", done.stderr


def test_what_another_thread_of_the_caller_keeps_is_not_ended_in_its_forks() -> None:
    done = run(IN_A_THREAD)
    assert done.stdout == "{0: 'here', 1: 'here'}\n", done.stderr


def test_a_store_host_that_dies_as_a_fork_is_executed() -> None:
    done = run(CRASHES)
    assert done.stdout == "{0: 'here'} 2\n", done.stderr  # the store host once, the rank
    assert "it ended before it listened" in done.stderr
