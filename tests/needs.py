"""Requirements of tests on this machine. If one is missing, the test is skipped with the reason, or
fails if `.ci/run` requires all of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NoReturn

import pytest

from elasticrun.testing import hosts
from tests.harness import LIMIT, await_true

LAB: Final = "ELASTICRUN_LAB"
"""`required` in this variable: what `scripts/lab_packages.sh` installs, and the rights to use it,
must be available."""

_MOUNT = 'mount -t tmpfs -o size={size} none "$0" && exec "$@"'


def lacking(why: str) -> NoReturn:
    """Skip this test, or fail it if everything is required."""
    if os.environ.get(LAB) == "required":
        pytest.fail(f"{why}; {LAB}=required does not let this test be skipped", pytrace=False)
    pytest.skip(why)


def packages(*names: str) -> None:
    """Skip the module's tests unless these packages are installed. None is imported: that would
    cost every test process seconds during collection."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)


def program(*names: str, package: str, path: str | None = None) -> str:
    """The path of the first of these programs; `package` is Debian's, `path` replaces PATH."""
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    lacking(f"no {' or '.join(names)} here (Debian: apt-get install {package})")


def hooked_backends() -> None:
    """Require that torch's flight recorder records backends that do not record themselves."""
    from torch._C import _distributed_c10d

    # hooks that record into the backend's own recorder, not that of all backends, are as new as
    # this
    if not hasattr(_distributed_c10d, "_reset_fr_trace"):
        pytest.skip("torch attaches no hook to such a backend before 2.15")


def browser() -> str:
    """The path of a headless browser for playwright, which brings none of its own."""
    return program(
        "chromium-headless-shell", "chromium", "google-chrome", package="chromium-headless-shell"
    )


def several_hosts(*, lines: bool = False) -> None:
    """Require hosts of network namespaces (elasticrun.testing.hosts); with `lines`, faulty lines
    too."""
    try:
        hosts.require()
        if lines:
            hosts.require_lines()
    except hosts.Impossible as why:
        lacking(str(why))


def namespaces(*apart: str) -> None:
    """Require private namespaces, given as options of unshare."""
    if why := why_not(("unshare", *apart)):
        lacking(f"no namespaces ({' '.join(apart)}) here: {why}")


def tmpfs(folder: Path, size: str) -> tuple[str, ...]:
    """The words before a command that mount an empty file system of this size (`8m`) at this
    folder. Only the command sees it, it disappears with the command, and the command keeps the
    pid."""
    before = ("unshare", "-rm", "sh", "-c", _MOUNT.format(size=size), str(folder))
    if why := why_not(before):
        lacking(f"no tmpfs can be mounted in a namespace here: {why}")
    return before


@contextlib.contextmanager
def freezer() -> Iterator[Callable[[int], None]]:
    """A function that puts a process into its own cgroup (v2) and freezes it."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    root = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    if root is None:
        lacking("no cgroup v2 is mounted here")
    folder = root / f"elasticrun-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as wrong:
        lacking(f"no cgroup can be made here: {wrong.strerror}")

    def freeze(pid: int) -> None:
        (folder / "cgroup.procs").write_text(f"{pid}")
        (folder / "cgroup.freeze").write_text("1")
        await_true(lambda: "frozen 1" in (folder / "cgroup.events").read_text(), "frozen cgroup")

    try:
        yield freeze
    finally:
        (folder / "cgroup.freeze").write_text("0")
        for pid in (folder / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        await_true(lambda: "populated 0" in (folder / "cgroup.events").read_text(), "empty cgroup")
        folder.rmdir()


@functools.cache
def why_not(before: tuple[str, ...]) -> str:
    """Why no command can run with this prefix, "" if one can."""
    try:
        done = subprocess.run(
            [*before, "true"], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except OSError as wrong:
        return str(wrong)
    if not done.returncode:
        return ""
    return done.stderr.strip() or f"{before[0]} ended with {done.returncode}"
