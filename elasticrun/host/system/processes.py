"""System calls that Python does not wrap, and information about processes from /proc.

Verbs that people type use psutil. This module does not, for three reasons. The fork server and the
ranks use it, and a forked rank must not have modules that an exec'd one lacks. The agent reads what
it needs about a process from one file in 14 us; psutil reads three files in 43 us, and its import
takes 22 ms of every start. And psutil has no start time in ticks (its `create_time` moves with the
clock), no process group or session, no wchan, no names or states of single threads, no parent-death
signal, no subreaper, no ptracer, no cgroup.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object, third: object = 0) -> bool:
    return bool(_libc.prctl(option, argument, third, 0, 0) == 0)


def user_name() -> str:
    """This user's name; the number if passwd has no entry."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def home() -> Path:
    """This user's home folder. Raises OSError with a sentence if there is none: a container may run
    as a user that is not in its passwd."""
    try:
        return Path.home()
    except RuntimeError:
        raise OSError("this user has no home (HOME is not set, nor is one in passwd)") from None


def die_with_parent(signum: int) -> None:
    """Make the kernel send us `signum` when the thread that created us ends; 0: no signal."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def set_name(name: bytes) -> None:
    """Set this process's name in `ps -o comm`, `top` and /proc/self/comm; the kernel keeps 15
    bytes. Call it in the main thread."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]))


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process instead of init. Returns False if that is
    impossible."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def allow_tracer(pid: int) -> bool:
    """Allow a process and its descendants to trace us, also after they exec, under Yama's
    ptrace_scope 1, where otherwise only ancestors may; 0: only ancestors again. Returns False
    without Yama, or if there is no such process."""
    return _prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid))


def memory_file(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """Create an anonymous file in memory (memfd_create); returns its descriptor. The OSError that
    it raises names the system call, because a sandbox may forbid it."""
    try:
        return os.memfd_create(name, flags)
    except OSError as error:
        raise OSError(error.errno, f"memfd_create: {error.strerror}") from None


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Process:
    """One process from /proc/PID/stat."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    """The letter of proc(5): R, S, D, "T" if stopped, "Z" if it has exited..."""
    started: int
    """Kernel start time, in clock ticks since boot."""

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def stat_fields(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from field 3 of proc(5) on. Raises OSError if there is no such
    process.

    The command in field 2 may contain blanks and parentheses, so the fields start after the last
    parenthesis."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def text_of(pid: int, name: str) -> str:
    """The stripped content of a file below /proc/PID; "" if unreadable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""


MAX_COMMAND = 200
"""Maximum characters of a command line shown to people."""


def command(pid: int) -> str:
    """The command line of a process as one line for people; its name if it has none; "" if it does
    not exist."""
    words = text_of(pid, "cmdline").rstrip("\0").split("\0")
    line = " ".join(" ".join(words).split()) or text_of(pid, "comm")
    return line if len(line) <= MAX_COMMAND else f"{line[: MAX_COMMAND - 4]} ..."


def read_process(pid: int) -> Process | None:
    """The process; None if it does not exist (any more)."""
    try:
        words = stat_fields(pid)
    except OSError:
        return None
    parent, group, session, started = (int(words[n]) for n in (1, 2, 3, 19))
    return Process(pid, parent, group, session, words[0].decode(), started)


def start_time(pid: int) -> int | None:
    """Kernel start time of a process, in clock ticks since boot; None if it does not exist or is a
    zombie."""
    process = read_process(pid)
    return None if process is None or process.has_ended else process.started


def state(pid: int) -> str:
    """The letter of proc(5) for a process's state ("T": stopped); "" if it does not exist."""
    process = read_process(pid)
    return "" if process is None else process.state


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped this process."""
    return state(pid) in ("T", "t")


def is_frozen(pid: int) -> bool:
    """Whether the process's cgroup is frozen; in /proc/PID/stat such a process looks asleep."""
    where = text_of(pid, "cgroup").splitlines()
    path = next((line[3:] for line in where if line.startswith("0::")), "")
    if path in ("", "/"):
        return False
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):  # the second beside cgroup v1
        with contextlib.suppress(OSError):
            return "frozen 1" in Path(f"{root}{path}/cgroup.events").read_text()
    return False


