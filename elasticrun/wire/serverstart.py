"""How the fork server is started: its command line, and a Popen that keeps signals off it.

Stands in `wire/` because the agent writes this command line and the fork server reads it, and
neither room knows the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

SERVER_FILE = Path(__file__).resolve().parent.parent / "forkserver" / "server.py"
"""Started by its path, so that no folder of the user's can stand in front of our package."""

SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that schedulers and terminals send to every process at once; our helpers ignore them
and obey their socket, so that the script's own handler can finish."""

ARGV_PAD = 1024
"""Blank bytes at the end of the server's command line: where the kernel does not let a child move
its command line, the rank's is written over the server's and must fit in."""


def ignored_signals() -> tuple[int, ...]:
    """The signals this process was started with as ignored (nohup, a shell's `&`).

    Call it before any handler is installed. SIGPIPE and SIGXFSZ are left out: Python ignores them
    itself at start, and subprocess gives a child the default again, as torchrun's ranks have it.
    """
    mine = {signal.SIGPIPE, signal.SIGXFSZ}
    return tuple(
        int(s)
        for s in sorted(signal.valid_signals() - mine)
        if signal.getsignal(s) is signal.SIG_IGN
    )


def server_words(
    fd: int, *, parent: int, ignored: Iterable[int], blocked: Iterable[int]
) -> list[str]:
    """The server's `sys.argv`. `fd`: its end of the socketpair; `ignored` and `blocked`: the signal
    dispositions and mask that ranks are to start with."""
    return [
        str(SERVER_FILE),
        f"--fd={fd}",
        f"--parent={parent}",
        f"--ignored-signals={','.join(map(str, ignored))}",
        f"--blocked-signals={','.join(str(int(s)) for s in blocked)}",
        " " * ARGV_PAD,
    ]


def warm_command(place: Path, *, idle: float, tells: int, modules: Iterable[str]) -> list[str]:
    """The command line of a warm process, which is a fork server's before it has an agent: where it
    listens, seconds until it ends if nobody asks, the descriptor where it says that it is ready,
    modules to import beside torch."""
    return [
        *(sys.executable, "-u", str(SERVER_FILE), f"--warm={place}", f"--idle={idle!r}"),
        *(f"--tells={tells}", f"--modules={','.join(modules)}", " " * ARGV_PAD),
    ]


def start_server(
    *, ignored: Iterable[int], env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server in a session of its own; return it and our end of the conversation.

    Call it from the main thread (the server's parent-death signal follows the thread). `ignored`
    is what `ignored_signals()` said at our start; `env` is the environment that ranks build on.
    The shielded signals are blocked over the start, so that none can kill the server before its
    first instruction, and none that is meant for us is lost.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    words = server_words(theirs.fileno(), parent=os.getpid(), ignored=ignored, blocked=blocked)
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            env=env,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
    return process, ours
