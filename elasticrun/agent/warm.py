"""Gets a fork server from a warm process: in milliseconds, because torch is already imported.

A warm process (`forkserver.warm`) has torch imported and forks fork servers for launchers of the
same user. Its socket is in the user's folder, to which only the user has access. The socket's name
is a hash of what decides which launchers it can serve at all: the interpreter, its environment
folder and our package, then the cgroup and the namespaces. The warm process compares everything
else at each request, and reports a difference.

If there is none, or it must not be used, the caller starts a fork server itself; one log line gives
the reason why an existing one is not used. This module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrun.host.log import NOTICE, logger
from elasticrun.host.system.processes import boot_id
from elasticrun.host.user_folder import user_folder
from elasticrun.wire import debugger, env, frames, spawning
from elasticrun.wire.types import EntryKind

if TYPE_CHECKING:
    import asyncio

    from elasticrun.config import Launch

IDLE: Final = 1800.0
"""Seconds without a job after which a warm process exits."""

WAIT_FOR_PROCESSES: Final = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID")
"""Variables set in job steps and pods, which end only when their last process has exited."""

ANSWER_LIMIT: Final = 2.0
"""Seconds to wait for a warm process to fork, which takes some hundredths of a second."""

OWN_END: Final = 5.0
"""Seconds that a fork server whose guard was killed has to kill its descendants itself."""

OFF: Final = "off"
"""The value of ELASTICRUN_WARM_SERVER that disables warm processes."""

FREE_THREADS: Final = ".free"
"""Suffix of the socket of the process with OMP_NUM_THREADS unset, if there are two processes."""

REMEDY: Final = "run `elasticrun warm --stop` and `elasticrun warm` here for one that matches"

PACKAGE: Final = Path(__file__).resolve().parent.parent


class WarmChild:
    """A fork server forked for us by a warm process: the interface of a child process.

    Its guard is its parent. `returncode` is None until the guard has swept all descendants, then as
    in `subprocess`. It is -SIGKILL if the guard itself was killed: the fork server sees that, kills
    its descendants and exits."""

    def __init__(self, pid: int, guard: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._guard = guard
        self._buffer = frames.FrameBuffer(spawning.FromWarm)
        self.swept: asyncio.Event | None = None
        self.has_lost_guard = False
        self._late: asyncio.TimerHandle | None = None

    @property
    def is_guarded(self) -> bool:
        """Whether its guard is still connected."""
        return self._guard.fileno() >= 0

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended(code)` once, in the running loop, when it and all its descendants have
        exited."""
        import asyncio  # late: asyncio is not imported when a fork server is requested

        self.swept = asyncio.Event()
        self._guard.setblocking(False)
        asyncio.get_running_loop().add_reader(self._guard, self._readable, ended)

    def wait(self, limit: float) -> int:
        """Wait for it and all its descendants to exit; returns its exit code. Raises TimeoutError
        after `limit` seconds."""
        self._guard.settimeout(limit)
        message = receive(self._guard)
        if not isinstance(message, spawning.Over):
            raise frames.FrameError("its guard sent an unexpected message")
        self._settle(message.code)
        return message.code

    def abandon(self) -> None:
        """Close the connection, as if this process were killed: the fork server exits."""
        self._guard.close()

    def kill(self) -> None:
        """Send SIGKILL to the fork server only; its guard kills the rest."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _readable(self, ended: Callable[[int], None]) -> None:
        import asyncio

        try:
            data = self._guard.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the guard was killed
            self._guard_died(ended)
            return
        words = list(self._buffer.feed(data))
        if words:
            asyncio.get_running_loop().remove_reader(self._guard)
            over = isinstance(words[0], spawning.Over)
            self._ended(words[0].code if over else -int(signal.SIGKILL), ended)

    def _guard_died(self, ended: Callable[[int], None]) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        loop.remove_reader(self._guard)
        self._guard.close()
        self.has_lost_guard = True
        self._late = loop.call_later(OWN_END, self.kill)
        loop.add_reader(self._pidfd, self._exited, ended)

    def _exited(self, ended: Callable[[int], None]) -> None:
        import asyncio

        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._late is not None:
            self._late.cancel()
        self._ended(-int(signal.SIGKILL), ended)

    def _ended(self, code: int, ended: Callable[[int], None]) -> None:
        self._settle(code)
        assert self.swept is not None
        self.swept.set()
        ended(code)

    def _settle(self, code: int) -> None:
        self._guard.close()
        os.close(self._pidfd)
        self.returncode = code


def fork_server(
    environ: Mapping[str, str], ignored: Iterable[int]
) -> tuple[WarmChild, socket.socket] | None:
    """A fork server with this environment, and our end of its socket; None if the caller has to
    start one."""
    with contextlib.suppress(OSError):
        path = find(environ)
        if path is not None and (path.is_socket() or environ.get(env.WARM_SERVER)):
            return ask(path, environ, ignored)
        if path is not None and (reason := _mismatch(path, environ)):
            _log_not_used("", reason)
    return None


def ask(
    path: Path, environ: Mapping[str, str], ignored: Iterable[int]
) -> tuple[WarmChild, socket.socket] | None:
    """Request a fork server from the warm process at `path`; None, with a log line, if it forks
    none."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    request = spawning.Ask(dict(environ), tuple(ignored), tuple(sorted(int(s) for s in blocked)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        guard = connect(path, ANSWER_LIMIT)
        try:
            answer = _ask(guard, request, theirs)
            if isinstance(answer, spawning.Forked):
                return WarmChild(answer.pid, guard), ours
            _log_not_used(environ.get(env.WARM_SERVER, ""), f"{answer.reason}; {REMEDY}")
        except BaseException:
            guard.close()
            raise
        guard.close()
    except (FileNotFoundError, ConnectionRefusedError):
        if environ.get(env.WARM_SERVER):  # else it has exited since
            logger.log(NOTICE, "no warm process at %s", path)
    except (OSError, frames.FrameError) as error:
        _log_not_used(environ.get(env.WARM_SERVER, ""), _words(error))
    finally:
        theirs.close()
    ours.close()
    return None


