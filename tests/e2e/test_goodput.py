"""A rank of two real agents fails once: their last lines say where the time went."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.further import cases
from tests.harness import PATIENT, await_true, free_port, warm_server

pytestmark = pytest.mark.slow

SCRIPTS = {
    "progress": """
import os, time
from elasticrun import training
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(12 if restarts else 0, 40):
    time.sleep(0.1)  # a step
    training.progress(step)
    if rank == 1 and step == 24 and not restarts:
        raise ValueError("bad luck")
""",
    "Checkpointer": """
import os, sys, time
import torch.distributed as dist
from elasticrun.training import Checkpointer
dist.init_process_group("gloo")
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Slow(dict):
    def state_dict(self):
        time.sleep(0.2)  # a save
        return dict(self)

    def load_state_dict(self, state):
        time.sleep(0.2)  # a restore
        self.update(state)

ckpt = Checkpointer(sys.argv[1], of=Slow(at=0), every_steps=10, persist_every_seconds=None)
for step in range(ckpt.restore(), 40):
    time.sleep(0.1)
    dist.barrier()  # a rank that is ahead would leave a later step for both
    ckpt.step(step + 1)
    if rank == 1 and step == 26 and not restarts:
        raise ValueError("bad luck")
""",
}

LINE = re.compile(
    r"goodput \d+\.\d % \(rank time in steps that were kept(; ETTR[^)]+ [\d.]+ %)?\): "
    r"1 interruption cost [\d.]+ s \(rank failure [\d.]+ s\), \d+ steps repeated"
    r"(, checkpoints (?P<saves>[\d.]+) s)?"
)


@pytest.mark.parametrize("told_by", cases(SCRIPTS, kept=["progress"]))
def test_the_last_lines_say_where_the_time_went(tmp_path: Path, told_by: str) -> None:
    """And `result.json`, to the microsecond."""
    script = tmp_path / "fails.py"
    script.write_text(SCRIPTS[told_by])
    flags = (
        f"--nnodes=2 --nproc-per-node=1 --max-restarts=1 --rdzv-endpoint=127.0.0.1:{free_port()} "
        f"--slot-price=36 --log-dir={tmp_path}/logs --run-dir={tmp_path}/run"
    )
    command = [sys.executable, "-m", "elasticrun", *flags.split()]
    jobs = [
        subprocess.Popen(
            [
                *command,
                f"--node-rank={rank}",
                f"--node-id=n{rank}",
                str(script),
                str(tmp_path / "out"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **PATIENT, **warm_server()},
        )
        for rank in range(2)
    ]
    told = [job.communicate(timeout=120)[1] for job in jobs]
    found = [LINE.search(text) for text in told]
    assert all(found), told
    saves = {one["saves"] for one in found if one is not None}
    await_true((tmp_path / "run/result.json").exists, "result")  # its master may outlive the agents
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["state"], result["nodes"], result["restarts"]) == ("succeeded", 2, 1)
    assert [one["cause"] for one in result["incidents"]] == ["rank_failed"]
    spent = result["goodput"]
    micros = [round(1e6 * row["seconds"]) for row in spent["rows"]]
    assert sum(micros) == round(1e6 * spent["slot_seconds"]) > 0
    assert spent["cost"] == pytest.approx(spent["slot_seconds"] * 36.0 / 3600.0)
    assert any(spent["line"] in text for text in told)
    again = {count for text in told for count in re.findall(r"(\d+) steps? repeated", text)}
    assert again == {str(result["incidents"][0]["steps_lost"])}, "all count the same steps"
    assert (saves == {None}) == (told_by == "progress"), told
