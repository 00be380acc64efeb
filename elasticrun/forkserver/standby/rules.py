"""Which system calls a standby may make before it is a rank.

A call passes only if it is known to read, or to change nothing but the process itself. Everything
else parks the standby: it makes that call when it has become the rank. `judge` decides; it asks
about the process through `Tracee`.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from socket import IPPROTO_TCP, SOL_SOCKET
from typing import Final, NamedTuple, Protocol

MARK: Final = 0x7E57AB1E
"""A number that no system call has; a standby uses it to speak to its tracer (`Mark`)."""


class Mark(Enum):
    """The first argument of a marked call."""

    READY = 1  # the script starts now; arguments: address and length of the hooks
    CLOCK = 2  # the script is about to read the clock
    LOAD = 3  # or the machine's load
    STORE = 4  # or to make a TCPStore, as init_process_group does


MAY_PASS: Final = frozenset([
    # reads of open files, and changes of the process's own descriptors
    "read", "pread64", "readv", "preadv", "preadv2", "recvfrom", "recvmsg", "lseek", "fstat",
    "getdents64", "fadvise64", "readahead", "close", "close_range", "dup", "dup2", "dup3", "fcntl",
    "ioctl", "pipe", "pipe2", "eventfd2", "memfd_create", "socket", "socketpair", "setsockopt",
    "getsockopt", "getsockname", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait",
    "timerfd_create", "ftruncate", "write", "writev", "connect",
    # memory, threads, signals
    "mmap", "mprotect", "munmap", "brk", "mremap", "madvise", "mincore", "mbind", "get_mempolicy",
    "set_mempolicy", "membarrier", "clone", "clone3", "exit", "futex", "set_robust_list",
    "get_robust_list", "rseq", "set_tid_address", "arch_prctl", "sched_yield", "getcpu",
    "restart_syscall", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack",
    # the process itself
    "getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getresuid",
    "getresgid", "getgroups", "getpgid", "getsid", "getpgrp", "capget", "uname", "umask", "getcwd",
    "getrandom", "getrlimit", "prlimit64", "getrusage", "sysinfo", "sched_getaffinity",
    "sched_setaffinity", "prctl", "clock_gettime", "clock_getres", "gettimeofday",
    "clock_nanosleep",
    # paths
    "open", "openat", "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getxattr", "lgetxattr", "chdir", "mkdir", "mkdirat", "unlink",
    "unlinkat",
])  # fmt: skip
"""The calls that may pass."""


class Seen(Enum):
    """What a call learns about a path."""

    CONTENT_BY_TIME = "time"  # size, times and inode tell whether it has changed
    EXISTENCE = "exists"
    NAMES = "names"  # of a folder
    BYTES = "bytes"  # of a file of the kernel, which has no times


class Read(NamedTuple):
    """A call that learns something about a path."""

    path: str
    seen: Seen = Seen.CONTENT_BY_TIME
    follow: bool = True


@dataclass(frozen=True, slots=True)
class Parked:
    """The call must not be made before the standby is the rank."""

    call: str


Verdict = Read | Parked | None
"""None: the call passes and learns nothing from outside."""


class Tracee(Protocol):
    """What the rules ask about the process that makes a call."""

    pid: int
    probes: set[str]
    """Files that the process has made to find out whether a folder is writable."""
    made: str
    """The folder that the process has tried to make last, although it exists."""
    search_path: frozenset[str]
    """The folders that imports search."""
    temporary: frozenset[str]
    """The folders in which `tempfile` may put files."""
    above: frozenset[str]
    """The folders above these, the working directory and temporary files."""

    def path(self, address: int, folder: int) -> str:
        """The absolute path in memory at `address`; `folder` is a descriptor or AT_FDCWD. ""
        if it is empty."""

    def opened(self, descriptor: int) -> str:
        """What /proc says about a descriptor."""

    def memory(self, address: int, length: int) -> bytes:
        """Bytes of its memory."""

    def left(self, address: int, clock: int | None) -> float:
        """Seconds until the time in memory at `address`, on this clock; None: it is a duration."""

    def may_create(self, path: str) -> bool:
        """Whether its user may make a file at this path."""

    def mode(self, path: str) -> int:
        """The type and mode of a file; 0 if there is none."""


AT_FDCWD: Final = -100
_NOFOLLOW: Final = 0x100  # AT_SYMLINK_NOFOLLOW
_O_NOFOLLOW: Final = os.O_NOFOLLOW
_LARGE: Final = 0o400000 if platform.machine() == "aarch64" else 0o100000  # O_LARGEFILE
_PROBES: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""How `tempfile` opens files."""
_TEMPORARY: Final = os.O_TMPFILE & ~os.O_DIRECTORY
_CHANGES: Final = os.O_CREAT | os.O_TRUNC | _TEMPORARY
_CLONE_THREAD: Final = 0x10000