def _ask(
    guard: socket.socket, request: spawning.Ask, theirs: socket.socket
) -> spawning.Forked | spawning.Declined:
    guard.sendall(frames.encode(request))
    answer = receive(guard)
    if isinstance(answer, spawning.Granted):
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            socket.send_fds(guard, [b"."], [theirs.fileno(), 0, 1, 2, folder])
        finally:
            os.close(folder)
        answer = receive(guard)
    if not isinstance(answer, spawning.Forked | spawning.Declined):
        raise frames.FrameError("its answer does not fit the request")
    return answer


def receive(conn: socket.socket) -> spawning.FromWarm:
    """The next message. Raises OSError if none arrives, and FrameError if it is invalid."""
    buffer = frames.FrameBuffer(spawning.FromWarm)
    while data := conn.recv(4096):
        for message in buffer.feed(data):
            return message  # type: ignore[no-any-return]
    raise ConnectionResetError("it ended")


def can_be_warm(launch: Launch) -> bool:
    """Whether a warm process can serve this job: not if ranks are never forked, nor with another
    interpreter than ours."""
    return launch.mode != "exec" and launch.python_exec in (None, "", sys.executable)


def leave_behind(launch: Launch) -> None:
    """Start a warm process for later jobs like this one, unless there is one; it initializes in the
    background."""
    held = next((name for name in WAIT_FOR_PROCESSES if os.environ.get(name)), "")
    why = ""
    if held or os.getpid() == 1:
        why = f"{held} is set" if held else "this is the first process of a container"
        why += ", and the process would keep it from ending"
    elif not can_be_warm(launch) or launch.entry.kind is EntryKind.COMMAND:
        why = "no rank of this job is forked"
    if why:
        logger.warning("no warm process is kept: %s", why)
        return
    environ = dict(os.environ)
    if launch.set_omp_threads:
        environ[env.OMP_NUM_THREADS] = "1"
    try:
        path = socket_path(environ)
        if not path.is_socket():
            _, pid = start(path, IDLE, environ, wait=False)
            how = "it is ready in some seconds; `elasticrun warm --stop` ends it"
            logger.log(NOTICE, "process %d stays warm for later jobs: %s", pid, how)
    except OSError as error:
        logger.warning("no warm process is kept: %s", error)


