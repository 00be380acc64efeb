"""Two jobs that name one folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.agent.rendezvous.claims import NAME
from tests.further import further
from tests.harness import ELASTICRUN, Launched, World, await_true

pytestmark = pytest.mark.slow

TRAIN = """
import sys, time
from pathlib import Path
import torch
from elasticrun.training import Checkpointer

stop = Path(sys.argv[2])
weights = torch.zeros(10)
ckpt = Checkpointer(
    sys.argv[1], weights=weights, every_steps=1, persist_every_steps=1, on_busy="wait"
)
step = ckpt.restore()
while not stop.exists():
    step += 1
    weights += 1
    ckpt.step(step)
    time.sleep(0.2)
"""


@further("agent/rendezvous/test_claims")
def test_the_second_job_says_by_whom_and_writes_nothing_until_the_first_has_ended(
    world: World, tmp_path: Path
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "ckpt"
    script.write_text(TRAIN)

    def job(name: str) -> tuple[Path, Launched]:
        stop = tmp_path / f"stop-{name}"
        words = ("--standalone", f"--rdzv-id={name}", str(script), str(folder), str(stop))
        return stop, world.launch(ELASTICRUN, *words)

    stop_one, one = job("one")
    await_true(lambda: list(folder.glob("step-*/.metadata")), "checkpoint of the first job")
    stop_two, two = job("two")
    two.until_text(f"no checkpoint is written: {folder} is claimed by job one on ")
    stop_one.touch()
    assert one.wait() == 0, one.stderr
    before = set(folder.glob("step-*/.metadata"))
    await_true(lambda: set(folder.glob("step-*/.metadata")) - before, "checkpoint of the second")
    stop_two.touch()
    assert two.wait() == 0, two.stderr
    assert not (folder / NAME).exists(), "left clean"
