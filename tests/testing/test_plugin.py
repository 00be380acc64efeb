"""The plugin as pytest and a team's own tests meet it: a pytest of its own for each."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from elasticrun.host.system.processes import state
from elasticrun.testing import processes
from tests.further import further
from tests.harness import SCRIPTS
from tests.testing.conftest import Inner

TRAIN = SCRIPTS / "trains.py"

EXAMPLE = f"""
def test_training_survives_a_dying_node(elastic_job, tmp_path):
    job = elastic_job({str(TRAIN)!r}, 120, tmp_path, nnodes="1:2", nodes=2)
    job.wait_for(step=30, world_size=2)
    died = job.kill_node(1)
    job.wait_for(step=30, world_size=1, since=died)  # from the checkpoint, not from 0
    assert job.result().ok
    assert max(step.step for step in job.steps()) == 119
"""


def test_nothing_is_imported_before_the_fixture_is_used(inner: Inner) -> None:
    """pytest's start costs those who do not use the fixture one tiny module of ours."""
    inner.write(
        "conftest.py",
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    open('modules', 'w').write('\\n'.join(sys.modules))\n",
    )
    code, said = inner.run("--collect-only")
    assert code == 5, said  # no tests
    modules = set((inner.folder / "modules").read_text().split())
    ours = {name for name in modules if name.partition(".")[0] == "elasticrun"}
    assert "elasticrun.testing.plugin" in ours, "the entry point is not there: install the package"
    assert ours == {
        "elasticrun",
        "elasticrun.testing",
        "elasticrun.testing.plugin",
        "elasticrun.testing.steps",
    }
    assert not modules & {"torch", "grpc", "psutil", "google.protobuf"}


def test_a_test_without_the_fixture_sees_nothing_of_it(inner: Inner) -> None:
    inner.write("test_plain.py", "def test_plain():\n    assert 'no' == 'yes'\n")
    code, said = inner.run()
    assert code == 1
    assert "elastic_job" not in said


@further("e2e/test_examples::test_the_users_test_passes")
@pytest.mark.slow
def test_the_ten_lines_of_the_readme(inner: Inner) -> None:
    """A team tests its training script against a dying node, and has a warm process of its own."""
    inner.warm_of_its_own = True
    inner.write("test_train.py", EXAMPLE)
    code, said = inner.run("-q")
    assert code == 0, said
    assert "1 passed" in said


@pytest.mark.slow
def test_a_failing_test_shows_what_agents_and_ranks_said(inner: Inner) -> None:
    inner.write("loud.py", "print('a word of the rank')\nraise SystemExit(3)\n")
    inner.write(
        "test_loud.py",
        "def test_loud(elastic_job):\n"
        "    job = elastic_job('loud.py')\n"
        "    assert job.result().outcomes == ('failed with exit code 1',)\n"
        "    job.wait_for(step=1)\n",
    )
    code, said = inner.run("-q")
    assert code == 1, said
    assert "waited for step 1, but every agent ended (node0 failed with exit code 1)" in said
    assert "elastic_job: node0, which failed with exit code 1" in said
    assert "a word of the rank" in said
    assert "exitcode  : 3" in said
    assert ">       job.wait_for(step=1)" in said, "the test's own line is what is shown"
    assert "elasticrun/testing" not in said, "and none of ours"


@further("test_a_failing_test_shows_what_agents_and_ranks_said")
@pytest.mark.slow
def test_one_limit_for_all_waits_of_a_project(inner: Inner) -> None:
    """A wait that names none ends after it; the job's own and a wait's own go before it."""
    inner.write("pytest.ini", "[pytest]\nelasticrun_timeout = 0.2\n")
    inner.write("idles.py", "import signal\nsignal.pause()\n")
    inner.write(
        "test_idles.py",
        "import pytest\n"
        "def test_idles(elastic_job):\n"
        "    job = elastic_job('idles.py', timeout=100)\n"
        "    with pytest.raises(AssertionError, match='within 0.1 s'):\n"
        "        job.wait_for(step=1, timeout=0.1)\n"
        "    assert job.timeout == 100\n"
        "def test_too_short(elastic_job):\n"
        "    with pytest.raises(AssertionError, match='did not start|within 0.2 s'):\n"
        "        elastic_job('idles.py').wait_for(step=1)\n",
    )
    code, said = inner.run("-q")
    assert code == 0, said
    code, said = inner.run("-q", "-o", "elasticrun_timeout=soon")
    assert code == 1, said
    assert "elasticrun_timeout=soon: give a number of seconds" in said


@pytest.mark.slow
def test_a_leftover_is_an_error_of_the_fixture_and_goes(inner: Inner) -> None:
    inner.write("ends.py", "")
    inner.write(
        "test_left.py",
        "import subprocess\n"
        "from elasticrun.testing import job, processes\n"
        "def test_left(elastic_job, monkeypatch):\n"
        "    job.LEFTOVER_LIMIT = 0.5\n"
        "    ours = elastic_job('ends.py')\n"
        "    left = subprocess.Popen(['sleep', '1000'], env={processes.MARK: ours.nodes[0].mark})\n"
        "    open('pid', 'w').write(str(left.pid))\n"
        "    assert ours.result().ok\n",
    )
    code, said = inner.run("-q")
    assert code == 1, said
    assert "1 passed, 1 error" in said
    assert "node0 has ended, but left processes:" in said
    assert "sleep 1000" in said
    pid = int((inner.folder / "pid").read_text())
    assert state(pid) in ("", "Z")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGINT, 2, marks=pytest.mark.soak)],
)
def test_nothing_outlives_a_pytest_that_is_ended(inner: Inner, signum: int, code: int) -> None:
    """The worst end of a test run leaves nothing, and a Ctrl-C neither."""
    inner.write("idles.py", "import signal\nsignal.pause()\n")
    inner.write(
        "test_idles.py",
        "import os, signal\n"
        "def test_idles(elastic_job):\n"
        "    job = elastic_job('idles.py', nnodes=2)\n"
        "    job.wait_for(lambda status: all(n.pids for n in status.nodes), world_size=2)\n"
        "    print(*(pid for node in job.nodes for pid in node.pids()), flush=True)\n"
        "    if SIGNUM == signal.SIGINT:\n"  # which a shell's background job ignores
        "        signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    os.kill(os.getpid(), SIGNUM)\n".replace("SIGNUM", str(int(signum))),
    )
    process = inner.start("-s", "-q")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    pids = [int(word) for word in said.split() if word.isdecimal()]
    assert len(pids) >= 6, said  # two agents, two fork servers, two ranks at least
    left = processes.await_end(pids, 240)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_the_example_is_the_one_that_the_documentation_shows() -> None:
    """docs/testing.md shows these very lines, with a script of the team's own."""
    root = Path(__file__).parent.parent.parent
    shown = EXAMPLE.replace(repr(str(TRAIN)), '"train.py"').strip()
    assert shown in (root / "docs/testing.md").read_text()
