"""Measurements without a launcher, each in its own process: probes.py PROBE [ARGUMENT ...]."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.gpu.results import CUDA, emit, gib, in_gib, trying

CUDA_DRIVER: Final = "libcuda.so.1"
COPIED: Final = 4
"""GiB that are copied at a time."""

HELD: Final = 8
"""GiB that a killed process has held."""

FREED: Final = 1 << 28
"""A device is free again if fewer bytes than these are in use beyond those from before."""

EVENT_WAIT: Final = 100
"""Milliseconds of one wait for an event."""


# ---------------------------------------------------------------- the driver


def count() -> None:
    """Print the driver's number of devices for each value of CUDA_VISIBLE_DEVICES in argv ("unset"
    for none), as JSON. Each is counted in a fork, because a process initializes CUDA once."""
    found = {}
    for form in sys.argv[2:]:
        read, write = os.pipe()
        if not os.fork():
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if form != "unset":
                os.environ["CUDA_VISIBLE_DEVICES"] = form
            os.write(write, str(_driver_count()).encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            found[form] = int(pipe.read() or b"-1")
        os.wait()
    print(json.dumps(found))


def _driver_count() -> int:
    """0 without a driver or a device."""
    try:
        driver, number = ctypes.CDLL(CUDA_DRIVER), ctypes.c_int()
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    return 0 if failed else number.value


def context() -> None:
    """Print the seconds to create a CUDA context with the driver's own calls, and to run torch's
    first kernel in it, as JSON."""
    driver, device, handle = ctypes.CDLL(CUDA_DRIVER), ctypes.c_int(), ctypes.c_void_p()
    calls: dict[str, Callable[[], int]] = {
        "cuInit": lambda: driver.cuInit(0),
        "cuDeviceGet": lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        "context": lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device),
    }
    took = {}
    for name, call in calls.items():
        began = time.monotonic()
        if error := call():
            raise RuntimeError(f"{name}: error {error}")
        took[name] = time.monotonic() - began
    began = time.monotonic()
    import torch

    took["import torch"] = time.monotonic() - began
    began = time.monotonic()
    torch.ones(1, device="cuda").add_(1).item()
    took["first kernel"] = time.monotonic() - began
    print(json.dumps({name: round(seconds, 4) for name, seconds in took.items()}))


# ---------------------------------------------------------------- copies


class SharedMemory:
    """Unnamed shared memory with all its pages mapped. It is not limited by the size of /dev/shm.
    `seconds` has the duration of each call."""

    def __init__(self, size: int) -> None:
        self.seconds: dict[str, float] = {}
        self._pieces: list[int] = []
        file = os.memfd_create("gpu-check")
        try:
            began = time.monotonic()
            os.posix_fallocate(file, 0, size)
            self.seconds["allocated"] = time.monotonic() - began
            began = time.monotonic()
            self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.seconds["mapped"] = time.monotonic() - began
        finally:
            os.close(file)
        import torch

        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def register(self, piece: int = 1 << 62) -> None:
        """Page-lock it, in pieces of this many bytes."""
        import torch

        cuda: Any = torch.cuda  # untyped
        began, at, size = time.monotonic(), self.bytes.data_ptr(), self.bytes.numel()
        for offset in range(0, size if CUDA else 0, piece):
            length = min(piece, size - offset)
            if error := int(cuda.cudart().cudaHostRegister(at + offset, length, 0)):
                raise RuntimeError(f"cudaHostRegister: error {error} at {offset >> 20} MiB")
            self._pieces.append(at + offset)
        self.seconds["page-locked"] = time.monotonic() - began

    def unregister(self) -> None:
        import torch

        cuda: Any = torch.cuda  # untyped
        began = time.monotonic()
        while self._pieces:
            if error := int(cuda.cudart().cudaHostUnregister(self._pieces.pop())):
                raise RuntimeError(f"cudaHostUnregister: error {error}")
        self.seconds["released"] = time.monotonic() - began

    def seconds_in_words(self) -> str:
        return ", ".join(f"{name} in {took:.3g} s" for name, took in self.seconds.items())


def copies() -> None:
    """Measure the rates from the device to each kind of host memory."""
    import torch

    from benchmarks.gpu.overlap import HOME, wait_for_device

    size = gib(COPIED)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=HOME)

    def rate(name: str, target: torch.Tensor, note: str = "") -> None:
        took, issued = [], 0.0
        for _ in range(4):
            wait_for_device()
            began = time.monotonic()
            target.copy_(source, non_blocking=True)
            issued = time.monotonic() - began
            wait_for_device()
            took.append(time.monotonic() - began)
        more = f"first {took[0]:.3g} s; issued in {issued * 1e3:.3g} ms; {note}"
        emit(f"device to {name}", in_gib(size) / min(took), "GiB/s", more)

    with trying("device to the device itself"):
        rate("the device itself", torch.empty_like(source))
    with trying("device to pageable memory"):
        rate("pageable memory", torch.zeros(size, dtype=torch.uint8))
    with trying("device to torch's page-locked memory"):
        began = time.monotonic()
        target = torch.empty(size, dtype=torch.uint8, pin_memory=CUDA)
        rate("torch's page-locked memory", target, f"made in {time.monotonic() - began:.3g} s")
        del target
    with trying("device to shared memory"):
        mapping = SharedMemory(size)
        rate("shared memory", mapping.bytes, mapping.seconds_in_words())
        mapping.register()
        rate("page-locked shared memory", mapping.bytes, mapping.seconds_in_words())
        equal = torch.equal(mapping.bytes, source.cpu())
        mapping.unregister()
        emit("bits in page-locked memory are equal", equal, "", mapping.seconds_in_words(), equal)
    with trying("one copy across pieces that were page-locked one by one"):
        mapping.register(gib(1))
        mapping.bytes.zero_()
        rate("shared memory, page-locked in pieces", mapping.bytes, mapping.seconds_in_words())
        equal = torch.equal(mapping.bytes, source.cpu())
        emit("one copy across pieces that were page-locked one by one", equal, ok=equal)
        mapping.unregister()


# ---------------------------------------------------------------- NVML


def nvml() -> None:
    """Check which events NVML delivers, which processes it lists, and when a killed process's
    memory is free."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    with trying("Xid and ECC events can be subscribed to"):
        _events(pynvml, device)
    with trying("memory of a killed process"):
        _memory(pynvml, device)


