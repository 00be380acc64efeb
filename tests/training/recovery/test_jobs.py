"""Real jobs whose healthy ranks keep their process when others die, leave or join."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.further import cases, further
from tests.harness import TRAINING

pytestmark = pytest.mark.slow

KILLS = 125
"""In each of four trainings."""

NODES = 0.2
"""Their share that ends all processes of a node."""

SCRIPT = Path(__file__).parent / "recovering.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "recoverable.py"


class Run:
    """One job of `recovering.py`, held before a step."""

    def __init__(self, elastic_job: Any, kind: str, folder: Path, steps: int, **how: Any) -> None:
        folder.mkdir()
        self._out = folder / "out"
        self._out.mkdir()
        self.go_to(0)
        self.steps = steps
        words = (kind, self._out, folder / "ckpt", steps)
        self.job = elastic_job(SCRIPT, *words, env=TRAINING, **how)

    def go_to(self, step: int) -> None:
        (self._out / "new").write_text(str(step))
        (self._out / "new").rename(self._out / "until")

    def entries(self) -> dict[int, list[dict[str, int]]]:
        """What each process has recorded, by pid."""
        found = defaultdict(list)
        for path in self._out.glob("*.jsonl"):
            found[int(path.stem)] = [json.loads(text) for text in path.read_text().splitlines()]
        return found

    def end(self) -> set[str]:
        """The weights that the ranks end with."""
        self.go_to(self.steps)
        assert self.job.result(240).ok
        return set(re.findall(r"weights=[0-9a-f]{64}", self.job.output(0)))


KINDS = cases(["ddp", "fsdp2", "hsdp", "compiled"], kept=["ddp"])


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_keep_their_process_and_the_weights_are_the_same(
    kind: str, elastic_job: Any, tmp_path: Path
) -> None:
    ranks = 4 if kind == "hsdp" else 3
    undisturbed = Run(elastic_job, kind, tmp_path / "undisturbed", 12, nproc_per_node=ranks)
    expected = undisturbed.end()
    run = Run(elastic_job, kind, tmp_path / "killed", 12, nproc_per_node=ranks, max_restarts=3)
    job = run.job
    run.go_to(4)
    job.wait_for_world(ranks, step=3)  # all ranks have saved what the survivors go on from
    pids = [job.rank_pid(rank) for rank in range(ranks)]
    killed = job.kill_rank(1)
    run.go_to(7)
    job.wait_for(step=6, since=killed)
    again = [job.rank_pid(rank) for rank in range(ranks)]
    assert [again[0], *again[2:]] == [pids[0], *pids[2:]]
    assert again[1] != pids[1]
    job.kill_rank(0)
    found = run.end()
    assert found == expected
    assert len(found) == 1
    for pid in pids[2:]:
        entries = run.entries()[pid]
        assert [one["restart"] for one in entries] == [0, 1, 2]
        assert len({one["kept"] for one in entries}) == 1
        assert [one["start"] for one in entries][:2] == [0, 4]


@further("test_survivors_keep_their_process_and_the_weights_are_the_same")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp", "compiled"])
def test_killed_at_random_moments(kind: str, elastic_job: Any, tmp_path: Path) -> None:
    """A rank or a whole node: in a quiet moment, in the middle of steps, and while the ranks come
    back."""
    steps = 3 * KILLS
    how = {"nnodes": 2, "nproc_per_node": 2, "options": ["--restart-backoff=0"]}
    expected = Run(elastic_job, kind, tmp_path / "undisturbed", steps, **how).end()
    run = Run(elastic_job, kind, tmp_path / "killed", steps, **how, max_restarts=2 * KILLS)
    chance = random.Random(kind)
    step, since = 0, None
    for _ in range(KILLS):
        moment = chance.choice(("quiet", "busy", "again"))
        if moment != "again" or since is None:
            step += chance.randint(1, 3)
            run.go_to(step)
        if moment == "quiet":
            run.job.wait_for(step=step - 1, since=since)
        if chance.random() < NODES:
            node = chance.randrange(2)
            since = run.job.kill_node(node)
            run.job.restart_node(node)
        else:
            run.job.wait_for(lambda status: status.world_size == 4)
            since = run.job.kill_rank(chance.randrange(4))
    assert run.end() == expected
    lived = list(run.entries().values())
    assert sum(len(entries) - 1 for entries in lived) > KILLS // 4
    for entries in lived:
        assert len({one["kept"] for one in entries}) == 1


def test_they_stay_while_nodes_join_and_die(elastic_job: Any, tmp_path: Path) -> None:
    run = Run(elastic_job, "ddp", tmp_path / "run", 20, nnodes="1:3", nodes=1, nproc_per_node=2)
    job = run.job
    run.go_to(3)
    job.wait_for(step=2)
    pids = [job.rank_pid(rank) for rank in range(2)]
    job.add_node(nproc_per_node=1)
    job.wait_for(world_size=3)
    run.go_to(8)
    job.wait_for(step=7, world_size=3)
    job.kill_node(1)
    job.wait_for(world_size=2)
    assert len(run.end()) == 1
    for rank, pid in enumerate(pids):
        entries = run.entries()[pid]
        assert [one["world"] for one in entries] == [2, 3, 2]
        assert {one["rank"] for one in entries} == {rank}


@further(
    "training/recovery/test_recovery::test_an_exception_of_its_own_is_raised",
    "test_survivors_keep_their_process_and_the_weights_are_the_same",
)
def test_the_failure_of_a_rank_that_was_kept_is_named(elastic_job: Any, tmp_path: Path) -> None:
    run = Run(elastic_job, "fails", tmp_path / "run", 9, nproc_per_node=2, max_restarts=1)
    run.go_to(3)
    run.job.wait_for(step=2)
    run.job.kill_rank(1)
    run.go_to(9)
    assert run.job.result(240).exit_codes == (1,)
    assert "rank 0: ValueError: its own; no restarts left" in run.job.output(0)


@further("test_survivors_keep_their_process_and_the_weights_are_the_same")
def test_the_example_ends_with_the_same_weights_after_a_failure(
    elastic_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, pids = [], []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # of its checkpoints
        words = ("--steps", 60, "--pause", 0 if name == "undisturbed" else 0.05)
        job = elastic_job(EXAMPLE, *words, nproc_per_node=2, max_restarts=1)
        if name == "killed":
            job.wait_for_output(0, re.compile(r"(?s)from step 0.*from step 0"))
            job.kill_rank(1)
        assert job.result().ok
        weights += re.findall(r"weights=-?\d+\.\d+", job.output(0))
        pids = re.findall(r"rank=0 of 2 pid=(\d+)", job.output(0))
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert len(pids) == 2
    assert len(set(pids)) == 1


@further(
    "training/recovery/test_recovery::test_a_wait_ends_when_the_round_is_over",
    "test_survivors_keep_their_process_and_the_weights_are_the_same",
)
def test_a_rank_in_python_code_is_interrupted(elastic_job: Any, tmp_path: Path) -> None:
    run = Run(elastic_job, "loop", tmp_path / "run", 6, nproc_per_node=2, max_restarts=1)
    run.go_to(6)
    run.job.wait_for(lambda _: len(run.entries()) == 2)
    entered = run.job.rank_pid(0)
    run.job.kill_rank(1)
    assert len(run.end()) == 1
    assert [one["restart"] for one in run.entries()[entered]] == [0, 1]


@further(
    "test_survivors_keep_their_process_and_the_weights_are_the_same",
    "sight/test_hangs::test_a_hang_is_named",
)
def test_a_hang_is_ended_without_a_new_process(elastic_job: Any, tmp_path: Path) -> None:
    how = {"nproc_per_node": 2, "max_restarts": 1, "options": ["--hang-limit=2"]}
    run = Run(elastic_job, "hangs", tmp_path / "run", 9, **how)
    assert len(run.end()) == 1
    lived = list(run.entries().values())
    assert len(lived) == 2
    for entries in lived:
        assert [(one["restart"], one["start"]) for one in entries] == [(0, 0), (1, 5)]
        assert len({one["kept"] for one in entries}) == 1
