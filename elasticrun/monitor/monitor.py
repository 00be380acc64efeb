"""The thread that answers the agent from within a rank, and only when it is asked.

It is started below `threading`, so that a script that counts its threads does not find it, blocks
all signals, so that each of them finds the script's own threads, and is gone after a fork in the
script. It sleeps in the kernel until a question comes; what it answers it reads in some
milliseconds at most, without a lock of Python's and without an import.
"""

from __future__ import annotations

import _thread
import atexit
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final

from elasticrun.monitor import recorder
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
"""Seconds for which the end of a rank waits for an answer under way."""


def start(name: str) -> None:
    """Answer at this name from now on, in a thread. A rank that cannot have one runs without."""
    with suppress(OSError, RuntimeError):
        listener = _listen(name)
        os.register_at_fork(after_in_child=partial(_leave, listener))
        main, running = threading.get_ident(), _thread.allocate_lock()
        running.acquire()
        _thread.start_new_thread(_run, (listener, main, running))
        atexit.register(_end, os.getpid(), listener, running)


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


def _leave(listener: socket.socket) -> None:
    """In a process that the script has forked: it is nobody to the agent."""
    with suppress(OSError):
        listener.close()


def _end(pid: int, listener: socket.socket, running: _thread.LockType) -> None:
    """The last thing before the interpreter ends: a thread that wants to go on after that is ended
    by it in the midst of torch's frames, and takes the process with it (SIGABRT)."""
    if os.getpid() != pid:
        return
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    running.acquire(timeout=END_LIMIT)


def _run(listener: socket.socket, main: int, running: _thread.LockType) -> None:
    try:
        _serve(listener, main)
    finally:
        running.release()


def _serve(listener: socket.socket, main: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    counters = recorder.Counters()
    try:
        mine = _inode(listener)
        while _inode(listener) == mine:  # a daemon that closes all has given the number away
            data, credentials, _, asker = listener.recvmsg(QUESTION_BYTES + 1, CREDENTIALS_BYTES)
            if not data:  # our own end
                return
            asked = read_question(data)
            if asked is None or not asker or not sent_by_us(credentials):
                continue
            with suppress(OSError):  # it does not wait for it any more
                listener.sendto(encode_answer(_answer(asked, counters, main)), asker)
    except (OSError, ValueError):
        return


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
