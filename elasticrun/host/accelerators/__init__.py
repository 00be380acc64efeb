"""The devices that ranks compute on: one small class per vendor, without importing torch.

`accelerator_for` returns the accelerator of this node, which knows torch's name for the device, the
backend of its collectives, the number of devices, and what is wrong with them. Drivers and vendors'
tools are queried in child processes with a time limit, because their calls can block forever, and a
process that loads them keeps their memory. Forbidden here: torch, a driver's library in this
process, and anything that resets, configures or occupies a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elasticrun.host.accelerators.ascend import Ascend
from elasticrun.host.accelerators.base import Accelerator, Cpu, Load, torch_build
from elasticrun.host.accelerators.nvidia import Nvidia

__all__ = ["ALIASES", "NAMES", "UNSUPPORTED", "Accelerator", "Load", "accelerator_for", "loads"]

_KINDS: Final[Mapping[str, type[Accelerator]]] = {"nvidia": Nvidia, "ascend": Ascend, "cpu": Cpu}

NAMES: Final = tuple(_KINDS)
"""The values of --accelerator."""

ALIASES: Final[Mapping[str, str]] = {"nvidia.com/gpu": "nvidia", "ascend-npu": "ascend"}
"""dlrover-run's names, and ours for the same device."""

UNSUPPORTED: Final = ("mthreads.com/gpu", "metax-tech.com/gpu")
"""dlrover-run's names of devices that have no class here."""


def accelerator_for(word: str, environ: Mapping[str, str]) -> Accelerator:
    """The accelerator named by `word` (one of NAMES or ALIASES), or the one of this node for "".

    Automatic choice: NVIDIA if torch is built for CUDA and a GPU is visible (or may be: only CUDA
    can tell), Ascend if torch_npu is installed and its devices are visible, else the CPU, even if
    there are accelerators of other vendors. With "" this blocks while a driver does, at most
    `nvidia.NVML_LIMIT` seconds; with a torch without CUDA it queries no driver. Raises ValueError
    for any other word.
    """
    name = ALIASES.get(word, word)
    if name in _KINDS:
        return _KINDS[name]()
    if name:
        raise ValueError(f"{word!r} is not a known accelerator: use {', '.join(NAMES)}")
    nvidia, ascend = Nvidia(), Ascend()
    if torch_build().cuda and nvidia.count(environ) != 0:
        return nvidia
    if ascend.present() and ascend.count(environ) != 0:
        return ascend
    return Cpu()


def loads(word: str, environ: Mapping[str, str], limit: float) -> tuple[Load, ...]:
    """The load of the devices named by `word` ("": NVIDIA's); see `Accelerator.loads`."""
    return _KINDS.get(ALIASES.get(word, word) or "nvidia", Cpu)().loads(environ, limit)
