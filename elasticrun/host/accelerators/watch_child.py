"""Watches this node's GPUs and network ports and prints their state as lines of JSON; run by path
in a child process, because calls of a driver can block forever.

    python -P watch_child.py POLL SYS [--gpus]

Prints a state every POLL seconds, and at once after an event of a GPU:

{"gpus": [{"index", "uuid", "lost": the error of a broken GPU, "xids": [numbers],
           "ecc": whether there were uncorrected memory errors, "slowed": [reasons],
           "recovery": what its driver asks for, "links": NVLinks that were up at the start,
           "down": how many of these are down}],
 "nics": [{"name", "up", "errors": {counter: increase since the start}}],
 "processes": [[GPU, pid, bytes or null], ...]}

Counters and links are compared with their values at the start. A line `processes` on standard input
is answered with {"processes": as above}. When standard input ends, or the thread that started this
process, this process ends. SYS is where sysfs is mounted. Without --gpus no driver is used.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

MAX_NICS = 64
MAX_XIDS = 16
"""Maximum number of network ports, and of different Xids of a GPU."""

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends us when our parent ends."""

EVENT_WAIT = 60_000
"""Milliseconds of one wait for an event."""

IB_COUNTERS = (
    *("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)
NET_COUNTERS = ("rx_crc_errors", "rx_errors", "tx_errors")
"""Counters of sysfs that only errors increase."""


class Events:
    """The Xids that GPUs have reported, by index; a thread waits for them."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._arrived: deque[tuple[int, int]] = deque(maxlen=1000)
        self._xids: dict[int, list[int]] = {}
        self.fd, self._wake = os.pipe()
        self._set = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                known = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                wanted = known & (
                    nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                )
                if wanted:
                    nvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            except nvml.NVMLError:
                continue  # a GPU without events; its state is still read
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, EVENT_WAIT)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    index = nvml.nvmlDeviceGetIndex(event.device)
                    self._arrived.append((index, int(event.eventData)))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    return  # a GPU is lost: the state says which
                continue
            os.write(self._wake, b"x")

    def of(self, index: int) -> list[int]:
        """The Xids of a GPU so far, without repetitions."""
        while self._arrived:
            gpu, xid = self._arrived.popleft()
            known = self._xids.setdefault(gpu, [])
            if xid not in known:
                known.append(xid)
                del known[:-MAX_XIDS]
        return self._xids.get(index, [])


class Gpus:
    """The state of each GPU."""

    def __init__(self) -> None:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._reads: Any = importlib.import_module("nvidia_child")  # beside this file
        self.events = Events(pynvml)
        self._first: dict[int, dict[str, Any]] = {}  # errors and links at the start
        self._uuids: dict[int, str] = {}

    def state(self) -> list[dict[str, Any]]:
        """The state of each GPU, as far as it answers."""
        count = min(self._nvml.nvmlDeviceGetCount(), self._reads.MAX_GPUS)
        return [self._of(index) for index in range(count)]

    def _of(self, index: int) -> dict[str, Any]:
        seen: dict[str, Any] = {"index": index, "xids": self.events.of(index)}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._uuids[index] = self._reads.as_text(self._nvml.nvmlDeviceGetUUID(handle))
            now = {
                "ecc": self._reads.errors(handle)["uncorrected"] or 0,
                "links": self._reads.links(handle),
            }
            first = self._first.setdefault(index, now)
            both = list(zip(first["links"], now["links"], strict=False))
            seen |= {
                "ecc": now["ecc"] > first["ecc"],
                "slowed": self._reads.clocks(handle)["slowed"],
                "links": sum(before for before, _ in both),
                "down": sum(before and not after for before, after in both),
                "recovery": self._recovery(handle),
            }
        except self._nvml.NVMLError as error:
            broken = (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
            seen["lost"] = str(error) if error.value in broken else ""
        return seen | {"uuid": self._uuids.get(index, "")}

    def _recovery(self, handle: Any) -> int:
        """What the driver asks for; 0: nothing, or it does not know."""
        nvml = self._nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return 0
        found = self._reads.answer_or_none(lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
        return int(found[0].value.uiVal) if found and found[0].nvmlReturn == 0 else 0

    def processes(self) -> list[list[int | None]]:
        """The processes that compute on GPUs: index of the GPU, pid, bytes."""
        found: list[list[int | None]] = []
        for index in range(min(self._nvml.nvmlDeviceGetCount(), self._reads.MAX_GPUS)):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                held = self._reads.memory(handle)["processes"]
            except self._nvml.NVMLError:
                continue
            found += [[index, pid, amount] for pid, amount in held]
        return found


class Nics:
    """The network ports of this machine: InfiniBand, and Ethernet with a device behind it."""

    def __init__(self, root: Path) -> None:
        ports = sorted((root / "class/infiniband").glob("*/ports/*"))
        cards = sorted(path.parent for path in (root / "class/net").glob("*/device"))
        self._ports = [*ports, *cards][:MAX_NICS]
        self._first = {path: _counters(path) for path in self._ports}
        self._was_up = {path: _is_up(path) for path in self._ports}

    def state(self) -> list[dict[str, Any]]:
        """The state of each port that was up at the start."""
        return [self._of(path) for path in self._ports if self._was_up[path]]

    def _of(self, path: Path) -> dict[str, Any]:
        first, now = self._first[path], _counters(path)
        errors = {name: now[name] - first.get(name, now[name]) for name in now}
        port = path.parent.name == "ports"
        name = f"{path.parent.parent.name} port {path.name}" if port else path.name
        risen = {name: count for name, count in errors.items() if count > 0}
        return {"name": name, "up": _is_up(path), "errors": risen}


def _is_up(path: Path) -> bool:
    if path.parent.name == "ports":
        return "ACTIVE" in _text(path / "state")
    return _text(path / "operstate") == "up"


def _counters(path: Path) -> dict[str, int]:
    port = path.parent.name == "ports"
    folder, names = ("counters", IB_COUNTERS) if port else ("statistics", NET_COUNTERS)
    found = {name: _text(path / folder / name) for name in names}
    return {name: int(text) for name, text in found.items() if text.isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # another driver, or the port is gone


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def processes(gpus: Gpus | None) -> dict[str, Any]:
    return {"processes": [] if gpus is None else gpus.processes()}


def watch(poll: float, nics: Nics, gpus: Gpus | None) -> None:
    """Print states and answers until standard input ends."""
    fds = [0] if gpus is None else [0, gpus.events.fd]
    asked, due = b"", time.monotonic()
    while True:
        left = due - time.monotonic()
        ready = select.select(fds, [], [], max(0.0, left))[0]
        if 0 in ready:
            piece = os.read(0, 4096)
            if not piece:
                return
            *lines, asked = (asked + piece).split(b"\n")
            for _ in lines:
                say(processes(gpus))
        if gpus is not None and gpus.events.fd in ready:
            os.read(gpus.events.fd, 4096)
            due = 0.0
        if due <= time.monotonic():
            state = [] if gpus is None else gpus.state()
            say({"gpus": state, "nics": nics.state(), **processes(gpus)})
            due = time.monotonic() + poll


def main(argv: list[str]) -> int:
    """Watch; the last line names an error of the driver."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while a driver blocks
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    lifeline = select.poll()
    lifeline.register(0, 0)
    if lifeline.poll(0):  # the parent has ended before the call of prctl
        return 0
    gpus = None
    if "--gpus" in argv:
        try:
            gpus = Gpus()
        except Exception as error:  # no library, no driver, or one of another version
            print(error)
            return 1
    watch(float(argv[0]), Nics(Path(argv[1])), gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
