"""Scripts of others, as they are but for the device, under both launchers, with a rank killed in
the middle: both restart, the script goes on from its own checkpoint and ends alike.

They are read from a checkout of pytorch/examples that ELASTICRUN_EXAMPLES names; no line of them is
here but those that name a device.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.harness import ELASTICRUN, TORCHRUN, Launched, World

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

VARIABLE: Final = "ELASTICRUN_EXAMPLES"
LIMIT: Final = 240.0
MODULES: Final = {ELASTICRUN: "elasticrun", TORCHRUN: "torch.distributed.run"}

RESTARTS: Final = {ELASTICRUN: 1, TORCHRUN: 20}
"""torchrun's store is one over all restarts, so that half of them fail (docs/torchrun.md)."""


@dataclass(frozen=True)
class Example:
    """`words`: what is typed in `folder`. `device`: lines about a GPU, and what they are on a CPU.
    `mark`: what it prints in the middle; `back`: what it prints when it has gone on; `last`: what
    its last line of all ranks begins with."""

    folder: str
    words: tuple[str, ...]
    device: dict[str, str]
    mark: str
    back: str
    last: str


TUTORIAL: Final = Example(
    "distributed/ddp-tutorial-series",
    ("multigpu_torchrun.py", "60", "3"),
    {
        'backend="nccl"': 'backend="gloo"',
        ".to(self.gpu_id)": '.to("cpu")',
        ", device_ids=[self.gpu_id]": "",
    },
    mark="Epoch 5 |",
    back="Resuming training from snapshot at Epoch",
    last="Epoch 59 |",
)
FSDP2: Final = Example(
    "distributed/FSDP2",
    ("example.py", "--dcp-api"),
    {
        "if not verify_min_gpu_count(min_gpus=_min_gpu_count):": "if False:",
        ", device_id=device)": ')\n    print("the group stands", flush=True)',
        "    torch.distributed.destroy_process_group()": '    print("saved", flush=True)\n'
        "    torch.distributed.destroy_process_group()",
    },
    mark="the group stands",
    back="the group stands",
    last="saved",
)


@pytest.fixture
def examples() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no checkout of pytorch/examples; see docs/matrix.md")
    return Path(named)


def copied(example: Example, examples: Path, world: World) -> Path:
    """The folder for a CPU."""
    folder = world.scratch / "example"
    shutil.copytree(examples / example.folder, folder)
    script = folder / example.words[0]
    text = script.read_text()
    for theirs, ours in example.device.items():
        text = text.replace(theirs, ours)
    script.write_text(text)
    return folder


def kill_rank_1(job: Launched) -> None:
    for process in job.below():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LOCAL_RANK") == "1":
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("there is no rank 1")


@pytest.mark.parametrize("example", [TUTORIAL, FSDP2], ids=["ddp-tutorial-series", "FSDP2"])
def test_a_rank_is_killed_in_the_middle(
    example: Example, examples: Path, world: World, torchrun_world: World
) -> None:
    for launcher, where in ((ELASTICRUN, world), (TORCHRUN, torchrun_world)):
        folder = copied(example, examples, where)
        job = where.command(
            [sys.executable, "-m", MODULES[launcher], "--standalone", "--nproc-per-node=2",
             f"--max-restarts={RESTARTS[launcher]}", *example.words],
            env={"OMP_NUM_THREADS": "1"}, cwd=folder,
        )  # fmt: skip
        before = job.until_text(example.mark, LIMIT, stream="stdout")
        kill_rank_1(job)
        assert job.wait(LIMIT) == 0, job.stdout[-4000:] + job.stderr[-4000:]
        after = job.stdout[len(before) :]
        assert example.back in after
        assert after.count(example.last) == 2, after[-4000:]