def _events(pynvml: Any, device: Any) -> None:
    supported = pynvml.nvmlDeviceGetSupportedEventTypes(device)
    known = {
        name.removeprefix("nvmlEventType"): getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith("nvmlEventType") and isinstance(getattr(pynvml, name), int)
    }
    names = ", ".join(name for name, bit in known.items() if bit and bit & supported == bit)
    emit("event types of this device", hex(supported), "", names)
    xid = pynvml.nvmlEventTypeXidCriticalError
    ecc = pynvml.nvmlEventTypeSingleBitEccError | pynvml.nvmlEventTypeDoubleBitEccError
    wanted = supported & (xid | ecc)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(device, wanted, events)
    emit("Xid and ECC events can be subscribed to", hex(wanted), ok=bool(wanted & xid))

    def next_event(milliseconds: int) -> str:
        try:
            data = pynvml.nvmlEventSetWait_v2(events, milliseconds)
        except pynvml.NVMLError as error:
            return "none" if error.value == pynvml.NVML_ERROR_TIMEOUT else str(error)
        return f"type {hex(data.eventType)}, data {data.eventData}"

    began, said = time.monotonic(), next_event(EVENT_WAIT)
    emit(f"a wait of {EVENT_WAIT} ms without an event", time.monotonic() - began, "s", said)
    failing = [sys.executable, __file__, "fail"]
    child = subprocess.run(failing, capture_output=True, text=True, timeout=60, check=False)
    last = (child.stderr.strip().splitlines() or ["-"])[-1][:150]
    said = next_event(1000)
    emit("event after a device-side assert", said, "", f"exit {child.returncode}: {last}")


def _memory(pynvml: Any, device: Any) -> None:
    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)

    def listed() -> Mapping[int, object]:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        return {one.pid: one.usedGpuMemory for one in found}

    before = used()
    child = subprocess.Popen([sys.executable, __file__, "hold"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    more = f"ours is {child.pid}; {in_gib(used() - before):.2f} GiB more in use"
    emit("processes that NVML lists", str(listed()), "", more, child.pid in listed())
    began, seen = time.monotonic(), dict[str, float]()
    child.kill()
    while time.monotonic() - began < 15 and len(seen) < 3:
        for what, done in (
            ("reaped", child.poll() is not None),
            ("off the list", child.pid not in listed()),
            ("memory free", used() - before < FREED),
        ):
            if done:
                seen.setdefault(what, round(time.monotonic() - began, 4))
        time.sleep(0.002)
    free = "memory free" in seen
    emit(f"kill -9 of a process that holds {HELD} GiB, seconds until", str(seen), "", "", free)


def hold() -> None:
    """Hold memory of the device until killed."""
    import torch

    held = torch.empty(gib(HELD), dtype=torch.uint8, device="cuda")
    print(held[0].item(), flush=True)
    time.sleep(60)


def fail() -> None:
    """Fail with a device-side assert."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


PROBED: Final = {one.__name__: one for one in (count, context, copies, nvml, hold, fail)}

if __name__ == "__main__":
    PROBED[sys.argv[1]]()
