"""Real jobs whose ranks die and whose world size changes use each sample once."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from elasticrun.training import ElasticBatchSampler
from tests import needs
from tests.further import cases, further
from tests.harness import CHECKPOINTING, TRAINING
from tests.training.data.elastic_data import GLOBAL_BATCH, SAMPLES, SEED
from tests.training.data.record import surviving

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "elastic_data.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_data.py"
TOTAL = 60
"""Twelve epochs."""
IMPORTS = {
    "with_hf.py": {"ELASTICRUN_PRELOAD": "transformers.trainer,torch.distributed.checkpoint"},
    "with_lightning.py": TRAINING,
}
"""So that only the fork server spends seconds on them, and not each life of a rank."""


def let_go_to(out: Path, step: int) -> None:
    """Let the training go on up to a step."""
    (out / "new").write_text(str(step))
    (out / "new").rename(out / "until")


def test_each_sample_is_used_once_over_kills_and_resizes(elastic_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    let_go_to(out, 9)
    words = (out, tmp_path / "ckpt", TOTAL)
    how = {"nproc_per_node": 2, "max_restarts": 9, "env": CHECKPOINTING}
    job = elastic_job(SCRIPT, *words, nnodes="1:3", nodes=1, **how)
    job.wait_for(step=8)
    killed = job.kill_rank(1)
    let_go_to(out, 14)
    job.wait_for(step=13, since=killed)
    job.add_node(nproc_per_node=1)
    job.wait_for(world_size=3)
    let_go_to(out, 22)
    job.wait_for(step=20, world_size=3)
    job.kill_node(1)
    job.wait_for(world_size=2)
    let_go_to(out, 29)
    job.wait_for(step=28, world_size=2)
    job.add_node(nproc_per_node=2)
    job.wait_for(world_size=4)
    let_go_to(out, TOTAL)
    assert job.result().ok
    found = surviving(out)
    sampler = ElasticBatchSampler(SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, place=(0, 1))
    assert sorted(found) == list(range(TOTAL))
    for step, used in found.items():
        assert Counter(used) == Counter(sampler.global_indices(step)), step
    each = sampler.steps_per_epoch
    for epoch in range(TOTAL // each):
        steps = range(epoch * each, (epoch + 1) * each)
        assert sorted(chain(*(found[step] for step in steps))) == list(range(SAMPLES))


@further(
    "test_each_sample_is_used_once_over_kills_and_resizes",
    "training/data/test_work_jobs::test_each_sample_is_used_once_over_kills_and_resizes",
)
def test_the_example_ends_with_the_same_weights_after_a_failure(
    elastic_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # of its checkpoints
        job = elastic_job(EXAMPLE, "--steps", 100, nproc_per_node=2, max_restarts=1)
        if name == "killed":
            job.wait_for_output(0, "step=25 ranks=2")
            job.kill_rank(1)
        assert job.result().ok
        found += re.findall(r"weights=\w+", job.output(0))
    assert len(found) == 2
    assert found[0] == found[1]


@further("test_each_sample_is_used_once_over_kills_and_resizes")
def test_losses_are_bitwise_those_without_failures(elastic_job: Any, tmp_path: Path) -> None:
    """Ranks of DDP are killed at random steps, and in the middle of steps."""
    chance = random.Random(30)
    losses = []
    for kills in (0, 6):
        out = tmp_path / str(kills)
        out.mkdir()
        words = (SCRIPT.with_name("ddp_losses.py"), out, out / "ckpt", TOTAL)
        how = {"nproc_per_node": 2, "max_restarts": 6, "options": ["--restart-backoff=0"]}
        let_go_to(out, 0)
        job = elastic_job(*words, **how)
        killed, step = None, 0
        for _ in range(kills):
            step += chance.randint(2, 8)
            let_go_to(out, step)
            job.wait_for(step=step - chance.choice((1, 2)), since=killed)
            killed = job.kill_rank(chance.randrange(2))
        let_go_to(out, TOTAL)
        assert job.result(600).ok
        assert len(re.findall(r": restart \d of 6 \(", job.output(0))) == kills
        losses.append({step: sorted(used) for step, used in surviving(out).items()})
    assert sorted(losses[0]) == list(range(TOTAL))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "lives"),
    cases(
        [("with_hf.py", (7,)), ("with_hf.py", (-1, 7)), ("with_lightning.py", (-1, 7))],
        kept=[("with_hf.py", (7,))],
        several=True,
    ),
)
def test_trainers_of_frameworks_use_each_sample_once(
    name: str, lives: tuple[int, ...], elastic_job: Any, tmp_path: Path
) -> None:
    """A rank is killed in the middle of the second epoch and in the middle of a step; the weights
    are those of a run without a kill."""
    needs.packages("lightning", "transformers")
    weights = []
    for dies_after in lives:
        out = tmp_path / str(dies_after)
        out.mkdir()
        words = (out, out / "ckpt", dies_after)
        how = {"nproc_per_node": 2, "max_restarts": 1, "env": IMPORTS[name]}
        job = elastic_job(SCRIPT.with_name(name), *words, **how)
        assert job.result(240).ok
        weights += re.findall(r"weights=\w+", job.output(0))
        again = re.findall(r"resume from step (\d+) in memory", job.output(0))
        assert all(int(step) <= 7 for step in again), (
            "a slow disk keeps the slots of newer steps busy"
        )
        assert bool(again) == (dies_after > 0)
        found = surviving(out)
        sampler = ElasticBatchSampler(40, global_batch=8, place=(0, 1))
        assert sorted(found) == list(range(14))
        for step, used in found.items():
            assert Counter(used) == Counter(sampler.global_indices(step)), step
    assert len(weights) == 2 * len(lives)
    assert len(set(weights)) == 1


@further("test_each_sample_is_used_once_over_kills_and_resizes")
@pytest.mark.parametrize("stop", [8, 10])
def test_lightning_goes_on_at_another_world_size(
    stop: int, elastic_job: Any, tmp_path: Path
) -> None:
    """In the middle of an epoch, whose batches it counts, and at the end of one."""
    needs.packages("lightning")
    out = tmp_path / "out"
    out.mkdir()
    script = SCRIPT.with_name("with_lightning.py")
    for ranks, steps in ((2, stop), (3, 14)):
        job = elastic_job(script, out, out / "ckpt", -1, steps, nproc_per_node=ranks)
        assert job.result(240).ok
    sampler = ElasticBatchSampler(40, global_batch=8, place=(0, 1))
    for step, used in surviving(out).items():
        assert Counter(used) == Counter(sampler.global_indices(step)), step


@pytest.mark.parametrize("workers", cases([0, 2], kept=[2]))
def test_a_stateful_loader_goes_on_at_the_same_world_size(
    workers: int, elastic_job: Any, tmp_path: Path
) -> None:
    needs.packages("torchdata")
    out = tmp_path / "out"
    out.mkdir()
    words = (out, tmp_path / "ckpt", workers)
    script = SCRIPT.with_name("with_torchdata.py")
    job = elastic_job(script, *words, nproc_per_node=2, max_restarts=1)
    assert job.result().ok
    assert "restart 1 of 1" in job.output(0)
    assert sorted(chain(*surviving(out).values())) == list(range(64))


def test_accelerate_does_not_split_the_batches_again() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = DataLoader(range(40), batch_sampler=ElasticBatchSampler(40, global_batch=8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"without accelerator\.prepare"):
        accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=0)
