"""The process of a store host that a caller has started: shielded, and ended with its caller."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

from elasticrun.forkserver import store_host
from elasticrun.system.processes import die_with_parent
from elasticrun.wire.spawning import SHIELDED


def serve(port_fd: int, ready_fd: int, parent: int) -> NoReturn:
    """Import torch, read the port from one pipe, serve a store, say so on the other."""
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    importlib.import_module("torch.distributed")
    words = os.read(port_fd, 16)
    if not words:  # the caller did without it
        os._exit(0)
    os.close(port_fd)
    store_host.host(int(words), ready_fd)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
