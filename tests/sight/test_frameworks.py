"""Frameworks of others, as they are: of their ranks one is stopped, or comes to a loop, or its data
loader's worker is stuck. Which rank it is, and where in the user's script, stands in the line."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from tests import needs
from tests.further import further
from tests.harness import ELASTICRUN, SCRIPTS, Launched, World

SCRIPT = SCRIPTS / "frameworks.py"
LINES = SCRIPT.read_text().splitlines()
FRAMEWORKS = {"hf": ("transformers", "accelerate"), "pl": ("lightning",)}


def where(framework: str, mark: str) -> str:
    """A pattern of the line that is marked so, at or below the beginning of this function."""
    first = LINES.index(f"def {framework}() -> None:") if mark == "trains" else 0
    number = next(n for n in range(first, len(LINES)) if LINES[n].endswith(f"# {mark}"))
    return rf"frameworks\.py:{number + 1} "


def rank_1(job: Launched) -> psutil.Process:
    """Its process; the workers of its loader have its environment too, and are its children."""
    mine = [one for one in job.below() if one.environ().get("RANK") == "1"]
    return next(one for one in mine if one.ppid() not in {other.pid for other in mine})


@further("sight/test_hangs::test_a_hang_is_named")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fault", ["stopped", "loader", "loop"])
def test_named(world: World, framework: str, fault: str) -> None:
    """Names are short here: the sockets of loaders lie below folders of these names."""
    needs.packages(*FRAMEWORKS[framework])
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", "--on-hang=tell")
    job = world.launch(ELASTICRUN, *words, str(SCRIPT), framework, *(["loop"] * (fault == "loop")))
    job.until_text("rank 1 trains", stream="stdout")
    if fault == "stopped":
        rank_1(job).send_signal(signal.SIGSTOP)
    elif fault == "loader":
        for worker in rank_1(job).children():
            worker.send_signal(signal.SIGSTOP)
    said = job.until_text("hang (")
    line = next(line for line in said.splitlines() if "hang (" in line)
    wanted = {
        "stopped": r"hang \(strong\): rank 1 .*is stopped by a signal",
        "loader": rf"hang \(strong\): rank 1 .*is idle at {where(framework, 'trains')}",
        "loop": rf"hang \(weak\): rank 1 .*is busy at {where(framework, 'here')}",
    }
    assert re.search(wanted[fault], line), line
    job.signal(signal.SIGTERM)
    job.wait()
