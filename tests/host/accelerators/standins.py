"""A pynvml and an npu-smi that answer from a file, for the children that ask the real ones."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from tests import needs

PYNVML = '''
"""Answers as NVML would, from the JSON file that $STANDIN_NVML names."""
import json, os, select, signal
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_IRQ_ISSUE = 11
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
NVML_NVLINK_MAX_LINKS = 36
nvmlClocksThrottleReasonHwSlowdown = 0x08
nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
nvmlEventTypeDoubleBitEccError = 0x2
nvmlEventTypeXidCriticalError = 0x8
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

TEXTS = {3: "Not Supported", 10: "Timeout", 12: "NVML Shared Library Not Found", 15: "GPU is lost",
         18: "RM has detected an NVML/RM version mismatch."}


class NVMLLibraryMismatchError(Exception):
    pass


class NVMLError(Exception):
    def __init__(self, value):
        self.value = value

    def __str__(self):
        return TEXTS[self.value]


with open(os.environ["STANDIN_NVML"]) as _file:
    NODE = json.load(_file)


def nvmlInit():
    if NODE.get("hangs"):
        signal.pause()
    if NODE.get("broken"):
        raise NVMLError(NODE["broken"])


def nvmlSystemGetDriverVersion():
    return "570.1"


def nvmlDeviceGetCount():
    return len(NODE["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    with open(os.environ["STANDIN_NVML"]) as file:  # a test may have changed it
        gpu = json.load(file)["gpus"][index]
    if gpu.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return gpu


def answer(handle, name):
    if name not in handle:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    if handle[name] == "lost":
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return handle[name]


def nvmlDeviceGetUUID(handle):
    return answer(handle, "uuid")


def nvmlDeviceGetName(handle):
    return answer(handle, "name")


def nvmlDeviceGetMigMode(handle):
    return [answer(handle, "mig")] * 2


def nvmlDeviceGetMemoryInfo(handle):
    used, total = answer(handle, "memory")
    return SimpleNamespace(used=used, total=total)


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=answer(handle, "busy"), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in answer(handle, "held")]


def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return answer(handle, "ecc")


def nvmlDeviceGetRetiredPagesPendingStatus(handle):
    return answer(handle, "retiring")


def nvmlDeviceGetRemappedRows(handle):
    return tuple(answer(handle, "rows"))


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return answer(handle, "reasons")


if not NODE.get("old"):
    nvmlDeviceGetCurrentClocksEventReasons = nvmlDeviceGetCurrentClocksThrottleReasons


def nvmlDeviceGetTemperature(handle, sensor):
    return answer(handle, "temperature")


def nvmlDeviceGetFieldValues(handle, fields):
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    value = SimpleNamespace(uiVal=answer(handle, "recovery"))
    return [SimpleNamespace(nvmlReturn=0, value=value)]


def nvmlDeviceGetSupportedEventTypes(handle):
    return answer(handle, "events")


def nvmlEventSetCreate():
    return {"gpus": [], "fifo": os.open(NODE["fifo"], os.O_RDWR) if "fifo" in NODE else -1}


def nvmlDeviceRegisterEvents(handle, types, events):
    assert types & ~answer(handle, "events") == 0
    events["gpus"].append(handle["uuid"])


def nvmlEventSetWait_v2(events, milliseconds):
    """An event is a line in the fifo: the number of a GPU, and an Xid."""
    if not select.select([events["fifo"]][events["fifo"] < 0:], [], [], milliseconds / 1000)[0]:
        raise NVMLError(NVML_ERROR_TIMEOUT)
    line = b""
    while not line.endswith(b"\\n"):
        line += os.read(events["fifo"], 1)
    index, xid = map(int, line.split())
    assert NODE["gpus"][index]["uuid"] in events["gpus"]
    return SimpleNamespace(
        device=index, eventType=nvmlEventTypeXidCriticalError, eventData=xid
    )


def nvmlDeviceGetIndex(device):
    return device


def nvmlDeviceGetNvLinkState(handle, link):
    links = answer(handle, "links")
    if link >= len(links):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return links[link]
'''


def gpu(number: int, **what: Any) -> dict[str, Any]:
    """A GPU that is well, but for what is said of it."""
    return {
        "uuid": f"GPU-{number}{number}",
        "name": "NVIDIA H100 80GB HBM3",
        "mig": 0,
        "memory": [2**29, 80 * 2**30],
        "busy": 0,
        "held": [],
        "ecc": 0,
        "retiring": 0,
        "rows": [0, 0, 0, 0],
        "reasons": 1,  # idle
        "temperature": 34,
        "links": [1] * 18,
        "events": 0xA,
        "recovery": 0,
        **what,
    }


LIBRARY = r"""
/* libnvidia-ml.so.1 of a node with two GPUs, the second in a bad way; OLD: of an older driver. */
#include <stdio.h>
#define GPU(device) ((int)(long)(device) - 1)
typedef unsigned int u32;
typedef unsigned long long u64;
struct memory { u64 total, free, used; };
struct process { u32 pid; u64 used; u32 gpu_instance, compute_instance; };
enum { SUCCESS, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

int nvmlInitWithFlags(u32 flags) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, u32 size) {
    snprintf(text, size, "535.1"); return SUCCESS; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    *device = (void *)(long)(index + 1); return SUCCESS; }