_PATHS: Final = {"stat": True, "lstat": False, "access": True, "readlink": False,
                 "getxattr": True, "lgetxattr": False}  # fmt: skip
"""Calls whose first argument is a path; whether they follow a link at its end."""

_PATHS_AT: Final = {"newfstatat": 3, "statx": 2, "faccessat": -1, "faccessat2": 3}
"""Calls with a folder's descriptor and a path; which argument has the flags."""

_ON_DESCRIPTORS: Final = frozenset(
    [
        "lseek",
        "read",
        "pread64",
        "readv",
        "preadv",
        "preadv2",
        "recvfrom",
        "recvmsg",
        "dup",
        "dup2",
        "dup3",
    ]
)
_OWN_PIPES: Final = ("pipe:[", "socket:[", "anon_inode:[eventfd]", "/memfd:")
"""What a standby may write to: nobody else has these, as it has no children. Its sockets are
connected to itself alone."""

_PRIVATE_IOCTLS: Final = frozenset([0x5401, 0x5450, 0x5451, 0x541B])
"""TCGETS, FIONCLEX, FIOCLEX, FIONREAD."""

_PRIVATE_PRCTLS: Final = frozenset([2, 3, 15, 16, 21, 23, 27, 30, 39, 40, 0x53564D41])
"""PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME and others that read; PR_SET_VMA."""

_PRIVATE_FCNTLS: Final = frozenset([1, 2, 3, 1032, 1033, 1034])
"""F_GETFD, F_SETFD, F_GETFL, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS."""
_F_DUPFD, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 4, 1030

_FUTEX_WAITS: Final = frozenset([0, 6, 9, 11, 13])
"""FUTEX_WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2."""

_FUTEX_LOCK_PI: Final = 6
_OF_DAY: Final = 0x100  # FUTEX_CLOCK_REALTIME
_TIMER_ABSTIME: Final = 1
_TIMESPEC: Final = 16
"""Bytes of a struct timespec; an itimerspec has the interval first."""

CLOCKS: Final = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)
"""Clocks that go on while a process stands still."""

SHORT_WAIT: Final = 0.02
"""Seconds of a wait that may be over at any moment: that for the interpreter's lock is 5 ms."""

MOST_AT_ONCE: Final = 256 * 1024 * 1024
"""Bytes of memory that a standby may ask for at once."""

_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_HIDDEN: Final = frozenset(
    [
        *("status", "stat", "wchan", "syscall", "stack", "sched", "schedstat", "mem", "fd", "task"),
        *("oom_score", "oom_score_adj", "cwd", "root", "map_files"),
    ]
)
"""Files in /proc/PID that show the tracer, the priority, or descriptors."""
_OWN_BYTES: Final = frozenset(["mountinfo", "mounts", "cgroup", "limits", "net"])
_STABLE: Final = ("/proc/cpuinfo", "/proc/filesystems", "/proc/version", "/proc/cmdline")


