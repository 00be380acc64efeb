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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from elasticrun.forkserver.helpers import numa
from elasticrun.forkserver.helpers.helper import environment
from elasticrun.forkserver.lazy_imports import GUARDED, Baseline, Stash
from elasticrun.forkserver.program import BecomeRank, Program
from elasticrun.host.system import processes
from elasticrun.host.system.title import become_program
from elasticrun.training.monitor import monitor, recorder
from elasticrun.wire.spawning import SpawnRank, command

PAGE_BYTES = 16 * 1024
"""Room for the few sentences that a rank ever says."""

NOTICE = b"N"  # a sentence for the operator
EXEC_NEXT = b"X"  # later lives of this script are to be exec'd
EXECED = b"E"  # this rank executes itself now
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


def become_rank(birth: Birth, order: SpawnRank, page: Page, stash: Stash) -> NoReturn:
    """In a fresh fork, signals blocked: raise BecomeRank with the program ready to run."""
    _settle(birth, order, page)
    _dispositions(birth, for_python=True)
    environ = environment(birth.baseline.environ, order)
    set_environ(environ)
    _renew_streams()
    birth.baseline.exits.let_go()
    _renew_library_state(stash)
    program = Program(order.entry, order.error_file, birth.mask, birth.baseline.excepthook)
    program.prepare()
    again = FreshStart(birth, order, page, stash, environ)
    stash.begin(again.take)
    words = command(order.entry)
    become_program(
        [os.fsencode(word) for word in words], [n + b"=" + v for n, v in environ.items()]
    )
    processes.set_name(os.fsencode(os.path.basename(words[0])))
    gc.enable()
    if order.monitor:
        recorder.keep(getattr(stash.modules.get("torch"), "__version__", ""))
        monitor.start(order.monitor)
    again.watch()
    raise BecomeRank(program)


def exec_rank(birth: Birth, order: SpawnRank, page: Page, python: str) -> NoReturn:
    """In a fresh fork, signals blocked: become `python -u script`, or the command."""
    _settle(birth, order, page)
    _dispositions(birth, for_python=False)
    environ = environment(birth.baseline.environ, order)
    words = command(order.entry, python)
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
    with suppress(OSError):
        os.sched_setaffinity(0, birth.baseline.affinity)
    if order.numa:
        try:
            cores = numa.cores(order.numa, order.local_rank, may_fail=order.numa_may_fail)
            os.sched_setaffinity(0, cores)
        except (numa.NotBound, OSError) as error:
            fail(page, str(error))


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
    """Put the standard streams anew on descriptors 0, 1 and 2, as `python -u` makes them: the
    server's remember things about its own descriptors (whether one can seek, how large its blocks
    are). They stay the same objects: log handlers and default arguments hold them."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is not None and not _reopen(stream, descriptor, name, mode):
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)


def _reopen(stream: Any, descriptor: int, name: str, mode: str) -> bool:
    """False where the descriptor is closed: the interpreter has no stream there."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    writing = mode == "w"
    buffering = 0 if writing else -1
    raw: Any = open(descriptor, mode + "b", buffering, closefd=False)  # noqa: SIM115
    (raw if writing else raw.raw).name = f"<{name}>"
    stream.__init__(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=False,
        write_through=True,
    )
    stream.mode = mode
    return True


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
    """What the server's imports made once and every process has for itself, random generators among
    it: here, before the script's first line, and never later."""
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()
    if process := stash.modules.get("multiprocessing.process"):
        key = process.AuthenticationString(os.urandom(32))
        process.current_process().__dict__["_config"]["authkey"] = key
    if tempfile := stash.modules.get("tempfile"):
        tempfile.tempdir = tempfile._name_sequence = None
    if logging := stash.modules.get("logging"):
        clock = time.time if sys.version_info < (3, 13) else time.time_ns
        logging._startTime = clock()
    if numpys := stash.modules.get("numpy.random"):  # only older ones' import brings it
        numpys.set_bit_generator(numpys.MT19937())
    if torch := stash.modules.get("torch"):
        torch.default_generator.seed()


# ---------------------------------------------------------------- a second start, by exec


