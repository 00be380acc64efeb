"""One command, run by torchrun and by elasticrun at the same time, and what came of each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat import recording
from tests.harness import (
    ELASTICRUN,
    SCRIPTS,
    TORCHRUN,
    Launched,
    World,
    await_listener,
    free_port,
    world_in,
)

RUN_LIMIT = 240.0
"""Seconds one side of a pair may take on a busy machine."""

NOT_MET = "RendezvousConnectionError"
"""torchrun's own end where two agents that start at one moment on one endpoint spoil each other's
store ("Ping failed", then 60 s of dialling): nothing to compare with."""

TRIES = 3


@dataclass(frozen=True)
class Case:
    """A command line, without the launcher's name. `{port}` in flags becomes a free port of each
    side; `{scratch}` its scratch folder; `agents` are further flags, one tuple for each agent."""

    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = ("dump.py",)
    env: Mapping[str, str] = field(default_factory=dict)
    agents: tuple[tuple[str, ...], ...] = ((),)
    cwd: str = ""  # below tests/, "": the scratch folder
    umask: int = -1
    ignoring: str = ""
    user_port: bool = False  # the ranks must see exactly `{port}`
    log_dir: str = ""  # where the log tree is looked for, below the scratch folder

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass
class Outcome:
    """What one launcher made of a case."""

    launcher: str
    codes: list[int]
    stdout: list[str]
    stderr: list[str]
    dumps: dict[tuple[int, int], dict[str, Any]]  # by rank and restart count
    tree: dict[str, str]  # files below the log folder, run folder's name made plain
    scratch: Path
    port: int

    @property
    def code(self) -> int:
        return self.codes[0]

    def plain(self, text: str) -> str:
        """Text without what must differ: folders, ports, run ids, random suffixes."""
        text = text.replace(str(self.scratch), "$SCRATCH").replace(str(self.port), "$PORT")
        text = re.sub(r"/(torchelastic|elasticrun)_[^/]+/", "/TEMPORARY/", text)
        text = re.sub(r"/[^/ ]+_[a-z0-9_]{8}/attempt_", "/RUN/attempt_", text)
        return re.sub(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", "UUID", text)


def fill(words: tuple[str, ...], world: World, port: int) -> list[str]:
    return [w.replace("{port}", str(port)).replace("{scratch}", str(world.scratch)) for w in words]


def variables(case: Case, world: World, port: int) -> dict[str, str]:
    """What a case puts into the environment of its agents."""
    own = {name: fill((value,), world, port)[0] for name, value in case.env.items()}
    return {"DUMP_DIR": str(world.scratch / "dumps"), **own}


def begin(launcher: str, case: Case, world: World, port: int) -> list[Launched]:
    """Start all agents of a case; torchrun's others when the first one has its c10d store: two that
    start at one moment spoil each other's."""
    dumps = world.scratch / "dumps"
    dumps.mkdir()
    name, *args = fill(case.program, world, port)
    script = str(SCRIPTS / name) if (SCRIPTS / name).exists() and not case.cwd else name
    env = variables(case, world, port)
    cwd = Path(__file__).parent.parent / case.cwd if case.cwd else world.scratch
    flags = fill(case.flags, world, port)
    jobs = []
    for more in case.agents:
        argv = (*flags, *fill(more, world, port), script, *args)
        jobs.append(
            world.launch(
                launcher, *argv, env=env, cwd=cwd, umask=case.umask, ignoring=case.ignoring
            )
        )
        if launcher == TORCHRUN and "--rdzv-backend=c10d" in flags and len(case.agents) > 1:
            await_listener(port)
    return jobs


def collect(launcher: str, case: Case, world: World, jobs: list[Launched], port: int) -> Outcome:
    """Wait for the agents and read what they and their ranks left."""
    codes = [job.wait(RUN_LIMIT) for job in jobs]
    dumps = {}
    for file in (world.scratch / "dumps").glob("*.json"):
        rank, restart = file.stem.split(".")
        dumps[int(rank), int(restart)] = json.loads(file.read_text())
    return Outcome(
        launcher=launcher,
        codes=codes,
        stdout=[job.stdout for job in jobs],
        stderr=[job.stderr for job in jobs],
        dumps=dumps,
        tree=read_tree(world.scratch / case.log_dir) if case.log_dir else {},
        scratch=world.scratch,
        port=port,
    )


