"""Whole jobs whose next life waits: restarts, logs, changed code, and what is left of a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun.wire.messages import JobStatus
from tests.compat.live import finish, summing
from tests.further import cases
from tests.harness import ELASTICRUN, PATIENT, SCRIPTS, Launched, World

pytestmark = pytest.mark.slow

WAITS = """
import signal
import torch.distributed as dist

dist.init_process_group("gloo")
signal.pause()
"""

LOUD = {"LOGLEVEL": "DEBUG", **PATIENT}


def job(world: World, *flags: str) -> Launched:
    """Two ranks, and standbys at once."""
    script = world.scratch / "program/train.py"
    script.parent.mkdir()
    script.write_text(Path(SCRIPTS, "puppet.py").read_text())
    words = ("--standby=0", "--nproc-per-node=2", *flags, str(script))
    return world.launch(ELASTICRUN, *words, env={**LOUD, "PYTHONPATH": str(SCRIPTS)})


def ready(launched: Launched) -> None:
    for local_rank in range(2):
        launched.until_text(f"standby of local rank {local_rank}: ready (connect)")


def test_the_next_life_continues_from_where_it_waits(world: World) -> None:
    logs = world.scratch / "logs"
    launched = job(world, "--max-restarts=2", "--tee=3", f"--log-dir={logs}")
    first = summing(world, 2, restart=0)
    ready(launched)
    os.kill(first[1].pid, signal.SIGKILL)
    second = summing(world, 2, restart=1)
    launched.until_text("standby of local rank 0: active")
    launched.until_text("standby of local rank 1: active")
    second[0].order("print", text="from the second life")
    launched.until_text("[default0]:from the second life", stream="stdout")
    finish(second, launched)
    (found,) = logs.glob("*/attempt_1/0/stdout.log")
    assert "from the second life" in found.read_text()
    assert not list(logs.glob("*/.next"))
    world.nothing_left()


def test_changed_code_is_run(world: World) -> None:
    """The user mends the script while its standbys wait."""
    launched = job(world, "--max-restarts=1")
    first = summing(world, 2, restart=0)
    ready(launched)
    script = world.scratch / "program/train.py"
    text = script.read_text()
    script.write_text(text.replace("import os\n", "import os\nprint('mended', flush=True)\n", 1))
    first[0].order("exit", code=1)
    second = summing(world, 2, restart=1)
    launched.until_text(f"changed ({script})")
    launched.until_text("mended", stream="stdout")
    finish(second, launched)


def says(words: str) -> Callable[[JobStatus], bool]:
    """Whether the status of the only node says this of its standbys, once the node is there."""
    return lambda status: [node.standby for node in status.nodes] == [words]


def test_status_says_how_many_are_ready_and_why_there_is_none(
    elastic_job: Any, tmp_path: Path
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    job = elastic_job(script, nproc_per_node=2, max_restarts=1, options=("--standby=0",))
    job.wait_for(says("2 of 2 ready"))
    job.kill_rank(1)
    job.wait_for(says("none: this is the last attempt that --max-restarts allows"))


def test_status_says_why_none_is_ready_yet(elastic_job: Any, tmp_path: Path) -> None:
    """Its standbys wait for a core that is idle, or have not begun."""
    script = tmp_path / "waits.py"
    busy = 'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":\n    while True: pass\n'
    script.write_text(f"import os\n{busy}{WAITS}")
    for after, said in (
        ("600", "none: they start 600 s after the ranks"),
        ("0.01", "0 of 2 ready: the rest do their imports, only while a core is idle"),
    ):
        job = elastic_job(script, nproc_per_node=2, max_restarts=1, options=(f"--standby={after}",))
        job.wait_for(says(said))
        job.close()


@pytest.mark.parametrize("whom", cases(["agent", "server"], kept=["agent"]))
def test_nothing_is_left_of_a_kill(world: World, whom: str) -> None:
    launched = job(world, "--max-restarts=1")
    first = summing(world, 2, restart=0)
    ready(launched)
    if whom == "agent":
        launched.process.kill()
        launched.wait()
    else:
        os.kill(first[0].ppid, signal.SIGKILL)
        second = summing(world, 2, restart=1)  # forked by another server
        finish(second, launched)
    world.nothing_left()


def test_each_node_has_standbys(elastic_job: Any, tmp_path: Path) -> None:
    """They know the store of the next round, which listens on another node."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    how = {"nnodes": 2, "max_restarts": 1, "options": ("--standby=0",), "env": LOUD}
    job = elastic_job(script, **how)
    for node in range(2):
        job.wait_for_output(node, "standby of local rank 0: ready (")
    job.kill_rank(1)
    for node in range(2):
        job.wait_for_output(node, "standby of local rank 0: active")
