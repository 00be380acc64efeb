"""Every way to hang, planted in a training of four ranks, and what the job says of it."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import needs
from tests.further import cases, further
from tests.harness import ELASTICRUN, SCRIPTS, Launched, World

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

FAULTY = SCRIPTS / "faulty.py"


class Row(NamedTuple):
    fault: str
    klass: str
    words: str
    """A pattern of the verdict's sentence."""


def here(fault: str) -> str:
    """The line at which rank 1 does what this fault says."""
    lines = FAULTY.read_text().splitlines()
    first = lines.index(f"def {fault}() -> None:")
    number = next(n for n in range(first, len(lines)) if lines[n].endswith("# here"))
    return rf"faulty\.py:{number + 1} {fault}"


MATES = "ranks 0,2,3 are in all_reduce .* rank 1 .* in"
CERTAIN = [
    Row("other", "certain", f"{MATES} broadcast .*{here('other')}"),
    Row("skipped", "certain", f"{MATES} barrier .*{here('skipped')}"),
    Row(
        "order",
        "certain",
        f"deadlock: rank 0 waits for rank 1 in .*, rank 1 waits for rank 0 in .*{here('order')}",
    ),
]
STRONG = [
    Row("stop", "strong", "rank 1 .*stopped"),
    Row("sleep", "strong", f"rank 1 .*{here('sleep')}"),
    Row("lock", "strong", f"rank 1 .*{here('lock')}"),
    Row("waits", "strong", f"rank 1 .*{here('waits')}"),
    Row("loader", "strong", f"rank 1 .*{here('loader')}"),
    Row("held", "strong", "rank 1 .*interpreter"),
]
WEAK = [
    Row("traced", "weak", "rank 1 .*debugger .*because a debugger is attached"),
    Row(
        "debugged",
        "weak",
        f"rank 1 .*debugger at {here('debugged')} .*because a debugger is attached",
    ),
]
NONE = ["save", "evaluate", "spin", "slow", "compile", "alone"]
"""What may well go on: nothing certain or strong is ever said of it."""


def start(
    world: World,
    fault: str,
    *flags: str,
    seconds: float = 600.0,
    env: Mapping[str, str] | None = None,
) -> Launched:
    words = ("--standalone", "--nproc-per-node=4", "--max-restarts=0", *flags)
    return world.launch(ELASTICRUN, *words, str(FAULTY), fault, str(seconds), env=env)


def end(job: Launched) -> None:
    job.signal(signal.SIGTERM)
    job.wait()


def verdict(job: Launched, klass: str) -> str:
    """The line that tells it."""
    said = job.until_text(f"hang ({klass}): ")
    return next(line for line in said.splitlines() if f"hang ({klass}): " in line)


@pytest.mark.parametrize(
    "row", cases([*CERTAIN, *STRONG, *WEAK], kept=[CERTAIN[0]]), ids=lambda row: row.fault
)
def test_a_hang_is_named(world: World, row: Row) -> None:
    """Class, rank, and the line of the script at which it stands."""
    job = start(world, row.fault, "--on-hang=tell")
    line = verdict(job, row.klass)
    assert re.search(row.words, line), line
    assert "it is not restarted automatically" in line
    end(job)


@pytest.mark.parametrize("row", cases([CERTAIN[0], CERTAIN[2], STRONG[1]], kept=[CERTAIN[0]]),
                         ids=lambda row: row.fault)  # fmt: skip
def test_a_hang_of_a_backend_that_does_not_record_itself_is_named(world: World, row: Row) -> None:
    """As NCCL is since torch 2.15: torch's flight recorder knows of it by a hook."""
    needs.hooked_backends()
    job = start(world, row.fault, "--on-hang=tell", env={"BACKEND": "stored"})
    line = verdict(job, row.klass)
    assert re.search(row.words, line), line
    end(job)


@pytest.mark.parametrize("fault", cases(NONE, kept=["alone"]))
def test_what_may_go_on_is_no_hang(world: World, fault: str) -> None:
    """It ends as it would without us."""
    job = start(world, fault, seconds=13.0 if fault == "alone" else 90.0)
    assert job.wait() == 0, job.stderr
    assert not re.search(r"hang \((certain|strong)\)", job.stderr), job.stderr


