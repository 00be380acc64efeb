"""What the state of a node's GPUs and network ports means: a fault that forbids ranks, or a notice.

A fault is what only a reset of the GPU or a reboot can clear, as the driver itself reports it: a
GPU that is lost, a recovery action, or one of the Xids in FATAL_XIDS. Everything else is a notice:
most Xids are errors of the application, and a link that is down may be a spare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from elasticrun.wire.messages import MAX_NOTICES

RESET: Final = "reset the GPU (nvidia-smi --gpu-reset) or reboot"
REBOOT: Final = "reboot the node"

FATAL_XIDS: Final[Mapping[int, tuple[str, str]]] = {
    46: ("GPU stopped processing", RESET),
    62: ("internal micro-controller halt", RESET),
    64: ("GPU memory remapping failure", RESET),
    79: ("GPU has fallen off the bus", REBOOT),
    95: ("uncontained memory error", RESET),
    110: ("security fault error", RESET),
    119: ("GSP RPC timeout", RESET),
    120: ("GSP error", RESET),
    136: ("link training failed", RESET),
    140: ("unrecovered ECC error", RESET),
    143: ("GPU initialization error", RESET),
    155: ("NVLink error defined by software", RESET),
    158: ("GPU fatal timeout", RESET),
}
"""Xids whose immediate action is RESET_GPU or RESTART_BM in NVIDIA's Xid catalog of October 2025
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), with what to do. Two with RESET_GPU
are left out: 109 (a context switch timeout, which a hanging kernel of the application causes as
well) and 156 (a retirement that waits for the next reset, while the GPU works)."""

OTHER_XIDS: Final[Mapping[int, str]] = {
    13: "graphics engine exception, mostly of the application",
    31: "GPU memory page fault, mostly of the application",
    43: "GPU stopped processing, mostly for an error of the application",
    45: "preemptive cleanup after another error",
    48: "double bit ECC error",
    63: "GPU memory remapping event",
    69: "graphics engine class error",
    74: "NVLink error",
    92: "high rate of corrected memory errors",
    94: "contained memory error",
    109: "context switch timeout",
    121: "C2C error",
    137: "NVLink privilege error",
    149: "NVLink error (NETIR)",
    154: "GPU recovery action changed",
    156: "resource retirement event",
}
"""Names of others from the same catalog, for people."""

RECOVERY: Final = {1: RESET, 2: REBOOT, 6: REBOOT, 7: REBOOT}
"""NVML's recovery actions (nvmlDeviceGpuRecoveryAction_t) after which the GPU cannot be used: GPU
reset, node reboot, bus reset, system reboot. The others let running work end first."""

MAX_HOLDERS: Final = 8
"""Maximum number of processes that a sentence names."""

SLOW_AFTER: Final = 3
"""Consecutive states in which a GPU is slowed down, before that is a notice; its end takes as
many."""


class GpuState(Struct, frozen=True):
    """One GPU, as `watch_child` prints it."""

    index: int
    uuid: str = ""
    lost: str = ""  # the error of a GPU that does not answer
    xids: tuple[int, ...] = ()
    ecc: bool = False  # there were uncorrected memory errors
    recovery: int = 0
    slowed: tuple[str, ...] = ()
    links: int = 0
    down: int = 0


class NicState(Struct, frozen=True):
    """One network port that was up at the start."""

    name: str
    up: bool
    errors: dict[str, int] = {}  # by counter: increase since the start


Holder = tuple[int, int, int | None]
"""A process that holds memory of a GPU: index of the GPU, pid, bytes (None: unknown)."""


class DeviceState(Struct, frozen=True):
    """All devices of a node, and who uses them."""

    gpus: tuple[GpuState, ...] = ()
    nics: tuple[NicState, ...] = ()
    processes: tuple[Holder, ...] = ()


class GpuProcesses(Struct, frozen=True):
    """The processes that hold memory of GPUs."""

    processes: tuple[Holder, ...] = ()

    def held_by(self, pids: Collection[int]) -> str:
        """Which of these processes hold memory, as a clause; "" if none does."""
        held = [
            f"process {pid} holds {'' if size is None else f'{size / 2**30:.3g} GiB of '}GPU {gpu}"
            for gpu, pid, size in self.processes
            if pid in pids
        ]
        more = len(held) - MAX_HOLDERS
        return ", ".join(held[:MAX_HOLDERS]) + (f" and {more} more" if more > 0 else "")


class DeviceJudge:
    """Judges the states of one node's devices, in order."""

    def __init__(self) -> None:
        self._slow: dict[int, int] = {}  # by GPU: consecutive slow states, up to twice SLOW_AFTER
        self._shown: set[int] = set()  # GPUs with a notice that they are slowed down

    def judge(
        self, state: DeviceState, used: Collection[int] | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """The fault ("": none) and the notices. `used`: the GPUs that ranks see, by index; None:
        all."""
        gpus = [gpu for gpu in state.gpus if used is None or gpu.index in used]
        faults = [fault for gpu in gpus for fault in _faults(gpu)]
        notices = [notice for gpu in gpus for notice in (*_notices(gpu), *self._slowed(gpu))]
        notices += [notice for nic in state.nics for notice in _nic_notices(nic)]
        return faults[0] if faults else "", tuple(notices[:MAX_NOTICES])

    def _slowed(self, gpu: GpuState) -> tuple[str, ...]:
        count = self._slow.get(gpu.index, 0)
        self._slow[gpu.index] = count = (
            min(SLOW_AFTER, count + 1) if gpu.slowed else max(0, count - 1)
        )
        if count == SLOW_AFTER:
            self._shown.add(gpu.index)
        elif count == 0:
            self._shown.discard(gpu.index)
        return (f"GPU {gpu.index} is slowed down by heat or power",) * (gpu.index in self._shown)


def _faults(gpu: GpuState) -> list[str]:
    title = f"GPU {gpu.index}"
    faults = [f"{title} does not answer ({gpu.lost}); {REBOOT}"] if gpu.lost else []
    for xid in gpu.xids:
        if xid in FATAL_XIDS:
            name, todo = FATAL_XIDS[xid]
            faults.append(f"{title} reports Xid {xid} ({name}); {todo}")
    if gpu.recovery in RECOVERY:
        faults.append(f"the driver of {title} asks for its recovery; {RECOVERY[gpu.recovery]}")
    return faults


def _notices(gpu: GpuState) -> list[str]:
    title = f"GPU {gpu.index}"
    xids = [xid for xid in gpu.xids if xid not in FATAL_XIDS]
    notices = [
        f"{title} reports Xid {xid}" + (f" ({OTHER_XIDS[xid]})" if xid in OTHER_XIDS else "")
        for xid in xids
    ]
    if gpu.ecc:
        notices.append(f"{title} has had uncorrected memory errors since this agent started")
    if gpu.recovery and gpu.recovery not in RECOVERY:
        notices.append(f"the driver of {title} asks for a reset when its work is done")
    if gpu.down:
        notices.append(f"{title}: {gpu.down} of its {gpu.links} NVLinks have gone down")
    return notices


def _nic_notices(nic: NicState) -> list[str]:
    notices = [] if nic.up else [f"network port {nic.name} has gone down"]
    for counter, count in sorted(nic.errors.items()):
        # in powers of ten, so that a growing count is not a new notice each time
        at_least = 10 ** (len(str(count)) - 1)
        more = "" if at_least == 1 else f" by {at_least} or more"
        notices.append(f"network port {nic.name}: {counter} has risen{more}")
    return notices
