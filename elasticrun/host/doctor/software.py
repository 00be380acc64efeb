"""Reports versions of torch, CUDA, NCCL and the driver, and devices, without importing torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from elasticrun.host.accelerators.base import Build, installed, torch_build
from elasticrun.host.doctor.verdict import ok, warning
from elasticrun.wire.types import Finding

CHECK: Final = "torch"

_NCCL: Final = tuple(f"nvidia-nccl-cu{major}" for major in (13, 12, 11))


def examine(root: Path = Path("/")) -> list[Finding]:
    """One finding with all versions, and `no` for each item that is missing."""
    version = installed("torch")
    if not version:
        todo = "pip install torch there, or run elasticrun with the Python that has it"
        return [warning(CHECK, f"{sys.executable} has no torch", todo)]
    nccl = next((found for name in _NCCL if (found := installed(name))), "")
    facts = (*_software(version, torch_build(), nccl), *_machine(root))
    return [ok(CHECK, ", ".join(facts))]


def _software(version: str, build: Build, nccl: str) -> tuple[str, ...]:
    if build.hip:
        return f"torch {version}", f"ROCm {build.hip}", "torch's bundled RCCL"
    if build.xpu:
        return f"torch {version}", f"XPU {build.xpu}"
    if build.cuda:
        return f"torch {version}", f"CUDA {build.cuda}", f"NCCL {nccl or 'bundled in torch'}"
    return f"torch {version}", "no CUDA", "no NCCL"


def _machine(root: Path) -> tuple[str, ...]:
    """NVIDIA's driver and devices; the other accelerators have their own checks."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return "no NVIDIA driver", "no NVIDIA device"
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)", text)
    devices = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _devices(root))
    counted = f"{devices} NVIDIA device{'s' * (devices != 1)}" if devices else "no NVIDIA device"
    return f"driver {found[1] if found else 'of an unknown version'}", counted


def _devices(root: Path) -> list[Path]:
    try:
        return list((root / "dev").iterdir())
    except OSError:
        return []
