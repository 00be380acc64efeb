"""`elasticrun logs`: a job that failed in two lives, and one that is followed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import termios
from pathlib import Path

import msgspec
import pytest

from elasticrun.agent.logs.log_index import LoggedRun
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.host.runs.layout import INCIDENTS, JobRecord, RunFolder, RunResult
from elasticrun.host.system.processes import ProcessId
from elasticrun.jobs.running.attempts import attempt_ends
from elasticrun.jobs.running.logs import _is_to_begin
from tests.agent.logs.test_terminal import Seen
from tests.further import further
from tests.harness import ELASTICRUN, SCRIPTS, World, await_true, ran

FAILS = """
import os, signal, sys
rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(30):
    print(f"rank {rank} life {life} step {step}", flush=True)
open(f"{rank}-{life}", "x").close()
if rank == "1":
    while not os.path.exists(f"0-{life}"):
        pass
    print("\\r 10%\\r 20%", file=sys.stderr)
    raise ValueError(f"bad luck {life}")
signal.pause()
"""


def shown(world: World, *words: str) -> list[str]:
    done = ran("logs", *words, env=world.environment())
    named = "json" in words or (words and not words[0].startswith("-"))
    assert done.returncode == 0
    assert re.fullmatch("" if named else r"== job \S+ \(failed\) ==\n", done.stderr)
    return done.stdout.splitlines()


def test_a_job_that_failed_twice(world: World) -> None:
    (world.scratch / "fails.py").write_text(FAILS)
    words = ("--nproc-per-node=2", "-r3", "--log-dir=logs", "--max-restarts=1", "--rdzv-id=bad")
    assert world.launch(ELASTICRUN, *words, "fails.py").wait() == 1

    newest = shown(world)
    assert newest[0] == "== rank 1 failed (ValueError: bad luck 1) =="
    assert newest[1:21] == [f"[1] rank 1 life 1 step {step}" for step in range(10, 30)]
    assert newest[-20:] == [f"[0] rank 0 life 1 step {step}" for step in range(10, 30)]
    assert "[1] ValueError: bad luck 1" in newest
    assert [line for line in newest if "%" in line] == ["[1]  20%"]  # of a bar its newest state

    lives = [line for line in shown(world, "bad", "--all") if line.startswith("==")]
    assert [re.sub(", .* ==", " ==", line) for line in lives] == [
        "== attempt_0 ==",
        "== rank 1 failed (ValueError: bad luck 0) ==",
        "== attempt_1 ==",
        "== rank 1 failed (ValueError: bad luck 1) ==",
    ]
    rows = map(json.loads, shown(world, "--all", "--rank=0", "-o", "json", "--tail=1"))
    assert [(row["life"], row["line"]) for row in rows] == [
        ("attempt_0", "rank 0 life 0 step 29"),
        ("attempt_1", "rank 0 life 1 step 29"),
    ]
    assert shown(world, "--rank=0", "--tail=1") == ["[0] rank 0 life 1 step 29"]
    grep = shown(world, "--rank=0", "--all", "--grep=step 2$")
    assert grep[1::3][:1] == ["[0] rank 0 life 0 step 2"]
    assert grep[-1] == "[0] rank 0 life 1 step 2"


def test_an_incident_belongs_to_the_attempt_of_its_round(tmp_path: Path) -> None:
    """Its file may be written after the next attempt has begun; a second start counts from 0, and
    its attempts may be given without those of the first."""
    folder = RunFolder(tmp_path)
    (tmp_path / INCIDENTS).mkdir()
    for number, (at, round_) in enumerate([(12.0, 1), (13.0, 2), (103.0, 1)], 1):
        row = IncidentRow(number, "rank", f"{number} failed", "", "", 0.0, round_)
        file = tmp_path / INCIDENTS / f"{number:04}.json"
        file.write_bytes(msgspec.json.encode(row))
        os.utime(file, (at, at))
    starts = [(0, 10.0), (1, 11.0), (2, 14.0), (0, 100.0), (1, 101.0)]
    ends = attempt_ends(folder, starts)
    said = [end.sentence if end is not None else "" for end in ends]
    assert said == ["1 failed", "2 failed", "", "3 failed", ""]
    folder.write_job(JobRecord(name="tr", began=99.0))
    assert attempt_ends(folder, starts) == ends
    assert attempt_ends(folder, starts[3:]) == ends[3:]


def test_after_a_resume_the_earlier_start_is_not_followed(tmp_path: Path) -> None:
    """Until a rank of the new start has a file, only the agents of the earlier one are known."""
    with subprocess.Popen(["true"]) as process:
        gone = ProcessId.of(process.pid)
    folder, own = RunFolder(tmp_path), ProcessId.own()
    folder.write_job(
        JobRecord(
            name="tr",
            host=own.host,
            pid=own.pid,
            started=own.started,
            boot_id=own.boot,
            pid_namespace=own.namespace,
            formed=1.0,
        )
    )
    before, now = (LoggedRun("tr", "", agent, 1.0) for agent in (gone, own))
    assert _is_to_begin(folder, [before])
    assert _is_to_begin(folder, [])
    assert not _is_to_begin(folder, [now])
    folder.write_result(RunResult(state="failed"))
    assert not _is_to_begin(folder, [before])
    folder.write_result(RunResult(state="saved"))
    assert _is_to_begin(folder, [now])


ENDS = """
import os, signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each ends by itself
dist.barrier()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else os._exit(int(sys.argv[1]))
dist.barrier()
"""


@further("test_a_job_that_failed_twice", "core/rounds/test_failures")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("3", "rank 1 failed (exit code 3); then ranks 0,2 lost their connection"),
        ("kill", "rank 1 failed (killed by SIGKILL); then ranks 0,2 lost their connection"),
        (
            "0",
            "rank 1 exited with 0 while others continued; rank _ lost its connection; "
            "then rank _ lost its connection",
        ),
    ],
)
def test_who_ended_without_a_word_comes_first(world: World, how: str, said: str) -> None:
    """And those that lost their connection to it stand under it."""
    (world.scratch / "ends.py").write_text(ENDS)
    words = ("--nproc-per-node=3", "-r3", "--log-dir=logs", "--rdzv-id=ends", "ends.py", how)
    assert world.launch(ELASTICRUN, *words).wait() == 1
    lines = shown(world, "ends", "--all")
    assert re.sub("rank [02]", "rank _", lines[0]) == f"== {said} =="
    assert sum(line.startswith("==") for line in lines) == 1
    assert any(line.startswith("[2] ") for line in lines)


@pytest.mark.parametrize(
    ("word", "why"), [("", "no log files of any"), ("x", "no job x has a run")]
)
def test_nothing_is_there(world: World, word: str, why: str) -> None:
    done = ran("logs", *filter(None, [word]), env=world.environment())
    assert done.returncode == 1
    assert why in done.stderr


def test_followed_until_the_end(world: World) -> None:
    words = ("--nproc-per-node=4", "--redirects=3", "--log-dir=logs", "--rdzv-id=tune")
    job = world.launch(ELASTICRUN, *words, str(SCRIPTS / "chorus.py"))
    here = [world.scratch / f"here-{rank}" for rank in range(4)]
    await_true(lambda: all(path.exists() for path in here), "ranks")
    reader = world.launch(ELASTICRUN, "logs", "tune", "-f")
    (world.scratch / "more").touch()
    reader.until_text("[2] nfs: server not responding\n", stream="stdout")
    (world.scratch / "go").touch()
    assert (job.wait(), reader.wait()) == (0, 0)
    lines = reader.stdout.splitlines()
    assert sorted(line for line in lines if "no end" in line) == [
        f"[{rank}] no end {rank} at all" for rank in range(4)
    ]
    assert sum("step 100 of 500" in line for line in lines) == 4


PROMPTS = """
import os, sys, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.05)
print("here", flush=True)
open("here", "x").close()
print("go on? ", end="", flush=True)
wait("answered")
print("yes", flush=True)
for percent in (10, 20):
    print(f"\\r{percent}%", end="", file=sys.stderr, flush=True)
    wait(f"seen-{percent}")
