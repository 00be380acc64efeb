"""A forked rank: what happens between the fork and the user's first line, and what it tells the
fork server from there on (`Page`).

Order matters: the ties to the server go first, then what may fail (files), then what the script
can see. Signals stay blocked until the program starts, so that one which comes early finds the
user's disposition and not the server's.
"""

from __future__ import annotations

import _thread
import gc
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from elasticrun.forkserver.helpers.helper import environment
from elasticrun.forkserver.lazy_imports import Baseline, Stash
from elasticrun.forkserver.program import BecomeRank, Program, command
from elasticrun.forkserver.renew import EnvironmentCheck, renew_ranks
from elasticrun.monitor import monitor, recorder
from elasticrun.system import processes
from elasticrun.system.title import set_command_line
from elasticrun.wire.env import OMP_NUM_THREADS
from elasticrun.wire.spawning import SpawnRank

PAGE_BYTES = 128 * 1024
"""Room for the names of some 3,000 modules; transformers' and lightning's imports need half."""

NOTICE = b"N"  # a sentence for the operator
EXEC_NEXT = b"X"  # later lives of this script are to be exec'd
MODULE = b"M"  # a module was looked for
IMPORTING = b"I"  # imports are under way
FAILED = b"F"  # the rank could not be started; a sentence

_HEADER = 4
_MAX_TEXT = 2000


class Page:
    """What a forked rank tells the fork server, without a descriptor that the script could see.

    Each rank shares one anonymous page run with the server. The rank appends records and pokes the
    server with SIGCHLD, which the server has a handler for in any case; what was not poked is read
    when the rank is reaped. Records beyond the bound are dropped, so nothing here can block or
    grow."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        self._server = os.getpid()
        self._writer = 0
        self._read = _HEADER
        self._lock = _thread.allocate_lock()

    # ------------------------------------------------------------ in the rank

    def adopt(self) -> None:
        """This process writes from now on; processes that it forks itself stay silent."""
        self._writer = os.getpid()
        self._lock = _thread.allocate_lock()

    def write(self, kind: bytes, text: str, *, poke: bool = True) -> None:
        """Append a record, cut to a bounded length; dropped when the page is full."""
        if os.getpid() != self._writer:
            return
        body = kind + text.encode("utf-8", "backslashreplace")[:_MAX_TEXT]
        with self._lock:
            end = self._end()
            if end + 2 + len(body) <= PAGE_BYTES:
                self._memory[end : end + 2 + len(body)] = len(body).to_bytes(2, "little") + body
                self._memory[:_HEADER] = (end + 2 + len(body)).to_bytes(_HEADER, "little")
        if poke:
            self.poke()

    def poke(self) -> None:
        """Have the server read. A rank that changed its user may not; it is read at its end."""
        if os.getppid() == self._server:
            with suppress(PermissionError):
                os.kill(self._server, signal.SIGCHLD)

    # ------------------------------------------------------------ in the server

    def read(self) -> Iterator[tuple[bytes, str]]:
        """The records since the last call. What a rank scribbled over the page ends the reading;
        it can do no more than say nothing."""
        end = self._end()
        while self._read + 2 <= end:
            length = int.from_bytes(self._memory[self._read : self._read + 2], "little")
            start = self._read + 2
            if not 1 <= length <= end - start:
                self._read = PAGE_BYTES
                return
            self._read = start + length
            body = self._memory[start : start + length]
            yield body[:1], body[1:].decode("utf-8", "replace")

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _end(self) -> int:
        end = int.from_bytes(self._memory[:_HEADER], "little") or _HEADER
        return min(max(end, _HEADER), PAGE_BYTES)


POKE_INTERVAL = 1.0
"""Seconds between two pokes for module names; a burst of imports is one piece of news."""

MAX_LEARNED = 3000
"""Most modules told; a frame holds more, but no script has been seen to need half of them."""


class Watcher:
    """In a rank: notes every module that it looks for (`lazy_imports.Stash.looked_for`)."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._seen: set[str] = set()
        self._looked_for: list[str] = []
        self._poked = 0.0

    def __call__(self, name: str) -> None:
        """`name` is looked for."""
        if name in self._seen or len(self._seen) >= MAX_LEARNED:
            return
        self._seen.add(name)
        # Told are the names that have become modules since; optional ones that are not installed
        # never do. The very last import of a script is not told: nothing is looked for after it.
        for found in self._looked_for:
            if found in sys.modules:
                self._page.write(MODULE, found, poke=False)
        self._looked_for = [name]
        now = time.monotonic()
        if now - self._poked >= POKE_INTERVAL:
            self._poked = now
            self._page.write(IMPORTING, "")


