"""A rank of a real job that does something long on purpose, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import ELASTICRUN, World

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

JUDGES = """
import time
import torch
import torch.distributed as dist
from elasticrun import training

dist.init_process_group("gloo")
for step in range(20):
    if step == 10 and dist.get_rank() == 1:
        with training.quiet("judge", minutes=20):
            time.sleep(70)
    dist.all_reduce(torch.ones(8))
    training.progress(step)
"""


def test_it_is_told_as_what_it_is(world: World, tmp_path: Path) -> None:
    """Not ended, though the limit is shorter; and it has a row in the ledger."""
    script = tmp_path / "judges.py"
    script.write_text(JUDGES)
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", "--on-hang=restart")
    job = world.launch(
        ELASTICRUN, *words, "--hang-limit=30", f"--log-dir={tmp_path}/logs", str(script)
    )
    job.until_text("no hang: rank 1 ")
    assert job.wait() == 0, job.stderr
    told = next(line for line in job.stderr.splitlines() if "no hang: " in line)
    assert "reports judge, for at most 19 min more; 1 rank waits for it in" in told
    assert "hang (" not in job.stderr
    (place,) = (world.scratch / "runs").rglob("result.json")
    rows = json.loads(place.read_text())["goodput"]["rows"]
    (waited,) = (row["seconds"] for row in rows if row["category"] == "wait")
    assert waited > 2 * 60.0
    assert {row["cause"] for row in rows if row["category"] == "wait"} == {"judge"}