def start(
    path: Path, idle: float, environ: Mapping[str, str], *, wait: bool = True
) -> tuple[str, int]:
    """Start a warm process that listens at `path`, with this environment. Returns its answer ("ok
    2.13.0", "no ..." or nothing) and its pid. It runs in its own session and outlives us."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    silent = None if wait else subprocess.DEVNULL
    try:
        command = spawning.warm_command(path, idle=idle, fd=writing if wait else -1)
        with debugger.without_debugger():
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=silent, stderr=silent,
                pass_fds=(writing,) if wait else (), start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(writing)
    answer = ""
    with open(reading, encoding="utf-8", errors="replace") as pipe:
        if wait:
            answer = pipe.read()
    if wait and not answer.startswith("ok"):
        process.wait()
    process.returncode = 0  # keeps Popen from waiting for it
    return answer.strip(), process.pid


def refusal(path: Path, environ: Mapping[str, str]) -> str:
    """Why the warm process at `path` would not fork for this process with this environment; empty
    if it would. The warm process exits if its imported packages differ from the installed ones."""
    try:
        with connect(path, ANSWER_LIMIT) as conn:
            conn.sendall(frames.encode(spawning.Ask(dict(environ), (), ())))
            answer = receive(conn)
    except (OSError, frames.FrameError) as error:
        return _words(error)
    return answer.reason if isinstance(answer, spawning.Declined) else ""


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it does not answer within {ANSWER_LIMIT:g} s"
    return str(error) or type(error).__name__


@functools.cache  # once per process: every started fork server would repeat it
def _log_not_used(named: str, reason: str) -> None:
    """Log why the warm process is not used: visibly by default, because nothing else explains slow
    starts, but at level INFO if the user has named it (`named`), as our pytest plugin does."""
    logger.log(logging.INFO if named else NOTICE, "the warm process is not used: %s", reason)


# ---------------------------------------------------------------- socket paths


def environment_name() -> str:
    """A hash of the interpreter and its packages, which must match."""
    python = os.path.realpath(sys.executable)
    words = (python, sys.prefix, sys.base_prefix, str(PACKAGE), sys.version)
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:12]


def _place_of(pid: int | str) -> dict[str, str]:
    """The cgroup and the namespaces of a process; a fork of it stays in all of them."""
    found = {"cgroup": Path(f"/proc/{pid}/cgroup").read_text()}
    for name in spawning.NAMESPACES:
        try:
            found[f"{name} namespace"] = os.readlink(f"/proc/{pid}/ns/{name}")
        except FileNotFoundError:  # an older kernel
            found[f"{name} namespace"] = ""
    return found


def _threads_of(pid: int) -> str:
    """The OMP_NUM_THREADS that a process was started with, as text. Raises OSError."""
    name = f"{env.OMP_NUM_THREADS}=".encode()
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = next((word for word in words if word.startswith(name)), b"")
    return found.removeprefix(name).decode(errors="replace") or "not set"


def _mismatch(path: Path, environ: Mapping[str, str]) -> str:
    """If no warm process listens at `path`: how another one of this environment differs, and the
    command that starts a matching one. Empty if there is no other."""
    here, found = _place_of("self"), ""
    threads = environ.get(env.OMP_NUM_THREADS, "")
    for other in path.parent.glob(f"warm-{environment_name()}-{_machine()}-*.sock"):
        with contextlib.suppress(OSError), connect(other, ANSWER_LIMIT) as conn:
            pid = frames.peer_of(conn)[0]
            differs = ((words, value) for words, value in _place_of(pid).items()
                       if value != here[words])  # fmt: skip
            words, value = next(differs, ("", ""))
            if not words:  # so it was started with another OMP_NUM_THREADS
                start = "`elasticrun warm`" if threads else "`elasticrun warm --one-rank`"
                return (
                    f"{env.OMP_NUM_THREADS} {threads or 'not set'} here, {_threads_of(pid)} in "
                    f"process {pid}; {start} here starts one for such jobs"
                )
            found = (
                f"{words} {here[words].strip()} here, {value.strip()} in process {pid}; "
                "`elasticrun warm` here starts another one"
            )
    return found


def socket_path(environ: Mapping[str, str]) -> Path:
    """The socket of the warm process for this process's user, cgroup and namespaces. Raises OSError
    if no folder is private to the user.

    torch sizes its thread pools at import, so jobs with one rank, for which OMP_NUM_THREADS is not
    set, use a separate warm process.
    """
    words = [*_place_of("self").values(), environ.get(env.OMP_NUM_THREADS, "")]
    place = hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
    return user_folder(environ) / f"warm-{environment_name()}-{_machine()}-{place}.sock"


def _machine() -> str:
    """A hash of this host and its boot. Hosts may share the user's folder, but a socket works only
    on the kernel that bound it."""
    return f"{_digest(os.uname().nodename)}-{_digest(boot_id())}"


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()[:6]


def may_remove(path: Path) -> bool:
    """Whether a socket that refuses connections belongs to this host: another host's process may be
    listening on its own."""
    words = path.name.split("-")
    return words[0] != "warm" or words[2:3] == [_digest(os.uname().nodename)]


def find(environ: Mapping[str, str]) -> Path | None:
    """The path of a warm process's socket that may serve us, which may not exist; None if warm
    processes are disabled."""
    named = environ.get(env.WARM_SERVER, "")
    if named == OFF:
        return None
    if not named:
        return socket_path(environ)
    own = Path(named + FREE_THREADS)
    return own if env.OMP_NUM_THREADS not in environ and own.is_socket() else Path(named)


def connect(path: Path, limit: float) -> socket.socket:
    """Connect to the process at `path` if it belongs to this user. Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        conn.settimeout(limit)
        conn.connect(f"/proc/self/fd/{folder}/{path.name}")  # a socket path has 107 bytes at most
        if frames.peer_of(conn)[1] != os.geteuid():
            raise PermissionError(f"the process at {path} belongs to another user")
    except BaseException:
        conn.close()
        raise
    finally:
        os.close(folder)
    return conn
