"""Limits of CPU time and memory: they hold, and nothing of them stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from elasticrun.testing import cgroups, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Impossible
from tests.harness import SCRIPTS

SPIN = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
print(time.process_time())
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
        pytest.skip(str(why))
    yield made
    made.close()
    assert cgroups.folders(made.name) == []


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_share_of_the_time(group: Group) -> None:
    """0.2 cores: of a second of spinning a fifth is computed, and the rest waited for."""
    group.cpus(0.2)
    spinner = started(*group.prefix(), sys.executable, "-c", SPIN, "1")
    said, _ = spinner.communicate(timeout=60)
    assert float(said) < 0.5
    group.cpus(None)


def test_more_memory_than_there_may_be(group: Group) -> None:
    """A process that was added after its start is killed by the kernel for what it takes then."""
    group.memory(100 << 20)
    eater = started(sys.executable, "-c", EAT)
    assert eater.stdout is not None
    assert eater.stdout.readline() == "ready\n"
    group.add([eater.pid])
    assert cgroups.members(group.name) == [eater.pid]
    said, _ = eater.communicate("\n", timeout=60)
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
    assert owner.stdout is not None
    name, sleeper = owner.stdout.readline().split()
    owner.kill()
    assert not processes.await_end([int(sleeper)], 60)
    cgroups.sweep()
    assert cgroups.folders(name) == []
    owner.communicate()


def test_a_node_with_little_memory(elastic_job: Any) -> None:
    """The agent tells its rank's death for want of memory from one by a crash."""
    job = elastic_job(SCRIPTS / "eats.py", 0, memory=500 << 20)
    assert job.result().exit_codes == (1,)
    assert "the kernel was out of memory and killed it" in job.output(0)
