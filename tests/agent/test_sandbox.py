"""Sandboxes that refuse system calls, and limits of processes: each is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.further import cases, further
from tests.harness import LIMIT, SCRIPTS, World, clean_environment

pytestmark = pytest.mark.slow

SANDBOXED = str(SCRIPTS / "sandboxed.py")
PUPPET = str(SCRIPTS / "puppet.py")


def sandboxed(*words: str) -> subprocess.CompletedProcess[str]:
    """`sandboxed.py` with these words; skipped where the kernel has no seccomp."""
    done = subprocess.run(
        [sys.executable, SANDBOXED, *words],
        env={**clean_environment(), "ELASTICRUN_WARM_SERVER": "off"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode == 77:
        pytest.skip("no seccomp filter can be installed here")
    return done


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("clone3=EPERM", "no thread can be started here"),
        ("kill=EPERM", "no signal may be sent here (kill: Operation not permitted)"),
    ],
)
def test_without_it_no_job_can_run(rule: str, sentence: str) -> None:
    done = sandboxed(rule, "--", sys.executable, "-m", "elasticrun", "--nproc-per-node=1", PUPPET)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@further("test_without_it_no_job_can_run", "test_a_saver_without_threads_says_so")
@pytest.mark.parametrize(
    "rules", cases(["prlimit64=EPERM,setrlimit=EPERM", "clone3=ENOSYS"], soaked=["clone3=ENOSYS"])
)
def test_a_job_that_does_without_it(world: World, rules: str) -> None:
    """Limits of open files cannot be raised; an older C library's way is taken."""
    trial = sandboxed(rules, "--", sys.executable, "-c", "")
    assert trial.returncode == 0
    script = world.scratch / "hello.py"
    script.write_text("print('trained')\n")
    done = sandboxed(rules, "--", sys.executable, "-m", "elasticrun", str(script))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "the check itself failed" not in done.stderr


def test_memfd_create_names_itself() -> None:
    code = "from elasticrun.host.system.processes import memory_file; memory_file('x')"
    done = sandboxed("memfd_create=EPERM", "--", sys.executable, "-c", code)
    assert "memfd_create: Operation not permitted" in done.stderr


def test_a_saver_without_threads_says_so() -> None:
    """A piece of work fails with the reason, and the saver goes on."""
    code = """
from elasticrun.snapshots.saver.pool import Inbox, WorkerPool, WorkItem
inbox = Inbox(lambda: None)
pool = WorkerPool("disk", 1, inbox.post)
for _ in range(2):
    pool.add(WorkItem(lambda stop: "done", str, print))
while calls := inbox.drain():
    for call in calls:
        call()
"""
    done = sandboxed("clone3=EPERM", "--", sys.executable, "-c", code)
    assert done.stdout.count("no thread can be started here") == 2, done
    assert done.stderr == ""