int nvmlDeviceGetUUID(void *device, char *text, u32 size) {
    snprintf(text, size, "GPU-%d%d", GPU(device), GPU(device)); return SUCCESS; }
int nvmlDeviceGetName(void *device, char *text, u32 size) {
    snprintf(text, size, "NVIDIA A100"); return SUCCESS; }
int nvmlDeviceGetMigMode(void *device, u32 *now, u32 *later) { return NOT_SUPPORTED; }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *amount) {
    amount->total = 40ull << 30; amount->used = GPU(device) ? 20ull << 30 : 1ull << 28;
    amount->free = amount->total - amount->used; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, u64 *count) {
    *count = kind == 1 && counter == 0 && GPU(device) ? 3 : 0; return SUCCESS; }
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, int *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetRemappedRows(void *device, u32 *right, u32 *wrong, u32 *pending, u32 *failed) {
    *right = *wrong = *failed = 0; *pending = GPU(device); return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons) {
    *reasons = GPU(device) ? 0x48 : 1; return SUCCESS; }
int nvmlDeviceGetTemperature(void *device, int sensor, u32 *degrees) {
    *degrees = 88; return SUCCESS; }
int nvmlDeviceGetNvLinkState(void *device, u32 link, u32 *active) {
    if (link > 11) return NOT_SUPPORTED;
    *active = !GPU(device) || link > 1; return SUCCESS; }
#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(void *device, u64 *reasons) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, struct process *list) {
    if (!GPU(device)) { *count = 0; return SUCCESS; }
    if (*count < 1) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    list[0] = (struct process){90004242, 19ull << 30, 0xFFFFFFFF, 0xFFFFFFFF}; return SUCCESS; }
#endif
"""
"""A stand-in for the driver's own library, so that the real pynvml is in the conversation."""


def bare(*hidden: str) -> dict[str, str]:
    """This environment without the variables that narrow what is visible."""
    names = {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", *hidden}
    return {name: value for name, value in os.environ.items() if name not in names}


def nvml(folder: Path, *gpus: dict[str, Any], **node: Any) -> dict[str, str]:
    """An environment in which the child finds these GPUs."""
    (folder / "pynvml.py").write_text(PYNVML)
    described = folder / "nvml.json"
    described.write_text(json.dumps({"gpus": gpus, **node}))
    return bare() | {"PYTHONPATH": str(folder), "STANDIN_NVML": str(described)}


def library(folder: Path, *flags: str) -> dict[str, str]:
    """An environment in which the real pynvml finds LIBRARY; skips where nothing compiles it."""
    compiler = needs.program("cc", package="gcc")
    source = folder / "nvml.c"
    source.write_text(LIBRARY)
    made = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", made, source], check=True)
    return bare() | {"LD_LIBRARY_PATH": str(folder)}


def npu_smi(folder: Path, script: str) -> dict[str, str]:
    """An environment in which `npu-smi` is this shell script."""
    tool = folder / "npu-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return bare() | {"PATH": f"{folder}:{os.environ['PATH']}"}
