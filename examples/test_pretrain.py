"""How to test that your own script survives: pytest, with a fixture of elasticrun's plugin.

Run it with `pip install pytest`, then `pytest examples/test_pretrain.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("pretrain.py")
SMALL = ("--batch=8", "--micro-batch=4", "--length=16", "--width=32", "--layers=1")
STEPS = 400


def test_pretraining_survives_the_loss_of_a_node(elastic_job: Any, tmp_path: Path) -> None:
    job = elastic_job(
        SCRIPT, f"--dir={tmp_path}", f"--steps={STEPS}", *SMALL, nnodes="1:2", nodes=2
    )
    job.wait_for(step=30, world_size=2)
    died = job.kill_node(1)
    first = job.wait_for(step=0, world_size=1, since=died)
    assert first.step > 0, "it started over"
    assert job.result().ok
    assert max(step.step for step in job.steps()) == STEPS - 1
