"""The examples that people start from, at a small size: each survives what it says it survives.
Others have tests of their own: `test_examples_snapshots`, and those of recovery and
data."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elasticrun.jobs.operator.crd import crd
from elasticrun.testing.job import ElasticJob
from elasticrun.wire import env
from tests import needs
from tests.further import further
from tests.harness import LIMIT, clean_environment
from tests.jobs.render.rendered import render

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = EXAMPLES / "cluster"
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Job = Callable[..., ElasticJob]


@pytest.mark.slow
def test_the_users_test_passes() -> None:
    """Which pretrains, and loses a node."""
    words = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "test_pretrain.py")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *words), cwd=EXAMPLES, env=clean_environment(),
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@further(
    "test_the_users_test_passes",
    "training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once",
)
@pytest.mark.parametrize("script", ["finetune_hf.py", "lightning_fit.py"])
def test_frameworks_resume(script: str, elastic_job: Job, tmp_path: Path) -> None:
    """A rank dies; the others restart with it, from the last step in memory."""
    needs.packages("lightning", "transformers")
    steps = 120
    job = elastic_job(
        EXAMPLES / script, "--dir", tmp_path / "runs", "--steps", steps, nproc_per_node=2,
        max_restarts=3, env=OFFLINE,
    )  # fmt: skip
    job.wait_for(step=20, world_size=2)
    died = job.kill_rank(1)
    first = job.wait_for(step=0, world_size=2, since=died)
    assert first.step > 5, "it started over"
    assert job.result().ok
    assert max(step.step for step in job.steps()) == steps
    assert f"done step={steps}" in job.output(0)


@pytest.mark.slow
@further(
    "training/checkpointing/test_ranks::test_sharded_state_from_memory_at_another_number_of_ranks",
    "snapshots/test_departure::test_one_node_leaves_and_the_other_goes_on",
)
def test_shards_are_spread_over_more_ranks(
    elastic_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 with `--nnodes=1:4`: it starts on one node, and another one joins."""
    monkeypatch.chdir(tmp_path)  # the example's checkpoints are in a folder of the current one
    shm = {env.SHM_DIR: str(tmp_path)}
    job = elastic_job(
        EXAMPLES / "snapshots_fsdp2.py", "--steps", 10**7, nnodes="1:4", nodes=1,
        options=["--grow=now"], env={"OMP_NUM_THREADS": "1", **shm},
    )  # fmt: skip
    job.wait_for_output(0, "step=50 ")
    job.add_node()
    joined = job.wait_for(world_size=2).step
    job.wait_for(condition=lambda status: status.step >= joined + 100)
    steps = [int(step) for step in re.findall(r"step=(\d+) ", job.output(0))]
    assert steps[-1] >= joined
    assert steps == sorted(steps), "it started over"


def _command(text: str) -> list[str]:
    """The words of the command in the comment at the beginning."""
    (line,) = re.findall(r"^# elasticrun render (.*)$", text, re.M)[:1]
    return shlex.split(line)


@pytest.mark.parametrize("name", ["job.yaml", "slurm.sh", "trainjob.yaml"])
def test_files_are_what_render_prints(name: str) -> None:
    text = (CLUSTER / name).read_text()
    body = re.sub(r"^# elasticrun render .*\n", "", text, count=1, flags=re.M)
    printed = render(*_command(text)).out
    if name == "trainjob.yaml":  # the runtime, and then a TrainJob
        assert body.startswith(f"{printed}---\n")
    else:
        assert body == printed


@pytest.mark.parametrize("name", ["job.yaml", "slurm.sh", "trainjob.yaml"])
def test_files_run_an_example(name: str) -> None:
    words = _command((CLUSTER / name).read_text())
    script = words[words.index("--") + 1]
    assert (EXAMPLES.parent / script).exists()


def test_the_elastic_job_is_one() -> None:
    made: dict[str, Any] = yaml.safe_load((CLUSTER / "elasticjob.yaml").read_text())
    (version,) = crd()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    jsonschema.validate(made, schema)
    known = set(schema["properties"]["spec"]["properties"])
    assert set(made["spec"]) <= known
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "elasticrun"
    assert (EXAMPLES.parent / container["args"][0]).exists()


def test_the_page_has_each_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in (*EXAMPLES.glob("*.py"), *CLUSTER.iterdir()):
        assert f"({path.relative_to(EXAMPLES)})" in page, path.name
