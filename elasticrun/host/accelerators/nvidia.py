"""NVIDIA GPUs, as reported by NVML (queried in a child, see `nvidia_child`)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticrun.host.accelerators.base import Accelerator, Load, count_finding, memory_finding
from elasticrun.host.accelerators.child_output import NoAnswer, json_of
from elasticrun.wire.types import Finding, Level

NVML_LIMIT: Final = 20.0
"""Seconds for querying NVML; a node with eight GPUs without persistence mode takes about ten."""

ORPHAN_LIMIT: Final = 30.0
"""Seconds by which the child's own limit exceeds ours, so that a slow child is reported as a
timeout and not as one that printed nothing.
"""

MIB: Final = 1024 * 1024

_CHILD: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvidia_child.py")

_DRIVER_FILES: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl")


class Nvidia(Accelerator):
    """GPUs with CUDA and NCCL."""

    name = "nvidia"
    device = "cuda"
    backend = "nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"

    def count(self, environ: Mapping[str, str]) -> int | None:
        """Number of visible GPUs according to NVML; 0 without a driver. None if NVML does not
        answer, or with MIG, whose instances only CUDA counts."""
        listed = environ.get(self.visible_variable)
        if listed is not None and not listed.strip():
            return 0
        try:
            answer = _query("count", environ)
        except NoAnswer:
            return None if has_driver() else 0
        uuids = answer.get("uuids")
        if not isinstance(uuids, list) or answer.get("mig"):
            return None
        seen = visible(listed, [str(uuid) for uuid in uuids])
        return None if seen is None else len(seen)

    def loads(self, environ: Mapping[str, str], limit: float) -> tuple[Load, ...]:
        """See Accelerator.loads. Reported by NVML; () with MIG."""
        if not has_driver():
            return ()
        try:
            answer: Any = _query("loads", environ, limit)
            ours = visible(environ.get(self.visible_variable), answer["uuids"])
            found = [Load(int(percent), used // MIB) for percent, used in answer["loads"]]
        except (NoAnswer, KeyError, TypeError, ValueError):
            return ()
        return tuple(found[index] for index in ours) if ours and not answer.get("mig") else ()

    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        """Findings on the number, memory, ECC, pages, clocks and NVLinks of the visible GPUs."""
        try:
            answer = _query("examine", environ)
            driver, gpus = str(answer.get("driver")), _gpus(answer)
        except NoAnswer as why:
            return (_not_queried(str(why)),)
        listed = environ.get(self.visible_variable)
        ours = visible(listed, [gpu.uuid for gpu in gpus])
        seen = gpus if ours is None else [gpus[index] for index in ours]
        findings = [_count(seen, wanted, driver, counted=ours is not None)]
        answering = [gpu for gpu in seen if not gpu.error]
        for name, judge, fine in _CHECKS if answering else ():
            bad = [found for gpu in answering if (found := judge(gpu)) is not None]
            findings += bad or [Finding(name, Level.OK, fine)]
        return (*findings, *(_unanswered(gpu) for gpu in seen if gpu.error))


def has_driver() -> bool:
    """Whether a driver is loaded, or its device node is available in this container."""
    return any(os.path.exists(path) for path in _DRIVER_FILES)


def visible(listed: str | None, uuids: Sequence[str]) -> list[int] | None:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES selects, in its order, interpreted as CUDA and
    torch do: the first entry decides whether all are numbers or all are names, and the list ends at
    the first entry that is not a device. A duplicate empties it.

    None if it names MIG instances, which are not in NVML's list of GPUs.
    """
    if listed is None:
        return list(range(len(uuids)))
    if listed.startswith("MIG-"):
        return None
    is_named = listed.startswith("GPU-")
    entries: list[str | int] = []
    for item in listed.split(","):
        entry = item if is_named else _number(item.strip())
        if entry in entries:  # also of devices that do not exist
            return []
        if entry is None or (is_named and not item.startswith("GPU-")):
            break
        entries.append(entry)
    seen: list[int] = []
    for entry in entries:
        index = _named(entry, uuids) if isinstance(entry, str) else entry
        if index is None or index >= len(uuids):
            break
        if index in seen:
            return []
        seen.append(index)
    return seen


def _number(entry: str) -> int | None:
    """The number that an entry begins with; None without one, or if it is negative."""
    number = re.match(r"[+-]?[0-9]+", entry)
    return int(number[0]) if number is not None and int(number[0]) >= 0 else None


