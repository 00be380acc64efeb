"""Processes of a job under test: finds them by a mark in their environment or by their network
namespace, whatever their parent is now; signals all of them; waits for them with pidfds.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from elasticrun.host.system.inotify import IN_MODIFY, Inotify
from elasticrun.host.system.processes import Process, ProcessId, all_processes, boot_id
from elasticrun.host.system.title import FORK_SERVER, MASTER
from elasticrun.testing import WARM_FOLDER
from elasticrun.wire import env

MARK: Final = "ELASTICRUN_TEST_NODE"
"""Environment variable of every process of a node; its value names the job and the node."""

ROUNDS: Final = 100
"""Maximum number of times that `signal_all` searches for new processes, so that a fork bomb cannot
keep it busy forever."""

IN_MOVED: Final = 0x0000_00C0  # IN_MOVED_FROM | IN_MOVED_TO

IN_CREATE_DELETE: Final = 0x0000_0300


_OWNED: Final = re.compile(r"elasticrun-(\d+)-(\d+)-(\d+)-\d+-\w+")
_COUNT: Final = itertools.count()


def new_name(what: str) -> str:
    """A unique name for a kernel object, which identifies this process as its maker. `what`: one
    word, to end the name."""
    own = ProcessId.own()
    return f"elasticrun-{own.pid}-{own.started}-{own.namespace}-{next(_COUNT)}-{what}"


def is_owned(name: str) -> bool:
    """Whether `new_name` made this name."""
    return _OWNED.fullmatch(name) is not None


def is_orphaned(name: str) -> bool:
    """Whether the process that made this name is known to have ended."""
    found = _OWNED.fullmatch(name)
    if found is None:
        return False
    pid, started, namespace = map(int, found.groups())
    maker = ProcessId(pid, started, boot_id(), namespace, os.uname().nodename)
    return maker.is_alive() is False


def new_folder(where: str, what: str) -> Path:
    """A new folder in `where`, named by `new_name`. Removes those of processes that have ended."""
    for each in os.listdir(where):
        if each.endswith(f"-{what}") and is_orphaned(each):
            shutil.rmtree(os.path.join(where, each), ignore_errors=True)
    folder = Path(where, new_name(what))
    folder.mkdir(mode=0o700)
    return folder


def start_keeper(module: str, prefix: str) -> subprocess.Popen[bytes]:
    """Start a process that calls `keep(prefix)` of a module when this process ends, or when its
    stdin is closed."""
    code = f"import sys; from {module} import keep; sys.stdin.buffer.read(); keep(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-c", code, prefix],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach it
    )


def living() -> list[Process]:
    """Every process of this machine except zombies and this process."""
    return [p for p in all_processes() if not p.has_ended and p.pid != os.getpid()]


def _pids_where(holds: Callable[[int], bool]) -> list[int]:
    found = []
    for process in living():
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            if holds(process.pid):
                found.append(process.pid)
    return found


def marked(mark: str) -> list[int]:
    """The processes with $ELASTICRUN_TEST_NODE=`mark` in their initial environment, and their
    forks."""
    entry = f"{MARK}={mark}".encode()
    return _pids_where(lambda pid: entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def in_network(namespace: str) -> list[int]:
    """The processes in a network namespace, given by its file."""
    there = os.stat(namespace)
    return _pids_where(lambda pid: os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), there))


def is_master(pid: int) -> bool:
    """Whether a process is a job master, even before it has set its title."""
    line = command(pid)
    words = line.split()
    return line.startswith(MASTER.format("")) or any(
        a == "-m" and (b == "elasticrun.master" or (b == "elasticrun" and "master" in rest[:1]))
        for a, b, *rest in (words[i : i + 3] for i in range(len(words) - 1))
    )


def is_fork_server(pid: int) -> bool:
    """Whether a process is a fork server, or was just forked by one."""
    line = command(pid)
    return line == FORK_SERVER.decode() or "forkserver/server.py" in line


def children(pid: int) -> list[int]:
    """The children of a process. For an agent they include a fork server that a warm process forked
    for it, which is a child of its guard."""
    parents = {process.pid: process.parent for process in living()}
    guard = f"elasticrun: guard of agent {pid}"
    guards = {each for each, parent in parents.items() if parent != pid and command(each) == guard}
    return [each for each, parent in parents.items() if parent == pid or parent in guards]


def below(pid: int) -> list[int]:
    """All descendants of a process, by `children`; parents before children."""
    found, waiting = [], [pid]
    while waiting:
        below_it = children(waiting.pop())
        found += below_it
        waiting += below_it
    return found


def command(pid: int) -> str:
    """The command line of a process as one line; "" if it has exited."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace").strip()


def signal_all(find: Callable[[], Iterable[int]], number: int) -> set[int]:
    """Send a signal to all processes that `find` returns, until it returns no new ones. Returns the
    pids. Higher pids are first, so usually children before parents: the death of an agent would
    wake its stopped master."""
    sent: set[int] = set()
    for _ in range(ROUNDS):
        fresh = sorted((pid for pid in find() if pid not in sent), reverse=True)
        if not fresh:
            break
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        sent.update(fresh)
    return sent


