"""Ascend NPUs: device files, torch_npu's metadata, and the table printed by `npu-smi info`.

Written against the documented interface (torch_npu registers the device `npu` and the backend
`hccl`; npu-smi prints two lines per chip) and tested with a stand-in; never run on the hardware.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from elasticrun.host.accelerators.base import Accelerator, count_finding, installed, memory_finding
from elasticrun.host.accelerators.child_output import NoAnswer, output_of
from elasticrun.wire.types import Finding, Level

NPU_SMI_LIMIT: Final = 20.0
"""Seconds for npu-smi, which queries every chip in turn."""

_DEVICE = re.compile(r"davinci[0-9]+\Z")
_CHIP = re.compile(r"\|\s*(\d+)\s+(\S.*?)\s*\|\s*(\w+)\s*\|")
"""First line of a chip: NPU and name, health."""
_USE = re.compile(r"\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f:.]+\s*\|(.*)\|")
"""Second line of a chip: chip (and physical id), bus id, then shares and amounts."""
_AMOUNT = re.compile(r"(\d+)\s*/\s*(\d+)")
_PROCESS = re.compile(r"\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|[^|]*\|\s*(\d+)\s*\|")
"""A line of the second table: NPU and chip, process, name, megabytes."""


@dataclass(frozen=True, slots=True)
class _Chip:
    npu: int
    chip: int
    name: str
    health: str  # OK, Warning, Alarm, Critical, UNKNOWN
    used: int  # megabytes
    total: int
    processes: tuple[tuple[int, int], ...]  # pid, megabytes

    @property
    def title(self) -> str:
        return f"NPU {self.npu} chip {self.chip}"


class Ascend(Accelerator):
    """NPUs with torch_npu and HCCL. `dev`: the folder of their device files."""

    name = "ascend"
    device = "npu"
    backend = "hccl"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"

    def __init__(self, dev: str = "/dev") -> None:
        self._dev = dev

    def present(self) -> bool:
        """Whether torch can use NPUs here: torch_npu is installed and there are device files."""
        return bool(self._devices()) and bool(installed("torch_npu"))

    def count(self, environ: Mapping[str, str]) -> int | None:
        """Number of device files that ASCEND_RT_VISIBLE_DEVICES selects."""
        return len(visible(environ.get(self.visible_variable), self._devices()))

    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        """Findings on the number, health and memory of the visible NPUs.

        Assumes that the numbers in ASCEND_RT_VISIBLE_DEVICES follow the order of npu-smi's table.
        """
        listed = environ.get(self.visible_variable)
        found = len(visible(listed, self._devices()))
        version = installed("torch_npu")
        more = f"torch_npu {version}" if version else "torch_npu is not installed"
        number = count_finding("NPU count", "NPU", found, wanted, more, self.visible_variable)
        tool = shutil.which("npu-smi", path=environ.get("PATH"))
        try:
            if tool is None:
                raise NoAnswer("it is not on the PATH")
            chips = parse(output_of([tool, "info"], environ, NPU_SMI_LIMIT))
        except NoAnswer as why:
            return number, _not_queried(tool, str(why))
        seen = [chips[index] for index in visible(listed, len(chips))]
        health = [finding for chip in seen if (finding := _health(chip)) is not None]
        memory = [finding for chip in seen if (finding := _memory(chip)) is not None]
        return (
            number,
            *(health or [Finding("NPU health", Level.OK, "npu-smi reports OK for every NPU")]),
            *(memory or [Finding("NPU memory", Level.OK, "no other process uses NPU memory")]),
        )

    def _devices(self) -> int:
        try:
            return sum(_DEVICE.match(name) is not None for name in os.listdir(self._dev))
        except OSError:
            return 0


def visible(listed: str | None, devices: int) -> list[int]:
    """Which of `devices` devices ASCEND_RT_VISIBLE_DEVICES selects, as documented by CANN:
    comma-separated numbers, up to the first entry that is not a number or not a device."""
    if listed is None:
        return list(range(devices))
    seen: list[int] = []
    for entry in listed.split(","):
        number = re.match(r"[0-9]+", entry)
        if number is None or int(number[0]) >= devices or int(number[0]) in seen:
            break
        seen.append(int(number[0]))
        if number[0] != entry:  # another character ends the list
            break
    return seen


def parse(table: str) -> list[_Chip]:
    """The chips in the output of `npu-smi info`. Raises NoAnswer if there are none."""
    chips: list[_Chip] = []
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    head: tuple[int, str, str] | None = None
    for line in table.splitlines():
        if process := _PROCESS.match(line):
            npu, chip, pid, amount = (int(word) for word in process.groups())
            held.setdefault((npu, chip), []).append((pid, amount))
        elif (use := _USE.match(line)) and head is not None:
            amounts = [(int(a), int(b)) for a, b in _AMOUNT.findall(use[2]) if int(b) > 0]
            used, total = amounts[-1] if amounts else (0, 0)  # HBM is last, if present
            chips.append(_Chip(head[0], int(use[1]), head[1], head[2], used, total, ()))
            head = None
        elif first := _CHIP.match(line):
            head = (int(first[1]), first[2], first[3])
    if not chips:
        raise NoAnswer("its table lists no chip")
    return [replace(c, processes=tuple(held.get((c.npu, c.chip), ()))) for c in chips]


def _not_queried(tool: str | None, why: str) -> Finding:
    state, todo = Level.WARNING, "put npu-smi (of the driver) on the PATH"
    if tool is not None:
        state = Level.FAILED
        todo = "see whether npu-smi info answers; a driver that hangs needs a reboot"
    return Finding("NPU health", state, f"npu-smi could not be queried: {why}", todo)


def _health(chip: _Chip) -> Finding | None:
    word = chip.health.upper()
    if word == "OK":
        return None
    state = Level.FAILED if word in ("ALARM", "CRITICAL") else Level.WARNING
    seen = f"{chip.title} ({chip.name}): npu-smi reports {chip.health}"
    todo = f"see npu-smi info -t health -i {chip.npu} -c {chip.chip}"
    return Finding("NPU health", state, seen, todo)


def _memory(chip: _Chip) -> Finding | None:
    held = [(pid, amount * 2**20) for pid, amount in chip.processes]
    return memory_finding("NPU memory", chip.title, chip.used * 2**20, chip.total * 2**20, held)
