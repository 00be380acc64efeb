"""Checks what ranks need on a host: cores, shared memory, and limits of a process.

Cores: those of the host, and those that a container or a scheduler allows. Shared memory: data
loaders pass batches through it, NCCL and gloo put ring buffers in it. Limits (`ulimit`): ranks
inherit them from the agent.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from elasticrun.host.doctor.verdict import GIB, MIB, amount, failed, ok, warning
from elasticrun.wire.types import Finding

CORES: Final = "cores"

MAX_CGROUP_DEPTH: Final = 64
"""Maximum number of nested cgroups that are followed."""


def examine_cores(
    ranks: int, environ: Mapping[str, str], root: Path = Path("/"), host: int | None = None
) -> list[Finding]:
    """Check whether the usable cores suffice. `ranks`: number of ranks on this node. `host`: number
    of cores of the machine; None: count them."""
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
        return [warning(CORES, f"{seen}, for {ranks} ranks", todo)]
    # With several ranks torchrun and elasticrun set OMP_NUM_THREADS to 1.
    free = ranks == 1 and not environ.get("OMP_NUM_THREADS")
    if quota and quota < allowed and free:
        todo = f"set OMP_NUM_THREADS={max(1, int(quota))}"
        seen += f"; torch starts {allowed} threads, which the quota throttles"
        return [warning(CORES, seen, todo)]
    return [ok(CORES, seen)]


class CpuQuota(NamedTuple):
    """A limit of CPU time, and the folder of the cgroup that has it."""

    cores: float
    folder: Path

    def used(self) -> float | None:
        """Seconds of CPU time that the processes of the cgroup have used; None if unknown."""
        try:
            words = (self.folder / "cpu.stat").read_text().split()
            if "usage_usec" in words:  # v2
                return int(words[words.index("usage_usec") + 1]) / 1e6
            folder = self.folder
            if not (folder / "cpuacct.usage").exists():  # a hierarchy of its own
                folder = Path(f"{folder}/".replace("/cgroup/cpu/", "/cgroup/cpuacct/"))
            return int((folder / "cpuacct.usage").read_text()) / 1e9
        except (OSError, ValueError, IndexError):
            return None


def lowest_quota(root: Path = Path("/")) -> CpuQuota | None:
    """The lowest CPU quota of this process's cgroup (v2, v1) and its ancestors; None: no limit."""
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    found = ((_quota(folder), folder) for folder in _folders(text, root))
    limits = [CpuQuota(cores, folder) for cores, folder in found if cores is not None]
    return min(limits, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The lowest CPU quota, in cores; None: no limit."""
    lowest = lowest_quota(root)
    return None if lowest is None else lowest.cores


def _folders(text: str, root: Path) -> Iterator[Path]:
    """Folders of the process's cgroup and its ancestors, in each hierarchy that can have a CPU
    quota. `text`: the content of /proc/self/cgroup."""
    base = root / "sys/fs/cgroup"
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            places = [base, base / "unified"]
        elif "cpu" in controllers.split(","):
            places = [base / "cpu", base / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."][:MAX_CGROUP_DEPTH]
        for place in places:
            # In a container without a cgroup namespace, the path is the host's, but `place` is this
            # cgroup's folder.
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


SHM: Final = "shared memory"

SHM_PER_RANK: Final = 128 * MIB
"""Bytes that one rank with a few data loader workers needs at least; NCCL alone takes about 10 MiB
for every other rank on the node.
"""

DOCKER_DEFAULT: Final = 64 * MIB
"""Bytes of /dev/shm in a container without any setting."""

NO_SHM: Final = MIB

BIGGER: Final = (
    "make it larger (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium "
    "Memory at /dev/shm)"
)


def examine_shm(ranks: int, root: Path = Path("/")) -> list[Finding]:
    """Check whether shared memory suffices for `ranks` ranks on this node (0: unknown)."""
    place = root / "dev/shm"
    try:
        found = os.statvfs(place)
    except OSError as wrong:
        seen = f"there is no /dev/shm: {(wrong.strerror or str(wrong)).lower()}"
        return [warning(SHM, seen, f"data loaders with workers fail; {BIGGER}")]
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    seen = f"{amount(free)} of {amount(total)} are free in /dev/shm"
    if not os.access(place, os.W_OK | os.X_OK):
        return [failed(SHM, f"{seen}, and this user cannot write there", "chmod 1777 /dev/shm")]
    if total and free < NO_SHM:
        return [failed(SHM, seen, "remove files of dead processes there, or " + BIGGER)]
    ranks = max(1, ranks)
    wanted = ranks * SHM_PER_RANK
    if total == DOCKER_DEFAULT:
        return [warning(SHM, f"{seen}, Docker's default, which is too little", BIGGER)]
    if total and free < wanted:
        whose = "a rank" if ranks == 1 else f"{ranks} ranks"
        seen = f"{seen}; data loaders of {whose} may take {amount(wanted)}"
        todo = f"remove files of dead processes there, or {BIGGER}"
        return [warning(SHM, seen, todo if free < total // 2 else BIGGER)]
    return [ok(SHM, seen)]


OPEN_FILES: Final = "open files"
LOCKED: Final = "locked memory"

FILES: Final = 1024
"""The default soft limit of distributions; enough for a rank with its data loaders and a few
hundred peers."""

FEWEST: Final = 128
"""With fewer open files, a rank cannot even open its libraries, sockets and pipes."""

SPARE: Final = 512
"""Number of files that a process needs besides connections; the first node's c10d store has a
connection per rank.
"""


def examine_limits(ranks: int, root: Path = Path("/")) -> list[Finding]:
    """Check the limits of open files and locked memory. `ranks`: number of ranks of the whole job
    at its largest."""
    try:
        return [*_open_files(ranks), *_locked(root)]
    except OSError as error:
        return [ok(OPEN_FILES, f"limits cannot be read here (prlimit: {error.strerror})")]


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
        return [failed(OPEN_FILES, f"{seen}, which is too few for any rank", todo)]
    if soft < wanted:
        what = f"the store of {ranks} ranks" if wanted > FILES else "a rank with data loaders"
        return [warning(OPEN_FILES, f"{seen}; {what} may need {wanted}", todo)]
    return [ok(OPEN_FILES, seen)]


def _locked(root: Path) -> list[Finding]:
    """Check the limit of locked memory. Only InfiniBand needs much, because it pins its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = f"ulimit -l is {'unlimited' if soft == resource.RLIM_INFINITY else amount(soft)}"
    cards = _names(root / "sys/class/infiniband")
    if not cards:
        return [ok(LOCKED, f"{seen}; without InfiniBand no more is needed")]
    seen += f", and there is InfiniBand ({', '.join(cards[:4])})"
    if soft == resource.RLIM_INFINITY or soft >= 16 * GIB:
        return [ok(LOCKED, seen)]
    todo = "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a unit)"
    return [warning(LOCKED, f"{seen}, whose buffers cannot be registered", todo)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _word(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
