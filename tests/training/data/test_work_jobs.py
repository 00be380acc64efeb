"""Real jobs that take work from the master use each sample once, whatever is killed."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing.job import ElasticJob, JobError
from elasticrun.wire import env
from tests.further import fresh_seeds, further
from tests.harness import CHECKPOINTING, SCRIPTS, SOCKET, World, await_true
from tests.training.data.handed_out import EPOCHS, SIZE, TOTAL
from tests.training.data.record import surviving

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "handed_out.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "handed_out.py"
EVERYTHING = Counter(range(EPOCHS * TOTAL))


LAST = 10_000


def let_go_to(out: Path, step: int) -> None:
    (out / "new").write_text(str(step))
    (out / "new").rename(out / "until")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    found = tmp_path / "out"
    found.mkdir()
    let_go_to(found, 13)
    return found


def test_each_sample_is_used_once_over_kills_and_resizes(
    elastic_job: Any, out: Path, tmp_path: Path
) -> None:
    words = (out, tmp_path / "ckpt")
    how = {"nproc_per_node": 2, "max_restarts": 9, "env": CHECKPOINTING}
    job = elastic_job(SCRIPT, *words, nnodes="1:3", nodes=1, **how)
    job.wait_for(step=12)
    killed = job.kill_rank(1)
    let_go_to(out, 21)
    job.wait_for(step=20, since=killed)
    job.add_node(nproc_per_node=1)
    job.wait_for(world_size=3)
    job.kill_master()
    let_go_to(out, 31)
    job.wait_for(step=30, world_size=3)  # who may have begun before the master was killed
    job.kill_node(1)
    job.wait_for(world_size=2)
    let_go_to(out, LAST)
    assert job.result(120).ok
    assert Counter(chain(*surviving(out).values())) == EVERYTHING


@further(
    "test_each_sample_is_used_once_over_kills_and_resizes",
    "training/recovery/test_jobs::test_survivors_keep_their_process_and_the_weights_are_the_same",
)
def test_ranks_that_keep_their_process_take_work_again(
    elastic_job: Any, out: Path, tmp_path: Path
) -> None:
    words = (out, tmp_path / "ckpt", "recoverable")
    job = elastic_job(SCRIPT, *words, nproc_per_node=2, max_restarts=1, env=CHECKPOINTING)
    job.wait_for(step=12)
    kept = job.rank_pid(0)
    killed = job.kill_rank(1)
    let_go_to(out, 21)
    job.wait_for(step=20, since=killed)
    assert job.rank_pid(0) == kept
    let_go_to(out, LAST)
    assert job.result(120).ok
    assert Counter(chain(*surviving(out).values())) == EVERYTHING


@further(
    "test_each_sample_is_used_once_over_kills_and_resizes",
    "snapshots/test_random_kills::test_killed_at_random_moments",
)
def test_a_job_that_is_started_again_goes_on_from_its_checkpoint(
    elastic_job: Any, out: Path, tmp_path: Path
) -> None:
    """All its processes are killed, and the same command is typed again."""
    (tmp_path / "shm").mkdir()
    left = {env.SHM_DIR: tmp_path / "shm"}  # where killed agents leave their snapshots
    words = (out, tmp_path / "ckpt")
    first = elastic_job(SCRIPT, *words, nproc_per_node=2, env=left)
    let_go_to(out, 46)
    first.wait_for(step=45)
    first.kill_node(0)
    first.result()
    let_go_to(out, LAST)
    assert elastic_job(SCRIPT, *words, nproc_per_node=3, env=left).result(120).ok
    assert Counter(chain(*surviving(out).values())) == EVERYTHING


@further(
    "test_each_sample_is_used_once_over_kills_and_resizes",
    "sim/test_work_chaos::test_invariants_hold",
)
def test_without_a_checkpointer_nothing_is_left_out(elastic_job: Any, out: Path) -> None:
    """What a rank had begun and not finished is handed out again, and nothing else."""
    job = elastic_job(SCRIPT, out, "-", nproc_per_node=3, max_restarts=1)
    job.wait_for(step=12)
    job.kill_rank(1)
    let_go_to(out, LAST)
    assert job.result(120).ok
    texts = [path.read_text() for path in out.glob("*.jsonl")]
    used = Counter(sample for text in texts for sample in _samples(text))
    assert set(used) == set(EVERYTHING)
    assert used.total() - EVERYTHING.total() <= 3 * SIZE, "at most a shard of each rank"


@further("test_each_sample_is_used_once_over_kills_and_resizes")
def test_the_example_counts_each_sample_once(
    elastic_job: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # of its checkpoints
    held = (SCRIPTS / "held.py", 1, 57)  # or it could end before it is killed
    how = {"nproc_per_node": 2, "max_restarts": 1, "env": {SOCKET: world.hub.path}}
    job = elastic_job(*held, EXAMPLE, "--samples", 6000, **how)
    world.hub.ranks(1)
    job.kill_rank(1)
    assert job.result(120).ok
    assert "restart 1 of 1" in job.output(0)
    assert job.output(0).count("all ranks 12000") == 2


@further("test_each_sample_is_used_once_over_kills_and_resizes")
@pytest.mark.parametrize("seed", range(3))
def test_random_kills(seed: int, elastic_job: Any, out: Path, tmp_path: Path) -> None:
    _random_kills(seed, elastic_job, out, tmp_path)


@further("test_each_sample_is_used_once_over_kills_and_resizes")
@pytest.mark.parametrize("seed", fresh_seeds(20, 1))
def test_random_kills_of_fresh_seeds(
    seed: int, elastic_job: Any, out: Path, tmp_path: Path
) -> None:
    _random_kills(seed, elastic_job, out, tmp_path)


def _random_kills(seed: int, elastic_job: Any, out: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    words = (out, tmp_path / "ckpt")
    job = elastic_job(SCRIPT, *words, nnodes="1:3", nodes=2, nproc_per_node=1, max_restarts=99)
    step = 6
    for _ in range(5):
        let_go_to(out, step + 1)
        job.wait_for(step=step)
        match rng.choice(["rank", "master", "agent", "grow"]):
            case "rank":  # the second one may have gone with its agent
                await_true(lambda: _answers(job), "a master, after the last one was killed")
                ranks = job.wait_for(phase="running").world_size
                job.kill_rank(min(rng.randrange(2), ranks - 1))
            case "master":
                await_true(lambda: _answers(job), "a master, after the last one was killed")
                job.kill_master()
            case "agent":
                job.kill_agent(1)
                job.add_node(nproc_per_node=1)
            case _:
                job.add_node(nproc_per_node=1)
        step += rng.randint(4, 9)
    let_go_to(out, LAST)
    assert job.result(180).ok
    assert Counter(chain(*surviving(out).values())) == EVERYTHING


def _answers(job: ElasticJob) -> bool:
    try:
        job.status()
    except JobError:
        return False
    return True


def _samples(text: str) -> list[int]:
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [sample for line in lines for sample in line["used"]]
