"""The few system calls that Python has no name for, and what /proc knows about processes."""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object, third: object = 0) -> bool:
    return bool(_libc.prctl(option, argument, third, 0, 0) == 0)


def user_name() -> str:
    """This user's name, or number where it has none here."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def die_with_parent(signum: int) -> None:
    """Have the kernel send us `signum` when the thread that created us ends; 0: never mind."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def set_name(name: bytes) -> None:
    """Our name in `ps`, `top` and /proc/self/comm; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]))


def become_subreaper() -> bool:
    """Orphans below us become our children instead of init's. False where it cannot be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def let_trace(pid: int) -> bool:
    """Where Yama lets only ancestors trace us (ptrace_scope 1), also this process and all below it,
    over an exec too; 0: nobody else. False where there is no Yama, or no such process."""
    return _prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid))


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/PID/stat shows it."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    """The letter of proc(5): R, S, D, "T" where it is stopped, "Z" where it has ended..."""
    started: int
    """When the kernel started it, in clock ticks since boot."""

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def stat_fields(pid: int | str) -> list[bytes]:
    """What /proc/PID/stat says from field 3 of proc(5) on. OSError where there is no such process.

    The command before may contain blanks and brackets; the fields begin after its last bracket."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def text_of(pid: int, name: str) -> str:
    """What a file below /proc/PID says, without blanks at its ends; "" where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""


def read_process(pid: int) -> Process | None:
    """None if there is no such process (any more)."""
    try:
        words = stat_fields(pid)
    except OSError:
        return None
    parent, group, session, started = (int(words[n]) for n in (1, 2, 3, 19))
    return Process(pid, parent, group, session, words[0].decode(), started)


def start_time(pid: int) -> int | None:
    """When the kernel started this process, in clock ticks since boot; None if there is none."""
    process = read_process(pid)
    return None if process is None or process.has_ended else process.started


def state(pid: int) -> str:
    """The letter of proc(5) for what a process does ("T": it is stopped); "" if there is none."""
    process = read_process(pid)
    return "" if process is None else process.state


def boot_id() -> str:
    """Names the time since this machine's last start; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def everybody() -> list[Process]:
    """Every process of the machine, zombies among them, as /proc shows them at this moment."""
    found = [read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [process for process in found if process is not None]


def below(root: int, *, without: Collection[int] = ()) -> set[int]:
    """All descendants of `root`, zombies among them; the processes of `without` and what is below
    them left out."""
    return set(_walk(root, _family(), without))


def descendants(root: int) -> list[Process]:
    """All processes below `root`, parents before children; zombies are left out."""
    has_files = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    found = map(read_process, _walk(root, _children if has_files else _family()))
    return [process for process in found if process is not None and not process.has_ended]


def _walk(
    root: int, children: Callable[[int], Iterable[int]], without: Collection[int] = ()
) -> Iterator[int]:
    waiting, seen = [root], set(without)
    while waiting:
        for pid in children(waiting.pop()):
            if pid not in seen:
                seen.add(pid)
                yield pid
                waiting.append(pid)


def _children(pid: int) -> list[int]:
    """From /proc/PID/task/*/children (CONFIG_PROC_CHILDREN): no scan of the whole host."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except OSError:  # it has gone, or may not be looked at
        pass
    return found


def _family() -> Callable[[int], list[int]]:
    """Who is whose child, from one scan of /proc, as for kernels without `children` files."""
    below: dict[int, list[int]] = {}
    for process in everybody():
        below.setdefault(process.parent, []).append(process.pid)
    return lambda pid: below.get(pid, [])


def idle_seconds(cores: Collection[int]) -> float:
    """For how long these cores together have had nothing to do since boot, to 0.01 s; 0.0 where
    the kernel does not tell. One that waits for a disk has nothing to do."""
    ticks = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *times = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cores:
                ticks += int(times[3]) + int(times[4])  # idle, iowait
    except (OSError, ValueError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


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
