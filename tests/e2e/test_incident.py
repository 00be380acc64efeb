"""A rank fails in a real job: the record of it lies beside the logs, and the terminal, the record,
the page and the ledger tell the same seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from elasticrun.host.runs.index import runs_root
from tests.further import further
from tests.harness import warm_server

pytestmark = pytest.mark.slow

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
    environ = {**os.environ, **warm_server(), "XDG_RUNTIME_DIR": str(tmp_path)}
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
    assert "restarted in" not in said[0], "the launcher has told what it cost"
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


SLOW_SETUP = """
import os, sys, time
from pathlib import Path
from elasticrun import training
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while restarts and not Path(sys.argv[1], "runs").exists():
    time.sleep(0.05)
time.sleep(1.0 * restarts)  # imports and setup, from the moment at which all know that ranks run
for step in range(6 if restarts else 0, 60):
    training.progress(step)
    time.sleep(0.1)
    if rank == 1 and step == 10 and not restarts:
        raise ValueError("bad luck")
while restarts and not Path(sys.argv[1], "seen").exists():
    time.sleep(0.1)
"""

RESTARTED = re.compile(r"restarted in (\d+\.\d\d) s")
FIRST_STEP = re.compile(r"first step after (\d+\.\d\d) s")
REPEATED = re.compile(r"(\d+) steps? repeated")


@further(
    "test_a_failing_rank_leaves_a_record",
    "e2e/test_run_folder::test_a_failed_job_leaves_all_of_it",
)
def test_all_tell_the_same_seconds_of_an_event(tmp_path: Path) -> None:
    """Until the ranks ran again, and until the first step: each is counted once, by the master."""
    script = tmp_path / "fails.py"
    environ = {**os.environ, **warm_server()}
    script.write_text(SLOW_SETUP)
    command = [sys.executable, "-m", "elasticrun"]
    flags = "--rdzv-id=it-counts --standalone --nproc-per-node=2 --max-restarts=1"
    job = subprocess.Popen(
        [*command, *flags.split(), f"--log-dir={tmp_path}/logs", str(script), str(tmp_path)],
        stderr=subprocess.PIPE, text=True, env={**environ, "LOGLEVEL": "INFO"},
    )  # fmt: skip
    assert job.stderr is not None
    said: list[str] = []
    while not any(FIRST_STEP.search(line) for line in said):
        said.append(job.stderr.readline())
        assert said[-1], "".join(said)
        if RESTARTED.search(said[-1]):
            (tmp_path / "runs").touch()
    url = next(line.split("the job's page: ")[1] for line in said if "the job's page: " in line)
    with urlopen(url.split("/?")[0].strip().rstrip("/") + "/picture") as answer:
        (shown,) = json.load(answer)["incidents"]
    listed = subprocess.run(
        [*command, "incidents", "it-counts"], timeout=60, capture_output=True, text=True
    )
    status = subprocess.run(
        [*command, "status", "it-counts"], timeout=60, capture_output=True, text=True
    )
    (tmp_path / "seen").touch()
    said += job.stderr.readlines()
    assert job.wait() == 0, "".join(said)

    (folder,) = (tmp_path / "logs" / "incidents").iterdir()
    row = json.loads((folder / "0001.json").read_text())
    restarted, first_step = row["restarted"], row["first_step"]
    assert first_step - restarted > 1.0, "the script's own second"
    assert first_step == pytest.approx(sum(phase["seconds"] for phase in row["phases"]))
    assert (shown["restarted"], shown["first_step"]) == (restarted, first_step)
    result = json.loads((runs_root(os.environ) / folder.name / "result.json").read_text())
    (short,) = result["incidents"]
    assert (short["restarted"], short["first_step"]) == (restarted, first_step)
    words = [f"{seconds:.2f}" for seconds in (restarted, first_step)]
    told = "".join(said)
    assert RESTARTED.findall(told) == words[:1], told
    assert FIRST_STEP.findall(told) == words[1:], told
    assert set(REPEATED.findall(told)) == {str(row["steps_lost"])}, told
    page = (folder / "0001.md").read_text()
    assert (RESTARTED.findall(page), FIRST_STEP.findall(page)) == (words[:1], words[1:])
    assert f" {words[0]} s " in listed.stdout, listed
    assert f" {words[1]} s " in listed.stdout, listed
    goodput = result["goodput"]
    down = sum(one["seconds"] for one in goodput["rows"] if one["category"] in ("down", "restore"))
    assert down / 2 == pytest.approx(first_step, abs=0.01), "in slot-seconds, of two ranks"
    assert f"1 interruption cost {words[1]} s" in goodput["line"]
    assert f"cost {words[1]} s" in status.stdout, status
