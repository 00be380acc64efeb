"""What a real bash makes of `elasticrun completion bash`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.host.runs.index import make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder
from tests.harness import LIMIT, World, ran

pytestmark = pytest.mark.slow


def completed(script: str, world: World, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    typed = " ".join(f"'{word}'" for word in ("elasticrun", *words))
    asks = (
        f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}\n"
        '_shtab_elasticrun; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environ = world.environment()
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asks], env=environ, capture_output=True, text=True,
        timeout=LIMIT, cwd=world.scratch, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_verbs_flags_and_names_of_jobs(world: World) -> None:
    pytest.importorskip("shtab")
    for launch in ("0123abcd", "4567abcd"):
        path = make_run(Path(world.environment()["ELASTICRUN_RUNS"]), "train-7", launch)
        RunFolder(path).write_job(JobRecord(name="train-7", began=1.0))
    script = ran("completion", "bash", env=world.environment()).stdout
    assert completed(script, world, "sus") == ["suspend"]
    assert completed(script, world, "--rdzv-en") == ["--rdzv-endpoint"]
    assert "--keep-files" in completed(script, world, "delete", "--k")
    assert completed(script, world, "delete", "tr") == ["train-7"]
    assert completed(script, world, "top", "no") == ["nodes"]
    assert completed(script, world, "render", "s") == ["slurm"]
    for words in (("scale", "tr"), ("incidents", "tr"), ("ckpt", "ls", "tr")):
        assert completed(script, world, *words) == ["train-7"], words
    assert completed(script, world, "logs", "-f", "tr") == ["train-7"]
    assert ran("completion", "zsh", env=world.environment()).stdout.startswith(
        "#compdef elasticrun"
    )
