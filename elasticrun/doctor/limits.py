"""Limits of a process (`ulimit`) that ranks inherit from the agent."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from elasticrun.doctor.verdict import GIB, amount, failed, ok, warning
from elasticrun.wire.types import Finding

OPEN_FILES: Final = "open files"
LOCKED: Final = "locked memory"

FILES: Final = 1024
"""What distributions give, and enough for a rank with its data loaders and a few hundred peers."""

FEWEST: Final = 128
"""Fewer, and a rank cannot even open its libraries, sockets and pipes."""

SPARE: Final = 512
"""Files that a process needs beside one connection for every rank: the first node's c10d store has
one of each."""


def examine(ranks: int, root: Path = Path("/")) -> list[Finding]:
    """`ranks`: of the whole job at its largest."""
    return [*_open_files(ranks), *_locked(root)]


def _open_files(ranks: int) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"ulimit -n is {_word(soft)}"
    if soft == resource.RLIM_INFINITY:
        return [ok(OPEN_FILES, seen)]
    wanted = max(FILES, ranks + SPARE)
    there = hard == resource.RLIM_INFINITY or hard >= wanted
    todo = f"ulimit -n {wanted}" + (
        "" if there else f" (the hard limit is {_word(hard)}: limits.conf, LimitNOFILE= of a unit)"
    )
    if soft < FEWEST:
        return [failed(OPEN_FILES, f"{seen}, with which no rank can work", todo)]
    if soft < wanted:
        what = f"the store of {ranks} ranks" if wanted > FILES else "a rank with data loaders"
        return [warning(OPEN_FILES, f"{seen}; {what} may need {wanted}", todo)]
    return [ok(OPEN_FILES, seen)]


def _locked(root: Path) -> list[Finding]:
    """InfiniBand pins the buffers it sends; nothing else of a job asks for much."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = f"ulimit -l is {'unlimited' if soft == resource.RLIM_INFINITY else amount(soft)}"
    cards = _names(root / "sys/class/infiniband")
    if not cards:
        return [ok(LOCKED, f"{seen}; no InfiniBand device needs more")]
    seen += f", and there is InfiniBand ({', '.join(cards[:4])})"
    if soft == resource.RLIM_INFINITY or soft >= 16 * GIB:
        return [ok(LOCKED, seen)]
    todo = "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a unit)"
    return [warning(LOCKED, f"{seen}, which cannot register its buffers", todo)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _word(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