def read_tree(folder: Path) -> dict[str, str]:
    """Every file below a log folder, as text; folders with random names are called RUN (the
    run's own) and TEMPORARY (the one made where none was named)."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            name = re.sub(r"(^|/)[^/]+_[a-z0-9_]{8}/attempt_", r"\1RUN/attempt_", name)
            name = re.sub(r"^(torchelastic|elasticrun)_[^/]+/", "TEMPORARY/", name)
            files[name] = path.read_text(errors="replace")
    return files


BESIDE = ("launcher-error.json",)
"""Files of the scratch folder that a test reads."""


def name_of(case: Case) -> str:
    """A case's name in the recording."""
    text = json.dumps({k: v for k, v in vars(case).items() if v and v != -1}, default=dict)
    return text.replace(sys.executable, "«PYTHON»")


def record(case: Case, theirs: Outcome, world: World) -> dict[str, Any]:
    """What `recalled` needs."""
    base = world.environment(variables(case, world, theirs.port))
    dumps = {
        f"{rank}.{life}": recording.without_base(dump, base, umask=case.umask != -1)
        for (rank, life), dump in sorted(theirs.dumps.items())
    }
    logs = theirs.scratch / case.log_dir
    made = {
        "codes": theirs.codes,
        "stdout": theirs.stdout,
        "stderr": theirs.stderr,
        "dumps": dumps,
        "tree": theirs.tree,
        "folders": sorted(p.name for p in logs.iterdir() if p.is_dir()) if case.log_dir else [],
        "files": {
            name: (theirs.scratch / name).read_text()
            for name in BESIDE
            if (theirs.scratch / name).exists()
        },
    }
    made = recording.plain(made, theirs.scratch, theirs.port)
    return dict(made)


def recalled(case: Case, kept: Mapping[str, Any], world: World) -> Outcome:
    """torchrun's outcome as if it had been run now, in this world."""
    port = free_port()
    told = recording.here(kept, world.scratch, port)
    base = world.environment(variables(case, world, port))
    dumps = {}
    for name, dump in told["dumps"].items():
        rank, life = name.split(".")
        dumps[int(rank), int(life)] = recording.with_base(dump, base)
    for folder in told["folders"]:
        (world.scratch / case.log_dir / folder).mkdir(parents=True, exist_ok=True)
    for name, text in told["files"].items():
        (world.scratch / name).write_text(text)
    return Outcome(
        launcher=TORCHRUN,
        codes=told["codes"],
        stdout=told["stdout"],
        stderr=told["stderr"],
        dumps=dumps,
        tree=told["tree"],
        scratch=world.scratch,
        port=port,
    )


class Pairs:
    """Runs each case once a session, both launchers at the same time; torchrun's side is recalled
    where it has been recorded."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._recorded = recording.known()
        self._known: dict[Case, tuple[Outcome, Outcome]] = {}
        self._runs = 0

    def __call__(self, case: Case) -> tuple[Outcome, Outcome]:
        if case not in self._known:
            self._known[case] = self._run(case)
        return self._known[case]

    def _run(self, case: Case) -> tuple[Outcome, Outcome]:
        self._runs += 1
        folder = self._base / f"pair-{self._runs}"
        if recording.HOW == "record":
            return (self._theirs(case, folder),) * 2
        with world_in(folder / "e") as ours:
            port = free_port()
            jobs = begin(ELASTICRUN, case, ours, port)
            theirs = self._theirs(case, folder)
            return theirs, collect(ELASTICRUN, case, ours, jobs, port)

    def _theirs(self, case: Case, folder: Path) -> Outcome:
        kept = None if recording.HOW == "record" else self._recorded.get(name_of(case))
        for number in range(TRIES):
            world = World(folder / f"t{number}")
            try:
                if kept is not None:
                    return recalled(case, kept, world)
                port = free_port()
                found = collect(TORCHRUN, case, world, begin(TORCHRUN, case, world, port), port)
                if not any(NOT_MET in text for text in found.stderr):
                    if recording.HOW == "record":
                        recording.keep(name_of(case), record(case, found, world))
                    return found
            finally:
                world.close(strict=False)
        assert recording.HOW != "record", "torchrun's agents have not met: record it again"
        return found
