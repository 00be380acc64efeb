"""CPU and memory limits for the processes of one node, through cgroups v1 or v2.

A `Group` is a folder in each hierarchy that it needs; its name identifies the process that made it.
A keeper process removes the group when that process ends. If the keeper is killed too, the next
process that makes a group removes it, as with the hosts of `hosts.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from elasticrun.testing import processes
from elasticrun.testing.hosts import Impossible, LabError

ROOT: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 100_000
"""Period over which CPU time is counted; the kernel's default."""

KILL_LIMIT: Final = 60.0
"""Seconds for the processes of a group to exit after SIGKILL."""

ENTER: Final = (
    'left=$1; shift; while [ "$left" -gt 0 ]; do '
    'echo $$ >"$1" || exit; shift; left=$((left - 1)); done; exec "$@"'
)
"""Shell script that enters cgroups and then runs a command. Arguments: the number of cgroup.procs
files, the files, the command."""


def require() -> None:
    """Raise Impossible if no limits can be set here."""
    if why := _why_none():
        raise Impossible(f"CPU time and memory cannot be limited here: {why}")


def _places() -> list[Path]:
    return [ROOT, *(path for path in ROOT.iterdir() if path.is_dir())] if ROOT.is_dir() else []


def folders(name: str) -> list[Path]:
    """The folders of the group with this name, one in each hierarchy that has it."""
    return [place / name for place in _places() if (place / name / "cgroup.procs").exists()]


class Group:
    """A cgroup with the limits of one node. Raises Impossible, LabError. Must be closed."""

    def __init__(self, what: str) -> None:
        require()
        sweep()
        self.name = processes.new_name(what)
        self._keeper = processes.start_keeper(__name__, self.name)
        try:
            for place in {_hierarchy("cpu"), _hierarchy("memory")}:
                (place / self.name).mkdir()
        except OSError as error:
            self.close()
            raise LabError(f"a cgroup could not be made: {error}") from None

    def cpus(self, cores: float | None) -> None:
        """Limit CPU time to this many cores; None: no limit."""
        quota = None if cores is None else int(cores * PERIOD_US)
        self._write("cpu", "cpu.max", f"{quota or 'max'} {PERIOD_US}", "cpu.cfs_quota_us", quota)

    def memory(self, nbytes: int | None) -> None:
        """Limit memory to this many bytes, beyond which the kernel kills a process; None: no limit.
        Memory that processes allocated before they were added does not count. The processes get no
        swap."""
        folder = _hierarchy("memory") / self.name
        swap, none = folder / "memory.memsw.limit_in_bytes", folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("-1")  # it must not be below the other limit
        self._write("memory", "memory.max", str(nbytes or "max"), "memory.limit_in_bytes", nbytes)
        if swap.exists() and nbytes is not None:
            swap.write_text(str(nbytes))
        if none.exists():
            none.write_text("0")

    def _write(self, what: str, file: str, text: str, old: str, value: int | None) -> None:
        folder = _hierarchy(what) / self.name
        try:
            if (folder / file).exists():
                (folder / file).write_text(text)
            else:
                (folder / old).write_text(str(-1 if value is None else value))
        except OSError as error:
            raise LabError(f"{what} could not be limited ({text}): {error.strerror}") from None

    def add(self, pids: Iterable[int]) -> None:
        """Add these processes, and with them their future children."""
        for pid in pids:
            for folder in folders(self.name):
                with contextlib.suppress(ProcessLookupError):
                    (folder / "cgroup.procs").write_text(str(pid))

    def prefix(self) -> list[str]:
        """Words to put before a command, to run it in this group (they exec it)."""
        files = [str(folder / "cgroup.procs") for folder in folders(self.name)]
        return ["sh", "-c", ENTER, "sh", str(len(files)), *files]

    def close(self) -> None:
        """Kill the group's processes and remove the group. Idempotent."""
        remove(self.name)
        self._keeper.communicate()


def keep(prefix: str) -> None:
    """Remove all groups whose names begin with `prefix`; called by the keeper."""
    for name in _names():
        if name.startswith(prefix):
            with contextlib.suppress(OSError):  # another process removed it first
                remove(name)


def sweep() -> None:
    """Remove the groups whose makers have ended."""
    for name in _names():
        if processes.is_orphaned(name):
            with contextlib.suppress(OSError):
                remove(name)


def remove(name: str) -> None:
    """Kill the processes of the group with this name and remove it."""
    processes.kill_all(functools.partial(members, name), KILL_LIMIT)
    for folder in folders(name):
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                os.rmdir(below)


def members(name: str) -> list[int]:
    """The processes in the group with this name."""
    found: set[int] = set()
    for folder in folders(name):
        for file in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(map(int, file.read_text().split()))
    return sorted(found)


def _names() -> list[str]:
    found = {name for place in _places() for name in os.listdir(place)}
    return sorted(filter(processes.is_owned, found))


def _hierarchy(controller: str) -> Path:
    """The folder of the hierarchy that has this controller."""
    old = ROOT / controller
    return old if (old / "cgroup.procs").exists() else ROOT


@functools.cache
def _why_none() -> str:
    if os.geteuid() != 0:
        return "that needs root"
    for controller in ("cpu", "memory"):
        place = _hierarchy(controller)
        if not os.access(place / "cgroup.procs", os.W_OK):
            return f"there is no cgroup that can be written for {controller} under {ROOT}"
        if place == ROOT:
            try:
                (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                return f"{ROOT} does not delegate {controller}: {error.strerror}"
    return ""
