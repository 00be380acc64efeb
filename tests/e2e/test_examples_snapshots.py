"""The examples with snapshots: five lines more than plain scripts, and nothing lost by a kill.

A run that was killed in the middle has to end with bitwise the weights of the plain script that
never was.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.further import further
from tests.harness import ELASTICRUN, LIMIT, PATIENT, SCRIPTS, TORCHRUN, Launched, World, await_true

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("ddp", "fsdp2")
STEPS = "240"
"""Each hundredth is written out, each tenth is in memory."""

pytestmark = pytest.mark.slow


def code(path: Path) -> list[str]:
    """The lines of a script below its docstring, empty ones left out."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    assert isinstance(first, ast.Expr)
    return [line for line in text.splitlines()[first.end_lineno :] if line]


@pytest.mark.parametrize("name", NAMES)
def test_snapshots_take_five_changed_lines(name: str) -> None:
    plain, ours = code(EXAMPLES / f"{name}.py"), code(EXAMPLES / f"snapshots_{name}.py")
    differ = list(difflib.ndiff(plain, ours))
    assert len([line for line in differ if line.startswith("+ ")]) == 5
    assert len([line for line in differ if line.startswith("- ")]) == 1


def run(
    world: World,
    folder: Path,
    launcher: str,
    script: str,
    *flags: str,
    steps: str = STEPS,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Launched:
    """One of the examples on two ranks, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    words = ("--nproc-per-node=2", *flags, str(EXAMPLES / script), "--steps", steps)
    return world.launch(
        launcher, *words, cwd=folder, env={"OMP_NUM_THREADS": "1", **PATIENT, **env}
    )


@pytest.fixture
def shm() -> Iterator[str]:
    """Shared memory for a job that is killed: what it leaves there waits for its next agent."""
    made = tempfile.mkdtemp(prefix="elasticrun-test-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


def outcome(job: Launched) -> tuple[str, str]:
    """The life in which it ended, and the weights that it learned."""
    assert job.wait(LIMIT) == 0, job.stderr[-4000:]
    (found,) = re.findall(r"done life=(\d+) weights=(\w+)", job.stdout)
    return found[0], found[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The weights that a plain script learns."""

    @functools.cache
    def weights(name: str, steps: str = STEPS) -> str:
        created = World(tmp_path_factory.mktemp("undisturbed"))
        job = run(created, created.scratch / "cwd", ELASTICRUN, f"{name}.py", steps=steps)
        found = outcome(job)[1]
        created.close(strict=True)
        return found

    return weights


@further("snapshots/test_failures::test_saved_at_the_breakpoint")
@pytest.mark.parametrize(("name", "killed"), [("ddp", 0), ("fsdp2", 1)])
def test_a_killed_rank_costs_no_bit_of_the_result(
    name: str, killed: int, undisturbed: Callable[..., str], world: World
) -> None:
    """It is killed when it has done step 57, and the next life goes on from memory, at step 50 or
    not many tens before. What is saved at the breakpoint is that."""
    if name == "fsdp2" and importlib.metadata.version("torch").startswith(("2.4.", "2.5.", "2.6.")):
        pytest.skip("this torch has no FSDP2 that works on a CPU: its plain script fails too")
    flags = ("--max-restarts=3", "--restart-backoff=0", "--save-at-breakpoint")
    held = (str(SCRIPTS / "held.py"), str(killed), "57")  # or it could end before it is killed
    script, steps = f"snapshots_{name}.py", "110"
    job = run(world, world.scratch / "cwd", ELASTICRUN, script, *flags, *held, steps=steps)
    (rank,) = world.hub.ranks(1)
    os.kill(rank.pid, signal.SIGKILL)
    assert outcome(job) == ("1", undisturbed(name, steps))
    again = [int(step) for step in re.findall(r"step=(\d+) life=1", job.stdout)]
    assert again
    assert min(again) > 10
    kept = committed(world.scratch / "cwd" / "runs" / name)
    assert 100 in kept
    assert min(kept) >= 10


def committed(folder: Path) -> list[int]:
    """The steps of the checkpoints that count."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata"))


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "snapshots/saver/test_saver::test_two_ranks_are_written_and_plain_torch_reads_them",
)
def test_a_second_job_goes_on_from_storage_and_torch_reads_it(world: World, shm: str) -> None:
    """The whole job is killed; a new one starts from the newest checkpoint."""
    folder = world.scratch / "cwd"
    own = {"ELASTICRUN_SHM_DIR": shm}
    first = run(world, folder, ELASTICRUN, "snapshots_ddp.py", steps="100000", env=own)
    written = folder / "runs/ddp"
    await_true(lambda: max(committed(written), default=0) >= 100, "marker of step 100 or later")
    first.signal(signal.SIGKILL)
    first.wait()
    world.nothing_left()
    step = committed(folder / "runs/ddp")[-1]
    target = folder / "out.pt"
    words = ("torch.distributed.checkpoint.format_utils", "dcp_to_torch")
    place = folder / f"runs/ddp/step-{step:09d}"
    shown = world.command((sys.executable, "-m", *words, str(place), str(target)))
    assert shown.wait(LIMIT) == 0, shown.stderr
    assert target.stat().st_size > 0
    further = str(step + 50)
    second = run(world, folder, ELASTICRUN, "snapshots_ddp.py", steps=further)
    never = run(world, folder, ELASTICRUN, "ddp.py", steps=further)
    assert outcome(second) == outcome(never)
    steps = [int(step) for step in re.findall(r"step=(\d+) life=0", second.stdout)]
    assert steps
    assert min(steps) > step


@further(
    "training/checkpointing/test_ranks::test_with_torch_alone_checkpoints_are_plain_and_come_back_at_any_number"
)
def test_the_same_script_under_torchrun(undisturbed: Callable[..., str], world: World) -> None:
    """No agent: torch's own asynchronous save, the same folder, and one warning."""
    folder = world.scratch / "cwd"
    job = run(world, folder, TORCHRUN, "snapshots_ddp.py")
    assert outcome(job) == ("0", undisturbed("ddp"))
    assert committed(folder / "runs/ddp") == [100, 200]
    again = run(world, folder, ELASTICRUN, "snapshots_ddp.py")
    assert outcome(again) == ("0", undisturbed("ddp"))
    assert "step=" not in again.stdout