# ---------------------------------------------------------------- becoming a rank

CANNOT_START = 125
"""Exit code of a child that could not become a rank; the page says why."""

SELF_IGNORED = (int(signal.SIGPIPE), int(signal.SIGXFSZ))
"""The interpreter ignores these at its start, whatever it was given."""

_signal: Any = sys.modules["_signal"]
"""What lies below `signal`: with its enums, setting all dispositions takes 8 ms."""
_SIGINT = int(signal.SIGINT)
_SETTABLE = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


@dataclass(frozen=True, slots=True)
class Birth:
    """What a rank is born with: what the agent had at its own start."""

    server: int  # pid
    agent: int  # pid, 0 where it is not to be seen from here
    ignored: frozenset[int]
    mask: frozenset[int]
    baseline: Baseline


def become_rank(birth: Birth, order: SpawnRank, page: Page, stash: Stash, learn: bool) -> NoReturn:
    """In a fresh fork, signals blocked: raise BecomeRank with the program ready to run."""
    _settle(birth, order, page)
    _dispositions(birth, for_python=True)
    environ = environment(birth.baseline.environ, order)
    set_environ(environ)
    _renew_streams()
    made = {os.fsdecode(name): os.fsdecode(value) for name, value in stash.environ.items()}
    check = EnvironmentCheck(stash.reads, stash.saw, made)
    bound = bool(order.cpus) and set(order.cpus) != birth.baseline.affinity
    rank = _Rank(order, page, check, bound)
    _renew_library_state(stash)
    stash.tell(rank.packages_returned)
    if learn:
        stash.looked_for = Watcher(page)
    program = Program(order.entry, order.error_file, birth.mask)
    program.prepare()
    words = command(order.entry)
    set_command_line(
        [os.fsencode(word) for word in words], [n + b"=" + v for n, v in environ.items()]
    )
    processes.set_name(os.fsencode(os.path.basename(words[0])))
    gc.enable()
    if order.monitor:
        recorder.keep(getattr(stash.modules.get("torch"), "__version__", ""))
        monitor.start(order.monitor)
    raise BecomeRank(program)


def exec_rank(birth: Birth, order: SpawnRank, page: Page, python: str) -> NoReturn:
    """In a fresh fork, signals blocked: become `python -u script`, or the command."""
    _settle(birth, order, page)
    _dispositions(birth, for_python=False)
    environ = environment(birth.baseline.environ, order)
    words = [*order.exec_prefix, *command(order.entry, python)]
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, birth.mask)
        os.execvpe(words[0], words, environ)
    except OSError as error:
        fail(page, f"cannot run {words[0]}: {error.strerror}")


def fail(page: Page, reason: str) -> NoReturn:
    """End this child; the server tells the agent the reason."""
    page.write(FAILED, reason, poke=False)
    os._exit(CANNOT_START)


def _settle(birth: Birth, order: SpawnRank, page: Page) -> None:
    """Session, ties to the server, files, cores: the same for a fork and an exec."""
    page.adopt()
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != birth.server:
        os._exit(CANNOT_START)
    os.setsid()
    if birth.agent:  # an ancestor may trace us anyway; its py-spy is a child of it, and is none
        processes.let_trace(birth.agent)
    try:
        _redirect(1, order.stdout)
        _redirect(2, order.stderr)
    except OSError as error:
        fail(page, f"cannot write the log file {error.filename}: {error.strerror}")
    cores = set(order.cpus) or birth.baseline.affinity
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        words = ",".join(map(str, sorted(cores)))
        page.write(NOTICE, f"local rank {order.local_rank} is not bound to cores {words}: {error}")


