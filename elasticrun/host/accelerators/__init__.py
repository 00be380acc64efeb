"""WHAT RANKS COMPUTE ON: one small class a vendor, found out without importing torch.

`of` gives the accelerator of this node: its word for torch, the backend of its collectives, how
many there are, and what is wrong with them. Drivers and vendors' tools are asked in throw-away
children with a time limit, because their calls can block for good and what loads them keeps their
memory. Forbidden here: torch, a driver's library in this process, and anything that resets,
configures or occupies a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elasticrun.host.accelerators.ascend import Ascend
from elasticrun.host.accelerators.base import Accelerator, Cpu, Load, torch_build
from elasticrun.host.accelerators.nvidia import Nvidia

__all__ = ["ALIASES", "NAMES", "UNSUPPORTED", "Accelerator", "Load", "loads", "of"]

_KINDS: Final[Mapping[str, type[Accelerator]]] = {"nvidia": Nvidia, "ascend": Ascend, "cpu": Cpu}

NAMES: Final = tuple(_KINDS)
"""The words of --accelerator."""

ALIASES: Final[Mapping[str, str]] = {"nvidia.com/gpu": "nvidia", "ascend-npu": "ascend"}
"""dlrover-run's words for the same."""

UNSUPPORTED: Final = ("mthreads.com/gpu", "metax-tech.com/gpu")
"""Words of dlrover-run for which there is no class here."""


def of(word: str, environ: Mapping[str, str]) -> Accelerator:
    """The accelerator that `word` names (one of NAMES or ALIASES), or with "" the one of this node.

    Found by itself: NVIDIA where torch is built for CUDA and a GPU is visible (or only CUDA could
    tell), Ascend where its devices and torch_npu are there and visible, else the CPU, also where
    there are accelerators of other vendors. With "" this can block for as long as a driver does
    (`nvidia.NVML_LIMIT`); torch without CUDA asks nobody.
    Raises ValueError for any other word.
    """
    name = ALIASES.get(word, word)
    if name in _KINDS:
        return _KINDS[name]()
    if name:
        raise ValueError(f"{word!r} is no accelerator known here: use {', '.join(NAMES)}")
    nvidia, ascend = Nvidia(), Ascend()
    if torch_build().cuda and nvidia.count(environ) != 0:
        return nvidia
    if ascend.present() and ascend.count(environ) != 0:
        return ascend
    return Cpu()


def loads(word: str, environ: Mapping[str, str], limit: float) -> tuple[Load, ...]:
    """How busy the devices are that `word` names, with "" NVIDIA's; see `Accelerator.loads`."""
    return _KINDS.get(ALIASES.get(word, word) or "nvidia", Cpu)().loads(environ, limit)