@further("test_what_may_go_on_is_no_hang")
def test_an_overloaded_host_is_no_hang(world: World) -> None:
    """Rank 1 and all others get a tenth of a core: it works for minutes, and looks come late."""
    job = start(world, "crowded", seconds=8.0)
    job.until_text("at the fault", stream="stdout")
    for _ in range(16):
        world.command((sys.executable, "-c", "while True: pass"))
    assert job.wait() == 0, job.stderr
    assert not re.search(r"hang \((certain|strong)\)", job.stderr), job.stderr


@further("core/sight/test_waiting")
def test_a_stopped_rank_by_exec_is_named(world: World) -> None:
    line = verdict(start(world, "stop", "--on-hang=tell", "--launch=exec"), "strong")
    assert re.search("rank 1 .*is stopped by a signal; it is unknown who waits for it", line), line


CALLER = """
import sys, torch
import torch.distributed as dist
from elasticrun.launcher import LaunchConfig, elastic_launch

def train():
    dist.init_process_group("gloo")
    for _ in range(10):
        dist.all_reduce(torch.ones(1000))
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(1000), src=1)
    dist.all_reduce(torch.ones(1000))

if __name__ == "__main__":
    elastic_launch(LaunchConfig(1, 1, 2, start_method=sys.argv[1], max_restarts=0), train)()
"""


@further("test_a_hang_is_named")
@pytest.mark.parametrize("method", cases(["spawn", "fork", "forkserver"], kept=["spawn"]))
def test_a_hang_of_functions_is_named(world: World, tmp_path: Path, method: str) -> None:
    """Ranks that the program which calls has started answer as forked ones do."""
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    with tempfile.TemporaryDirectory(prefix="er-") as short:  # of multiprocessing's sockets
        environ = {"ELASTICRUN_ON_HANG": "tell", "TMPDIR": short}
        job = world.command((sys.executable, str(script), method), env=environ)
        line = verdict(job, "certain")
        assert re.search(
            r"rank 0 .* all_reduce .* rank 1 .* broadcast .* caller\.py:11 train", line
        )
        assert "it is not restarted automatically" in line
        end(job)


STEPS = """
import time
import torch
import torch.distributed as dist
from elasticrun.testing import step

dist.init_process_group("gloo")
for number in range(100_000):
    dist.all_reduce(torch.ones(8))
    step(number)
    time.sleep(0.1)
"""


@further("test_what_may_go_on_is_no_hang")
def test_a_frozen_agent_is_no_hang(elastic_job: Any, tmp_path: Path) -> None:
    """Of one node of two, for forty seconds, in which its ranks train on."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    patient = ["--rdzv-conf=heartbeat_timeout=90"]
    job = elastic_job(script, nnodes=2, nproc_per_node=2, options=patient, timeout=150)
    begun = job.wait_for(step=10, world_size=4).step
    job.freeze_node(1, agent_only=True)
    job.wait_for(step=begun + 400)
    job.thaw_node(1)
    job.wait_for(step=begun + 600)
    said = job.output(0) + job.output(1)
    assert "hang (" not in said, said
    assert getattr(job.status().round, "number", 0) == 1


@further("core/scripts/hang_certain.txt", "test_a_hang_is_named")
def test_two_nodes_and_a_new_life(elastic_job: Any) -> None:
    """Ranks on two nodes that call different collectives are started again."""
    soon = ["--on-hang=auto", "--hang-limit=12"]
    job = elastic_job(FAULTY, "other", nnodes=2, nproc_per_node=2, max_restarts=1, options=soon)
    said = re.compile(r"hang \(certain\): .*in all_reduce .* in broadcast")
    job.wait_for_output(0, said)
    job.wait_for(round=2)
    (run,) = job.run_folders
    assert {file.name for file in run.glob("logs/hang-1/*")} == {
        f"rank-{rank}.txt" for rank in range(4)
    }
    error = (run / "error.txt").read_text()
    assert "\nverdict:    script\n" in error
    assert f"\nstacks:     {run}/logs/hang-2 on node " in error, "those of its end"
    assert not error.count("ended with: ")
