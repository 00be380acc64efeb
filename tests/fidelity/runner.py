"""Runs one script under torchrun and under each of elasticrun's ways to start a rank.

`Runs.records(case)` has what every rank of every life recorded (`scripts/witness.py`), by mode.
Ranks kill themselves at the end of each life but the last, so that later lives are restarts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elasticrun.wire.env import WARM_SERVER
from tests import needs
from tests.harness import ELASTICRUN, LIMIT, TORCHRUN, Launched, World

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
PACKAGES = HERE / "packages"
CUSTOMIZATION = SCRIPTS / "customization"

LAST_LIFE = 2
COMPARED = (0, LAST_LIFE)
"""Lives that run whole. The ones between them end at the script's first line: they only make the
last one a later one."""

RUN_LIMIT = 3 * LIMIT
"""Seconds for one job on a busy machine: it imports torch up to six times."""

FIRST_WORDS = {TORCHRUN: ["-m", "torch.distributed.run"], ELASTICRUN: ["-m", "elasticrun"]}


@dataclass(frozen=True)
class Mode:
    """One way in which ranks come to be."""

    launcher: str
    flags: tuple[str, ...] = ()
    sharers: tuple[int, ...] = (0,)
    """How many ancestors of a rank have its memory layout (`witness.sharers`): none where it was
    executed; its fork server; also that server's guard and the warm process."""


MODES = {
    "torchrun": Mode(TORCHRUN),
    "exec": Mode(ELASTICRUN, ("--launch=exec",)),
    "fork": Mode(ELASTICRUN, sharers=(1,)),
    "warm": Mode(ELASTICRUN, sharers=(2, 3)),
    "parked": Mode(ELASTICRUN, ("--standby=0",), sharers=(1,)),
}

Records = dict[tuple[int, int], dict[str, Any]]
"""What was recorded, by life and rank."""


@dataclass(frozen=True)
class Case:
    """A script with its words; `-m` in front for a module."""

    words: tuple[str, ...]
    customized: bool = False  # with a sitecustomize and a .pth file that run code
    executed: bool = False  # elasticrun may decide to execute its ranks
    ranks: int = 2
    env: Mapping[str, str] = field(default_factory=dict, hash=False)

    def command(self) -> list[str]:
        if self.words[0] == "-m":
            return list(self.words)
        return [str(SCRIPTS / self.words[0]), *self.words[1:]]


@dataclass
class Ran:
    """One mode of a case, when it has ended."""

    code: int
    records: Records
    printed: dict[str, str]  # by "life/rank stream", of whole lives
    console: str