def why_unresponsive(pid: int) -> str:
    """Why a process does not answer, for a sentence about it."""
    if is_stopped(pid):
        return "it is stopped (SIGSTOP, a debugger)"
    return "its cgroup is frozen" if is_frozen(pid) else "it hangs"


def cpu_ticks(pid: int) -> int:
    """CPU time used by this process, in clock ticks; 0 if it does not exist."""
    try:
        words = stat_fields(pid)
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def boot_id() -> str:
    """The id of the current boot of this machine; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the PID namespace that contains every process of the machine (PROC_PID_INIT_INO)."""


def pid_namespace() -> int:
    """Inode of our PID namespace; 0 if unknown, or if /proc shows another one."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.stat("/proc/self/ns/pid").st_ino
    return 0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process across PID namespaces, hosts that share a folder, and reboots.

    A pid alone identifies nothing: it is reused, and each PID namespace and each host has its own.
    Every comparison with a process that another process has recorded goes through here.
    """

    pid: int = 0  # in `namespace`; 0: no process
    started: int = 0  # when the kernel started it, in clock ticks since boot
    boot: str = ""  # boot id of the kernel it runs on
    namespace: int = 0  # inode of its PID namespace; 0: unknown
    host: str = ""  # host name, to tell a reboot from another machine

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The id of a process in our own PID namespace."""
        started = start_time(pid) or 0
        return cls(pid, started, boot_id(), pid_namespace(), os.uname().nodename)

    @classmethod
    def own(cls) -> ProcessId:
        """The id of this process."""
        return cls.of(os.getpid())

    @property
    def is_local(self) -> bool:
        """Whether `pid` is valid in our PID namespace, so that the process can be signaled and its
        files in /proc read."""
        where = (self.boot, self.namespace)
        if not self.boot and self.host != os.uname().nodename:
            return False
        return bool(self.namespace) and where == (boot_id(), pid_namespace())

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if unknown, because it is on another host or in a PID
        namespace that is not visible here."""
        if self.is_local:
            return start_time(self.pid) == self.started
        if self.boot != boot_id():  # same host name: this host was rebooted
            return False if self.host == os.uname().nodename else None
        if self.boot and self.namespace:
            return self._is_below()
        return None

    def _is_below(self) -> bool | None:
        """`is_alive` for a process of this kernel in another PID namespace. One below ours appears
        in our /proc, where the last number of its NSpid is its pid in its own namespace."""
        for process in all_processes():
            if process.started == self.started and not process.has_ended:
                found = re.search(
                    r"^NSpid:.*\s(\d+)$", text_of(process.pid, "status"), re.MULTILINE
                )
                if found and int(found[1]) == self.pid:
                    return True
        sees_all = pid_namespace() == INITIAL_PID_NAMESPACE and read_process(1) is not None
        return False if sees_all else None


def all_processes() -> list[Process]:
    """Every process that /proc shows now, including zombies."""
    found = [read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [process for process in found if process is not None]


def below(root: int, *, without: Collection[int] = ()) -> set[int]:
    """All descendants of `root`, including zombies; leaves out the processes of `without` and their
    descendants."""
    return set(_walk(root, _children_by_parent(), without))


def descendants(root: int) -> list[Process]:
    """All processes below `root`, parents before children, without zombies."""
    has_files = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    found = map(read_process, _walk(root, _children if has_files else _children_by_parent()))
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
    """The children of a process, from /proc/PID/task/*/children (CONFIG_PROC_CHILDREN), without a
    scan of all processes."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except OSError:  # it has exited, or may not be read
        pass
    return found


def _children_by_parent() -> Callable[[int], list[int]]:
    """A function that returns the children of a process, from one scan of /proc."""
    below: dict[int, list[int]] = {}
    for process in all_processes():
        below.setdefault(process.parent, []).append(process.pid)
    return lambda pid: below.get(pid, [])


def thread_names() -> list[str]:
    """Names of all threads of this process except the main one, as ps(1) shows them, including
    threads that Python did not start; "" for one that has just ended."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    names.append(file.read().rstrip("\n"))
            except OSError:
                names.append("")
    return names
