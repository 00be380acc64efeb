"""A training under elasticrun with snapshots: what it must come to, and that it leaves nothing."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticrun.snapshots.shm.segment import Segment
from elasticrun.testing import processes
from elasticrun.testing.job import ElasticJob
from elasticrun.testing.steps import World
from tests.harness import CHECKPOINTING, TRAINING, await_true, processes_of, until_file

TRAIN = Path(__file__).with_name("train.py")
ENDLESS = ("--mode", "counter", "--steps", "1000000000", "--pause", "0.05")
"""Words for a training that goes on until it is stopped, whose numbers are nobody's concern."""

STEPS = 12

SILENCE = 60
"""Seconds of silence after which a node is dead: more than a process stands still on a machine that
is busy, or the job would begin another round of its own accord."""

NOTICED = 10
"""The same where a test waits for the news of a death that nobody tells."""

Job = Callable[..., ElasticJob]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints that lie there."""
    found = folder.glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


@cache
def undisturbed(mode: str, world: int, steps: int) -> tuple[str, ...]:
    """The fingerprints by rank of a run that nothing befell and that took no snapshot in memory;
    once for all processes of a run of the tests."""
    place = Path(os.environ["XDG_STATE_HOME"], f"undisturbed-{mode}-{world}-{steps}")
    with place.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (known := file.read()):
            known = "\n".join(_run_undisturbed(mode, world, steps))
            file.write(known)
    return tuple(known.split("\n"))


def _run_undisturbed(mode: str, world: int, steps: int) -> list[str]:
    folder = tempfile.mkdtemp(prefix="undisturbed-")
    try:
        command = [
            *(sys.executable, "-m", "elasticrun", "--standalone", f"--nproc-per-node={world}"),
            f"--rdzv-conf=heartbeat_timeout={SILENCE}",
            *(str(TRAIN), "--mode", mode, "--steps", str(steps), "--every", "1000000"),
            *("--out", folder, "--ckpt", f"{folder}/ckpt"),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **TRAINING, **processes.warm_process(os.environ)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [str(ends(Path(folder), rank)[-1]) for rank in range(world)]
    finally:
        shutil.rmtree(folder)


def told(out: Path, rank: int) -> list[dict[str, Any]]:
    """The lines that a rank has written."""
    file = out / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def starts(out: Path, rank: int) -> list[int]:
    """The steps that a rank has gone on from, life by life."""
    return [line["start"] for line in told(out, rank) if "start" in line]


def ends(out: Path, rank: int) -> list[str]:
    return [line["end"] for line in told(out, rank) if "end" in line]


def until_printed(out: Path, rank: int) -> None:
    """Wait until a rank that runs with `--print-at` is past that step and its snapshot."""
    until_file(out / f"rank-{rank}.jsonl", lambda text: '"at"' in text)


class Training:
    """One job with snapshots: `out` has what ranks tell, `ckpt` the checkpoints, `shm` segments."""

    def __init__(self, elastic_job: Job, folder: Path, shm: Path) -> None:
        self._elastic_job = elastic_job
        self.out, self.ckpt, self.shm = folder / "out", folder / "ckpt", shm
        self.gate = folder / "gate"
        self.out.mkdir()
        self.job: ElasticJob
        self.mode, self.steps, self.world = "ddp", STEPS, 2
        self.round = 1  # the master's number of that in which the test begins
        self._whole = 0  # ranks without which a life is none of the test's

    def start(
        self,
        *args: str,
        mode: str = "ddp",
        steps: int = STEPS,
        nproc: int = 2,
        nodes: int = 1,
        gated: bool = False,
        env: dict[str, object] | None = None,
        script: Path = TRAIN,
        silence: int = SILENCE,
        options: Sequence[str] = (),
        **more: Any,
    ) -> ElasticJob:
        """`nproc` ranks on each of `nodes` nodes; `more` is elastic_job's."""
        self.mode, self.steps, self.world = mode, steps, nproc * nodes
        if script == TRAIN:
            args = ("--mode", mode, "--steps", str(steps), *args)
        if gated:
            args = (*args, "--gate", str(self.gate))
        imports = TRAINING if script == TRAIN and mode != "counter" else CHECKPOINTING
        if nproc == 1:  # its fork server would import as much as the rank
            imports = {}
        self.job = self._elastic_job(
            *(script, "--out", self.out, "--ckpt", self.ckpt),
            *args,
            nproc_per_node=nproc,
            nodes=nodes,
            env={"ELASTICRUN_SHM_DIR": self.shm, "OMP_NUM_THREADS": 1, **imports, **(env or {})},
            options=[f"--rdzv-conf=heartbeat_timeout={silence}", *options],
            **more,
        )
        return self.job

    def open_gate(self, step: int = 10**9) -> None:
        """Let ranks go on beyond each step below this one."""
        fresh = self.gate.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.rename(self.gate)

    def all_there(self) -> None:
        """Wait, with the gate still shut, until the world has all of its ranks: where fewer nodes
        are enough, a job may begin without one that is late, and once more when it has come."""
        status = self.job.wait_for(world_size=self.world)
        self.round, self._whole = status.round.number, self.world

    def comes_to(self, step: int) -> World:
        """Wait until all ranks are there and have done this step, beyond which the gate is shut."""
        self.all_there()
        self.open_gate(step)
        return self.job.wait_for_world(self.world, step=step)

    def go_on(self) -> None:
        """Open the gate once something has ended the round that the test began in: not before, or
        the ranks that are to be stopped would go on."""
        self.job.wait_for(round=self.round + 1, phase="running")
        self.open_gate()

    def finish(self, code: int = 0) -> None:
        """Wait for the end."""
        result = self.job.result()
        assert {c for c in result.exit_codes if c != -9} == {code}, result

    def is_as_if_nothing_happened(self) -> None:
        """Every rank ended, once, with the bits of a run that was never disturbed."""
        expected = undisturbed(self.mode, self.world, self.steps)
        assert [ends(self.out, rank) for rank in range(self.world)] == [[end] for end in expected]

    def ends_as_if_undisturbed(self, *starts: int, ranks: Sequence[int] = (0, 1)) -> None:
        """The job ends well, to the bit, and these ranks have gone on from these steps."""
        self.finish()
        assert [self.starts(rank) for rank in ranks] == [[*starts]] * len(ranks)
        self.is_as_if_nothing_happened()

    def starts(self, rank: int = 0) -> list[int]:
        """As `starts` has it, without lives before all were there (`all_there`)."""
        lives = [line for line in told(self.out, rank) if "start" in line]
        whole = dropwhile(lambda line: line["world"] < self._whole, lives)
        return [line["start"] for line in whole]

    def segments(self, *, replicas: bool = False) -> list[Path]:
        """Files in shared memory, without locks: of ranks, or of replicas."""
        files = [p for p in self.shm.rglob("*") if p.is_file() and "-" in p.name]
        return [p for p in files if p.name.startswith("r") is replicas]

    def lose_memory(self) -> None:
        """The memory of agents that were killed goes with their machine."""
        for folder in self.shm.iterdir():
            with (folder / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(folder)

    until = staticmethod(await_true)

    def checkpoints(self) -> list[int]:
        """Steps with a marker."""
        return checkpoints(self.ckpt)

    def said(self, pattern: str) -> bool:
        """Whether any node has said so by now."""
        texts = [self.job.output(number) for number in range(len(self.job.nodes))]
        return any(re.search(pattern, text) for text in texts)


def fork_server(job: ElasticJob, node: int = 0) -> psutil.Process:
    """Of this node; its children bear its command line too."""
    below = processes_of(processes.children(job.nodes[node].pid))
    (found,) = (p for p in below if processes.is_fork_server(p.pid))
    return found


def saver(job: ElasticJob, node: int = 0) -> psutil.Process:
    found = []
    for process in fork_server(job, node).children():
        with suppress(psutil.NoSuchProcess):  # the store of a round that is over, say
            if process.name() == "elasticrun-save":
                found.append(process)
    (only,) = found
    return only


@contextmanager
def opened(path: Path) -> Iterator[Segment]:
    """A segment that others use meanwhile."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        segment = Segment(memoryview(memory))
        try:
            yield segment
        finally:
            segment.close()


def flip(path: Path, step: int) -> None:
    """One bit of the first tensor of this step, in a segment."""
    with opened(path) as segment:
        (snapshot,) = (s for s in segment.snapshots() if s.step == step)
        segment.payload(snapshot.slot)[segment.layout().tensors[0].payload] ^= 1


def watermark(path: Path) -> int:
    """The newest step that a segment's ranks know to be whole."""
    with opened(path) as segment:
        return segment.watermark


def asked(path: Path) -> int:
    """The step that a segment's rank is asked to save."""
    with opened(path) as segment:
        return segment.save_at


@pytest.fixture
def training(elastic_job: Job, tmp_path: Path) -> Iterator[Training]:
    """At the end nothing may be left in shared memory."""
    shm = Path(tempfile.mkdtemp(prefix="elasticrun-test-", dir="/dev/shm"))
    made = Training(elastic_job, tmp_path, shm)
    try:
        yield made
        nodes = made.job.nodes if hasattr(made, "job") else []
        if all(node.exit_code not in (None, -9) for node in nodes):
            left = [p for p in shm.rglob("*") if p.is_file()]
            assert not left, f"left in shared memory: {left}"
    finally:
        shutil.rmtree(shm, ignore_errors=True)
