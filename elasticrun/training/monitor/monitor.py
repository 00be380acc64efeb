"""The thread that answers the agent from within a rank, only on request.

It is started below `threading`, so a script that counts its threads does not see it. It blocks all
signals, so they reach the script's own threads. It sleeps in the kernel until a question arrives,
and collects the answer within a few milliseconds, without a Python lock and without an import. The
thread does not exist while the script forks: see `_Monitor`.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final

from elasticrun.training.monitor import recorder
from elasticrun.wire.progress import (
    CREDENTIALS_BYTES,
    MAX_ANSWER_FRAMES,
    MAX_ANSWER_THREADS,
    QUESTION_BYTES,
    RankAnswer,
    RankQuestion,
    ThreadAnswer,
    bind_socket,
    encode_answer,
    read_question,
    sent_by_us,
)

HIGH: Final = 1000
"""The socket's descriptor is at least this, or the highest that is allowed: scripts rely on getting
number 3 for the first file that they open.
"""

SEND_LIMIT: Final = struct.pack("@ll", 1, 0)
"""One second (struct timeval): how long an answer waits until the agent has read earlier ones."""

END_LIMIT: Final = 1.0
"""Seconds that the exit of a rank, or a fork in it, waits for an answer in progress."""


COUNTED_LATE: Final = (3, 13) <= sys.version_info < (3, 13, 10) or sys.version_info[:3] == (
    3,
    14,
    0,
)
"""Whether this Python counts threads only after the last fork hook has returned (gh-137109)."""


class MonitorSocket(socket.socket):
    """The monitor's socket. An audit hook tells it from the sockets of the script by its class."""


def start(name: str) -> None:
    """Answer at this socket name from now on, in a thread. If no thread can be started, the rank
    runs without one."""
    with suppress(OSError, RuntimeError):
        monitor = _Monitor(_listen(name))
        os.register_at_fork(
            before=monitor.pause,
            after_in_parent=monitor.resume,
            after_in_child=monitor.close_in_child,
        )
        if COUNTED_LATE:  # a C function; a Python one would run the pending call in here
            os.register_at_fork(after_in_parent=_pending(monitor.start_thread))
        atexit.register(monitor.stop)
        monitor.start_thread()


def _listen(name: str) -> socket.socket:
    low = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with low:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        floor = HIGH if most in (resource.RLIM_INFINITY, -1) else min(HIGH, most - 1)
        high = fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, floor)
    listener = MonitorSocket(socket.AF_UNIX, socket.SOCK_DGRAM, fileno=high)
    try:
        listener.setblocking(True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_LIMIT)
        bind_socket(listener, name)
    except OSError:
        listener.close()
        raise
    return listener