def environment_of_packages(folder: Path, *, customized: bool) -> Path:
    """The interpreter of a virtual environment that has what this one has, and the packages of the
    tests as installed ones."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)],
        check=True,
        timeout=LIMIT,
    )
    place = next(folder.glob("lib/python3*/site-packages"))
    for package in PACKAGES.iterdir():
        place.joinpath(package.name).symlink_to(package)
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(ROOT)]
    place.joinpath("everything.pth").write_text("\n".join(dict.fromkeys(installed)) + "\n")
    if customized:
        for name in ("sitecustomize.py", "fidelity_pth.py"):
            place.joinpath(name).symlink_to(CUSTOMIZATION / name)
        place.joinpath("fidelity.pth").write_text("import fidelity_pth\n")
    return folder / "bin/python"


class Runs:
    """The runs of one test module, in one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pythons: dict[bool, str] = {}
        self._jobs = 0

    def python(self, customized: bool) -> str:
        if customized not in self._pythons:
            folder = self.world.scratch / ("customized" if customized else "environment")
            self._pythons[customized] = str(environment_of_packages(folder, customized=customized))
        return self._pythons[customized]

    def ran(self, case: Case, *modes: str, at_once: bool = True) -> dict[str, Ran]:
        """The case under each of these modes, at the same time or one after the other."""
        self._jobs += 1
        found: dict[str, Ran] = {}
        for batch in [modes] if at_once else [(mode,) for mode in modes]:
            started = {mode: self._start(case, mode) for mode in batch}
            found |= {mode: self._collect(case, mode, job) for mode, job in started.items()}
        return found

    def _out(self, mode: str) -> Path:
        return self.world.scratch / f"job-{self._jobs}" / mode

    def _variables(self, case: Case) -> dict[str, str]:
        return {
            "PYTHONPATH": str(SCRIPTS),
            "HF_HUB_OFFLINE": "1",
            # without it half of torchrun's restarts fail (docs/torchrun.md)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "FIDELITY_LAST_LIFE": str(LAST_LIFE),
            "FIDELITY_BRIEF_LIVES": ",".join(str(n) for n in range(LAST_LIFE) if n not in COMPARED),
            "FIDELITY_CHANGED": "first",
            "FIDELITY_REMOVED": "first",
            WARM_SERVER: "off",
            **case.env,
        }

    def disturbed(
        self, case: Case, restarts: int, disturb: Callable[[psutil.Process], object]
    ) -> Ran:
        """The case with standbys, and with what somebody does to its processes."""
        self._jobs += 1
        job = self._start(case, "parked", restarts)
        disturb(psutil.Process(job.process.pid))
        return self._collect(case, "parked", job)

    def _start(self, case: Case, mode: str, restarts: int = LAST_LIFE) -> Launched:
        how, out = MODES[mode], self._out(mode)
        out.mkdir(parents=True)
        env = {**self._variables(case), "FIDELITY_OUT": str(out)}
        if mode == "warm":
            env |= self._warm(case)
        env["FIDELITY_PARKED"] = "1" if mode == "parked" else ""
        # another process's mount would drop a standby that has read the table of mounts
        apart = ("unshare", "--mount")
        own_mounts = apart if mode == "parked" and not needs.why_not(apart) else ()
        launch = [
            *own_mounts,
            *(self.python(case.customized), *FIRST_WORDS[how.launcher]),
            *("--standalone", f"--nproc-per-node={case.ranks}", f"--max-restarts={restarts}"),
            *(("--restart-backoff=0",) if restarts > LAST_LIFE else ()),
            *("--redirects=3", f"--log-dir={out / 'logs'}", *how.flags, *case.command()),
        ]
        return self.world.command(launch, env=env, cwd=SCRIPTS)

    def _collect(self, case: Case, mode: str, job: Launched) -> Ran:
        code, out = job.wait(RUN_LIMIT), self._out(mode)
        records: Records = {}
        for file in out.glob("life-*-rank-*.json"):
            life, rank = map(int, re.findall(r"\d+", file.name))
            text = file.read_text()
            unique = json.loads(text)["unique"]
            records[life, rank] = {**json.loads(self._plain(text, mode)), "unique": unique}
        printed = {}
        for life, rank in sorted(records):
            for name in ("stdout", "stderr"):
                (file,) = out.glob(f"logs/*/attempt_{life}/{rank}/{name}.log")
                text = file.read_text(errors="replace")
                printed[f"{life}/{rank} {name}"] = self._plain(text, mode)
        return Ran(code, records, printed, job.stdout + job.stderr)

    def _plain(self, text: str, mode: str) -> str:
        """Without what two runs must not share: folders, ports, random names."""
        text = text.replace(str(self._out(mode)), "$OUT")
        text = re.sub(r"\$OUT/logs/[^/\"]+/attempt", "$OUT/logs/RUN/attempt", text)
        return re.sub(r"/fidelity-(effects-)?\w{8}", r"/fidelity-\g<1>RANDOM", text)

    # ------------------------------------------------------------ the warm process

    def _warm(self, case: Case) -> dict[str, str]:
        """The variables of a job that is forked from a warm process of its kind of environment,
        from which another job was forked before."""
        one = ("--one-rank",) if case.ranks == 1 else ()
        place = self.world.scratch / "-".join(["warm", *"c" * case.customized, *one])
        own = {WARM_SERVER: "", "XDG_RUNTIME_DIR": str(place)}
        if not place.exists():
            place.mkdir(mode=0o700)
            env = {**self._variables(case), **own}
            words = [self.python(case.customized), "-m", "elasticrun"]
            started = self.world.command([*words, "warm", *one], env=env, cwd=SCRIPTS)
            started.wait(LIMIT)
            teacher = [*words, "--nproc-per-node=1", str(SCRIPTS / "teacher.py")]
            job = self.world.command(teacher, env=env, cwd=SCRIPTS)
            assert job.wait(LIMIT) == 0, job.stderr
        return own

    def close(self) -> None:
        """End the warm processes."""
        for place in self.world.scratch.glob("warm*"):
            env = {"XDG_RUNTIME_DIR": str(place)}
            words = [self.python("-c" in place.name), "-m", "elasticrun", "warm", "--stop"]
            self.world.command(words, env=env, cwd=SCRIPTS).wait(LIMIT)


@contextmanager
def runs_in(world: World) -> Iterator[Runs]:
    """Runs for the length of a block."""
    made = Runs(world)
    try:
        yield made
    finally:
        made.close()