def kill_all(find: Callable[[], Iterable[int]], limit: float) -> set[int]:
    """SIGKILL all processes that `find` returns and wait up to `limit` seconds. Returns the pids of
    those left.

    All are stopped before the first is killed, so that no agent can report a rank's death before it
    is killed itself: as when a machine loses power."""
    signal_all(find, signal.SIGSTOP)
    return await_end(signal_all(find, signal.SIGKILL), limit)


def await_end(pids: Iterable[int], limit: float) -> set[int]:
    """Wait up to `limit` seconds until these processes, of any parent, have ended. Returns the pids
    of those that have not."""
    fds: dict[int, int] = {}
    poller = select.poll()
    try:
        for pid in set(pids):
            with contextlib.suppress(ProcessLookupError):
                fds[os.pidfd_open(pid)] = pid
        for fd in fds:
            poller.register(fd, select.POLLIN)
        left = dict(fds)
        deadline = Deadline(limit)
        while left:
            over = deadline.over()
            for fd, _ in poller.poll(deadline.left() * 1000):
                poller.unregister(fd)
                del left[fd]
            if over:
                break
        return set(left.values())
    finally:
        for fd in fds:
            os.close(fd)


class Waiter:
    """Wakes when a file in a watched folder is written, created or removed, or when a watched
    process ends. Raises OSError if the kernel has no inotify instance left."""

    def __init__(self) -> None:
        self._inotify = Inotify()
        self._poller = select.poll()
        self._poller.register(self._inotify.fileno(), select.POLLIN)
        self._ends: dict[int, int] = {}

    def folder(self, path: str) -> None:
        """Watch the files in this folder."""
        self._inotify.watch(path, IN_MODIFY | IN_MOVED | IN_CREATE_DELETE)

    def process(self, pid: int) -> None:
        """Watch for the exit of a process. Its pid must be valid: for a child, not reaped yet."""
        fd = os.pidfd_open(pid)
        self._ends[fd] = pid
        self._poller.register(fd, select.POLLIN)

    def wait(self, limit: float) -> bool:
        """Wait for an event, at most `limit` seconds; returns whether there was one. An event since
        the last call counts, so none is missed between a check and this call."""
        happened = self._poller.poll(max(0.0, limit) * 1000)
        for fd, _ in happened:
            if fd in self._ends:
                self._poller.unregister(fd)
                del self._ends[fd]
                os.close(fd)
            else:
                self._inotify.read()
        return bool(happened)

    def close(self) -> None:
        """Close all descriptors."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()
        self._inotify.close()


class Deadline:
    """A time limit for something to happen."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether no time is left."""
        return self.left() <= 0


# ---------------------------------------------------------------- the warm process of the run


IDLE: Final = 900.0
"""Seconds without a job after which the warm process exits by itself if the run was killed."""

MAX_STARTS: Final = 16
"""Maximum number of starts of warm processes in a run: one exits when a test installs a package,
and the next job starts another."""

OF_A_TEST: Final = ("ELASTICRUN_TEST_", "TMPDIR", "XDG_RUNTIME_DIR", "ELASTICRUN_RUNS")
"""Variables, or prefixes of their names, that differ from test to test: the warm process does not
get them."""

_SOCKET: Final = "warm.sock"
_ONE_RANK: Final = f"{_SOCKET}.free"
"""Socket of a second warm process, for jobs of one rank, in which OMP_NUM_THREADS is not set
(`warm.FREE_THREADS`)."""


def end_warm_process(folder: str) -> None:
    """End the run's warm processes and remove their folder."""
    from elasticrun.agent.warm import connect
    from elasticrun.wire import frames, spawning

    for name in (_SOCKET, _ONE_RANK):
        with contextlib.suppress(OSError), connect(Path(folder, name), 5.0) as conn:
            conn.sendall(frames.encode(spawning.Leave()))
            conn.recv(1)  # EOF at its exit
    shutil.rmtree(folder, ignore_errors=True)


def warm_process(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a launcher with the environment `environ` finds the run's warm process,
    which is started if necessary; {} if there is none."""
    folder = os.environ.get(WARM_FOLDER, "")
    if folder in ("", "off") or env.WARM_SERVER in environ:
        return {}
    place = Path(folder, _SOCKET)
    own = {n: v for n, v in environ.items() if not n.startswith(OF_A_TEST)}
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        _start_at(place, {env.OMP_NUM_THREADS: "1", **own})
        if env.OMP_NUM_THREADS not in own:
            _start_at(Path(folder, _ONE_RANK), own)
    except OSError:
        return {}
    return {env.WARM_SERVER: str(place)} if place.is_socket() else {}


def _start_at(place: Path, environ: Mapping[str, str]) -> None:
    """Start a warm process at this socket unless there is one. If it does not start, jobs start
    cold."""
    from elasticrun.agent.warm import start

    if place.is_socket():
        return
    with open(place.with_name("starts"), "ab") as starts:
        fcntl.flock(starts, fcntl.LOCK_EX)
        if not place.is_socket() and starts.tell() < MAX_STARTS:
            starts.write(b".")
            starts.flush()
            start(place, IDLE, environ)
