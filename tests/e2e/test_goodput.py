"""A rank of two real agents fails once: their last lines say where the time went."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness import free_port

SCRIPT = """
import os, time
from elasticrun import training
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(12 if restarts else 0, 40):
    time.sleep(0.1)  # a step
    training.progress(step)
    if rank == 1 and step == 24 and not restarts:
        raise ValueError("bad luck")
"""

LINE = re.compile(r"(goodput|uptime) \d+\.\d %: 1 restart cost [\d.]+ s \(rank failure [\d.]+ s\)")


def test_the_last_lines_say_where_the_time_went(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    flags = (
        f"--nnodes=2 --nproc-per-node=1 --max-restarts=1 --rdzv-endpoint=127.0.0.1:{free_port()}"
    )
    command = [sys.executable, "-m", "elasticrun", *flags.split()]
    jobs = [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", f"--node-id=n{rank}", str(script)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [job.communicate(timeout=120)[1] for job in jobs]
    assert all(LINE.search(text) for text in told), told
