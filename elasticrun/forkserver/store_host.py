"""A process that serves one c10d TCPStore until it is killed.

Forked by the server where torch is ready; otherwise this file is run by path:
`python -u store_host.py PORT READY_FD PARENT_PID`. The agent holds PORT bound (SO_REUSEPORT, not
listening), so that no one else gets it while an older rank may still dial it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder's modules must not stand in front of the standard library

import os
import resource
import signal
import socket
from datetime import timedelta
from typing import Any, NoReturn

BACKLOG = 4096
"""Every rank of the job dials the store in the same second; the kernel caps it at somaxconn."""

STORE_TIMEOUT = timedelta(seconds=300)
"""torch's own default; the host itself waits for nobody."""


def host(port: int, ready_fd: int) -> NoReturn:
    """Listen on `port`, write one line to `ready_fd`, serve until killed.

    The line is `ok`, or `ok <sentence>` where an older way had to be used, or `failed <sentence>`.
    """
    try:
        listener = _listen(port)
        store, remark = _serve(listener, port)
    except Exception as error:
        _say(ready_fd, f"failed {type(error).__name__}: {error}")
        os._exit(1)
    _say(ready_fd, f"ok {remark}".rstrip())
    os.close(ready_fd)
    while store is not None:
        signal.pause()
    os._exit(1)


def _say(ready_fd: int, line: str) -> None:
    os.write(ready_fd, " ".join(line.split())[:1000].encode("utf-8", "replace") + b"\n")


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 and IPv4 where both are there."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        address: tuple[str, int] = ("::", port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", port))
    listener.listen(BACKLOG)
    return listener


def _serve(listener: socket.socket, port: int) -> tuple[Any, str]:
    """The store, and a remark where its libuv server did not take the socket over."""
    import torch.distributed as dist

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

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

    import torch

    try:
        uv = libuv_takes_sockets(torch.__version__)
        store, remark = serve() if uv else serve(use_libuv=False), ""
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        store = serve(use_libuv=False)
        remark = f"torch's libuv store would not take a socket over ({first}); the older one runs"
    listener.detach()  # the store closes it
    return store, remark


def libuv_takes_sockets(version: str) -> bool:
    """Whether the libuv store of this torch can be tried with a socket that listens already. Up to
    2.6 it cannot, and torch writes an error to the console each time it is asked to."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 7)


def _main() -> NoReturn:
    port, ready_fd, parent = map(int, sys.argv[1:4])
    if os.getppid() != parent:
        os._exit(1)
    host(port, ready_fd)


if __name__ == "__main__":
    _main()