def _named(entry: str, uuids: Sequence[str]) -> int | None:
    """The index of the only GPU whose UUID begins like this; None if there is none."""
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU as reported by the child; a value is None if the GPU or its driver does not report
    it."""

    index: int  # NVML's and nvidia-smi's
    error: str = ""  # it does not answer: the rest is unknown
    uuid: str = ""
    name: str = ""
    mig: bool = False
    used: int = 0  # bytes
    total: int = 0
    processes: tuple[tuple[int, int | None], ...] = ()  # pid, bytes
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    retiring: int | None = None  # 1: pages wait to be retired
    remapping: int | None = None  # 1: rows wait to be remapped
    remap_failed: int | None = None
    slowed: tuple[str, ...] = ()
    temperature: int | None = None  # °C
    links: tuple[int, ...] = ()  # 1 up, 0 down

    @property
    def title(self) -> str:
        return f"GPU {self.index}"


def _query(what: str, environ: Mapping[str, str], limit: float = 0.0) -> dict[str, object]:
    """Query NVML in a child. `limit`: seconds, 0.0: NVML_LIMIT. Raises NoAnswer."""
    limit = limit or NVML_LIMIT
    command = [sys.executable, "-P", _CHILD, what, str(limit + ORPHAN_LIMIT)]
    return json_of(command, environ, limit)


def _gpus(answer: Mapping[str, Any]) -> list[_Gpu]:
    try:
        return [
            _Gpu(
                **gpu
                | {name: tuple(gpu.get(name, ())) for name in ("slowed", "links")}
                | {"processes": tuple((pid, held) for pid, held in gpu.get("processes", ()))}
            )
            for gpu in answer["gpus"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise NoAnswer("it sent an unexpected answer") from None


def _count(seen: Sequence[_Gpu], wanted: int, driver: str, *, counted: bool) -> Finding:
    names = ", ".join(sorted({gpu.name for gpu in seen if gpu.name}))
    more = "; ".join(part for part in (names, f"driver {driver}" if driver else "") if part)
    if not counted or any(gpu.mig for gpu in seen):
        sentence = f"GPUs are partitioned by MIG, and only CUDA counts the instances ({more})"
        return Finding("GPU count", Level.OK, sentence)
    usable = sum(not gpu.error for gpu in seen)
    return count_finding("GPU count", "GPU", usable, wanted, more, Nvidia.visible_variable)


def _not_queried(why: str) -> Finding:
    if has_driver():
        seen = f"NVML could not be queried: {why}"
        todo = (
            "see whether nvidia-smi answers, and look for Xid messages in the kernel log; a driver "
            "that hangs needs a reboot"
        )
    else:
        seen = f"there is no NVIDIA driver on this node ({why})"
        todo = "load it, pass the devices into this container, or use --accelerator=cpu"
    return Finding("GPU count", Level.FAILED, seen, todo)


def _unanswered(gpu: _Gpu) -> Finding:
    todo = "look for Xid messages in the kernel log; reset the GPU or reboot"
    seen = f"{gpu.title} does not answer: {gpu.error}"
    return Finding("GPU count", Level.FAILED, seen, todo)


def _memory(gpu: _Gpu) -> Finding | None:
    return memory_finding("GPU memory", gpu.title, gpu.used, gpu.total, gpu.processes)


def _ecc(gpu: _Gpu) -> Finding | None:
    if not gpu.uncorrected:
        return None
    seen = f"{gpu.title}: {gpu.uncorrected} uncorrected memory errors since the driver was loaded"
    todo = f"{_reset(gpu)}; replace the GPU if they recur"
    return Finding("GPU ECC", Level.FAILED, seen, todo)


def _pages(gpu: _Gpu) -> Finding | None:
    if gpu.remap_failed:
        seen = f"{gpu.title}: a bad row of its memory could not be remapped"
        return Finding("GPU pages", Level.FAILED, seen, "replace the GPU")
    if not gpu.remapping and not gpu.retiring:
        return None
    what = "rows wait to be remapped" if gpu.remapping else "pages wait to be retired"
    seen = f"{gpu.title}: bad {what} and are still in use"
    return Finding("GPU pages", Level.WARNING, seen, _reset(gpu))


def _reset(gpu: _Gpu) -> str:
    return f"reset it (nvidia-smi --gpu-reset -i {gpu.index}) or reboot"


def _clocks(gpu: _Gpu) -> Finding | None:
    if not gpu.slowed:
        return None
    heat = f" at {gpu.temperature} °C" if gpu.temperature is not None else ""
    seen = f"{gpu.title} runs slower than it could{heat}: {', '.join(gpu.slowed)}"
    todo = "look at the cooling and the power supply of this node (nvidia-smi -q -d PERFORMANCE)"
    return Finding("GPU clocks", Level.WARNING, seen, todo)


def _nvlink(gpu: _Gpu) -> Finding | None:
    down = sum(state == 0 for state in gpu.links)
    if not down or down == len(gpu.links):
        return None
    seen = f"{gpu.title}: {down} of its {len(gpu.links)} NVLinks are down"
    todo = (
        f"compare nvidia-smi nvlink -s -i {gpu.index} with a good node's; normal only where a "
        "bridge was never fitted"
    )
    return Finding("NVLink", Level.WARNING, seen, todo)


_CHECKS: Final[tuple[tuple[str, Callable[[_Gpu], Finding | None], str], ...]] = (
    ("GPU memory", _memory, "no other process uses GPU memory"),
    ("GPU ECC", _ecc, "no uncorrected memory errors since the driver was loaded"),
    ("GPU pages", _pages, "no bad memory waits to be replaced"),
    ("GPU clocks", _clocks, "no GPU is slowed down by heat or power"),
    ("NVLink", _nvlink, "no GPU has some of its links down"),
)
"""Checks of every GPU: the finding's name, the check, and the sentence if every GPU passes."""
