"""The thread that answers the agent from within a rank, and only when it is asked.

It is started below `threading`, so that a script that counts its threads does not find it, and
blocks all signals, so that each of them finds the script's own threads. It sleeps in the kernel
until a question comes; what it answers it reads in some milliseconds at most, without a lock of
Python's and without an import. While the script forks there is no such thread: see `_Monitor`.
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
    MAX_FRAMES_SAID,
    MAX_THREADS_SAID,
    QUESTION_BYTES,
    RankAsked,
    RankSays,
    ThreadSays,
    encode_answer,
    hear_at,
    read_question,
    sent_by_us,
)

HIGH: Final = 1000
"""The socket's descriptor is at least this, or the highest that may be had: scripts count on it
that the first file they open is number 3."""

SEND_LIMIT: Final = struct.pack("@ll", 1, 0)
"""A second (struct timeval) for which an answer waits until the agent has read others."""

END_LIMIT: Final = 1.0
"""Seconds for which the end of a rank, and a fork in it, wait for an answer under way."""


COUNTED_LATE: Final = (3, 13) <= sys.version_info < (3, 13, 10) or sys.version_info[:3] == (
    3,
    14,
    0,
)
"""Whether this Python counts threads only when a fork's last hook has returned (gh-137109)."""


def start(name: str) -> None:
    """Answer at this name from now on, in a thread. A rank that cannot have one runs without."""
    with suppress(OSError, RuntimeError):
        monitor = _Monitor(_listen(name))
        os.register_at_fork(
            before=monitor.pause, after_in_parent=monitor.resume, after_in_child=monitor.leave
        )
        if COUNTED_LATE:  # in C, or what is pending would be done in here
            os.register_at_fork(after_in_parent=_pending(monitor.begin))
        atexit.register(monitor.end)
        monitor.begin()


def _listen(name: str) -> socket.socket:
    low = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with low:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        floor = HIGH if most in (resource.RLIM_INFINITY, -1) else min(HIGH, most - 1)
        high = fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, floor)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, fileno=high)
    try:
        listener.setblocking(True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_LIMIT)
        hear_at(listener, name)
    except OSError:
        listener.close()
        raise
    return listener


class _Monitor:
    """The thread of one rank, from its start to its end.

    It ends before each fork of the script and starts again behind it in the parent; questions that
    come meanwhile wait in the socket. Python counts threads at a fork and warns of more than one
    since 3.12, which must not be ours; and a lock of torch's that our thread held would stay locked
    in the child for ever."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._name = listener.getsockname()
        self._mine = _inode(listener)
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._counters = recorder.Counters()
        self._running = _thread.allocate_lock()
        """Held for as long as there is a thread, or one is about to start."""
        self._thread = 0
        """What the kernel calls the newest one."""
        self._forking: set[int] = set()
        """Threads of the script that are in a fork."""
        self._over = False

    # ------------------------------------------------------------ in the script's threads

    def pause(self) -> None:
        """Before a fork: no thread of ours, or END_LIMIT has passed."""
        if self._over or os.getpid() != self._pid:
            return
        self._forking.add(_thread.get_ident())
        try:
            if _inode(self._listener) != self._mine:  # the script has closed it
                return
            # something to read, so that the thread looks up; nothing is needed if much is there
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
        with suppress(FileNotFoundError):  # the kernel counts it until it is there no more
            while time.monotonic() < deadline:
                os.stat(place)
                os.sched_yield()

    def resume(self) -> None:
        """Behind a fork, in the parent."""
        mine = _thread.get_ident()
        self._forking.discard(mine)
        # where another thread forks, Python has two threads to warn of in any case
        if not COUNTED_LATE or mine != self._main:
            self.begin()

    def begin(self) -> None:
        """Have a thread, unless there is one or none may be."""
        if self._stopped() or not self._running.acquire(blocking=False):
            return
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads can be had
            self._over = True
            self._running.release()

    def leave(self) -> None:
        """In a process that the script has forked: it is nobody to the agent."""
        self._over = True
        with suppress(OSError):
            self._listener.close()

    def end(self) -> None:
        """The last thing before the interpreter ends: a thread that wants to go on after that is
        ended by it in the midst of torch's frames, and takes the process with it (SIGABRT)."""
        if os.getpid() != self._pid:
            return
        self._over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._running.acquire(timeout=END_LIMIT)

    # ------------------------------------------------------------ in ours

    def _stopped(self) -> bool:
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
            # a fork that did not wait for us is over: who resumed found us still there
            if self._stopped() or not self._running.acquire(blocking=False):
                return

    def _serve(self) -> None:
        while not self._stopped():
            if _inode(self._listener) != self._mine:
                self._over = True  # a daemon that closes all has given the number away
                return
            data, credentials, _, asker = self._listener.recvmsg(
                QUESTION_BYTES + 1, CREDENTIALS_BYTES
            )
            asked = read_question(data)
            if asked is None or not asker or not sent_by_us(credentials):
                continue
            with suppress(OSError):  # it does not wait for it any more
                said = _answer(asked, self._counters, self._main)
                self._listener.sendto(encode_answer(said), asker)


def _pending(work: Callable[[], None]) -> Callable[[], object]:
    """A function of C that has the main thread do this as soon as it executes Python again."""

    def call(_: int | None) -> int:
        work()
        return 0

    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    adding = ctypes.PYFUNCTYPE(ctypes.c_int, kind, ctypes.c_void_p)
    return partial(adding(("Py_AddPendingCall", ctypes.pythonapi)), kind(call), None)


def _inode(listener: socket.socket) -> tuple[int, int]:
    found = os.fstat(listener.fileno())
    return found.st_dev, found.st_ino


def _answer(asked: RankAsked, counters: recorder.Counters, main: int) -> RankSays:
    try:
        groups = recorder.positions() if asked.full else counters.look()
    except Exception:  # another torch than those that are known: what it counts is not told
        groups = ()
    threads = _threads(main) if asked.stacks else ()
    return RankSays(asked.number, groups, threads)


def _threads(main: int) -> tuple[ThreadSays, ...]:
    """All threads but this one, the main one first."""
    mine = _thread.get_ident()
    frames = sys._current_frames()
    known: Any = dict(threading._active)  # type: ignore[attr-defined]
    idents = sorted(frames, key=lambda ident: ident != main)
    return tuple(
        ThreadSays("main" if ident == main else _name(known, ident), _frames(frames[ident]))
        for ident in idents[: MAX_THREADS_SAID + 1]
        if ident != mine
    )[:MAX_THREADS_SAID]


def _name(known: Any, ident: int) -> str:
    return _utf8(str(getattr(known.get(ident), "name", ""))[:100]) or f"thread {ident}"


def _utf8(text: str) -> str:
    """What can be told; a path may hold bytes that are no text."""
    return text.encode("utf-8", "replace").decode()


def _frames(frame: FrameType | None) -> tuple[tuple[str, int, str], ...]:
    """Innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MAX_FRAMES_SAID:
        code = frame.f_code
        found.append(
            (_utf8(code.co_filename[-300:]), frame.f_lineno or 0, _utf8(code.co_name[:100]))
        )
        frame = frame.f_back
    return tuple(found)