def _redirect(descriptor: int, path: str) -> None:
    """Put a fresh file (or /dev/null) under `descriptor`; an empty path leaves what is there."""
    if not path:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    opened = os.open(path, flags, 0o666)
    if opened == descriptor:
        os.set_inheritable(opened, True)
        return
    os.dup2(opened, descriptor)
    os.close(opened)


def _renew_streams() -> None:
    """Put new standard streams on descriptors 0, 1 and 2, as `python -u` makes them: the server's
    remember things about its own descriptors (whether one can seek, how large its blocks are)."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old: Any = getattr(sys, name)
        stream = _open(descriptor, name, mode, old) if old is not None else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open(descriptor: int, name: str, mode: str, old: TextIO) -> TextIO | None:
    import io

    try:
        os.fstat(descriptor)
    except OSError:  # closed: the interpreter has None there
        return None
    writing = mode == "w"
    buffering = 0 if writing else -1
    raw: Any = open(descriptor, mode + "b", buffering, closefd=False)  # noqa: SIM115
    (raw if writing else raw.raw).name = f"<{name}>"
    stream: Any = io.TextIOWrapper(
        raw,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=False,
        write_through=True,
    )
    stream.mode = mode
    return stream  # type: ignore[no-any-return]


def _dispositions(birth: Birth, *, for_python: bool) -> None:
    for number in _SETTABLE:
        action: Any = _signal.SIG_IGN if number in birth.ignored else _signal.SIG_DFL
        if for_python and number == _SIGINT and action == _signal.SIG_DFL:
            action = _signal.default_int_handler
        if for_python and number in SELF_IGNORED:
            action = _signal.SIG_IGN
        # None: a handler that is not Python's, which the interpreter has installed at its start
        # as it would in a rank of its own (faulthandler, by PYTHONDEVMODE)
        if _signal.getsignal(number) not in (action, None):
            _signal.signal(number, action)


def set_environ(environ: Mapping[bytes, bytes]) -> None:
    """Make these the variables of this process, for Python and for C alike."""
    held: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]
    for name in held.keys() - environ.keys():
        os.unsetenv(name)
    for name, value in environ.items():
        if held.get(name) != value:
            os.putenv(name, value)
    held.clear()
    held.update(environ)


def _renew_library_state(stash: Stash) -> None:
    """What the standard library made once in the server and every process has for itself."""
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()
    if process := stash.modules.get("multiprocessing.process"):
        key = process.AuthenticationString(os.urandom(32))
        process.current_process().__dict__["_config"]["authkey"] = key
    if tempfile := stash.modules.get("tempfile"):
        tempfile.tempdir = None
    if logging := stash.modules.get("logging"):
        clock = time.time if sys.version_info < (3, 13) else time.time_ns
        logging._startTime = clock()


@dataclass
class _Rank:
    """The rank at the moments when its script brings preloaded packages back."""

    order: SpawnRank
    page: Page
    check: EnvironmentCheck
    bound: bool  # to other cores than the server's first ones

    def packages_returned(self, packages: set[str]) -> None:
        """Give numpy and torch fresh random states and Lightning its rank, and see what the script
        has set above."""
        renew_ranks(packages)
        modules: Mapping[str, Any] = sys.modules
        if "numpy" in packages and "numpy.random" in modules:
            modules["numpy.random"].seed()
        if "torch" in packages:
            modules["torch"].default_generator.seed()
            if self.bound and not os.environ.get(OMP_NUM_THREADS):
                modules["torch"].set_num_threads(len(self.order.cpus))
        left = self.check.take_over(self.check.changed(packages))
        if not left:
            return
        what = next((n for n in ("torch", "numpy") if n in packages), min(packages))
        self.page.write(EXEC_NEXT, self.order.entry.target, poke=False)
        self.page.write(
            NOTICE,
            f"local rank {self.order.local_rank}: {', '.join(left)} was set before the script's "
            f"first import of {what}, too late for a forked rank, which runs without it; later "
            f"lives of {self.order.entry.target} are started by exec",
        )
