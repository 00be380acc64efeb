"""One Slurm for all tests of a process, and what each test does with it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.compat.live import PUPPET
from tests.harness import LIMIT, Launched, Peer, World, host_of, passed, until_file
from tests.slurm.cluster import Cluster, missing

NODES = 4


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started once; skipped where it cannot be."""
    needs.several_hosts()
    if lacking := missing():
        needs.lacking(
            f"no Slurm here: no {', '.join(lacking)} (Debian: slurmctld slurmd slurm-client munge)"
        )
    made = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    try:
        made.start()
        yield made
    finally:
        made.close()


class Slurm:
    """What one test starts; `batch` scripts write into `folder`."""

    def __init__(self, cluster: Cluster, world: World, folder: Path) -> None:
        self.cluster = cluster
        self.world = world
        self.folder = folder
        self._scripts = 0

    def types(self, *command: str, **how: Any) -> Launched:
        """A command on the login machine, which goes on while the test does."""
        env = {**self.cluster.environment(), "LOGLEVEL": "INFO", **how.pop("env", {})}
        return self.world.command(self.cluster.typed(*command), env=env, **how)

    def srun(self, *words: str, **how: Any) -> Launched:
        """`srun` with these words; its console is that of all tasks."""
        return self.types("srun", *words, **how)

    def sbatch(self, script: str, *options: str, env: dict[str, str] | None = None) -> Batch:
        """Submit a shell script; its console is a file that all attempts append to."""
        path = self.folder / f"batch-{self._scripts}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        return self.submits(*options, str(path), env=env)

    def submits(self, *words: str, env: dict[str, str] | None = None) -> Batch:
        console = self.folder / f"batch-{self._scripts}.txt"
        console.touch()
        self._scripts += 1
        told = {**self.cluster.environment(), "LOGLEVEL": "INFO", **(env or {})}
        submit = ("sbatch", "--parsable", f"--output={console}", "--open-mode=append")
        started = self.world.command(self.cluster.typed(*submit, *words), env=told)
        assert started.wait() == 0, started.stderr
        return Batch(int(started.stdout.split(";")[0]), console)

    def nodes_of(self, job: Batch) -> list[str]:
        """The machines that it has, or had last, the one of its script first."""
        listed = self.told(job, "NodeList")
        return self.cluster.run("scontrol", "show", "hostnames", listed).split()

    def told(self, job: Batch, what: str) -> str:
        """A field of what Slurm tells about it."""
        shown = self.cluster.run("scontrol", "show", "job", str(job.number)).split()
        return next(word.partition("=")[2] for word in shown if word.startswith(f"{what}="))

    def await_end(self, job: Batch) -> None:
        """Wait until Slurm has done with it."""
        assert self.srun(f"--dependency=afterany:{job.number}", "true").wait(2 * LIMIT) == 0

    def host_of(self, peer: Peer) -> str:
        return host_of(peer, self.cluster.lab)

    def show(self) -> None:
        """For a test that failed: what everybody has said."""
        for console in sorted(self.folder.rglob("*.txt")) + sorted(self.folder.glob("console-*")):
            if text := console.read_text(errors="replace"):
                print(f"--- {console.name}\n{text[-4000:]}")
        print(f"--- the controller\n{self.cluster.tail()}")


class Batch:
    """A job that sbatch has taken."""

    def __init__(self, number: int, console: Path) -> None:
        self.number = number
        self.console = console

    def until_text(self, text: str) -> str:
        return until_file(self.console, lambda shown: text in shown)


def meeting(nnodes: str, first: str, job: str = "$SLURM_JOB_ID") -> str:
    """The command that agents of one step start with where nothing is left to be found out: what
    people write into batch scripts, in a shell's words."""
    port = "$((20000 + SLURM_JOB_ID % 20000))"
    return (
        f"elasticrun --nnodes={nnodes} --rdzv-backend=c10d "
        f"--rdzv-endpoint={first}:{port} --rdzv-id={job}"
    )


def agent(nnodes: str, first: str, *flags: str) -> list[str]:
    """The same for puppets, as the words that follow those of `srun`."""
    return ["sh", "-c", f"exec {meeting(nnodes, first)} {shlex.join(flags)} {PUPPET}"]


@pytest.fixture
def slurm(cluster: Cluster, world: World, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """When the test has passed, its jobs are over by themselves, or those it says are cancelled;
    what was on the machines is gone."""
    made = Slurm(cluster, world, world.scratch)
    with cluster.clean():
        yield made
        if not passed(request):
            made.show()
    cluster.power_on_all()
    left = cluster.empty_memory()
    assert not passed(request) or not left, f"left in shared memory: {left}"


PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
"""What people are told to type: tests run it as it stands there, but for the words that a small
machine has to have otherwise."""
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def script_of_page(begins: str, instead: dict[str, str]) -> str:
    """The block of the page that begins so."""
    (block,) = (block for block in BLOCKS if block.startswith(begins))
    return _with(block, instead)


def typed_on_page(begins: str, instead: dict[str, str]) -> list[str]:
    """The words of the line that begins so."""
    lines = [line for block in BLOCKS for line in block.splitlines()]
    (line,) = (line for line in lines if line.startswith(begins))
    return shlex.split(_with(line, instead), comments=True)


def _with(text: str, instead: dict[str, str]) -> str:
    for word, other in instead.items():
        assert word in text, f"docs/slurm.md has no {word} there any more"
        text = text.replace(word, other)
    return text
