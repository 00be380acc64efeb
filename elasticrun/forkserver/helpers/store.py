"""A process that serves one c10d TCPStore until it is killed.

The agent keeps the port bound (SO_REUSEPORT, not listening), so that no other process gets it while
a rank of an older round may still connect to it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from elasticrun.host.system.sandbox import raise_file_limit
from elasticrun.wire.spawning import FromSpawner, Notice, SpawnFailed, SpawnStore, StoreListening

BACKLOG: Final = 4096
"""Backlog of the listening socket: every rank of the job connects to the store within the same
second; the kernel caps this at somaxconn.
"""

STORE_TIMEOUT: Final = timedelta(seconds=300)
"""torch's default; the host itself never waits."""

MAX_REASON: Final = 1000
"""Maximum characters of torch's error about a store."""


def host(
    order: SpawnStore, send: Callable[[FromSpawner], None], hang_up: Callable[[], None]
) -> None:
    """Listen, report it, and serve until killed. Returns after reporting a failure. `hang_up`
    closes the pipe of `send`."""
    try:
        store, remark = _serve(_listen(order.port), order.port)
    except Exception as error:
        why = _line(f"{type(error).__name__}: {error}")
        send(SpawnFailed(order.key, why, lasting=isinstance(error, ImportError)))
        return
    send(StoreListening(order.key, os.getpid(), order.port))
    if remark:
        send(Notice(_line(remark)))
    hang_up()
    while store:  # torch's own threads serve
        signal.pause()


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses: IPv6 and IPv4 if both are available."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("::", port))
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", port))
    listener.listen(BACKLOG)
    return listener


def _serve(listener: socket.socket, port: int) -> tuple[Any, str]:
    """The store, and a remark if torch's libuv server did not accept the socket."""
    import torch.distributed as dist

    raise_file_limit()

    def serve(**more: object) -> Any:
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        return make(
            "localhost",
            port,
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            **more,
        )

    try:
        store, remark = serve(), ""
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        store = serve(use_libuv=False)
        remark = f"torch's libuv store did not accept a socket ({first}); using the older store"
    listener.detach()  # the store closes it
    return store, remark
