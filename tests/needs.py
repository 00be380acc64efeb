"""What a test needs of this machine; where it cannot be had, the test is skipped and says why."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from elasticrun.testing import hosts
from tests.harness import LIMIT

_MOUNT = 'mount -t tmpfs -o size={size} none "$0" && exec "$@"'


def several_hosts(*, lines: bool = False) -> None:
    """Hosts of network namespaces (elasticrun.testing.hosts); with `lines`, slow ones too."""
    try:
        hosts.require()
        if lines:
            hosts.require_lines()
    except hosts.Impossible as why:
        pytest.skip(str(why))


def namespaces(*apart: str) -> None:
    """Namespaces of a process' own, by these options of unshare."""
    if why := _why_not(("unshare", *apart)):
        pytest.skip(f"no namespaces ({' '.join(apart)}) here: {why}")


def tmpfs(folder: Path, size: str) -> tuple[str, ...]:
    """What stands before a command that is to find an empty file system of this size (`8m`) at
    this folder. Nobody else sees it, and it goes with the command, whose pid is the first one's."""
    before = ("unshare", "-rm", "sh", "-c", _MOUNT.format(size=size), str(folder))
    if why := _why_not(before):
        pytest.skip(f"no tmpfs can be mounted in a namespace here: {why}")
    return before


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
