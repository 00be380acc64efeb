"""A rank fails in a real job: the record of it lies beside the logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
from elasticrun import training
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(6 if restarts else 0, 12):
    training.progress(step)
    print("step", step, flush=True)
    if rank == 1 and step == 10 and not restarts:
        raise ValueError("bad luck")
"""


def test_a_failing_rank_leaves_a_record(tmp_path: Path) -> None:
    script, told = tmp_path / "fails.py", tmp_path / "told"
    script.write_text(SCRIPT)
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    environ["ELASTICRUN_TRACE_DIR"] = str(tmp_path / "traces")
    flags = "--rdzv-id=it-fails --standalone --nproc-per-node=2 --max-restarts=1 --redirects=3"
    command = [
        sys.executable,
        "-m",
        "elasticrun",
        *flags.split(),
        f"--log-dir={tmp_path}",
        f"--on-event=cat >> {told}",
    ]
    done = subprocess.run(
        [*command, str(script)], timeout=120, capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "incidents").iterdir()
    said = [line for line in done.stderr.splitlines() if "incident 1: rank 1 failed" in line]
    assert len(said) == 1, done.stderr
    assert "; restart 1, " in said[0]
    assert said[0].endswith(f": {folder}/0001.md")
    row = json.loads((folder / "0001.json").read_text())
    assert (row["cause"], row["rank"], row["over"]) == ("rank_failed", 1, True)
    assert [phase["name"] for phase in row["phases"]][:3] == ["stop", "gather", "spawn"]
    assert row["last_lines"].endswith("ValueError: bad luck")
    assert "step 10" in row["last_lines"]
    text = (folder / "0001.md").read_text()
    assert text.startswith("# Incident 1: rank 1 failed (ValueError: bad luck)")
    assert "| spawn | " in text
    for words, line in (("", "   1 "), ("1", "# Incident 1: rank 1 failed (ValueError: bad luck)")):
        asks = [sys.executable, "-m", "elasticrun", "incidents", "it-fails", *words.split()]
        shown = subprocess.run(asks, timeout=60, capture_output=True, text=True, env=environ)
        assert any(text.startswith(line) for text in shown.stdout.splitlines()), shown
    (trace,) = (tmp_path / "traces").iterdir()
    replays = [sys.executable, "-m", "elasticrun", "replay", str(trace), "--timeline", "out.json"]
    subprocess.run(replays, timeout=60, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    spans = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {span["name"] for span in spans if span["ph"] == "X"}
    assert names >= {"round 1", "round 2", "incident 1", "stop", "spawn"}
    assert told.read_text().count('"event":"incident"') == 2
    assert told.read_text().count('"event":"end"') == 1
    assert told.read_text().rindex('"event":"incident"') < told.read_text().index('"event":"end"')
