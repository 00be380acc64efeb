"""What a rank does whose program is a function: everything around the call of it.

Runs in a child of the caller, made by multiprocessing with the start method that was asked for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from elasticrun.forkserver.errorfile import write_error_file
from elasticrun.forkserver.linux import die_with_parent

LENGTH_BYTES: Final = 8
"""A result is its length, then itself: whoever inherited the pipe may hold it open for ever."""

LET_END: Final = b"e"
"""What a rank is sent, once it has sent its result, when all local ranks have done so."""


@dataclass(frozen=True)
class RankPlan:
    """How this rank differs from the caller. Plain data: it is pickled where ranks are spawned."""

    env: Mapping[str, str]
    unset: tuple[str, ...]
    stdout: str  # as in wire.spawner.SpawnRank
    stderr: str
    error_file: str
    cpus: tuple[int, ...]
    parent: int  # pid whose death ends this rank, 0 where the kernel cannot watch it
    handlers: Mapping[int, Any]  # to restore; empty where the rank did not inherit ours


def run_rank(
    plan: RankPlan,
    results: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    close_inherited: Callable[[], None] | None = None,
) -> None:
    """Become the rank, call the function, send back what it returned, and stay until it may end:
    its end would break connections that other ranks are still using.

    An exception is described in the error file, as `@record` does, and goes on upwards, where
    multiprocessing prints it and ends the process with 1."""
    _become_a_rank(plan)
    if close_inherited is not None:
        close_inherited()

    def call() -> bytes:
        return pickle.dumps(function(*args), pickle.HIGHEST_PROTOCOL)

    payload = _recorded(call, plan.error_file)
    _send(results, pickle.dumps(None) if payload is None else payload)


def _become_a_rank(plan: RankPlan) -> None:
    for signum, handler in plan.handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    try:
        os.setsid()
    except PermissionError:  # it leads a group already
        pass
    if plan.parent:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != plan.parent:  # it died before the kernel was asked
            os._exit(1)
    for name in plan.unset:
        os.environ.pop(name, None)
    os.environ.update(plan.env)
    if plan.cpus:
        os.sched_setaffinity(0, plan.cpus)
    for fd, path, name in ((1, plan.stdout, "stdout"), (2, plan.stderr, "stderr")):
        if path:
            _redirect(fd, path, name)


def _redirect(fd: int, path: str, name: str) -> None:
    stream = getattr(sys, name)
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.dup2(file, fd)
    os.close(file)
    try:
        same = stream.fileno() == fd
    except (AttributeError, OSError, ValueError):
        same = False
    if not same:  # a notebook or a test had put something else in its place
        setattr(sys, name, open(fd, "w", buffering=1, closefd=False, errors="replace"))  # noqa: SIM115


def _recorded(call: Callable[[], bytes], error_file: str) -> bytes | None:
    """`call()`, with its exception described in the error file; None for SystemExit(0)."""
    if "torch" in sys.modules:  # then its own, with whatever error handler the user has put in
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
