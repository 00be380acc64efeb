"""A forked rank sees of itself what `python -u script.py` sees: one row each, compared to exec.

The same probe is run in the same place by exec, by fork, and by a fork server that a warm process
has forked; as a script, as a module, as a folder and as a zip. Rows that differ on purpose stand in
ON_PURPOSE with the reason and with what must be true of the two instead.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import LIMIT, forking, plain_environment, warm_process
from tests.further import cases

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("probe.py")

ON_PURPOSE: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "modules": (
        "threading and what it imports stay: the interpreter waits for threads there",
        lambda by_exec, by_fork: (
            set(by_exec) <= set(by_fork) <= {*by_exec, "threading", "_weakrefset"}
        ),
    ),
    "sys.meta_path": (
        "the finder that gives preloaded modules back stands in front",
        lambda by_exec, by_fork: by_fork == ["_Finder", *by_exec],
    ),
    "hash seed": (
        "the interpreter draws it at its start: one per fork server, and no longer per rank",
        lambda by_exec, by_fork: by_exec != by_fork,
    ),
    "torch: tasks": (
        "OpenBLAS ends its idle thread when a fork begins, and starts it again when it is needed",
        lambda by_exec, by_fork: 1 <= by_fork <= by_exec,
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the probe as a script, a module of a package and a folder."""
    folder = tmp_path_factory.mktemp("place")
    package = folder / "pack" / "inner"
    package.mkdir(parents=True)
    for init in (folder / "pack", package):
        (init / "__init__.py").touch()
    (package / "probe.py").write_text(PROBE.read_text())
    (folder / "probe.py").write_text(PROBE.read_text())
    (folder / "tree").mkdir()
    (folder / "tree" / "__main__.py").write_text(PROBE.read_text())
    return folder


ENTRIES: dict[str, Callable[[Path], Entrypoint]] = {
    "script": lambda place: Entrypoint(EntryKind.SCRIPT, str(place / "probe.py")),
    "module": lambda place: Entrypoint(EntryKind.MODULE, "pack.inner.probe"),
    "folder": lambda place: Entrypoint(EntryKind.SCRIPT, str(place / "tree")),
    "relative folder": lambda place: Entrypoint(EntryKind.SCRIPT, "tree"),
    "settings": lambda place: Entrypoint(EntryKind.SCRIPT, "probe.py"),
    "traced": lambda place: Entrypoint(EntryKind.SCRIPT, "probe.py"),
}

SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONINTMAXSTRDIGITS": "5000",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONNODEBUGRANGES": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONSTARTUP": "/nowhere.py",
    "PYTHONUTF8": "1",
    "PYTHONWARNINGS": "error::BytesWarning,ignore::FutureWarning",
}
"""Of the interpreter, for the kind "settings": it starts with them, as the fork server does."""

OF_KIND = {
    "settings": SETTINGS,
    "traced": {**SETTINGS, "PYTHONDEVMODE": "1", "PYTHONTRACEMALLOC": "2"},
}
"""Where every allocation is traced, an import of torch takes half a minute."""

KEPT = [
    ("script", "fork"),
    ("module", "warm"),
    ("settings", "fork"),
]
"""What `make test` has: how a server came to be, and what kind of thing it runs, are two rules."""


