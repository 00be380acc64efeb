"""What every kind of accelerator can be asked, and the findings that several of them make; what is
installed for which hardware, read from files instead of importing it."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from elasticrun.host.system.processes import read_process
from elasticrun.wire.types import Finding, Level

MEMORY_SHARE: Final = 0.3
"""A device of whose memory others hold this share or more fails (dlrover-run's figure); raise it
where something that belongs to the node keeps memory there."""

MAX_NAMED: Final = 8
"""Most processes that one finding names."""

MAX_GENERATIONS: Final = 64
"""How far up the parents of a process are followed."""


_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=[ \t]*['\"]([^'\"\n]*)['\"]", re.MULTILINE)
"""In torch's version.py."""


class Build(NamedTuple):
    """What the installed torch was built for; "" where it was not (or where there is no torch)."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""


def torch_build(folder: str | None = None) -> Build:
    """What torch was built for, read from its version.py without importing it."""
    if folder is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return Build()
        folder = os.path.dirname(spec.origin)
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            told = dict(_BUILT_FOR.findall(file.read()))
    except (OSError, ValueError):
        return Build()
    return Build(**told)


def installed(distribution: str) -> str:
    """The version of an installed distribution, "" where it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Load(NamedTuple):
    """How busy a device is."""

    percent: int = -1  # of the last moments in which it computed; -1: not known
    mib: int = 0  # of its memory in use


class Accelerator(ABC):
    """A kind of device that ranks compute on; one class a vendor, without state of its own."""

    name: ClassVar[str]
    """The word of --accelerator."""
    device: ClassVar[str]
    """torch's word for the device: cpu, cuda, npu."""
    backend: ClassVar[str]
    """torch's word for its collectives: gloo, nccl, hccl."""
    visible_variable: ClassVar[str]
    """The variable that narrows what a process sees; "" where there is none."""

    @abstractmethod
    def count(self, environ: Mapping[str, str]) -> int | None:
        """How many a process with this environment sees; None where only its library can tell."""

    @abstractmethod
    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        """What is right and wrong with them, for `wanted` ranks on this node (0: not known).

        Only what this environment sees is judged. Blocks, but for the limit of its child at most.
        """

    def loads(self, environ: Mapping[str, str], limit: float) -> tuple[Load, ...]:
        """How busy each is that a process with this environment sees, in its order; () where that
        is not told within `limit` seconds, for which it blocks at most."""
        return ()


def enough(
    check: str, noun: str, found: int, wanted: int, more: str = "", variable: str = ""
) -> Finding:
    """The finding on the number of devices: `found` are visible, `wanted` are asked for."""
    have = f"{found} {noun}{'' if found == 1 else 's'}"
    tail = f" ({more})" if more else ""
    if found >= wanted:
        need = f" for {wanted} rank{'' if wanted == 1 else 's'}" if wanted else ""
        return Finding(check, Level.OK, f"{have}{need}{tail}")
    seen = f"only {have} can be seen, {wanted} are asked for{tail}"
    todo = (
        f"look at the driver and at {variable}, ask for fewer ranks, or say --accelerator=cpu if "
        "the ranks do not use them"
    )
    return Finding(check, Level.FAILED, seen, todo)


def in_use(
    check: str, device: str, used: int, total: int, processes: Sequence[tuple[int, int | None]]
) -> Finding | None:
    """The finding on memory (bytes) that strangers hold on a device, None where nobody does.

    processes: pid and bytes (None: not told) of those that compute there. Where one of them was
    started by this process, the job runs already and what is in use is its own. A driver may count
    processes as the host does while we run in a container: where one of them is not found here,
    none of them is surely another's, and that is a warning at most.
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
    """The clause on processes that are not found here, "" where all are."""
    if not unknown:
        return ""
    which = "it is" if processes == 1 else f"{unknown} of these {processes} are"
    return (
        f"; {which} not seen from here (ended since, or numbered by a host around this container) "
        "and may be this job's own"
    )


def descends_from_us(pid: int) -> bool | None:
    """Whether this process, or one that it has started, started that one; None where that cannot
    be told: there is no such process here (it has ended, its id is of a host whose processes this
    container does not see), or no /proc that shows it."""
    for _ in range(MAX_GENERATIONS):
        if pid == os.getpid():
            return True
        process = read_process(pid)
        if process is None:
            return None
        pid = process.parent
        if pid <= 0:  # its line of parents has ended
            return False
    return None


def cores() -> int:
    """Cores that this process may be scheduled on, as torch counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cpu(Accelerator):
    """The cores of this node, where there is nothing else or the user says so; ranks share them,
    so no number of ranks is too large."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"
    visible_variable = ""

    def count(self, environ: Mapping[str, str]) -> int | None:
        return cores()

    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        return ()  # quota, cores and memory of the machine are the doctor's own checks
