"""The parent of a fork server that was forked from a warm process; it represents the agent.

Normally the agent is the fork server's parent: it is notified of the server's exit and adopts the
server's orphans. A warm process cannot give the agent a child, so each such fork server has a
guard. When the agent or the fork server exits, the guard kills everything below it and then
reports. It holds no state, and training does not depend on the warm process.
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
"""Seconds that a fork server has for its own sweep after its agent has exited."""

SWEEP_LIMIT: Final = 30.0
"""Seconds after which processes that survive SIGKILL are left to the kernel."""


def become_guard(
    conn: socket.socket,
    handed: Sequence[int],
    shown: Sequence[bytes],
    become_server: Callable[[int], None],
) -> None:
    """In a fresh fork of the warm process: become the guard. Forks again and returns only in that
    child, which becomes the fork server, after `become_server(guard)` with the guard's pid.
    `handed` are the fork server's descriptors; `conn` is the guard's. `shown`: the agent's
    variables, so that a search for the job's processes by variable finds the guard."""
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
        except BaseException:  # no fork server can be started
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
    """Wait until the agent or the fork server has exited; then kill everything that is left."""
    exited = os.pidfd_open(server)
    _send(conn, Forked(server))
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(conn, select.POLLIN)
    if exited not in dict(poll.poll()):  # the agent sends nothing, so this is EOF
        os.kill(server, signal.SIGCONT)  # a stopped one now reads EOF on its socket
        own = select.poll()
        own.register(exited, select.POLLIN)
        own.poll(OWN_END * 1000)
    pid, status = os.waitpid(server, os.WNOHANG)
    if pid == 0:
        os.kill(server, signal.SIGKILL)
        _, status = os.waitpid(server, 0)
    sweep.kill_everything(SWEEP_LIMIT)
    _send(conn, Over(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _send(conn: socket.socket, word: Forked | Over) -> None:
    with suppress(OSError):  # the agent has exited; the poll reports it
        conn.sendall(encode(word))
