"""`elasticrun logs`: a job that failed in two lives, and one that is followed."""

from __future__ import annotations

import re

import pytest

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
    raise ValueError(f"bad luck {life}")
signal.pause()
"""


def shown(world: World, *words: str) -> list[str]:
    done = ran("logs", *words, env=world.environment())
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_job_that_failed_twice(world: World) -> None:
    (world.scratch / "fails.py").write_text(FAILS)
    words = ("--nproc-per-node=2", "-r3", "--log-dir=logs", "--max-restarts=1", "--rdzv-id=bad")
    assert world.launch(ELASTICRUN, *words, "fails.py").wait() == 1

    newest = shown(world)
    assert newest[0] == "== rank 1 failed: ValueError: bad luck 1 =="
    assert newest[1:21] == [f"[1] rank 1 life 1 step {step}" for step in range(10, 30)]
    assert newest[-20:] == [f"[0] rank 0 life 1 step {step}" for step in range(10, 30)]
    assert "[1] ValueError: bad luck 1" in newest

    lives = [line for line in shown(world, "bad", "--all") if line.startswith("==")]
    assert [re.sub(", .* ==", " ==", line) for line in lives] == [
        "== attempt_0 ==",
        "== rank 1 failed: ValueError: bad luck 0 ==",
        "== attempt_1 ==",
        "== rank 1 failed: ValueError: bad luck 1 ==",
    ]
    assert shown(world, "--rank=0", "--tail=1") == ["[0] rank 0 life 1 step 29"]
    grep = shown(world, "--rank=0", "--all", "--grep=step 2$")
    assert grep[1::3][:1] == ["[0] rank 0 life 0 step 2"]
    assert grep[-1] == "[0] rank 0 life 1 step 2"


@pytest.mark.parametrize("word", ["", "unknown"])
def test_nothing_is_there(world: World, word: str) -> None:
    done = ran("logs", *filter(None, [word]), env=world.environment())
    assert done.returncode == 1
    assert "no log files of" in done.stderr


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
