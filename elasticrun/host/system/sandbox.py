"""What a sandbox (seccomp) or a limit (RLIMIT_NPROC, pids.max) may refuse, in words that say so."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_LIMITS: Final = (
    "too many processes or threads (ulimit -u, pids.max), or a sandbox that refuses clone3"
)


class NoThread(TimeoutError):
    """No thread could be started. For whoever has set a limit it is the same as no answer."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(f"no thread can be started here ({error}): {_LIMITS}")


def start_thread(
    target: Callable[..., object], name: str, args: tuple[object, ...] = ()
) -> threading.Thread:
    """A daemon thread that runs `target(*args)`. NoThread."""
    thread = threading.Thread(target=target, args=args, name=f"elasticrun-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(error) from None
    return thread


def raise_file_limit() -> None:
    """As many open files as this process may have; where that cannot be had it does with less."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def refused() -> str:
    """What this process may not do and no launcher can do without, in a sentence; "" if nothing."""
    try:
        os.kill(os.getpid(), 0)
        start_thread(int, "trial").join()
    except PermissionError as error:
        return f"no signal may be sent here (kill: {error.strerror}), so no rank could be ended"
    except NoThread as error:
        return str(error)
    return ""


def kill(pid: int) -> None:
    """SIGKILL, where there is such a process and it is ours to kill."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
