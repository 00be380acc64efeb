"""The few system calls that Python has no name for, and what /proc knows about processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object, third: object = 0) -> bool:
    return bool(_libc.prctl(option, argument, third, 0, 0) == 0)


def die_with_parent(signum: int) -> None:
    """Have the kernel send us `signum` when the thread that created us ends; 0: never mind."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def set_name(name: bytes) -> None:
    """Our name in `ps`, `top` and /proc/self/comm; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]))


def become_subreaper() -> bool:
    """Orphans below us become our children instead of init's. False where it cannot be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Process:
    """One living process (not a zombie) as /proc shows it."""

    pid: int
    parent: int
    group: int
    session: int
    state: str


def read_process(pid: int) -> Process | None:
    """None if there is no such process (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    words = text.rpartition(b")")[2].split()
    return Process(pid, int(words[1]), int(words[2]), int(words[3]), words[0].decode())


def descendants(root: int) -> list[Process]:
    """All processes below `root`, parents before children; zombies are left out."""
    found = [read_process(pid) for pid in _walk(root)]
    return [process for process in found if process is not None and process.state not in "ZX"]


def _walk(root: int) -> Iterator[int]:
    has_files = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    children = _children if has_files else _Family().children
    waiting = [root]
    while waiting:
        for pid in children(waiting.pop()):
            yield pid
            waiting.append(pid)


def _children(pid: int) -> list[int]:
    """From /proc/PID/task/*/children (CONFIG_PROC_CHILDREN): no scan of the whole host."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


class _Family:
    """Who is whose child, from one scan of /proc, for kernels without `children` files."""

    def __init__(self) -> None:
        self._below: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            process = read_process(int(name)) if name.isdigit() else None
            if process is not None:
                self._below.setdefault(process.parent, []).append(process.pid)

    def children(self, pid: int) -> list[int]:
        return self._below.get(pid, [])


def has_thread(thread: int) -> bool:
    """Whether this process has such a thread, by its id in the kernel."""
    return os.path.exists(f"/proc/self/task/{thread}")


def thread_names() -> list[str]:
    """Of the threads of this process beside the main one, also those that Python knows nothing of:
    what ps(1) calls them; "" for one that has just ended."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    names.append(file.read().rstrip("\n"))
            except OSError:
                names.append("")
    return names
