"""Cores: what the host has, what a container or a scheduler lets this process use, and how many
ranks are to share it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from elasticrun.doctor.verdict import ok, warning
from elasticrun.wire.types import Finding

CHECK: Final = "cores"

LONGEST_PATH: Final = 64
"""Levels of cgroups that are climbed; nobody nests so deep."""


def examine(
    ranks: int, environ: Mapping[str, str], root: Path = Path("/"), host: int | None = None
) -> list[Finding]:
    """`ranks`: on this node. `host`: cores of the machine, counted where none is given."""
    host = host or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    usable = min(float(allowed), quota) if quota else float(allowed)
    seen = f"{usable:.4g} of {host} cores can be used"
    held = [f"affinity: {allowed}"] if allowed < host else []
    held += [f"CPU quota: {quota:.4g}"] if quota and quota < host else []
    if held:
        seen += f" ({', '.join(held)})"
    if held and ranks > usable:
        todo = "ask the container or the scheduler for more cores, or start fewer ranks"
        return [warning(CHECK, f"{seen}, for {ranks} ranks", todo)]
    # With several ranks torchrun and we set it to 1.
    free = ranks == 1 and not environ.get("OMP_NUM_THREADS")
    if quota and quota < allowed and free:
        todo = f"set OMP_NUM_THREADS={max(1, int(quota))}"
        seen += f"; torch starts {allowed} threads, which the quota then holds up"
        return [warning(CHECK, seen, todo)]
    return [ok(CHECK, seen)]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that this process' cgroup (v2 or v1) or one above it may use; None for
    no limit."""
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    found = [quota for folder in _folders(text, root) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _folders(text: str, root: Path) -> Iterator[Path]:
    """The process' cgroup, and those above it, in each hierarchy that can hold a quota."""
    base = root / "sys/fs/cgroup"
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            places = [base, base / "unified"]
        elif "cpu" in controllers.split(","):
            places = [base / "cpu", base / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."][:LONGEST_PATH]
        for place in places:
            # Without a cgroup namespace the path is the host's, and what is mounted is our own.
            yield from (place.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _quota(folder: Path) -> float | None:
    """The limit of one cgroup in cores, None if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: the word max
        return None
