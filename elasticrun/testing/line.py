"""Faulty lines: a relay that delays, drops and throttles the frames of some hosts, on any kernel.

`hosts.py` runs it as a program inside the network of the switch. For each host it creates two TAP
devices, `near<I>` (towards the switch) and `far<I>` (towards the host), and passes frames between
them according to its rules. One process carries all frames, which is fast enough for control
traffic and small collectives, but not for bulk data.

Commands are lines of JSON on standard input; each is answered by one line ("ok", or the error):

    {"line": 2}                                 create the devices of host 2
    {"host": 2, "delay": 0.2}                   delay each frame to or from it by so many seconds
    {"host": 2, "loss": 0.3}                    drop this share of the frames that it receives
    {"host": 2, "rate": 1000000.0}              bytes per second, each way; 0: no limit
    {"host": 2, "deaf": ["02:00:00:00:00:01"]}  drop frames from these hosts to it
    {"host": 2, "mute": ["02:00:00:00:00:01"]}  drop frames from it to these hosts
    {"host": 2, "down": 1.0, "up": 2.0}         pass nothing for 1 s, then all for 2 s, and so on

A rule applies until another of the same kind replaces it. Random numbers come from a fixed seed, so
that a run is repeatable as far as the kernel allows. The program exits at EOF on standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Final

TUNSETIFF: Final = 0x4004_54CA
IFF_TAP_NO_PI: Final = 0x1002
TUN: Final = "/dev/net/tun"
FRAME: Final = 65536
MAX_FRAMES: Final = 20_000
"""Maximum number of frames in flight; more are dropped, as in a router with a full buffer."""

MAX_BACKLOG_SECONDS: Final = 0.2
"""Maximum seconds that a frame may wait on a line with a limited rate; later frames are dropped,
which makes senders slow down."""


@dataclass
class HostLine:
    """The rules of one host's line."""

    near: int
    far: int
    delay: float = 0.0
    loss: float = 0.0
    deaf: frozenset[bytes] = frozenset()
    mute: frozenset[bytes] = frozenset()
    down: float = 0.0
    up: float = 0.0
    rate: float = 0.0
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])  # inward, outward
    since: float = field(default_factory=time.monotonic)

    def apply(self, words: dict[str, Any]) -> None:
        """Apply a command that changes rules. Raises ValueError."""
        for name, value in words.items():
            if name in ("deaf", "mute"):
                setattr(self, name, frozenset(bytes.fromhex(m.replace(":", "")) for m in value))
            elif name in ("delay", "loss", "down", "up", "rate"):
                setattr(self, name, float(value))
            elif name != "host":
                raise ValueError(f"no such rule: {name}")
        if "down" in words:
            self.since = time.monotonic()

    def passes(self, frame: bytes, outward: bool, now: float, chance: random.Random) -> bool:
        """Whether a frame passes the rules; `outward`: the host sent it; `chance`: for losses."""
        if self.down > 0 and (now - self.since) % (self.down + self.up) < self.down:
            return False
        if outward:
            return frame[0:6] not in self.mute
        return frame[6:12] not in self.deaf and not (self.loss and chance.random() < self.loss)

    def passing_time(self, size: int, outward: bool, now: float) -> float | None:
        """When a frame of `size` bytes has passed at the line's rate, which it reserves; None: the
        frame is dropped."""
        if self.rate <= 0:
            return now
        free = max(now, self.free[outward])
        if free - now > MAX_BACKLOG_SECONDS:
            return None
        self.free[outward] = free + size / self.rate
        return self.free[outward]


class Relay:
    """Relays the frames of all lines of one lab."""

    def __init__(self) -> None:
        self._chance = random.Random(1)
        self._lines: dict[int, HostLine] = {}
        self._ends: dict[int, tuple[HostLine, bool]] = {}
        self._due: list[tuple[float, int, int, bytes]] = []  # time, sequence, destination, frame
        self._order = itertools.count()

    def run(self) -> None:
        """Run until EOF of standard input."""
        rest = b""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            readable, _, _ = select.select([0, *self._ends], [], [], wait)
            for fd in readable:
                if fd != 0:
                    self._receive(fd)
                    continue
                data = os.read(0, FRAME)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._execute(line)
            self._deliver()

    def _execute(self, line: bytes) -> None:
        try:
            words = json.loads(line)
            if "line" in words:
                self._add(int(words["line"]))
            else:
                self._lines[int(words["host"])].apply(words)
            answer = "ok"
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            answer = f"{type(wrong).__name__}: {wrong}"
        os.write(1, answer.encode() + b"\n")

    def _add(self, host: int) -> None:
        line = HostLine(_tap(f"near{host}"), _tap(f"far{host}"))
        self._lines[host] = line
        self._ends[line.near] = (line, False)
        self._ends[line.far] = (line, True)

    def _receive(self, fd: int) -> None:
        line, outward = self._ends[fd]
        try:
            frame = os.read(fd, FRAME)
        except OSError:  # the device is not up yet, or has no data
            return
        now = time.monotonic()
        if len(self._due) >= MAX_FRAMES or not line.passes(frame, outward, now, self._chance):
            return
        passed = line.passing_time(len(frame), outward, now)
        if passed is not None:
            to = line.near if outward else line.far
            heapq.heappush(self._due, (passed + line.delay, next(self._order), to, frame))

    def _deliver(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, fd, frame = heapq.heappop(self._due)
            with contextlib.suppress(OSError):  # down, or its queue is full: lost
                os.write(fd, frame)


def _tap(name: str) -> int:
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP_NO_PI))
    return fd


if __name__ == "__main__":
    Relay().run()