class FreshStart:
    """How a forked rank becomes `python -u script` after all, with the same process id.

    At the script's first import of numpy or torch it may turn out that this import would not be
    what the server's was: a variable was set, a module replaced. Only the script's first lines have
    run then. They run again in the program that is executed, so it is executed only where they have
    done nothing that can be seen outside of this process: an audit hook and the kernel's count of
    writes tell. Otherwise the rank goes on with the server's import, and later lives are exec'd; so
    that this is rare, the server has looked through the text of the script before
    (`trust.before_import`)."""

    def __init__(
        self,
        birth: Birth,
        order: SpawnRank,
        page: Page,
        stash: Stash,
        environ: Mapping[bytes, bytes],
    ) -> None:
        self._birth, self._order, self._page, self._stash = birth, order, page, stash
        self._environ = environ
        self._folder = os.getcwd()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._seen = ""  # the first thing that was done outside, in words
        self._compiled = 0  # files of compiled modules that were written
        self._written = 0
        self._pid = os.getpid()
        self._cores = os.sched_getaffinity(0)

    def watch(self) -> None:
        """Begin to look; the last thing before the script's first line."""
        sys.addaudithook(self._heard)
        self._written = _writes()

    def take(self, reason: str) -> None:
        """Execute the program anew, since `reason`; returns where the first lines must not run
        twice."""
        if os.getpid() != self._pid:
            return  # a process that the script has forked is what its parent is
        target = self._order.entry.target
        self._page.write(EXEC_NEXT, target, poke=False)
        done = self._done()
        if done:
            self._page.write(
                NOTICE,
                f"{target}: {reason}, too late for forked ranks, which run without that in this "
                f"life, since their first lines have {done}; later lives are started by exec",
            )
            return
        self._page.write(NOTICE, f"{target}: {reason}, so ranks are started by exec", poke=False)
        self._page.write(EXECED, "")
        self._execute()

    def _execute(self) -> NoReturn:
        os.chdir(self._folder)
        os.umask(self._umask)
        with suppress(OSError):
            os.sched_setaffinity(0, self._cores)
        for timer in (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF):
            _signal.setitimer(timer, 0)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _SETTABLE)
        _dispositions(self._birth, for_python=False)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._birth.mask)
        words = command(self._order.entry)
        os.execve(words[0], words, self._environ)

    def _done(self) -> str:
        """What the first lines have done that is seen outside; empty: nothing."""
        if self._seen:
            return self._seen
        if (now := _writes()) < 0:
            return "perhaps written something, which this kernel does not tell"
        if len(os.listdir("/proc/self/task")) > 1 + bool(self._order.monitor):
            return "started a thread"
        return "written something" if now - self._written > self._compiled else ""

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._stash.modules:
            return
        if event == "import":
            if args[0] in GUARDED and args[0] in self._stash.modules:
                self._guard()
        elif event == "open":
            self._opened(*args[:3])
        elif event.startswith(_OUTSIDE) and not self._seen and not _is_compiled(args):
            self._seen = f"called {event}"

    def _guard(self) -> None:
        """An import hook in front of our finder would load a second copy of torch's libraries."""
        finder = self._stash.finder
        if sys.meta_path[:1] != [finder]:
            self.take("a finder was put in front of sys.meta_path before torch was imported")
            with suppress(ValueError):
                sys.meta_path.remove(finder)
            sys.meta_path.insert(0, finder)

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int) or not flags or not flags & _WRITING or path == os.devnull:
            return
        if _is_compiled((path,)):
            self._compiled += 1
        elif not self._seen:
            self._seen = f"opened {os.fsdecode(path)} to write"


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_OUTSIDE = (
    *("builtins.input", "fcntl.", "ftplib.", "http.client.", "imaplib.", "nntplib.", "os.chmod"),
    *("os.chown", "os.exec", "os.fork", "os.kill", "os.lchown", "os.link", "os.lockf", "os.mkdir"),
    *("os.posix_spawn", "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.setxattr"),
    *("os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.utime", "poplib."),
    *("pty.spawn", "resource.prlimit", "resource.setrlimit", "shutil.", "signal.pthread_kill"),
    *("smtplib.", "socket.bind", "socket.connect", "socket.send", "sqlite3.connect"),
    *("subprocess.Popen", "syslog.", "telnetlib.", "tempfile.", "urllib.Request"),
)
"""Beginnings of the audit events of what is seen outside of a process, or cannot be taken back."""

_COMPILED = f"{os.sep}__pycache__"

_COUNTS = "/proc/self/io"
"""Where the kernel counts writes, unless it was built without CONFIG_TASK_IO_ACCOUNTING."""


def _is_compiled(args: Iterable[Any]) -> bool:
    """Whether this is about the compiled file of a module, which an import may write."""
    return any(isinstance(each, str) and _COMPILED in each for each in args)


def _writes() -> int:
    """Calls by which this process has written anything; -1 where the kernel does not say."""
    try:
        with open(_COUNTS, "rb", buffering=0) as file:
            words = file.read(1000).split()
    except OSError:
        return -1
    return int(words[words.index(b"syscw:") + 1])
