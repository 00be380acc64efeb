"""Samples a rank and its descendants in the kernel: CPU time, I/O, memory, process state.

Needs no privilege; a value that cannot be read counts as zero.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from elasticrun.host.system import processes
from elasticrun.wire.messages import Being

POLLERS: Final = frozenset({"gloo_tcp_loop"})
"""Threads of libraries that wake up all the time without doing work."""

TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_BEINGS: Final = {"T": Being.STOPPED, "t": Being.TRACED, "D": Being.DISK, "R": Being.RUNS}


@dataclass(frozen=True, slots=True)
class Activity:
    """One sample. `cpu` and `io` are counters."""

    being: Being
    cpu: float = 0.0  # seconds, without pollers
    io: int = 0  # bytes read and written, files and pipes
    own: int = 0  # bytes of `io` by main threads
    rss: int = 0  # bytes
    kernel: str = ""  # kernel function in which the rank's main thread sleeps

    @property
    def may_answer(self) -> bool:
        """Whether one of its threads could answer if it got the interpreter lock."""
        return self.being in (Being.RUNS, Being.SLEEPS)


class Activities:
    """Samples process trees. It caches which threads are pollers."""

    def __init__(self) -> None:
        self._named: dict[tuple[int, int], bool] = {}  # (process, thread) -> is a poller

    def sample(self, pids: Collection[int]) -> dict[int, Activity]:
        """A sample of each of these ranks; takes up to some milliseconds per rank. May run in
        several threads at the same time."""
        seen: set[tuple[int, int]] = set()
        found = {pid: self._tree(pid, seen) for pid in pids}
        known = self._named.copy()  # atomic copy: other threads add to it
        self._named = {thread: name for thread, name in known.items() if thread in seen}
        return found

    def _tree(self, root: int, seen: set[tuple[int, int]]) -> Activity:
        process = processes.read_process(root)
        if process is None or process.has_ended:
            return Activity(Being.ENDED)
        cpu, io, own, rss = 0.0, 0, 0, 0
        for pid in (root, *(one.pid for one in processes.descendants(root))):
            try:
                fields = processes.stat_fields(pid)
            except OSError:
                continue
            ticks = sum(map(int, fields[11:15]))  # its own, and of reaped children
            cpu += (ticks - self._polled(pid, seen)) / TICKS
            io += _io(pid, "io")
            own += _io(pid, f"task/{pid}/io")
            rss += int(fields[21]) * PAGE
        being, kernel = _being(root, process.state), processes.text_of(root, "wchan")
        return Activity(being, max(0.0, cpu), io, own, rss, kernel)

    def _polled(self, pid: int, seen: set[tuple[int, int]]) -> int:
        """CPU ticks of the threads that only poll."""
        ticks = 0
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            return 0
        maker = processes.text_of(pid, "comm")
        for thread in threads:
            seen.add((pid, thread))
            if self._is_poller(pid, thread, maker):
                try:
                    ticks += sum(map(int, processes.stat_fields(f"{pid}/task/{thread}")[11:13]))
                except OSError:
                    continue
        return ticks

    def _is_poller(self, pid: int, thread: int, maker: str) -> bool:
        known = self._named.get((pid, thread))
        if known is None:
            name = processes.text_of(pid, f"task/{thread}/comm")
            known = name in POLLERS
            # a new thread has its creator's name at first
            if known or name != maker:
                self._named[pid, thread] = known
        return known


def _being(pid: int, letter: str) -> Being:
    if letter == "T" and "TracerPid:\t0\n" not in processes.text_of(pid, "status"):
        return Being.TRACED
    being = _BEINGS.get(letter, Being.SLEEPS)
    if being in (Being.SLEEPS, Being.DISK) and processes.is_frozen(pid):
        return Being.FROZEN
    return being


def _io(pid: int, file: str) -> int:
    lines = (line.partition(": ") for line in processes.text_of(pid, file).splitlines())
    return sum(int(number) for name, _, number in lines if name in ("rchar", "wchar"))