class _Monitor:
    """The monitor thread of one rank, from start to end.

    It ends before each fork of the script and starts again afterwards in the parent; questions wait
    in the socket meanwhile. There are two reasons. Since Python 3.12 a fork with more than one
    thread gives a warning, which must not be due to our thread. And a torch lock that our thread
    holds during a fork would stay locked in the child forever."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._name = listener.getsockname()
        self._mine = _inode(listener)
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._counters = recorder.Counters()
        self._running = _thread.allocate_lock()
        """Held while the thread exists or is about to start."""
        self._thread = 0
        """Native id of the newest thread."""
        self._forking: set[int] = set()
        """Threads of the script that are in a fork."""
        self._over = False

    # ------------------------------------------------------------ in the script's threads

    def pause(self) -> None:
        """Before a fork: end our thread, or give up after END_LIMIT."""
        if self._over or os.getpid() != self._pid:
            return
        self._forking.add(_thread.get_ident())
        try:
            if _inode(self._listener) != self._mine:  # the script has closed it
                return
            # Send an empty datagram to wake the thread; unnecessary if the queue is full.
            self._listener.sendto(b"", socket.MSG_DONTWAIT, self._name)
        except BlockingIOError:
            pass
        except OSError:
            return
        deadline = time.monotonic() + END_LIMIT
        if not self._running.acquire(timeout=END_LIMIT):
            return
        self._running.release()
        place = f"/proc/self/task/{self._thread}"
        with suppress(FileNotFoundError):  # it counts until it is gone from /proc
            while time.monotonic() < deadline:
                os.stat(place)
                os.sched_yield()

    def resume(self) -> None:
        """After a fork, in the parent: start the thread again."""
        mine = _thread.get_ident()
        self._forking.discard(mine)
        # if another thread forks, Python counts two threads anyway
        if not COUNTED_LATE or mine != self._main:
            self.start_thread()

    def start_thread(self) -> None:
        """Start the thread, unless it runs already or must not run."""
        if self._must_stop() or not self._running.acquire(blocking=False):
            return
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # thread limit reached
            self._over = True
            self._running.release()

    def close_in_child(self) -> None:
        """In a process that the script has forked: close the socket; the agent does not know it."""
        self._over = True
        with suppress(OSError):
            self._listener.close()

    def stop(self) -> None:
        """Stop the thread, right before the interpreter finalizes. The interpreter would kill a
        thread that continues after that in the middle of torch's frames, which aborts the process
        (SIGABRT)."""
        if os.getpid() != self._pid:
            return
        self._over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._running.acquire(timeout=END_LIMIT)

    # ------------------------------------------------------------ in our thread

    def _must_stop(self) -> bool:
        return self._over or bool(self._forking) or os.getpid() != self._pid

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        self._thread = _thread.get_native_id()
        while True:
            try:
                self._serve()
            except (OSError, ValueError):
                self._over = True
            finally:
                self._running.release()
            # a fork that did not wait for us is over, and `resume` found this thread still running
            if self._must_stop() or not self._running.acquire(blocking=False):
                return

    def _serve(self) -> None:
        while not self._must_stop():
            if _inode(self._listener) != self._mine:
                self._over = True  # a daemon that closes all descriptors has reused the number
                return
            data, credentials, _, asker = self._listener.recvmsg(
                QUESTION_BYTES + 1, CREDENTIALS_BYTES
            )
            question = read_question(data)
            if question is None or not asker or not sent_by_us(credentials):
                continue
            with suppress(OSError):  # the agent no longer waits for the answer
                answer = _reply_to(question, self._counters, self._main)
                self._listener.sendto(encode_answer(answer), asker)


def _pending(work: Callable[[], None]) -> Callable[[], object]:
    """A C function that schedules `work` in the main thread, at the next Python instruction."""

    def call(_: int | None) -> int:
        work()
        return 0

    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    adding = ctypes.PYFUNCTYPE(ctypes.c_int, kind, ctypes.c_void_p)
    return partial(adding(("Py_AddPendingCall", ctypes.pythonapi)), kind(call), None)


def _inode(listener: socket.socket) -> tuple[int, int]:
    found = os.fstat(listener.fileno())
    return found.st_dev, found.st_ino


def _reply_to(request: RankQuestion, counters: recorder.Counters, main: int) -> RankAnswer:
    try:
        groups = recorder.positions() if request.full else counters.read()
    except Exception:  # an unknown version of torch: report no counters
        groups = ()
    threads = _threads(main) if request.stacks else ()
    return RankAnswer(request.number, groups, threads)


def _threads(main: int) -> tuple[ThreadAnswer, ...]:
    """All threads except this one, the main thread first."""
    mine = _thread.get_ident()
    frames = sys._current_frames()
    known: Any = dict(threading._active)  # type: ignore[attr-defined]
    idents = sorted(frames, key=lambda ident: ident != main)
    return tuple(
        ThreadAnswer("main" if ident == main else _name(known, ident), _frames(frames[ident]))
        for ident in idents[: MAX_ANSWER_THREADS + 1]
        if ident != mine
    )[:MAX_ANSWER_THREADS]


def _name(known: Any, ident: int) -> str:
    return _utf8(str(getattr(known.get(ident), "name", ""))[:100]) or f"thread {ident}"


def _utf8(text: str) -> str:
    """Make the text encodable; a path may contain bytes that are not valid text."""
    return text.encode("utf-8", "replace").decode()


def _frames(frame: FrameType | None) -> tuple[tuple[str, int, str], ...]:
    """The frames, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MAX_ANSWER_FRAMES:
        code = frame.f_code
        found.append(
            (_utf8(code.co_filename[-300:]), frame.f_lineno or 0, _utf8(code.co_name[:100]))
        )
        frame = frame.f_back
    return tuple(found)
