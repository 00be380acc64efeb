"""The interface of all accelerators, and the findings that several of them share.

Also finds out which packages are installed, and for which devices torch was built, from files and
without importing them.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from elasticrun.host.system.processes import read_process
from elasticrun.wire.types import Finding, Level

MEMORY_SHARE: Final = 0.3
"""A device fails its check if other processes hold this share of its memory or more (dlrover-run's
value). Raise it if something that belongs to the node keeps memory there.
"""

MAX_NAMED: Final = 8
"""Maximum number of processes named by one finding."""

MAX_GENERATIONS: Final = 64
"""Maximum number of generations of ancestors that `descends_from_us` follows."""


_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=[ \t]*['\"]([^'\"\n]*)['\"]", re.MULTILINE)
"""A line of torch's version.py that names a platform it was built for."""


class Build(NamedTuple):
    """The versions of the platforms that the installed torch was built for; "" for the others, or
    if there is no torch."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""


def torch_build(folder: str | None = None) -> Build:
    """What torch was built for, from its version.py, without importing it."""
    if folder is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return Build()
        folder = os.path.dirname(spec.origin)
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            values = dict(_BUILT_FOR.findall(file.read()))
    except (OSError, ValueError):
        return Build()
    return Build(**values)


def installed(distribution: str) -> str:
    """The version of an installed distribution, "" if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Load(NamedTuple):
    """The load of a device."""

    percent: int = -1  # of recent time in which it computed; -1: unknown
    mib: int = 0  # of its memory in use


class Accelerator(ABC):
    """A kind of device that ranks compute on; one class per vendor, stateless."""

    name: ClassVar[str]
    """The value of --accelerator."""
    device: ClassVar[str]
    """torch's name of the device: cpu, cuda, npu."""
    backend: ClassVar[str]
    """torch's name of its backend for collectives: gloo, nccl, hccl."""
    visible_variable: ClassVar[str]
    """The variable that restricts which devices a process sees; "" if none."""

    @abstractmethod
    def count(self, environ: Mapping[str, str]) -> int | None:
        """Number of devices that a process with this environment sees; None if only its library
        knows."""

    @abstractmethod
    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        """Findings on the devices, for `wanted` ranks on this node (0: unknown).

        Checks only the devices that this environment sees. Blocks at most for the time limit of the
        child that it queries.
        """

    def loads(self, environ: Mapping[str, str], limit: float) -> tuple[Load, ...]:
        """The load of each device that a process with this environment sees, in the order in which
        it sees them; () if that is unknown. Blocks for `limit` seconds at most."""
        return ()


def count_finding(
    check: str, noun: str, found: int, wanted: int, more: str = "", variable: str = ""
) -> Finding:
    """The finding on the number of devices: `found` are visible, `wanted` are needed."""
    have = f"{found} {noun}{'' if found == 1 else 's'}"
    tail = f" ({more})" if more else ""
    if found >= wanted:
        need = f" for {wanted} rank{'' if wanted == 1 else 's'}" if wanted else ""
        return Finding(check, Level.OK, f"{have}{need}{tail}")
    seen = f"only {have} can be seen, {wanted} are requested{tail}"
    todo = (
        f"look at the driver and at {variable}, start fewer ranks, or use --accelerator=cpu if "
        "the ranks do not use them"
    )
    return Finding(check, Level.FAILED, seen, todo)


def memory_finding(
    check: str, device: str, used: int, total: int, processes: Sequence[tuple[int, int | None]]
) -> Finding | None:
    """The finding on memory (bytes) that other processes hold on a device; None if they hold little
    and none of them computes there.

    processes: pid and bytes (None: unknown) of those that compute there. If this process started
    one of them, the job is already running and the memory in use is its own: None. Inside a
    container a driver may report the host's pids. So if one of the pids does not exist here, the
    process may be this job's own, and the finding is only a warning.
    """
    ours = {pid: descends_from_us(pid) for pid, _ in processes}
    if any(ours.values()):
        return None
    unknown = sum(found is None for found in ours.values())
    share = used / total if total > 0 else 0.0
    if share < MEMORY_SHARE and not processes:
        return None
    names = [
        f"process {pid}" + (f" ({held / 2**20:.0f} MiB)" if held is not None else "")
        for pid, held in processes
    ]
    named = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        named += f" and {len(names) - MAX_NAMED} more"
    amount = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB of its memory"
    much = share >= MEMORY_SHARE
    limit = f", limit {MEMORY_SHARE * 100:g} %" if much else ""
    held_by = f"held by {named or 'processes that cannot be seen from here'}"
    seen = f"{device}: {amount} ({share * 100:.0f} %{limit}) {held_by}{_doubt(unknown, len(ours))}"
    todo = "end what another job has left there, or give this job other devices"
    if unknown:
        todo = f"see on the host itself whose they are; {todo}"
    state = Level.FAILED if much and not unknown else Level.WARNING
    return Finding(check, state, seen, todo)


def _doubt(unknown: int, processes: int) -> str:
    """The clause about processes whose pids do not exist here; "" if all exist."""
    if not unknown:
        return ""
    which = "it is" if processes == 1 else f"{unknown} of these {processes} are"
    return (
        f"; {which} not seen from here (ended since, or numbered by a host around this container) "
        "and may be this job's own"
    )


def descends_from_us(pid: int) -> bool | None:
    """Whether a process is this one or a descendant; None if unknown, because it or an ancestor is
    not in /proc: it has exited, or its pid is that of a host whose processes this container does
    not see."""
    for _ in range(MAX_GENERATIONS):
        if pid == os.getpid():
            return True
        process = read_process(pid)
        if process is None:
            return None
        pid = process.parent
        if pid <= 0:  # no further ancestors
            return False
    return None


def cores() -> int:
    """Number of cores that this process may run on, as torch counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cpu(Accelerator):
    """The cores of this node, used if there is no other accelerator, or on request. Ranks share
    them, so any number of ranks is possible."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"
    visible_variable = ""

    def count(self, environ: Mapping[str, str]) -> int | None:
        return cores()

    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        return ()  # `doctor` checks cores, quota and memory
