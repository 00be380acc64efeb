"""What a test needs of this machine; where it cannot be had, the test is skipped and says why, or
fails where `.ci/run` has said that everything must be there."""

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
"""`required` in this variable: what `scripts/lab_packages.sh` installs, and what it takes to use
it, must be there."""

_MOUNT = 'mount -t tmpfs -o size={size} none "$0" && exec "$@"'


def lacking(why: str) -> NoReturn:
    """This test cannot run here."""
    if os.environ.get(LAB) == "required":
        pytest.fail(f"{why}; {LAB}=required does not let this test be skipped", pytrace=False)
    pytest.skip(why)


def packages(*names: str) -> None:
    """These are installed, else the module's tests are skipped. None is imported: that would cost
    every test process seconds while it collects."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)


def program(*names: str, package: str, path: str | None = None) -> str:
    """Where the first of these programs is; `package` is Debian's, `path` replaces PATH."""
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    lacking(f"no {' or '.join(names)} here (Debian: apt-get install {package})")


def hooked_backends() -> None:
    """torch's flight recorder has what backends do that record nothing themselves."""
    from torch._C import _distributed_c10d

    # that a hook records into a recorder of the backend's own, and not of all backends, is as new
    if not hasattr(_distributed_c10d, "_reset_fr_trace"):
        pytest.skip("torch attaches no hook to such a backend before 2.15")


def browser() -> str:
    """Where a browser is that shows pages to nobody, for playwright; it brings none of its own."""
    return program(
        "chromium-headless-shell", "chromium", "google-chrome", package="chromium-headless-shell"
    )


def several_hosts(*, lines: bool = False) -> None:
    """Hosts of network namespaces (elasticrun.testing.hosts); with `lines`, slow ones too."""
    try:
        hosts.require()
        if lines:
            hosts.require_lines()
    except hosts.Impossible as why:
        lacking(str(why))


def namespaces(*apart: str) -> None:
    """Namespaces of a process' own, by these options of unshare."""
    if why := _why_not(("unshare", *apart)):
        lacking(f"no namespaces ({' '.join(apart)}) here: {why}")


def tmpfs(folder: Path, size: str) -> tuple[str, ...]:
    """What stands before a command that is to find an empty file system of this size (`8m`) at
    this folder. Nobody else sees it, and it goes with the command, whose pid is the first one's."""
    before = ("unshare", "-rm", "sh", "-c", _MOUNT.format(size=size), str(folder))
    if why := _why_not(before):
        lacking(f"no tmpfs can be mounted in a namespace here: {why}")
    return before


@contextlib.contextmanager
def freezer() -> Iterator[Callable[[int], None]]:
    """Puts a process into a cgroup of its own (v2) and freezes that."""
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
def _why_not(before: tuple[str, ...]) -> str:
    """Why no command can run behind this, "" if one can."""
    try:
        done = subprocess.run(
            [*before, "true"], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except OSError as wrong:
        return str(wrong)
    if not done.returncode:
        return ""
    return done.stderr.strip() or f"{before[0]} ended with {done.returncode}"