print("\\r99%", file=sys.stderr, flush=True)
"""


@further("test_followed_until_the_end", "agent/logs/test_terminal")
def test_a_line_that_does_not_end_is_followed_on_a_terminal(world: World, monkeypatch) -> None:
    """A prompt before it is answered, and each state of a progress bar in the place of the last."""
    (world.scratch / "prompts.py").write_text(PROMPTS)
    words = ("--nproc-per-node=1", "--redirects=3", "--log-dir=logs", "--rdzv-id=asks")
    job = world.launch(ELASTICRUN, *words, "prompts.py")
    await_true((world.scratch / "here").exists, "the rank")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    follows = world.launch(ELASTICRUN, "logs", "asks", "-f", stdout=writer)
    os.close(writer)
    seen = Seen(reader)
    for end, name in (
        ("[0] go on? ", "answered"),
        ("[0] 10%", "seen-10"),
        ("20%\x1b[K", "seen-20"),
    ):
        seen.until(lambda text, end=end: text.endswith(end))
        (world.scratch / name).touch()
    assert (job.wait(), follows.wait()) == (0, 0)
    seen.until(lambda _: False)
    assert seen.text == ("[0] here\n[0] go on? yes\n[0] 10%\r[0] 20%\x1b[K\r[0] 99%\x1b[K\n")
    os.close(reader)
