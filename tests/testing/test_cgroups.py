"""Limits of CPU time and memory: they hold, and nothing of them stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing import cgroups, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Impossible
from tests import needs
from tests.further import further
from tests.harness import PATIENT, SCRIPTS

pytestmark = pytest.mark.slow

SPIN = """
import sys, time
end, before = time.monotonic() + float(sys.argv[1]), time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - before)
"""

EAT = """
print("ready", flush=True)
input()
held = b"x" * (200 << 20)
print("ate")
"""


@pytest.fixture
def group() -> Iterator[Group]:
    """Limits for whom a test likes; skipped where there can be none."""
    try:
        made = Group("test")
    except Impossible as why:
        needs.lacking(str(why))
    yield made
    made.close()
    assert cgroups.folders(made.name) == []


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_share_of_the_time(group: Group) -> None:
    """0.2 cores: of a second of spinning a fifth is computed, and the rest waited for."""
    group.cpus(0.2)
    spinner = started(*group.prefix(), sys.executable, "-c", SPIN, "1")
    said, _ = spinner.communicate(timeout=240)
    assert float(said) < 0.5
    group.cpus(None)


def test_more_memory_than_there_may_be(group: Group) -> None:
    """A process that was added after its start is killed by the kernel for what it takes then."""
    group.memory(100 << 20)
    eater = started(sys.executable, "-c", EAT)
    assert eater.stdout.readline() == "ready\n"
    group.add([eater.pid])
    assert cgroups.members(group.name) == [eater.pid]
    said, _ = eater.communicate("\n", timeout=240)
    assert (eater.returncode, said) == (-signal.SIGKILL, "")


ABANDONS = """
import subprocess, sys
from elasticrun.testing.cgroups import Group
group = Group("left")
sleeper = subprocess.Popen([*group.prefix(), "sleep", "1000"], start_new_session=True)
print(group.name, sleeper.pid, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_left_is_removed(group: Group) -> None:
    owner = started(sys.executable, "-c", ABANDONS)
    name, sleeper = owner.stdout.readline().split()
    owner.kill()
    assert not processes.await_end([int(sleeper)], 60)
    cgroups.sweep()
    assert cgroups.folders(name) == []
    owner.communicate()


def test_a_node_with_little_memory(elastic_job: Any) -> None:
    """The agent tells its rank's death for want of memory from one by a crash."""
    job = elastic_job(SCRIPTS / "eats.py", 0, "itself", memory=500 << 20)
    assert job.result().exit_codes == (1,)
    assert "the kernel was out of memory and killed it" in job.output(0)


@further("test_a_node_with_little_memory")
def test_a_fork_server_on_a_node_with_little_memory(elastic_job: Any) -> None:
    """With a CUDA build of torch, a rank that has just begun is smaller than its fork server."""
    job = elastic_job(SCRIPTS / "eats.py", 0, "parent", memory=500 << 20)
    assert job.result().exit_codes == (1,)
    (cause,) = re.findall(r"over: rank 0: the fork server ended: it was killed.*", job.output(0))
    assert ", because the kernel was out of memory;" in cause


SPINS = """
import itertools, time
from elasticrun.testing import step
for number in itertools.count():
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    step(number)
"""


def test_a_node_that_is_given_less_time_as_it_runs(elastic_job: Any, tmp_path: Path) -> None:
    """0.2 cores: the 0.4 s of computing of eight steps take 2 s, less what was saved up."""
    script = tmp_path / "spins.py"
    script.write_text(SPINS)
    job = elastic_job(script, env=PATIENT)
    job.wait_for(step=0)
    at = job.limit_cpus(0, 0.2)
    last = job.steps()[-1].step
    assert job.wait_for(step=last + 9).time - at > 1.0
    job.limit_cpus(0, None)
    job.wait_for(step=last + 20)


HUNGRY = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"{os.getpid()} is hungry in life {life}\\n".encode())  # in one piece
signal.sigwait([signal.SIGUSR1])
held = [b"x" * (1 << 24) for _ in range(128)]
signal.pause()
"""


def test_a_node_that_is_given_less_memory_as_it_runs(elastic_job: Any, tmp_path: Path) -> None:
    """A rank that somebody kills there is told from one that the kernel kills for its memory."""
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY)
    job = elastic_job(script, max_restarts=1, env=PATIENT)

    def rank(life: int) -> int:
        job.wait_for_output(0, f"is hungry in life {life}")
        return int(re.findall(rf"(\d+) is hungry in life {life}", job.output(0))[0])

    first = rank(0)
    job.limit_memory(0, 1 << 30)  # twice what the fork server has with any torch
    os.kill(first, signal.SIGKILL)
    second = rank(1)
    job.wait_for_output(0, "killed by SIGKILL")
    assert "out of memory" not in job.output(0)
    os.kill(second, signal.SIGUSR1)
    assert job.result().exit_codes == (1,)
    assert job.output(0).count("the kernel was out of memory and killed it") == 1
