"""Real frameworks under the real command: what runs under torchrun runs here, with the same result.

The scripts train tiny models on CPU with gloo and fixed seeds, so that the trained weight must be
the same under both launchers, on every rank. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.compat.recording import HOW
from tests.further import further
from tests.harness import ELASTICRUN, SCRIPTS, TORCHRUN, World, free_port

needs.packages("lightning", "accelerate", "transformers")

pytestmark = pytest.mark.slow

FOLDER = SCRIPTS / "frameworks"
RESULT = re.compile(r"(?P<prefix>.*)RESULT (?P<result>\{.*?\})")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TITAN = "[model]\nwidth = 8\n[training]\nlr = 0.1\nsteps = 5\n"
LIMIT = 240.0


def results(text: str) -> list[dict[str, Any]]:
    """What the ranks said, by rank."""
    found = [json.loads(match["result"]) for match in RESULT.finditer(text)]
    return sorted(found, key=lambda result: int(result["rank"]))


def trained(world: World, argv: list[str], cwd: Path | None = None) -> list[dict[str, Any]]:
    """Run one command to its end; every rank has learned, and all have the same weight."""
    job = world.command(argv, env=ENVIRONMENT, cwd=cwd or world.scratch)
    assert job.wait(LIMIT) == 0, job.stdout + job.stderr
    said = results(job.stdout)
    assert [result["rank"] for result in said] == [0, 1], job.stdout + job.stderr
    assert {result["world"] for result in said} == {2}
    assert len({result["weight"] for result in said}) == 1
    assert all(result["last"] < result["first"] / 2 for result in said)
    return said


def command(launcher: str, *words: str) -> list[str]:
    module = {TORCHRUN: "torch.distributed.run", ELASTICRUN: "elasticrun"}[launcher]
    return [sys.executable, "-m", module, *words]


SCRIPTS_HERE = ("lightning_fit.py", "accelerate_loop.py", "hf_trainer.py")


@further(
    "training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once",
    "compat/test_environment::test_every_variable_is_torchruns",
)
@pytest.mark.parametrize("script", SCRIPTS_HERE)
def test_scripts_of_frameworks(script: str, world: World, torchrun_world: World) -> None:
    words = ["--nproc-per-node=2", str(FOLDER / script)]
    mine = trained(world, command(ELASTICRUN, *words))
    if HOW == "live":
        assert mine == trained(torchrun_world, command(TORCHRUN, *words))


@further(
    "compat/test_output::test_the_console_shows_the_same",
    "compat/test_flags::test_whole_command_lines",
)
def test_a_command_line_in_torchtitans_style(world: World, torchrun_world: World) -> None:
    config = world.scratch / "titan.toml"
    config.write_text(TITAN)
    words = [
        "--nproc_per_node=2", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0",
        "--local-ranks-filter", "1", "--role", "rank", "--tee", "3",
        "-m", "titan.train", "--job.config_file", str(config),
    ]  # fmt: skip
    seen = {}
    for launcher, where in ((ELASTICRUN, world), (TORCHRUN, torchrun_world)):
        job = where.command(command(launcher, *words), env=ENVIRONMENT, cwd=FOLDER)
        assert job.wait(LIMIT) == 0, job.stdout + job.stderr
        lines = list(RESULT.finditer(job.stdout))
        assert len(lines) == 1, job.stdout  # the filter shows rank 1 alone
        seen[launcher] = (lines[0]["prefix"], json.loads(lines[0]["result"]))
    assert seen[ELASTICRUN] == seen[TORCHRUN]
    assert seen[ELASTICRUN][0] == "[rank1]:"
    assert seen[ELASTICRUN][1]["role"] == "rank"


@further("api/test_run::test_run_with_a_namespace")
def test_accelerates_own_launcher(world: World, torchrun_world: World) -> None:
    """`accelerate launch` builds its arguments with our parser and calls our run(args)."""
    words = ["accelerate", str(FOLDER / "accelerate_loop.py")]
    substitute = [sys.executable, str(FOLDER / "substitute.py")]
    mine = trained(world, [*substitute, ELASTICRUN, *words])
    theirs = trained(torchrun_world, [*substitute, TORCHRUN, *words])
    assert mine == theirs


@further("api/test_run::test_run_with_a_namespace")
def test_fabrics_command_line(world: World, torchrun_world: World) -> None:
    """`fabric run` calls our main([...]); its ranks see the port that it names."""
    substitute = [sys.executable, str(FOLDER / "substitute.py")]
    runs = []
    for launcher, where in ((ELASTICRUN, world), (TORCHRUN, torchrun_world)):
        port = free_port()
        words = [launcher, "fabric", str(port), str(FOLDER / "fabric_loop.py")]
        said = trained(where, [*substitute, *words])
        assert {result.pop("port") for result in said} == {str(port)}
        runs.append(said)
    assert runs[0] == runs[1]