class Pictures:
    """What the probe saw, by entry; each pair of runs is made once."""

    def __init__(self, place: Path, ends: ExitStack) -> None:
        self.place = place
        self._ends = ends
        self._warm: Path | None = None
        self._taken: dict[tuple[str, str], dict[str, Any]] = {}

    def pair(self, kind: str, way: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What an exec'd program saw, and one that was started that way."""
        return self.taken(kind, "exec"), self.taken(kind, way)

    def taken(self, kind: str, way: str) -> dict[str, Any]:
        if (kind, way) not in self._taken:
            self._taken[kind, way] = self._take(kind, way)
        return self._taken[kind, way]

    def _take(self, kind: str, way: str) -> dict[str, Any]:
        entry = ENTRIES[kind](self.place)
        settings = OF_KIND.get(kind, {})
        # what it prints, and where, is part of the picture
        out = self.place / f"{kind}.{'exec' if way == 'exec' else 'fork'}.json"
        out.unlink(missing_ok=True)
        stdout, stderr = self.place / f"{way}.out", self.place / f"{way}.err"
        order = Entrypoint(entry.kind, entry.target, (str(out), "--lr", "0.1"))
        if way == "exec":
            self._exec(order, stdout, stderr, settings)
        elif way == "fork":
            self._fork(order, stdout, stderr, settings, None)
        elif settings:
            with warm_process(self.place / f"{kind}.sock", plain_environment(**settings)) as warm:
                self._fork(order, stdout, stderr, settings, warm)
        else:
            self._fork(order, stdout, stderr, settings, self._shared())
        assert out.exists(), stderr.read_text()
        return json.loads(out.read_text())

    def _shared(self) -> Path:
        """The warm process of all that ask for no settings."""
        if self._warm is None:
            place = self.place / "warm.sock"
            self._warm = self._ends.enter_context(warm_process(place, plain_environment()))
        return self._warm

    def _exec(
        self, entry: Entrypoint, stdout: Path, stderr: Path, settings: dict[str, str]
    ) -> None:
        words = ["-m", entry.target] if entry.kind is EntryKind.MODULE else [entry.target]
        with stdout.open("wb") as out, stderr.open("wb") as err:
            subprocess.run(
                [sys.executable, "-u", *words, *entry.args],
                cwd=self.place,
                env={**plain_environment(**settings), "WORD": "ä\udcff"},
                stdout=out,
                stderr=err,
                start_new_session=True,
                timeout=LIMIT,
                check=True,
            )

    def _fork(
        self,
        entry: Entrypoint,
        stdout: Path,
        stderr: Path,
        settings: dict[str, str],
        warm: Path | None,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place)
            env = plain_environment(**settings)
            with forking(entry, env=env, warm=warm, cold=warm is None) as driver:
                code = driver.run(
                    entry,
                    env={"WORD": "ä\udcff"},
                    stdout=str(stdout),
                    stderr=str(stderr),
                ).code
                assert code == 0, stderr.read_text()


@pytest.fixture(scope="module")
def pictures(place: Path) -> Iterator[Pictures]:
    with ExitStack() as ends:
        yield Pictures(place, ends)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_test_starts_is_born_hearing_signals(number: signal.Signals) -> None:
    """However the tests were started themselves."""
    text = f"import signal, sys; sys.exit(signal.getsignal({int(number)}) is signal.SIG_IGN)"
    assert subprocess.run([sys.executable, "-c", text], timeout=LIMIT).returncode == 0


@pytest.mark.slow
def test_a_run_in_the_background_finds_the_same() -> None:
    """`nohup` has a process born ignoring SIGHUP; tests/conftest.py keeps that from the tests."""
    done = subprocess.run(
        ["nohup", sys.executable, "-m", "pytest", "-q", __file__, "-k", "born_hearing"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def told(by_exec: Any, by_fork: Any) -> str:
    """Both; of long lists what only one has."""
    if isinstance(by_exec, list) and isinstance(by_fork, list) and len(by_exec) > 20:
        more, less = (
            [each for each in one if each not in other]
            for one, other in ((by_exec, by_fork), (by_fork, by_exec))
        )
        return f"only by exec {more}, only by fork {less}, or another order"
    return f"{by_exec} / {by_fork}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"), cases(product(ENTRIES, ("fork", "warm")), kept=KEPT, several=True)
)
def test_it_sees_what_an_exec_sees(pictures: Pictures, kind: str, way: str) -> None:
    by_exec, by_fork = pictures.pair(kind, way)
    assert by_exec.keys() == by_fork.keys()
    wrong = []
    for row, value in by_exec.items():
        if row in ON_PURPOSE:
            reason, holds = ON_PURPOSE[row]
            if not holds(value, by_fork[row]):
                wrong.append(f"{row} ({reason}): {value} / {by_fork[row]}")
        elif by_fork[row] != value:
            wrong.append(f"{row}: {told(value, by_fork[row])}")
    assert not wrong, "\n".join(wrong)
