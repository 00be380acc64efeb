"""The parent of a fork server that was forked from a warm process: what its agent is to others.

An agent is its fork server's parent, and hears of its end and adopts what it leaves; a warm process
cannot give it a child. So each such fork server has a guard of its own. It ends everything below it
once the agent is gone, or the fork server is, and then says so; it holds no state, and training
does not notice whether the warm process lives.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from elasticrun.host.system import processes, sweep
from elasticrun.host.system.title import set_command_line
from elasticrun.wire.frames import encode, peer_of
from elasticrun.wire.spawning import SHIELDED, Forked, Over

OWN_END: Final = 5.0
"""Seconds that a fork server has to sweep for itself after its agent's end."""

SWEEP_LIMIT: Final = 30.0
"""Seconds until processes that survive SIGKILL are left to the kernel."""


def become_guard(
    conn: socket.socket,
    handed: Sequence[int],
    shown: Sequence[bytes],
    become_server: Callable[[int], None],
) -> None:
    """In a fresh fork of the warm process. Returns in a fork of that alone, which is to live as a
    fork server: after `become_server(guard)`, with the guard's process id. `handed` are the
    descriptors that are the fork server's; `conn` is the guard's. `shown`: the
    agent's variables, so that whoever looks for the job's processes by one finds the guard."""
    os.setsid()
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    processes.set_name(b"elasticrun-guar")
    processes.become_subreaper()
    words = [b"elasticrun:", b"guard", b"of", b"agent", str(peer_of(conn)[0]).encode()]
    set_command_line(words, shown)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            conn.close()
            become_server(guard)
        except BaseException:  # no fork server, and the warm process is another one
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        return
    try:
        for descriptor in handed:
            os.close(descriptor)
        _watch(conn, pid)
    finally:
        os._exit(1)


def _watch(conn: socket.socket, server: int) -> NoReturn:
    """Until the agent is gone, or its fork server is; then until nothing is left."""
    gone = os.pidfd_open(server)
    _say(conn, Forked(server))
    poll = select.poll()
    poll.register(gone, select.POLLIN)
    poll.register(conn, select.POLLIN)
    if gone not in dict(poll.poll()):  # the agent: it says nothing, so this is its end
        os.kill(server, signal.SIGCONT)  # a stopped one reads the end of its socket now
        own = select.poll()
        own.register(gone, select.POLLIN)
        own.poll(OWN_END * 1000)
    pid, status = os.waitpid(server, os.WNOHANG)
    if pid == 0:
        os.kill(server, signal.SIGKILL)
        _, status = os.waitpid(server, 0)
    sweep.kill_everything(SWEEP_LIMIT)
    _say(conn, Over(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _say(conn: socket.socket, word: Forked | Over) -> None:
    with suppress(OSError):  # the agent is gone, which the next look tells
        conn.sendall(encode(word))
