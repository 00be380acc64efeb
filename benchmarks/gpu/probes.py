"""Measurements without a launcher, each in its own process: probes.py PROBE [ARGUMENT ...]."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
        self.locked: list[int] = []  # the addresses of pieces
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

    def range(self) -> tuple[int, int]:
        """Its first address and the one after its last."""
        begin = self.bytes.data_ptr()
        return begin, begin + self.bytes.numel()

    def register(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Page-lock these ranges of addresses, one by one."""
        import torch

        cuda: Any = torch.cuda  # untyped
        began, first = time.monotonic(), self.bytes.data_ptr()
        for begin, end in pieces if CUDA else ():
            if error := int(cuda.cudart().cudaHostRegister(begin, end - begin, 1)):
                raise RuntimeError(f"cudaHostRegister: error {error} at {begin - first >> 20} MiB")
            self.locked.append(begin)
        self.seconds["page-locked"] = time.monotonic() - began

    def unregister(self) -> None:
        import torch

        cuda: Any = torch.cuda  # untyped
        began = time.monotonic()
        while self.locked:
            if error := int(cuda.cudart().cudaHostUnregister(self.locked.pop())):
                raise RuntimeError(f"cudaHostUnregister: error {error}")
        self.seconds["released"] = time.monotonic() - began

    def seconds_in_words(self) -> str:
        return ", ".join(f"{name} in {took:.3g} s" for name, took in self.seconds.items())


def copies() -> None:
    """Measure the rates from the device to each kind of host memory."""
    import torch

    from benchmarks.gpu.overlap import HOME, wait_for_device
    from elasticrun.snapshots.dcp.restoring import copy_all
    from elasticrun.training.checkpointing.memory import devices

    size = gib(COPIED)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=HOME)

    def rate(name: str, target: torch.Tensor, note: str = "", *, is_cut: bool = False) -> None:
        took, issued = [], 0.0
        for _ in range(4):
            wait_for_device()
            began = time.monotonic()
            pair = devices.cut([target], [source]) if is_cut else ([target], [source])
            copy_all(*pair, non_blocking=True)
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
    mapping = SharedMemory(size)
    with trying("device to shared memory"):
        rate("shared memory", mapping.bytes, mapping.seconds_in_words())
    whole, pieces = [mapping.range()], devices.pieces(*mapping.range())
    for how, ranges in (("at once", whole), (f"in {len(pieces)} pieces", pieces)):
        with trying(f"shared memory, page-locked {how}"):
            launches_meanwhile(how, mapping, ranges)
            name = f"shared memory, page-locked {how}"
            rate(name, mapping.bytes.zero_(), mapping.seconds_in_words(), is_cut=ranges is pieces)
            equal = torch.equal(mapping.bytes, source.cpu())
            emit(f"{name}: bits are equal", equal, ok=equal)
        mapping.unregister()
    with trying("one copy across pieces that were page-locked one by one"):
        mapping.register(pieces)
        try:
            rate("shared memory, one copy across pieces", mapping.bytes)
        except RuntimeError as error:  # elasticrun does not rely on it
            emit("one copy across pieces that were page-locked one by one", False, "", str(error))
        mapping.unregister()


def launches_meanwhile(how: str, mapping: SharedMemory, ranges: Sequence[tuple[int, int]]) -> None:
    """Page-lock memory in another thread, and measure how long a kernel takes at most meanwhile: no
    step of a training may wait for that."""
    import torch

    from benchmarks.gpu.overlap import HOME, wait_for_device

    ones, took = torch.ones(1000, device=HOME), list[float]()
    wait_for_device()
    locking = threading.Thread(target=mapping.register, args=(ranges,))
    locking.start()
    while locking.is_alive() or not took:
        began = time.monotonic()
        ones.add_(1)
        wait_for_device()
        took.append(time.monotonic() - began)
    locking.join()
    locked = len(mapping.locked)
    note = (
        f"of {len(took)}, median {sorted(took)[len(took) // 2]:.3g} s; {locked} pieces are locked"
    )
    good = locked == len(ranges) * CUDA
    emit(f"longest kernel while memory is page-locked {how}", max(took), "s", note, good)


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
