"""Queries NVML about this node's GPUs and prints one JSON object; run by path in a child process.

    python -P nvidia_child.py count|examine|loads LIMIT

`count` lists the GPUs, `examine` describes each with its health, `loads` also reports their load.
In `examine`, a GPU that does not answer has an `error`, and a value that a GPU, a driver or a
release of NVML does not know is null. About LIMIT seconds after the start the kernel kills this
process, so that it does not outlive a killed caller.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pynvml

MAX_GPUS = 64
MAX_PROCESSES = 32
"""Maximum number of GPUs, and of processes per GPU, that are listed; today a node has at most 16
GPUs."""

GONE = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_IRQ_ISSUE,
    pynvml.NVML_ERROR_TIMEOUT,
)
"""Errors that mean that the GPU itself is broken, not that it lacks a feature."""


def answer_or_none(query: Callable[[], Any]) -> Any:
    """The answer, or None if this GPU, driver or NVML has none. Raises NVMLError if the GPU is
    broken (GONE)."""
    try:
        return query()
    except (AttributeError, pynvml.NVMLLibraryMismatchError):
        return None  # another version of pynvml or the driver, without this function
    except pynvml.NVMLError as error:
        if error.value in GONE:
            raise
        return None


def as_text(text: Any) -> str:
    """A text from NVML, which older releases of pynvml return as bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def count() -> dict[str, Any]:
    """UUIDs in NVML's order, which is that of nvidia-smi, and whether any GPU is in MIG mode."""
    uuids, mig = [], False
    for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuids.append(as_text(pynvml.nvmlDeviceGetUUID(handle)))
        mig = mig or in_mig(handle)
    return {"uuids": uuids, "mig": mig}


def in_mig(handle: Any) -> bool:
    mode = answer_or_none(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    return mode is not None and mode[0] == 1


def examine() -> dict[str, Any]:
    """The driver's version, and identity and health of every GPU."""
    driver = answer_or_none(lambda: as_text(pynvml.nvmlSystemGetDriverVersion()))
    gpus = [gpu(index) for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS))]
    return {"driver": driver or "", "gpus": gpus}


def gpu(index: int) -> dict[str, Any]:
    """Identity and health of one GPU, as far as it answers."""
    seen: dict[str, Any] = {"index": index, "error": ""}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        seen["uuid"] = as_text(pynvml.nvmlDeviceGetUUID(handle))
        seen["name"] = as_text(pynvml.nvmlDeviceGetName(handle))
        seen["mig"] = in_mig(handle)
        seen |= memory(handle) | errors(handle) | clocks(handle)
        seen["links"] = links(handle)
    except pynvml.NVMLError as error:
        seen["error"] = str(error)
    return seen


def loads() -> dict[str, Any]:
    """The result of `count`, and for each GPU [percent of the time in use (-1: unknown), bytes in
    use]."""
    seen = []
    for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = answer_or_none(lambda handle=handle: pynvml.nvmlDeviceGetUtilizationRates(handle))  # type: ignore[misc]
        amount = answer_or_none(lambda handle=handle: pynvml.nvmlDeviceGetMemoryInfo(handle))  # type: ignore[misc]
        seen.append([-1 if used is None else used.gpu, 0 if amount is None else amount.used])
    return {**count(), "loads": seen}


def memory(handle: Any) -> dict[str, Any]:
    """Bytes in use and in total, and the compute processes: [pid, bytes or null]."""
    amount = answer_or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    listed = answer_or_none(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return {
        "used": amount.used if amount is not None else 0,
        "total": amount.total if amount is not None else 0,
        "processes": [[one.pid, one.usedGpuMemory] for one in listed[:MAX_PROCESSES]],
    }


def errors(handle: Any) -> dict[str, Any]:
    """Uncorrected ECC errors since the driver was loaded, and memory that must be replaced."""
    rows = answer_or_none(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    return {
        "uncorrected": answer_or_none(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "retiring": answer_or_none(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
        "remapping": None if rows is None else rows[2],
        "remap_failed": None if rows is None else rows[3],
    }


def clocks(handle: Any) -> dict[str, Any]:
    """Why the clocks are reduced (a list, empty if they are not), and the temperature (°C)."""
    reasons = answer_or_none(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:  # drivers before 535 use the older name
        reasons = answer_or_none(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    slow = {
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "software thermal slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "hardware thermal slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return {
        "slowed": [name for name, bit in slow.items() if (reasons or 0) & bit],
        "temperature": answer_or_none(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
    }


def links(handle: Any) -> list[int]:
    """The state of each NVLink of this GPU: 1 up, 0 down."""
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = answer_or_none(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[misc]
        if state is not None:
            states.append(int(state))
    return states


def main(argv: list[str]) -> int:
    """Print the answer, or an error as one line on stderr; returns the exit code."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(float(argv[1])) + 1)
    try:
        pynvml.nvmlInit()
        answer = {"count": count, "examine": examine, "loads": loads}[argv[0]]()
    except pynvml.NVMLError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
