"""Shared memory: data loaders hand batches over in it, NCCL and gloo have rings there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from elasticrun.doctor.verdict import MIB, amount, failed, ok, warning
from elasticrun.wire.types import Finding

CHECK: Final = "shared memory"

PER_RANK: Final = 128 * MIB
"""What one rank with some data loader workers takes, or more; NCCL alone takes about 10 MiB for
every other rank on its node."""

DOCKER_DEFAULT: Final = 64 * MIB
"""What a container has whose maker said nothing about it."""

NONE: Final = MIB

BIGGER: Final = (
    "make it bigger (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium "
    "Memory at /dev/shm)"
)


def examine(ranks: int, root: Path = Path("/")) -> list[Finding]:
    """Whether so many ranks of this node (0: not known) have enough of it below `root`."""
    place = root / "dev/shm"
    try:
        found = os.statvfs(place)
    except OSError as wrong:
        seen = f"there is no /dev/shm: {(wrong.strerror or str(wrong)).lower()}"
        return [warning(CHECK, seen, f"data loaders with workers fail; {BIGGER}")]
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    seen = f"{amount(free)} of {amount(total)} are free in /dev/shm"
    if not os.access(place, os.W_OK | os.X_OK):
        return [failed(CHECK, f"{seen}, and this user cannot write there", "chmod 1777 /dev/shm")]
    if total and free < NONE:
        return [failed(CHECK, seen, "remove what dead processes have left there, or " + BIGGER)]
    ranks = max(1, ranks)
    wanted = ranks * PER_RANK
    if total == DOCKER_DEFAULT:
        return [warning(CHECK, f"{seen}, docker's default, which is too little", BIGGER)]
    if total and free < wanted:
        whose = "a rank" if ranks == 1 else f"{ranks} ranks"
        seen = f"{seen}; data loaders of {whose} may take {amount(wanted)}"
        todo = f"remove what dead processes have left there, or {BIGGER}"
        return [warning(CHECK, seen, todo if free < total // 2 else BIGGER)]
    return [ok(CHECK, seen)]
