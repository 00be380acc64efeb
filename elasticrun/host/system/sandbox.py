"""Operations that a sandbox (seccomp) or a limit (RLIMIT_NPROC, pids.max) may refuse: starting
threads, raising the file limit, sending signals."""

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
    """No thread could be started. A TimeoutError, so that callers with a time limit need not handle
    it separately."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(f"no thread can be started here ({error}): {_LIMITS}")


def start_thread(
    target: Callable[..., object], name: str, args: tuple[object, ...] = ()
) -> threading.Thread:
    """Start a daemon thread that runs `target(*args)`. Raises NoThread."""
    thread = threading.Thread(target=target, args=args, name=f"elasticrun-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(error) from None
    return thread


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit; ignores errors."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def launcher_problem() -> str:
    """Why this process cannot act as a launcher (it may not send signals or start threads), as a
    sentence; "" if it can."""
    try:
        os.kill(os.getpid(), 0)
        start_thread(int, "trial").join()
    except PermissionError as error:
        return f"no signal may be sent here (kill: {error.strerror}), so no rank could be ended"
    except NoThread as error:
        return str(error)
    return ""


def kill(pid: int) -> None:
    """Send SIGKILL; a no-op if the process does not exist or may not be signaled."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