def judge(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Whether a process may make this call. `name`: "" for an unknown call."""
    parked = Parked(name)
    if name not in MAY_PASS:
        return parked
    if (handler := _HANDLERS.get(name)) is not None:
        return handler(name, arguments, tracee)
    if name in _ON_DESCRIPTORS:
        return None if _int(arguments[0]) > 2 else parked
    if name in _PATHS:
        return _of_path(tracee.path(arguments[0], AT_FDCWD), tracee, follow=_PATHS[name])
    if (flags_at := _PATHS_AT.get(name)) is not None:
        follow = flags_at < 0 or not arguments[flags_at] & _NOFOLLOW
        return _of_path(tracee.path(arguments[1], _int(arguments[0])), tracee, follow=follow)
    return None


def _int(value: int) -> int:
    """A C int from a register."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


# ---------------------------------------------------------------- paths


def _own(path: str, tracee: Tracee) -> str:
    """The name of a file below /proc/PID of the process itself; "" for another path."""
    for prefix in ("/proc/self/", "/proc/thread-self/", f"/proc/{tracee.pid}/"):
        if path.startswith(prefix):
            return path[len(prefix) :].partition("/")[0]
    return ""


def _is_device(path: str) -> bool:
    """/dev/shm has files of ordinary programs."""
    return path.startswith("/dev/") and not path.startswith("/dev/shm/")


def _of_path(path: str, tracee: Tracee, *, follow: bool) -> Verdict:
    """A call that asks about a path without opening it."""
    if not path:
        return None  # about a descriptor
    if path.startswith("/proc/") or path == "/proc":
        own = _own(path, tracee)
        return None if own else Read(path, Seen.EXISTENCE, follow)
    if path.startswith("/sys/") or _is_device(path):
        return Read(path, Seen.EXISTENCE, follow)
    return _of_folder_or_file(path, tracee, follow=follow)


def _of_folder_or_file(path: str, tracee: Tracee, *, follow: bool) -> Verdict:
    """Who asks about a folder may look at its time. Three kinds of folders change too often for
    that, and are asked about for other reasons: imports ask for the names in the folders that they
    search, `os.path.realpath` whether a folder is a link, `os.makedirs` whether it is one."""
    if path in tracee.search_path:
        return Read(path, Seen.NAMES)
    made, tracee.made = tracee.made, ""
    existence = path in tracee.above or path == made
    return Read(path, Seen.EXISTENCE if existence else Seen.CONTENT_BY_TIME, follow)


def _open(name: str, path: str, flags: int, tracee: Tracee) -> Verdict:
    parked = Parked(name)
    if path in _DEVICES:
        return None
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & _CHANGES:
        return None if _is_probe(path, flags, tracee) else _fails(name, path, tracee)
    if _is_device(path):
        return parked
    if path.startswith("/proc/"):
        own = _own(path, tracee)
        if own:
            bytes_of = Read(path, Seen.BYTES)
            return parked if own in _HIDDEN else bytes_of if own in _OWN_BYTES else None
        return Read(path, Seen.BYTES) if path.startswith((*_STABLE, "/proc/sys/")) else parked
    mode = tracee.mode(path)
    if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return parked
    if path.startswith("/sys/"):
        return Read(path, Seen.NAMES if stat.S_ISDIR(mode) else Seen.BYTES)
    tracee.made = ""
    if stat.S_ISDIR(mode) and (path in tracee.search_path or path in tracee.above):
        return Read(path, Seen.NAMES)
    return Read(path, follow=not flags & _O_NOFOLLOW)


def _fails(name: str, path: str, tracee: Tracee) -> Verdict:
    """A call that would make a file or folder: imports try to, beside packages of another user."""
    if tracee.mode(path) or tracee.may_create(path):
        return Parked(name)
    return Read(os.path.dirname(path), Seen.EXISTENCE)


def _is_probe(path: str, flags: int, tracee: Tracee) -> bool:
    """Whether this is how `tempfile` finds out, once per process, whether a folder is writable: a
    new file with a random name, a few bytes, and its removal."""
    folder, stem = os.path.split(path)
    if flags & ~_LARGE != _PROBES or folder not in tracee.temporary or tracee.probes:
        return False
    if len(stem) != 8:
        return False
    if not all(letter in "abcdefghijklmnopqrstuvwxyz0123456789_" for letter in stem):
        return False
    tracee.probes.add(path)
    return True


def _opens(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    if name == "open":
        return _open(name, tracee.path(arguments[0], AT_FDCWD), arguments[1], tracee)
    return _open(name, tracee.path(arguments[1], _int(arguments[0])), arguments[2], tracee)


def _readlinkat(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return _of_path(tracee.path(arguments[1], _int(arguments[0])), tracee, follow=False)


def _mkdir(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Making a folder that exists has no effect."""
    folder, at = (AT_FDCWD, 0) if name == "mkdir" else (_int(arguments[0]), 1)
    path = tracee.path(arguments[at], folder)
    if not tracee.mode(path):
        return _fails(name, path, tracee)
    tracee.made = path
    return Read(path, Seen.EXISTENCE)


def _chdir(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return Read(tracee.path(arguments[0], AT_FDCWD), Seen.EXISTENCE)


def _uname(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Of what it tells, only the host's name may change."""
    return Read("/proc/sys/kernel/hostname", Seen.BYTES)


def _socket(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """A socket of AF_UNIX, AF_INET or AF_INET6 reaches nobody before it is connected."""
    return None if arguments[0] in (1, 2, 10) else Parked(name)


def _unlink(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    folder, at = (AT_FDCWD, 0) if name == "unlink" else (_int(arguments[0]), 1)
    return None if tracee.path(arguments[at], folder) in tracee.probes else Parked(name)


def _connect(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Connecting to a path at which there is nothing, such as the socket of nscd, has no effect."""
    address = tracee.memory(arguments[1], min(arguments[2], 110))
    path = os.fsdecode(address[2:].partition(b"\0")[0])
    if int.from_bytes(address[:2], "little") != 1 or not path.startswith("/") or tracee.mode(path):
        return Parked(name)
    return Read(path, Seen.EXISTENCE)


# ---------------------------------------------------------------- everything else


def _write(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    descriptor = _int(arguments[0])
    target = tracee.opened(descriptor) if descriptor > 2 else ""
    private = target.startswith(_OWN_PIPES) or target in tracee.probes
    return None if private else Parked(name)


def _fcntl(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    descriptor, what = _int(arguments[0]), _int(arguments[1])
    private = what in _PRIVATE_FCNTLS
    private |= what == _F_SETFL and descriptor > 2
    private |= what in (_F_DUPFD, _F_DUPFD_CLOEXEC) and descriptor > 2
    return None if private else Parked(name)


def _ioctl(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """FIONBIO of an own descriptor is private; TIOCGWINSZ fails for whatever is no terminal."""
    request = arguments[1] & 0xFFFFFFFF
    descriptor = _int(arguments[0])
    private = request in _PRIVATE_IOCTLS
    private |= request == 0x5421 and descriptor > 2
    private |= request == 0x5413 and not tracee.opened(descriptor).startswith("/dev/")
    return None if private else Parked(name)


def _clone(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    flags = arguments[0]
    if name == "clone3":
        flags = int.from_bytes(tracee.memory(arguments[0], 8), "little")
    return None if flags & _CLONE_THREAD else Parked(name)


def _waits(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """A wait with a limit would go on while the standby is parked, and be over when it is the
    rank."""
    if name == "futex":
        if arguments[1] & 0x7F not in _FUTEX_WAITS or not arguments[3]:
            return None
        end = deadline(name, arguments)
        left = tracee.left(arguments[3], end.clock if end else None)
        return Parked(name) if left > SHORT_WAIT else None
    return Parked(name) if _int(arguments[3]) > 0 else None


class WaitEnd(NamedTuple):
    """When a wait ends: the address of that time, and its clock."""

    address: int
    clock: int


def deadline(name: str, arguments: tuple[int, ...]) -> WaitEnd | None:
    """The deadline that this call waits for; None if it has none, a duration instead, or one of a
    clock that stands still with the process."""
    address, clock = 0, time.CLOCK_MONOTONIC
    match name:
        case "futex" if (what := arguments[1] & 0x7F) in _FUTEX_WAITS and what:
            of_day = arguments[1] & _OF_DAY or what == _FUTEX_LOCK_PI
            address, clock = arguments[3], time.CLOCK_REALTIME if of_day else clock
        case "futex_waitv":
            address, clock = arguments[3], _int(arguments[4])
        case "futex_wait":
            address, clock = arguments[4], _int(arguments[5])
        case "clock_nanosleep" if arguments[1] & _TIMER_ABSTIME:
            address, clock = arguments[2], _int(arguments[0])
        case "mq_timedsend" | "mq_timedreceive":
            address, clock = arguments[4], time.CLOCK_REALTIME
        case "timer_settime" | "timerfd_settime" if arguments[1] & _TIMER_ABSTIME:
            address = arguments[2] + _TIMESPEC  # of a clock that this call does not name
    return WaitEnd(address, clock) if address and clock in CLOCKS else None


def _mmap(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Data, and not code, needs this much memory."""
    anonymous = arguments[3] & 0x20  # MAP_ANONYMOUS
    return Parked(name) if anonymous and arguments[2] and arguments[1] > MOST_AT_ONCE else None


def _setaffinity(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return None if _int(arguments[0]) in (0, tracee.pid) else Parked(name)


def _setsockopt(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    """Options of other levels may send something, such as IP_ADD_MEMBERSHIP."""
    return None if _int(arguments[1]) in (SOL_SOCKET, IPPROTO_TCP) else Parked(name)


def _nanosleep(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    seconds, nanoseconds = struct.unpack("=qq", tracee.memory(arguments[2], 16))
    return Parked(name) if seconds or nanoseconds or arguments[1] else None


def _prlimit(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return None if _int(arguments[0]) in (0, tracee.pid) else Parked(name)


def _prctl(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return None if arguments[0] in _PRIVATE_PRCTLS else Parked(name)


def _truncate(name: str, arguments: tuple[int, ...], tracee: Tracee) -> Verdict:
    return None if tracee.opened(_int(arguments[0])).startswith("/memfd:") else Parked(name)


_HANDLERS: Final[Mapping[str, Callable[[str, tuple[int, ...], Tracee], Verdict]]] = {
    "open": _opens, "openat": _opens, "readlinkat": _readlinkat, "mkdir": _mkdir,
    "mkdirat": _mkdir, "chdir": _chdir, "uname": _uname,
    "futex": _waits, "epoll_wait": _waits, "epoll_pwait": _waits, "mmap": _mmap,
    "sched_setaffinity": _setaffinity, "setsockopt": _setsockopt,
    "unlink": _unlink, "unlinkat": _unlink,
    "socket": _socket, "connect": _connect, "write": _write, "writev": _write,
    "fcntl": _fcntl, "ioctl": _ioctl, "clone": _clone,
    "clone3": _clone, "clock_nanosleep": _nanosleep, "prlimit64": _prlimit, "prctl": _prctl,
    "ftruncate": _truncate,
}  # fmt: skip
