"""A rank that runs a function: the process around the call, and its representation in the caller.

The rank is a child of the caller, started by multiprocessing with the requested start method. The
caller is a user's program with objects of any kind. Destructors of some objects wait for a thread
of the caller (a gloo process group's does). In a fork that thread does not exist, so the fork hangs
or crashes. Two things destroy objects in a fork: the garbage collector, and CPython's fork itself,
which drops the thread-local data of other threads (DTensor has a cache per thread that holds device
meshes, which hold their process groups). `ForkGuard` prevents both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from elasticrun.forkserver.helpers import numa
from elasticrun.forkserver.program import write_error_file
from elasticrun.host.system.processes import allow_tracer, die_with_parent
from elasticrun.training.monitor import monitor, recorder
from elasticrun.wire.spawning import SpawnRank

MODULE = "torch.distributed"
"""Objects of types from this module are not destroyed in a fork from a multi-threaded process."""

LENGTH_BYTES: Final = 8
"""A result is sent as its length, then its bytes. EOF cannot mark its end, because a process that
inherited the pipe may keep it open forever.
"""

LET_END: Final = b"e"
"""Sent to a rank that has sent its result, once all local ranks have sent theirs."""

READ_BYTES: Final = 256 * 1024


class ForkGuard:
    """Keeps objects alive across a fork. The garbage collector is off from before the fork until
    `in_fork` runs in the child. A list refers to the objects that must not be destroyed: in the
    parent while it forks, in the child until it exits, since the child never leaves the block."""

    def __init__(self) -> None:
        self._collects = True
        self._kept_alive: list[object] = []

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Protect objects while the caller forks in this block."""
        self._collects = gc.isenabled()
        gc.disable()
        try:
            if MODULE in sys.modules and len(sys._current_frames()) > 1:
                self._kept_alive = _objects()
            yield
        finally:
            self._kept_alive = []
            if self._collects:
                gc.enable()

    def in_fork(self) -> None:
        """In the child: turn the collector on again, but never for objects that the caller made."""
        gc.freeze()
        if self._collects:
            gc.enable()


def _objects() -> list[object]:
    """All objects of types from MODULE that the collector tracks. Takes about 20 ms when torch is
    imported."""
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        ours = known.get(kind)
        if ours is None:
            ours = known[kind] = str(kind.__module__).startswith(MODULE)
        if ours:
            found.append(one)
    return found


@dataclass(frozen=True)
class RankPlan:
    """How this rank differs from the caller. Plain data: it is pickled where ranks are spawned."""

    order: SpawnRank  # the agent's; its entry is not used
    parent: int  # pid whose death ends this rank; 0 where the kernel cannot watch it
    agent: int  # the agent's pid
    handlers: Mapping[int, Any]  # to restore; empty where the rank did not inherit ours


def run_rank(
    plan: RankPlan,
    results: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    close_inherited: Callable[[], None] | None = None,
) -> None:
    """Become the rank, call the function, send its result, and stay until LET_END arrives: an
    earlier exit would break connections that other ranks are still using.

    An exception is written to the error file, as `@record` does, and propagates to multiprocessing,
    which prints it and exits with 1."""
    _become_a_rank(plan)
    if close_inherited is not None:
        close_inherited()
    order = plan.order
    if order.monitor:
        recorder.enable(getattr(sys.modules.get("torch"), "__version__", ""))
        monitor.start(order.monitor)

    def call() -> bytes:
        call = function
        if order.numa:
            call = numa.bound(call, order.numa, order.local_rank, may_fail=order.numa_may_fail)
        return pickle.dumps(call(*args), pickle.HIGHEST_PROTOCOL)

    payload = _recorded(call, order.error_file)
    _send(results, pickle.dumps(None) if payload is None else payload)


def _become_a_rank(plan: RankPlan) -> None:
    for signum, handler in plan.handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    with contextlib.suppress(PermissionError):  # already a process group leader
        os.setsid()
    if plan.parent:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != plan.parent:  # it died before prctl took effect
            os._exit(1)
    allow_tracer(plan.agent)  # the caller is our ancestor, and the agent is not
    order = plan.order
    for name in order.unset:
        os.environ.pop(name, None)
    os.environ.update(order.env)
    for fd, path, name in ((1, order.stdout, "stdout"), (2, order.stderr, "stderr")):
        if path:
            _redirect(fd, path, name)


def _redirect(fd: int, path: str, name: str) -> None:
    stream = getattr(sys, name)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.dup2(file, fd)
    os.close(file)
    same = False
    with contextlib.suppress(AttributeError, OSError, ValueError):
        same = stream.fileno() == fd
    if not same:  # a notebook or a test has replaced the stream
        setattr(sys, name, open(fd, "w", buffering=1, closefd=False, errors="replace"))  # noqa: SIM115


def _recorded(call: Callable[[], bytes], error_file: str) -> bytes | None:
    """Run `call()` and write an exception to the error file; None for SystemExit(0)."""
    if "torch" in sys.modules:  # torch's own, with the user's error handler
        from torch.distributed.elastic.multiprocessing.errors import record

        payload: bytes | None = record(call)()
        return payload
    faulthandler.enable(all_threads=True)
    try:
        return call()
    except SystemExit as ending:
        if ending.code == 0:
            return None
        raise
    except Exception as error:
        if error_file:
            write_error_file(error_file, error)
        raise


def _send(results: Connection, payload: bytes) -> None:
    rest = memoryview(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    while rest:
        rest = rest[os.write(results.fileno(), rest) :]
    with contextlib.suppress(OSError):  # the caller has died
        os.read(results.fileno(), len(LET_END))
    results.close()


@dataclass(eq=False)
class FunctionRank:
    """One process that runs the function, and the part of its result that has arrived."""

    key: int
    local_rank: int
    rank: int
    of: int  # number of local ranks in this round
    process: BaseProcess
    results: Connection
    received: bytearray = field(default_factory=bytearray)
    ended_well: bool = False

    def read(self) -> bool:
        """Read a part of the result; return False at EOF."""
        try:
            data = os.read(self.results.fileno(), READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += data
        return bool(data)

    def payload(self) -> bytes | None:
        """The pickled result; None if it is incomplete."""
        end = self._end()
        return bytes(self.received[LENGTH_BYTES:end]) if self._is_whole() else None

    def _end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "big")

    def _is_whole(self) -> bool:
        return len(self.received) >= LENGTH_BYTES and len(self.received) >= self._end()

    def has_returned(self) -> bool:
        """Whether its function has returned, or the process has exited with 0 without a result."""
        return self.ended_well or self._is_whole()

    def release(self) -> None:
        """Send LET_END: its process waits for it after its function has returned."""
        if not self.results.closed:
            with contextlib.suppress(OSError):  # it has exited in another way
                os.write(self.results.fileno(), LET_END)
