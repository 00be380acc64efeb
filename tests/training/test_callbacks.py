"""The callbacks for Lightning and for HF's Trainer, with the real libraries on tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.compat.recording import HOW
from tests.further import cases, further
from tests.harness import ELASTICRUN, SCRIPTS, TORCHRUN, World, clean_environment, program

needs.packages("lightning", "transformers")

pytestmark = pytest.mark.slow

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LIMIT = 240.0
DIES_AFTER = 13
SCRIPTS_HERE = ("hf_trainer.py", "lightning_fit.py")


def results(world: World, script: str, dies_after: int, launcher: str) -> list[Any]:
    """What both ranks said at the end of one run."""
    script_at = str(SCRIPTS / "frameworks" / script)
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    if launcher == ELASTICRUN:  # an agent that stands still for a while is not dead
        flags += ("--rdzv-conf=heartbeat_timeout=60",)
    folder = f"run-{len(world.jobs)}"
    job = world.launch(launcher, *flags, script_at, folder, str(dies_after), env=ENVIRONMENT)
    assert job.wait(LIMIT) == 0, job.stdout + job.stderr
    found = [json.loads(line) for line in re.findall(r"RESULT (\{.*?\})", job.stdout)]
    assert len(found) == 2, job.stdout + job.stderr
    return sorted(found, key=lambda result: int(result["rank"]))


@further("training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once")
def test_what_is_cut_off_skips_what_its_epoch_has_used(tmp_path: Path) -> None:
    """To the bit, up to the end of that epoch: data, optimizer, schedule and dropout."""
    script = Path(__file__).with_name("hf_in_two_parts.py")
    done = program(str(script), str(tmp_path), env={**clean_environment(), **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    told = {row[0]: row[1:] for row in rows if row[0] in ("whole", "part", "rest")}
    assert [told[part][0] for part in ("whole", "part", "rest")] == ["0", "0", "4"]
    assert told["rest"][1] == told["whole"][1]
    assert told["part"][1] != told["whole"][1]


@further("training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once")
@pytest.mark.parametrize("script", cases(SCRIPTS_HERE, kept=["hf_trainer.py"]))
def test_a_killed_rank_comes_to_the_same_weights(script: str, world: World) -> None:
    """The one that is never killed runs under torchrun too (`make soak`), where the callbacks work
    as well. The step after which a rank is killed may be in memory or not: the kill comes right
    after it."""
    never = results(world, script, 0, TORCHRUN if HOW == "live" else ELASTICRUN)
    killed = results(world, script, DIES_AFTER, ELASTICRUN)
    assert [(r["life"], r["began"]) for r in never] == [(0, 1)] * 2
    assert {r["life"] for r in killed} == {1}
    assert {r["began"] for r in killed} <= {DIES_AFTER, DIES_AFTER + 1}
    for left, right in zip(never, killed, strict=True):
        without = ("life", "began", "first", "last")  # the last two are losses of one life
        assert {k: v for k, v in left.items() if k not in without} == {
            k: v for k, v in right.items() if k not in without
        }
